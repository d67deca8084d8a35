"""Whole sweeps on fake clouds: slices that are preempted, and jobs that fail, are lost or never start."""

import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

from bert_jax import storage
from bert_jax.tools.sweep.results import Results
from tests.helpers import clouds as clouds_lib
from tests.helpers import objects, processes
from tests.helpers.launch import ROOT, make_checkout
from tests.helpers.runs import ONE_DEVICE

pytestmark = pytest.mark.slow

# Four points: three models, and one that fails on the machine. The second is preempted.
SWEEP = """
from bert_jax.tools.sweep import Point

def get_points(args):
    for i, steps in enumerate((4, 60, 4)):
        yield point(f"model{i}", args.data / "rows", f"--config.seed={i}", f"--config.steps={steps}")
    yield point("bad", args.data / "none")

def point(name, rows, *options):
    return Point(
        name,
        (
            *("pretrain", "--config", "L1-H16-A2,32", "--rows", rows, *options),
            *("--config.batch_size=4", "--config.evaluate_rows=8", "--config.evaluate_every_steps=4"),
            *("--config.log_every_steps=2", "--config.checkpoint.every_steps=4"),
        ),
        {"name": name},
    )
"""
OPTIONS = {
    "local": (),
    "tpu-vm": ("--launch=--accelerator=v5e-4", "--launch=--zone=us-west4-a"),
    "gke": ("--launch=--accelerator=v5e-4", "--launch=--image=registry/image"),
    "sky": ("--launch=--accelerator=tpu-v5e-4",),
}
TOOLS = {"tpu-vm": "gcloud", "gke": "kubectl", "sky": "sky"}
REFUSALS = {
    "tpu-vm": [(verb, clouds_lib.GCLOUD_QUOTA) for verb in (" create ", " describe ", " scp ")],
    "gke": [("apply", clouds_lib.KUBECTL_TOO_MANY), ("get", clouds_lib.KUBECTL_UNAVAILABLE)],
    "sky": [("queue", clouds_lib.SKY_STOPPED)],
}
# A command of a checkout without uncommitted changes, whose own commands start as quickly.
CODE = """
import pathlib, sys
from bert_jax import cli
from bert_jax.tools.launch.engines import base
sys.executable, base.CHECKOUT = {program!r}, pathlib.Path({checkout!r})
sys.exit(cli.main(sys.argv[1:]))
"""


class Sweeps:
    """Starts sweeps, in a folder of results for each engine, with outputs on object storage."""

    def __init__(self, folder, server, checkout):
        self.folder, self.server = folder, server
        path = folder / "program" / "bert-jax"
        self._code = CODE.format(program=str(path), checkout=str(checkout))
        self.program = processes.Program(path.parent, self._code)
        self.environment = {
            **ONE_DEVICE,
            **server.environment,
            "PYTHONPATH": str(ROOT),
            "BERT_JAX_CACHE": str(folder / "programs"),
            "BERT_JAX_STORAGE_CACHE": str(folder / "copies"),
            "BERT_JAX_LAUNCH_WAIT_SECONDS": "0.1",
            "BERT_JAX_SWEEP_QUERY_SECONDS": "0.2",
            "TPU_SLICE_POLL_SECONDS": "0.2",
        }

    def start(self, name, clouds=None, *options):
        """Start a sweep, or start it again, in a process of its own; `name` may be an engine."""
        on = name if name in OPTIONS else "tpu-vm"
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        (folder / "sweep.py").write_text(SWEEP)
        environment = {
            **self.environment,
            **(clouds.environment if clouds else {}),
            "BERT_JAX_LAUNCH": str(folder / "jobs"),
        }
        url = self.server.url
        arguments = ["sweep", folder, "--data", f"{url}/data", "--on", on, "--jobs", "2"]
        arguments += ["--runs", f"{url}/{name}" if clouds else folder / "runs", *OPTIONS[on]]
        arguments += options
        return processes.Process(
            [sys.executable, "-c", self._code, *arguments], environment, folder
        )

    def results(self, on):
        """Return what the results say of the models, without what depends on the machine and the time."""
        kept = ("metrics", "step", "seed", "real_tokens", "config", "facts")
        lines = Results(self.folder / on).read()
        return {
            line["point"]: {key: line[key] for key in kept}
            | {"loss": line["curve"]["loss"], "steps": line["curve"]["step"]}
            for line in lines
        }

    def attempts(self, on, point):
        """Return the attempts of a point, as this machine has recorded them."""
        (path,) = (self.folder / on / f"runs/sweeps/gs/{objects.BUCKET}/{on}").glob(f"{point}-*")
        lines = (path / "attempts.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("sweeps")
    with objects.serve("gs", str(folder / "objects")) as server, pytest.MonkeyPatch.context() as m:
        for name, value in server.environment.items():
            m.setenv(name, value)
        source = pathlib.Path(rows())
        paths = [path for path in source.rglob("*") if path.is_file() and path.name != "lock"]
        storage.upload(paths, [f"{server.url}/data/rows/{p.relative_to(source)}" for p in paths])
        sweeps = Sweeps(folder, server, make_checkout(tmp_path_factory))
        yield sweeps
        sweeps.program.close()


@pytest.fixture(scope="module")
def undisturbed(sweeps):
    """Return the results of the sweep on this machine."""
    process = sweeps.start("local")
    _, error = process.communicate()
    assert process.returncode == 1, error
    assert "bad failed: " in error
    return sweeps.results("local")


def until(condition, process):
    deadline = time.monotonic() + 120
    while not (value := condition()):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    return value


@pytest.mark.parametrize("on", ["tpu-vm", "gke", "sky"])
def test_sweep_equals_one_on_this_machine(on, sweeps, undisturbed, tmp_path):
    """Two points run at a time, after a wait for machines and on an API that refuses some requests.

    One is preempted, one fails, and the sweep is killed and started again.
    """
    # These machines have no TPU's metadata, in which JAX finds the others.
    settings = [f"{k}={v}" for k, v in sweeps.environment.items() if os.environ.get(k) != v]
    program = ["env", "--unset=BERT_JAX_DISTRIBUTED", *settings, str(sweeps.program.path)]
    clouds = clouds_lib.Clouds(tmp_path, program, unreachable=0)
    outputs = sweeps.folder / "objects" / objects.BUCKET / on
    try:
        clouds.hold(True)
        for pattern, refusal in REFUSALS[on]:
            # Once, as two answers in a row that there is no such job, and six early failures of one
            # launcher, are the end of a job.
            clouds.fail(TOOLS[on], pattern, 1, refusal)
        process = sweeps.start(on, clouds)
        until(lambda: len(clouds.calls(TOOLS[on])) > 6, process)
        assert not list(outputs.glob("*"))
        clouds.hold(False)
        saved = "model1-*/out/checkpoints/*/manifest.json"
        until(lambda: list(outputs.glob(saved)), process)
        job = sweeps.attempts(on, "model1")[-1]["job"]
        clouds.preempt(job)
        process.kill()
        process.wait()
        process = sweeps.start(on, clouds)
        _, error = process.communicate()
        assert process.returncode == 1, error
        assert error.count("bad failed: ") == 1
        assert "3 of 4 points done" in error
        if on == "tpu-vm":  # two slices, one of which was created again
            created = [call[5] for call in clouds.calls("gcloud") if call[4] == "create"]
            assert len({*created}) == 2
            assert not clouds.states()
    finally:
        clouds.close()
    results = sweeps.results(on)
    assert results == undisturbed
    (starts,) = outputs.glob("model1-*/out/starts.jsonl")
    steps = [json.loads(line)["step"] for line in starts.read_text().splitlines()]
    assert steps[0] == 0 < steps[1]
    assert sweeps.attempts(on, "bad")[-1]["status"] == 2


def test_slice_of_a_stopped_point_is_used_again_and_deleted(sweeps, tmp_path):
    """Of two points on one slice the user stops the first, which would run for ever; the second fails."""
    code = '[[ $* != *data/none* ]] || exit 2; trap "exit 75" TERM; while :; do sleep 0.05; done'
    clouds = clouds_lib.Clouds(tmp_path, ["bash", "-c", code, "bert-jax"], unreachable=0)
    try:
        process = sweeps.start(
            "stopped", clouds, "--only", "model0", "--only", "bad", "--jobs", "1"
        )
        until(lambda: clouds.calls("bert-jax"), process)
        (name,) = clouds.states()
        stop = [str(sweeps.program.path), "launch", "stop", name]
        environment = {**clouds.environment, "BERT_JAX_LAUNCH": str(sweeps.folder / "stopped/jobs")}
        subprocess.run(stop, env=environment, check=True, timeout=60)
        _, error = process.communicate()
    finally:
        clouds.close()
    assert process.returncode == 1
    assert "launch stop`: model0" in error
    assert "bad failed: " in error
    assert [call[5] for call in clouds.calls("gcloud") if call[4] == "create"] == [name]
    assert not clouds.states()
