"""Trackers: the calls they receive, checked with fakes of the few functions used."""

import os
import sys
import types

import jax
import pytest

from bert_jax.config.checks import validate
from bert_jax.config.schema import Config, MeshConfig
from bert_jax.errors import UserError
from bert_jax.runs import workdir
from bert_jax.runtime import sharding
from bert_jax.runtime.progress import Progress
from bert_jax.training import log, trackers

VALUES = {"train/loss": 2.5, "train/accuracy": 0.5}


class FakeWandb(types.ModuleType):
    def __init__(self):
        super().__init__("wandb")
        self.calls = []
        self.Settings = dict

    def init(self, **settings):
        self.calls.append(("init", settings))
        return self

    def __getattr__(self, name):
        return lambda *args, **named: self.calls.append((name, args, named))


class FakeMLflow(types.ModuleType):
    """A fake MLflow with one store, which keeps runs across clients."""

    def __init__(self):
        super().__init__("mlflow")
        self.uri, self.runs, self.metrics, self.parameters = "", {}, [], []
        self.entities = types.SimpleNamespace(
            Param=lambda *values: values, Metric=lambda *values: values
        )

    def MlflowClient(self, tracking_uri):
        self.uri = tracking_uri
        return self

    def get_experiment_by_name(self, name):
        return None

    def create_experiment(self, name):
        return "7"

    def search_runs(self, experiments, text):
        assert experiments == ["7"]
        return [run for run in self.runs.values() if f"'{run.tag}'" in text]

    def create_run(self, experiment, run_name, tags):
        info = types.SimpleNamespace(run_id=f"id-{run_name}")
        run = types.SimpleNamespace(info=info, tag=tags["bert_jax_run"], status="RUNNING")
        return self.runs.setdefault(info.run_id, run)

    def update_run(self, name, status):
        self.runs[name].status = status

    def log_batch(self, name, metrics=(), params=()):
        assert len(params) <= 100
        self.metrics += [(name, *metric) for metric in metrics]
        self.parameters += params

    def set_terminated(self, name, status):
        self.runs[name].status = status


def opened(names, folder):
    return trackers.open_trackers(
        Config(trackers=(names,)), folder, "0123abcd", "8 TPU v4"
    ).values()


def test_wandb_resumes_by_run_id_and_uses_our_steps(monkeypatch, tmp_path):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    (tracker,) = opened("wandb", tmp_path / "run")
    tracker.log(50, VALUES)
    tracker.close(failed=True)
    _, settings = fake.calls[0]
    assert (settings["id"], settings["resume"], settings["name"]) == ("0123abcd", "allow", "run")
    assert settings["config"].items() >= {("optim.learning_rate", 1e-4), ("devices", "8 TPU v4")}
    assert ("define_metric", ("*",), {"step_metric": "step"}) in fake.calls
    assert fake.calls[-2:] == [
        ("log", ({"step": 50, **VALUES},), {}),
        ("finish", (), {"exit_code": 1}),
    ]


def test_trackio_resumes_by_name(monkeypatch, tmp_path):
    calls = []
    run = types.SimpleNamespace(
        log=lambda *args, **named: calls.append((args, named)), finish=lambda: calls.append("end")
    )
    fake = types.SimpleNamespace(init=lambda *args, **named: calls.append((args, named)) or run)
    monkeypatch.setitem(sys.modules, "trackio", fake)
    (tracker,) = opened("trackio", tmp_path / "run")
    tracker.log(50, VALUES)
    tracker.close(failed=False)
    (project,), settings = calls[0]
    assert (project, settings["name"], settings["resume"]) == ("bert_jax", "run-0123abcd", "allow")
    assert settings["config"]["devices"] == "8 TPU v4"
    assert calls[1:] == [((VALUES,), {"step": 50}), "end"]


def test_mlflow_resumes_an_existing_run(monkeypatch, tmp_path):
    fake = FakeMLflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for step in (50, 100):
        (tracker,) = opened("mlflow", tmp_path / "run")
        assert fake.runs["id-run"].status == "RUNNING"
        tracker.log(step, VALUES)
        tracker.close(failed=step == 100)
        assert fake.runs["id-run"].status == ("FAILED" if step == 100 else "FINISHED")
    assert fake.uri == f"sqlite:///{tmp_path / 'mlflow.db'}"
    results = [(name, key, value, step) for name, key, value, _, step in fake.metrics]
    assert results == [("id-run", key, x, step) for step in (50, 100) for key, x in VALUES.items()]
    parameters = dict(fake.parameters)
    assert len(parameters) == len(fake.parameters), "sent once"
    assert parameters["phases.0.fraction"] == "1.0"


def test_unavailable_and_unknown_trackers_are_rejected(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"pip install .*wandb"):
        opened("wandb", tmp_path)
    broken = types.SimpleNamespace(init=lambda **_: 1 / 0, Settings=dict)
    monkeypatch.setitem(sys.modules, "wandb", broken)
    with pytest.raises(UserError, match="division by zero"):
        opened("wandb", tmp_path)
    with pytest.raises(UserError, match=r"config.trackers is .*neptune"):
        validate(Config(trackers=("wandb", "neptune")))
    validate(Config(trackers=("wandb", "mlflow")))


def test_run_continues_without_a_tracker_that_fails(capfd):
    """Neither an error of a tracker nor that of closing it replaces how the run ends."""
    received = []

    def unreachable(*_, **__):
        raise ConnectionError("no route to host")

    writer = log.Log.__new__(log.Log)
    writer._writes, writer._files = True, []
    writer._board = types.SimpleNamespace(add=lambda *_: None, close=lambda: None)
    writer._progress = Progress("train", 9, "steps")
    writer._trackers = {
        "wandb": types.SimpleNamespace(log=unreachable),
        "mlflow": types.SimpleNamespace(
            log=lambda step, values: received.append(step), close=unreachable
        ),
    }
    for step in (5, 10):
        writer._send(step, "train", {"loss": 2.5})
    with pytest.raises(UserError, match="stopped"), writer:
        raise UserError("stopped")
    assert received == [5, 10]
    lines = capfd.readouterr().err.splitlines()
    assert ["wandb" in line for line in lines] == [True, False]
    assert ["mlflow" in line for line in lines] == [False, True]


@pytest.mark.parametrize(
    ("fake", "variable"),
    [
        (FakeWandb, "WANDB_FINISH_TIMEOUT"),
        (FakeMLflow, "MLFLOW_HTTP_REQUEST_TIMEOUT"),
        (FakeMLflow, "MLFLOW_HTTP_REQUEST_MAX_RETRIES"),
    ],
)
def test_trackers_wait_minutes_for_a_server_at_most(fake, variable, monkeypatch, tmp_path):
    """Their packages wait up to hours; the user's own limits apply."""
    name = fake().__name__
    monkeypatch.setitem(sys.modules, name, fake())
    monkeypatch.setattr(os, "environ", {})
    opened(name, tmp_path / "run")
    assert 0 < int(os.environ[variable]) <= 120
    os.environ[variable] = "999"
    opened(name, tmp_path / "run")
    assert os.environ[variable] == "999"


def test_runs_of_one_config_have_different_tracker_runs(tmp_path, monkeypatch):
    mesh, names = sharding.make_mesh(MeshConfig(), jax.devices()[:1]), []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        monkeypatch.setattr(sys, "argv", ["bert-jax", "pretrain", "--workdir", folder.name])
        for step in (0, 7):
            workdir.record_start(folder, step, mesh, Config(), [128])
            names.append(workdir.first_start(folder))
    assert names[0] == names[1] != names[2] == names[3]


def test_windows_of_skipped_steps_are_not_written():
    log.Log.__new__(log.Log).training(5, {"loss": (0.0, 0.0)})
