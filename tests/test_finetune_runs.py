"""Fine-tuning from the command line: learning, resuming, rejected settings, and output files."""

import json
import re
import shutil
import signal
from unittest import mock

import jax
import numpy as np
import pytest
import transformers
from flax import traverse_util

from bert_jax import api, cli
from bert_jax import train as train_lib
from bert_jax.config.schema import CheckpointConfig, TaskConfig
from bert_jax.convert import source
from bert_jax.data import examples
from bert_jax.errors import UserError
from bert_jax.objectives import finetuning
from bert_jax.runs import checkpoint, workdir
from bert_jax.tasks.load import load_dataset
from bert_jax.training import step as step_lib
from bert_jax.training.log import Log
from tests import goldens
from tests.helpers import tasks
from tests.helpers.runs import VOCABULARY, assert_same_run, refused
from tests.helpers.tasks import arguments, choice_file, conll_file, squad_file


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tasks.write_table(tmp_path_factory.mktemp("table"))


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    changes = (f"task.test={data}/test.csv", "model.layers=2")
    assert cli.main(arguments(data, folder, *changes)) == 0
    return folder


def metrics(folder):
    return json.loads((folder / "metrics.json").read_text())


def losses(folder):
    return [line["loss"] for line in workdir.read_lines(folder / "metrics.jsonl")]


@pytest.fixture
def several(monkeypatch):
    """Config changes for a 30-step run with several row counts from step 10 on, on one device."""
    monkeypatch.setattr(examples, "LONG_RUN_STEPS", 30)
    monkeypatch.setattr(examples, "FIRST_STEPS", 10)
    return ("steps=30", "log_every_steps=1", "checkpoint.every_steps=4")


def row_counts(output):
    """Parse the row counts of the batches from the output of a run."""
    (text,) = re.findall(r"examples in ([\d or]+) rows", output)
    return [int(each) for each in text.split(" or ")]


@pytest.mark.slow
def test_resume_around_row_count_change_is_bitwise_identical(
    data, tmp_path, several, monkeypatch, capsys
):
    compile_step, compiled = step_lib.compile_step, {}

    def compile_once(config, phase, *others):
        if phase.batch_size not in compiled:
            compiled[phase.batch_size] = compile_step(config, phase, *others)
        return compiled[phase.batch_size]

    monkeypatch.setattr(step_lib, "compile_step", compile_once)
    whole = tmp_path / "whole"
    changes = (*several, "checkpoint.keep_last=9", "model.dropout=0.1")
    assert cli.main(arguments(data, whole, *changes)) == 0
    output = capsys.readouterr()
    *fewer, most = row_counts(output.out)
    assert f"compiling it for {' and '.join(map(str, fewer))} rows in the background" in output.err
    speed = workdir.read_lines(whole / "speed.jsonl")
    used = [round(line["tokens_per_second"] / line["steps_per_second"]) for line in speed]
    tokens = used[0] // most
    assert used[:10] == [most * tokens] * 10
    assert set(fewer) <= {each // tokens for each in used[10:]} <= {*fewer, most}
    for step in (8, 16):
        broken = tmp_path / str(step)
        shutil.copytree(whole, broken)
        for later in checkpoint.Checkpoints(broken / "checkpoints", CheckpointConfig()).steps():
            if later > step:
                shutil.rmtree(broken / "checkpoints" / str(later))
        assert cli.main(arguments(data, broken, *changes)) == 0
        assert f"resuming at step {step}" in capsys.readouterr().err
        assert_same_run(broken, whole)
        assert metrics(broken) == metrics(whole)


def test_background_compilation_failure_stops_the_run(data, tmp_path, several, monkeypatch, capsys):
    compile_step = step_lib.compile_step

    largest = []

    def fail(config, phase, *others):
        largest.append(max([phase.batch_size, *largest]))
        if phase.batch_size < largest[-1]:
            raise UserError(f"no program for {phase.batch_size} rows")
        return compile_step(config, phase, *others)

    monkeypatch.setattr(step_lib, "compile_step", fail)
    assert cli.main(arguments(data, tmp_path, *several)) == cli.EXIT_USER_ERROR
    output = capsys.readouterr()
    fewer = row_counts(output.out)[:-1]
    assert any(f"no program for {rows} rows" in output.err for rows in fewer)
    # Steps that need none of these programs still run.
    assert 8 <= workdir.read_lines(tmp_path / "metrics.jsonl")[-1]["step"] < 12


def test_sigterm_after_last_step_stops_before_next_seed(data, tmp_path, monkeypatch, capsys):
    evaluate_and_log = Log.evaluate_and_log

    def told_to_stop(log, step, measure):
        if step == 12:
            signal.raise_signal(signal.SIGTERM)
        return evaluate_and_log(log, step, measure)

    monkeypatch.setattr(Log, "evaluate_and_log", told_to_stop)
    folder = tmp_path / "runs"
    argv = arguments(data, folder, "epochs=1", options=("--seeds", "2"))
    assert cli.main(argv) == cli.EXIT_INTERRUPTED
    assert "saved step 12 of 12" in capsys.readouterr().err
    assert (folder / "seed_0" / "checkpoints" / "12").is_dir()
    assert not (folder / "seed_1").exists()


def test_settings_of_the_command_line_count_at_their_defaults(data, tmp_path, monkeypatch):
    finetune = mock.Mock(side_effect=UserError("stop"))
    monkeypatch.setattr(train_lib, "finetune", finetune)
    argv = arguments(data, tmp_path / "run", "model.head.pooling=cls")
    assert cli.main(argv) == cli.EXIT_USER_ERROR
    assert "model.head.pooling" in finetune.call_args.kwargs["keys"]
    with pytest.raises(UserError, match="stop"):
        api.finetune("table", "none", tmp_path / "run", changes={"model.head.pooling": "cls"})
    assert list(finetune.call_args.kwargs["keys"]) == ["model.head.pooling"]


def test_objective_of_a_glue_task_is_recorded(data, tmp_path, monkeypatch):
    """Exports and `Model.predict` read it from the config."""
    (tmp_path / "train.tsv").write_text(
        "index\tsentence1\tsentence2\tscore\n0\tthe river\ta mill\t2.5\n"
    )
    train = mock.Mock(side_effect=UserError("stop"))
    monkeypatch.setattr(train_lib, "train", train)
    path = tmp_path / "train.tsv"
    changes = ["task.name=stsb", "batch_size=1", f"task.train={path}", f"task.dev={path}"]
    assert cli.main(arguments(data, tmp_path / "run", *changes)) == cli.EXIT_USER_ERROR
    assert train.call_args.args[0].task.objective == "number"


def test_run_learns_and_writes_metrics_and_predictions(run):
    result = metrics(run)
    assert result["dev"]["accuracy"] > 0.9
    assert result["best_by"] == "accuracy"
    lines = workdir.read_lines(run / "metrics.jsonl")
    evaluated = {m["step"]: m["accuracy"] for m in lines if m["split"] == "heldout"}
    assert len(evaluated) == 9  # after every epoch of 12 steps and at the end, after step 100
    assert result["dev"]["accuracy"] == pytest.approx(max(evaluated.values()))
    for split, count in (("dev", 40), ("test", 2)):
        predictions = (run / "predictions" / split / "predictions.tsv").read_text().splitlines()
        assert len(predictions) == count + 1
    assert [line.split("\t")[1] for line in predictions[1:]] == ["no", "yes"]
    assert result["test"] == {}


def test_evaluate_and_predict_after_training(run, data, tmp_path, capsys):
    before = (run / "metrics.json").read_text()
    (run / "metrics.json").unlink()
    assert cli.main(["evaluate", "--workdir", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(before)
    assert (run / "metrics.json").read_text() == before
    # Another checkpoint's results do not replace the run's.
    step = checkpoint.Checkpoints(run / "checkpoints", CheckpointConfig()).steps()[0]
    assert cli.main(["evaluate", "--workdir", str(run), "--checkpoint", str(step), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == step
    assert (run / "metrics.json").read_text() == before
    assert json.loads((run / f"metrics_{step}.json").read_text())["step"] == step
    assert (run / f"predictions_{step}" / "dev" / "predictions.tsv").exists()
    new = tmp_path / "new.txt"
    new.write_text("w5 w0 w7\nw9 w1 w3\n")
    assert cli.main(["predict", "--workdir", str(run), "--out", str(tmp_path / "p"), str(new)]) == 0
    rows = (tmp_path / "p" / "predictions.tsv").read_text().splitlines()
    assert [row.split("\t")[1] for row in rows[1:]] == ["no", "yes"]


def test_changed_data_are_not_evaluated(run, data, capsys):
    path, before = data / "dev.csv", (run / "metrics.json").read_bytes()
    content = path.read_text()
    path.write_text(content.replace("yes", "no", 1))
    assert str(path) in refused(capsys, "evaluate", "--workdir", run)
    assert (run / "metrics.json").read_bytes() == before
    path.write_text(content)
    assert cli.main(["evaluate", "--workdir", str(run)]) == 0


def test_hugging_face_export_preserves_labels(run, tmp_path):
    assert cli.main(["export", "--workdir", str(run), "--out", str(tmp_path / "out")]) == 0
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert model.config.id2label == {0: "no", 1: "yes"}
    assert model.config.problem_type == "single_label_classification"
    classify = transformers.pipeline("text-classification", str(tmp_path / "out"))
    assert [c["label"] for c in classify(["w5 w0 w7", "w9 w1 w3"])] == ["no", "yes"]
    params = jax.device_get(checkpoint.load_model(run)[2])
    jax.tree.map(np.testing.assert_array_equal, source.read(str(tmp_path / "out")).params, params)


@pytest.mark.slow
def test_feature_based_training_freezes_the_encoder(run, data, tmp_path, capsys):
    """Two seeds from one checkpoint compile the step once."""
    changes = (
        *("model.head.features=weighted-all", "model.head.lstm_layers=2", "model.layers=2"),
        *("epochs=1", "optim.weight_decay=0.5"),
    )
    argv = arguments(data, tmp_path / "both", *changes, init=run, options=("--seeds", "2"))
    assert cli.main(argv) == 0
    output = capsys.readouterr()
    assert f"from {run}, new: classifier, features, lstm" in output.out
    assert output.err.count("compiled the step") == 1
    assert "±" in output.out
    before = traverse_util.flatten_dict(checkpoint.load_model(run)[2], sep="/")
    results = []
    for seed in range(2):
        folder = tmp_path / "both" / f"seed_{seed}"
        after = traverse_util.flatten_dict(checkpoint.load_model(folder, "latest")[2], sep="/")
        assert "pooler/kernel" in before.keys() - after.keys()
        results.append(after)
        assert workdir.read_config(folder).seed == seed
        accuracy = metrics(folder)["dev"]["accuracy"]
        assert metrics(tmp_path / "both")["dev"]["accuracy"]["values"][seed] == accuracy
        for path in after.keys() & before.keys() - {"classifier/kernel", "classifier/bias"}:
            np.testing.assert_array_equal(
                np.array(after[path]).view(np.uint32), np.array(before[path]).view(np.uint32), path
            )
    assert {path.split("/")[0] for path in after.keys() - before.keys()} == {"features", "lstm"}
    for path in after.keys() - before.keys():
        assert np.any(results[0][path] != results[1][path]), path
    assert np.any(after["features/weights"] != 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        pytest.param((), marks=pytest.mark.nightly),
        ("model.head.lstm_layers=1", "model.causal=true"),
    ],
)
def test_mesh_layouts_give_the_same_losses(data, tmp_path, more):
    """Compare data parallelism on eight devices with data + FSDP + tensor parallelism."""
    layouts = {"data": ["mesh.data=8"], "all": ["mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"]}
    off = ("model.dropout=0", "model.attention_dropout=0", "epochs=0.4")
    for name, changes in layouts.items():
        assert cli.main(arguments(data, tmp_path / name, *off, *changes, *more)) == 0
    np.testing.assert_allclose(losses(tmp_path / "data"), losses(tmp_path / "all"), rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["task.train=", "task.labels=no,yes"], "--config.task.train="),
        (["task.text_b=other"], "text, label); name one of these: --config.task.text_b="),
        (["task.dev="], "nothing to evaluate on"),
        (["batch_size=3000"], "config.batch_size"),
        (["epochs=0.05"], "0.05 epochs"),
        (["reset_layers=1"], "config.reset_layers"),
        (
            ["task.label=class"],
            "text, label); label the row, or name the column of the labels: --config.task.label=",
        ),
    ],
)
def test_invalid_configs_are_rejected(data, tmp_path, capsys, changes, expected):
    assert expected in refused(capsys, *arguments(data, tmp_path / "w", *changes))
    assert not (tmp_path / "w").exists()


def test_invalid_commands_are_rejected(run, data, tmp_path, capsys):
    (tmp_path / "s" / "seed_4").mkdir(parents=True)
    (tmp_path / "s" / "seed_4" / "config.json").touch()
    argv = arguments(data, tmp_path / "w")
    score = ["score", "glue:rte", data / "dev.csv", data / "dev.csv"]
    pretraining = f"--config={tasks.CONFIGS / 'pretrain.py'}:mini,128"
    for command, key in (
        ([*argv, "--vocab", ""], "--init none"),
        ([*arguments(data, tmp_path / "w", init=run), "--vocab", data / "vocab"], "--vocab"),
        (arguments(data, run, options=("--seeds", "2")), "a run of one seed"),
        (arguments(data, tmp_path / "s"), "seed_4"),
        (["evaluate", "--workdir", run, "--all"], "--all"),
        ([*score, "--null-odds", "x"], "--null-odds"),
        ([score[0], "glue:xyz", *score[2:]], "glue:xyz"),
        (["glue-zip", run, "--out", tmp_path / "z"], "test sets"),
        (["finetune", pretraining, "--init", "none", "--workdir", "w"], "FinetuneConfig"),
    ):
        assert key in refused(capsys, *command)
    with pytest.raises(UserError, match="standard input"):
        load_dataset(TaskConfig(kind="squad"), VOCABULARY, new="-")


@pytest.mark.parametrize(
    ("write", "task"),
    [
        (squad_file, {"kind": "squad", "name": "squad2"}),
        (conll_file, {"kind": "tagging"}),
        (choice_file, {"kind": "choice", "text_a": "question", "choices": ("first", "second")}),
        (tasks.labels_file, {"objective": "classes"}),
        (tasks.scores_file, {"kind": "pairs", "similarity": ("text", "text", "label")}),
    ],
)
def test_evaluation_does_not_need_the_training_data(tmp_path, write, task):
    train, dev = tmp_path / "train.csv", tmp_path / "dev.csv"
    write(train)
    write(dev)
    task = TaskConfig(tokens=32, question_tokens=8, train=str(train), dev=str(dev), **task)
    whole = load_dataset(task, VOCABULARY)
    train.unlink()
    part = load_dataset(task, VOCABULARY, whole.labels, training=False)
    assert list(part.splits) == ["dev"]
    jax.tree.map(
        np.testing.assert_array_equal, part.splits["dev"].tokens, whole.splits["dev"].tokens
    )
    assert finetuning.digest(part) == finetuning.digest(whole, ["dev"])
    with pytest.raises(UserError, match="train"):
        load_dataset(task, VOCABULARY, whole.labels)


def test_training_data_decide_whether_questions_can_be_unanswerable(tmp_path):
    train, dev = tmp_path / "train.json", tmp_path / "dev.json"
    squad_file(train)
    data = json.loads(train.read_text())
    questions = data["data"][0]["paragraphs"][0]["qas"]
    questions[:] = [question for question in questions if question["answers"]]
    dev.write_text(json.dumps(data))
    task = TaskConfig(kind="squad", tokens=32, question_tokens=8, train=str(train), dev=str(dev))
    dataset = load_dataset(task, VOCABULARY, ("start", "end"), training=False)
    assert list(dataset.splits) == ["dev"]
    assert dataset.unanswerable


@pytest.mark.parametrize(
    ("head", "name", "expected"),
    [
        ("span", "squad2", "answers.json nbest_predictions.json null_odds.json predictions.json"),
        ("token", "conll", "per_type.tsv predictions.conll probabilities.jsonl"),
        ("choice", "", "predictions.csv probabilities.csv"),
    ],
)
def test_each_task_kind_writes_its_prediction_files(data, tmp_path, capsys, head, name, expected):
    (config, write, changes), expected = goldens.HEADS[head], expected.split()
    file, folder = (
        tmp_path / {"squad2": "d.json", "conll": "d.txt"}.get(name, "d.csv"),
        tmp_path / "w",
    )
    write(file)
    files = [f"task.{split}={file}" for split in ("train", "dev")]
    argv = arguments(data, folder, *files, "epochs=2", "batch_size=4", *changes)
    argv[1] = f"--config={tasks.CONFIGS / config}"
    assert cli.main(argv) == 0
    result, written = metrics(folder), folder / "predictions" / "dev"
    assert result["best_by"] in result["dev"]
    assert sorted(p.name for p in written.iterdir()) == expected
    if not name:
        return
    if name == "squad2":  # by the best threshold
        assert result["dev"]["f1"] == pytest.approx(result["dev"]["best_f1"])
    capsys.readouterr()
    (predictions,) = written.glob("predictions.*")
    assert cli.main(["score", name, str(file), str(predictions)]) == 0
    output = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert float(output["f1"]) == pytest.approx(result["dev"]["f1"], abs=1e-4)
