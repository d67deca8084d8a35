"""Fine-tuning from the command line: learning, resuming, rejected settings, and output files."""

import dataclasses
import functools
import json
import re
import shutil
import signal
import time

import jax
import numpy as np
import pytest
import transformers
from flax import traverse_util

from bert_jax import api, cli
from bert_jax import train as train_lib
from bert_jax.config.flags import load
from bert_jax.config.schema import CheckpointConfig, FinetuneConfig, TaskConfig
from bert_jax.convert import source
from bert_jax.data import examples
from bert_jax.errors import UserError
from bert_jax.runs import checkpoint
from bert_jax.tasks.load import load_dataset
from bert_jax.training import step as step_lib
from bert_jax.training.log import Log
from tests.helpers import processes, tasks
from tests.helpers.runs import ONE_DEVICE, VOCABULARY, assert_same_run, python
from tests.helpers.tasks import arguments, choice_file, conll_file, squad_file


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tasks.write_table(tmp_path_factory.mktemp("table"))


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    assert cli.main(arguments(data, folder, f"task.test={data}/test.csv")) == 0
    return folder


@pytest.mark.slow
def test_non_finite_loss_stops_the_run(data, tmp_path, capsys):
    folder = tmp_path / "run"
    changes = ("optim.learning_rate=1e30", "optim.clip_norm=0")
    assert cli.main(arguments(data, folder, *changes)) == cli.EXIT_USER_ERROR
    assert "non-finite value: loss nan" in capsys.readouterr().err
    line = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["split"] == "stopped"
    assert 1 < line["step"] < 11


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
def test_resume_around_row_count_change_is_bitwise_identical(data, tmp_path, several, capsys):
    whole = tmp_path / "whole"
    changes = (*several, "checkpoint.keep_last=9", "model.dropout=0.1")
    assert cli.main(arguments(data, whole, *changes)) == 0
    output = capsys.readouterr()
    *fewer, most = row_counts(output.out)
    assert f"compiling it for {' and '.join(map(str, fewer))} rows in the background" in output.err
    speed = [json.loads(line) for line in (whole / "speed.jsonl").read_text().splitlines()]
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
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").open()]
    assert 8 <= max(steps) < 12  # steps that need none of these programs still run


def test_sigterm_after_last_step_stops_before_next_seed(data, tmp_path, monkeypatch, capsys):
    heldout = Log.heldout

    def told_to_stop(log, step, measure):
        if step == 12:
            signal.raise_signal(signal.SIGTERM)
        return heldout(log, step, measure)

    monkeypatch.setattr(Log, "heldout", told_to_stop)
    folder = tmp_path / "runs"
    argv = arguments(data, folder, "epochs=1", options=("--seeds", "2"))
    assert cli.main(argv) == cli.EXIT_INTERRUPTED
    assert "saved step 12 of 12" in capsys.readouterr().err
    assert (folder / "seed_0" / "checkpoints" / "12").is_dir()
    assert not (folder / "seed_1").exists()


def test_settings_of_the_command_line_count_at_their_defaults(data, tmp_path, monkeypatch):
    passed = {}

    def finetune(*_, **options):
        passed.update(options)
        raise UserError("stop")

    monkeypatch.setattr(train_lib, "finetune", finetune)
    argv = arguments(data, tmp_path / "run", "model.head_pooling=cls")
    assert cli.main(argv) == cli.EXIT_USER_ERROR
    assert "model.head_pooling" in passed["keys"]
    passed.clear()
    with pytest.raises(UserError, match="stop"):
        api.finetune("table", "none", tmp_path / "run", changes={"model.head_pooling": "cls"})
    assert list(passed["keys"]) == ["model.head_pooling"]


def test_objective_of_a_glue_task_is_recorded(data, tmp_path, monkeypatch):
    """Exports and `Model.predict` read it from the config."""
    (tmp_path / "train.tsv").write_text(
        "index\tsentence1\tsentence2\tscore\n0\tthe river\ta mill\t2.5\n"
    )
    trained = []

    def train(config, *_, **__):
        trained.append(config)
        raise UserError("stop")

    monkeypatch.setattr(train_lib, "train", train)
    path = tmp_path / "train.tsv"
    changes = ["task.name=stsb", "batch_size=1", f"task.train={path}", f"task.dev={path}"]
    assert cli.main(arguments(data, tmp_path / "run", *changes)) == cli.EXIT_USER_ERROR
    assert trained[0].task.objective == "number"


def test_run_learns_and_writes_metrics_and_predictions(run):
    result = json.loads((run / "metrics.json").read_text())
    assert result["dev"]["accuracy"] > 0.9
    assert result["best_by"] == "accuracy"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluated = {m["step"]: m["accuracy"] for m in lines if m["split"] == "heldout"}
    assert len(evaluated) == 9  # after every epoch of 12 steps and at the end, after step 100
    assert result["dev"]["accuracy"] == pytest.approx(max(evaluated.values()))
    for split, count in (("dev", 40), ("test", 2)):
        predictions = (run / "predictions" / split / "predictions.tsv").read_text().splitlines()
        assert len(predictions) == count + 1
    assert [line.split("\t")[1] for line in predictions[1:]] == ["no", "yes"]
    assert (run / "predictions" / "dev" / "confusion.png").stat().st_size > 1000
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


def test_hugging_face_export_preserves_labels(run, tmp_path):
    assert cli.main(["export", "--workdir", str(run), "--out", str(tmp_path / "out")]) == 0
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert model.config.id2label == {0: "no", 1: "yes"}
    assert model.config.problem_type == "single_label_classification"
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Fine-tuned on classification: 200 train, 40 dev, 2 test examples." in card
    classify = transformers.pipeline("text-classification", str(tmp_path / "out"))
    assert [c["label"] for c in classify(["w5 w0 w7", "w9 w1 w3"])] == ["no", "yes"]
    back = source.read(str(tmp_path / "out"))
    config, _, params, _ = checkpoint.load_model(run)
    assert back.config.model.problem_type == "single_label_classification"
    others = ("tied_decoder", "attention", "problem_type")
    assert back.config.model == dataclasses.replace(
        config.model, **{name: getattr(back.config.model, name) for name in others}
    )
    jax.tree.map(np.testing.assert_array_equal, back.params, jax.device_get(params))


@pytest.mark.slow
def test_feature_based_training_freezes_the_encoder(run, data, tmp_path, capsys):
    """Train two seeds, resume the first from the middle, and evaluate it from its checkpoint."""
    changes = (
        *("model.features=weighted-all", "model.lstm_layers=2", "epochs=1", "model.dropout=0.1"),
        *("optim.weight_decay=0.5", "checkpoint.every_steps=4", "checkpoint.keep_last=9"),
    )
    argv = arguments(data, tmp_path / "both", *changes, init=run, options=("--seeds", "2"))
    assert cli.main(argv) == 0
    output = capsys.readouterr()
    assert f"from {run}, new: classifier, features, lstm" in output.out
    assert output.err.count("compiled the step") == 1
    before = traverse_util.flatten_dict(checkpoint.load_model(run)[2], sep="/")
    results = []
    for seed in range(2):
        folder = tmp_path / "both" / f"seed_{seed}"
        after = traverse_util.flatten_dict(checkpoint.load_model(folder, "latest")[2], sep="/")
        assert "pooler/kernel" in before.keys() - after.keys()
        results.append(after)
        for path in after.keys() & before.keys() - {"classifier/kernel", "classifier/bias"}:
            np.testing.assert_array_equal(
                np.array(after[path]).view(np.uint32), np.array(before[path]).view(np.uint32), path
            )
    assert {path.split("/")[0] for path in after.keys() - before.keys()} == {"features", "lstm"}
    for path in after.keys() - before.keys():
        assert np.any(results[0][path] != results[1][path]), path
    assert np.any(after["features/weights"] != 0)

    whole, broken = tmp_path / "both" / "seed_0", tmp_path / "broken" / "seed_0"
    shutil.copytree(tmp_path / "both", tmp_path / "broken")
    for step in checkpoint.Checkpoints(broken / "checkpoints", CheckpointConfig()).steps():
        if step > 4:
            shutil.rmtree(broken / "checkpoints" / str(step))
    argv[argv.index("--workdir") + 1] = str(tmp_path / "broken")
    assert cli.main(argv) == 0
    assert "resuming at step 4" in capsys.readouterr().err
    assert_same_run(broken, whole)

    scored = (whole / "metrics.json").read_text()
    assert cli.main(["evaluate", "--workdir", str(whole), "--json"]) == 0
    assert (whole / "metrics.json").read_text() == scored
    out = tmp_path / "out"
    output = refusal(capsys, "export", "--workdir", whole, "--out", out)
    assert output.endswith(
        "config.model.lstm_layers is 2, which transformers' BERT does not support"
    )
    assert cli.main(["export", "--workdir", str(whole), "--out", str(out), "--heads", "none"]) == 0


def test_finetuning_starts_from_a_checkpoint_of_another_task(run, data, tmp_path, capsys):
    assert cli.main(arguments(data, tmp_path / "w", "epochs=1", init=run)) == 0
    output = capsys.readouterr().out
    assert f"from {run}, new: classifier" in output
    assert "200 train, 40 dev examples" in output
    # The same command with another --init is a different run, so it does not count as finished.
    refused = arguments(data, tmp_path / "w", "epochs=1", init=tmp_path / "w")
    assert cli.main(refused) == cli.EXIT_USER_ERROR
    assert "it began from another checkpoint (--init)" in capsys.readouterr().err


@pytest.mark.slow
def test_resume_after_sigkill_is_bitwise_identical(run, data, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    changes = ("checkpoint.every_steps=4", "model.dropout=0.1", "accumulation=2", "epochs=2")
    for folder in (whole, broken):
        killed = processes.Process(python(*arguments(data, folder, *changes)), env=ONE_DEVICE)
        path = folder / "metrics.jsonl"
        while folder == broken and killed.poll() is None:
            if path.exists() and len(path.read_bytes().splitlines()) >= 3:
                time.sleep(0.05)
                killed.send_signal(signal.SIGKILL)
        assert killed.wait() == (0 if folder == whole else -signal.SIGKILL)
    again = processes.run(python(*arguments(data, broken, *changes)), env=ONE_DEVICE)
    assert again.returncode == 0, again.stderr
    assert "resuming at step" in again.stderr
    assert_same_run(broken, whole)
    assert (broken / "metrics.json").read_text() == (whole / "metrics.json").read_text()


def test_each_seed_matches_a_single_seed_run(data, tmp_path, capsys):
    options = ("--seeds", "2")
    assert cli.main(arguments(data, tmp_path / "both", "epochs=1", options=options)) == 0
    output = capsys.readouterr()
    assert output.err.count("compiled the step") == 1
    assert "±" in output.out
    summary = json.loads((tmp_path / "both" / "metrics.json").read_text())
    each = [
        json.loads((tmp_path / "both" / f"seed_{i}" / "metrics.json").read_text())["dev"][
            "accuracy"
        ]
        for i in range(2)
    ]
    assert summary["dev"]["accuracy"]["values"] == each
    # The row count fits the batches of both seeds, so a single seed compiles to a different program
    # and matches only up to rounding.
    assert cli.main(arguments(data, tmp_path / "one", "epochs=1", "seed=1")) == 0
    alone, with_others = (
        [
            json.loads(line)["loss"]
            for line in (tmp_path / f / "metrics.jsonl").read_text().splitlines()
        ]
        for f in ("one", "both/seed_1")
    )
    np.testing.assert_allclose(alone, with_others, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("model.lstm_layers=1", "model.causal=true")])
def test_mesh_layouts_give_the_same_losses(data, tmp_path, more):
    """Compare data parallelism on eight devices with data + FSDP + tensor parallelism."""
    losses = []
    for i, changes in enumerate(
        (("mesh.data=8",), ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"))
    ):
        folder = tmp_path / str(i)
        off = ("model.dropout=0", "model.attention_dropout=0", "epochs=1")
        assert cli.main(arguments(data, folder, *off, *changes, *more)) == 0
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["task.train=", "task.labels=no,yes"], "no training examples"),
        (["task.dev="], "nothing to evaluate on"),
        (["task.tokens=64"], "config.task.tokens is 64: it must be 8 to 32"),
        (["frozen_layers=3"], "config.frozen_layers is 3: it must be at most 2"),
        (["batch_size=3000"], "config.batch_size is 3000, but there are only 200 examples"),
        (["epochs=0.05"], "only 200 examples for 0.05 epochs: not one step"),
        (["reset_layers=1"], "config.reset_layers must be 0 with --init none"),
        (["task.label=class"], "class"),
        (["task.kind=poetry"], "config.task.kind is 'poetry'"),
    ],
)
def test_invalid_configs_are_rejected(data, tmp_path, capsys, changes, expected):
    capsys.readouterr()
    assert cli.main(arguments(data, tmp_path / "w", *changes)) == cli.EXIT_USER_ERROR
    output = capsys.readouterr().err.strip()
    assert "\n" not in output, output
    assert expected in output
    assert not (tmp_path / "w").exists()


def refusal(capsys, *argv):
    capsys.readouterr()
    assert cli.main([str(each) for each in argv]) == cli.EXIT_USER_ERROR
    output = capsys.readouterr().err.strip()
    assert "\n" not in output, output
    return output


def test_invalid_commands_are_rejected(run, data, tmp_path, capsys):
    refused = functools.partial(refusal, capsys)
    argv = arguments(data, tmp_path / "w")
    argv[argv.index("--vocab") + 1] = ""
    assert "--init none needs a vocabulary" in refused(*argv)
    argv = [*arguments(data, tmp_path / "w", init=run), "--vocab", str(data / "vocab")]
    assert "--vocab" in refused(*argv)
    assert "is only for --init none" in refused(*argv)
    several = arguments(data, run, options=("--seeds", "2"))
    assert "holds a run of one seed" in refused(*several)
    (tmp_path / "s" / "seed_4").mkdir(parents=True)
    (tmp_path / "s" / "seed_4" / "config.json").touch()
    assert "holds runs of several seeds (seed_4" in refused(*arguments(data, tmp_path / "s"))
    assert "--rows and --all: only for pretraining runs" in refused(
        "evaluate", "--workdir", run, "--all"
    )
    assert "predict GLUE's test sets first" in refused("glue-zip", run, "--out", tmp_path / "z")
    with pytest.raises(UserError, match="standard input do not suffice"):
        load_dataset(TaskConfig(kind="squad"), VOCABULARY, new="-")
    wrong = f"--config={tasks.CONFIGS / 'pretrain.py'}:mini,128"
    result = refused("finetune", wrong, "--init", "none", "--workdir", "w")
    assert "must return a bert_jax.config.schema.FinetuneConfig" in result


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


@pytest.mark.parametrize("name", ["glue.py:stsb", "squad.py:2", "swag.py:own", "table.py:classes"])
def test_config_files_load_with_arguments(name):
    assert load([f"--config={tasks.CONFIGS / name}"], FinetuneConfig)


@pytest.mark.parametrize(
    ("kind", "write", "file", "changes", "expected"),
    [
        (
            "squad",
            squad_file,
            "d.json",
            ["task.question_tokens=8", "task.stride_tokens=8"],
            ["answers.json", "nbest_predictions.json", "null_odds.json", "predictions.json"],
        ),
        (
            "tagging",
            conll_file,
            "d.txt",
            [],
            ["per_type.tsv", "predictions.conll", "probabilities.jsonl"],
        ),
        (
            "choice",
            choice_file,
            "d.csv",
            ["task.kind=choice", "task.text_a=question", "task.choices=('first','second')"],
            ["predictions.csv", "probabilities.csv"],
        ),
    ],
)
def test_each_task_kind_writes_its_prediction_files(
    data, tmp_path, capsys, kind, write, file, changes, expected
):
    write(tmp_path / file)
    config = {"squad": "squad.py:2", "tagging": "tagging.py", "choice": "swag.py:own"}[kind]
    files = [f"task.{split}={tmp_path / file}" for split in ("train", "dev")]
    argv = arguments(data, tmp_path / "w", *files, "epochs=2", "batch_size=4", *changes)
    argv[1] = f"--config={tasks.CONFIGS / config}"
    assert cli.main(argv) == 0
    result = json.loads((tmp_path / "w" / "metrics.json").read_text())
    assert result["best_by"] in result["dev"]
    assert sorted(p.name for p in (tmp_path / "w" / "predictions" / "dev").iterdir()) == expected
    before = (tmp_path / "w" / "predictions" / "dev" / expected[-1]).read_bytes()
    capsys.readouterr()
    if kind == "choice":
        return
    name = "squad2" if kind == "squad" else "conll"
    name_of_file = f"predictions.{'json' if kind == 'squad' else 'conll'}"
    predictions = tmp_path / "w" / "predictions" / "dev" / name_of_file
    assert cli.main(["score", name, str(tmp_path / file), str(predictions)]) == 0
    output = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert float(output["f1"]) == pytest.approx(result["dev"]["f1"], abs=1e-4)
    new = ["predict", "--workdir", str(tmp_path / "w"), "--out", str(tmp_path / "new")]
    assert cli.main([*new, str(tmp_path / file)]) == 0
    assert (tmp_path / "w" / "predictions" / "dev" / expected[-1]).read_bytes() == before
    if kind == "squad":  # the best threshold on the dev set also applies to new questions
        assert result["dev"]["f1"] == pytest.approx(result["dev"]["best_f1"])
        for threshold, all_answered in ((-1e9, False), (1e9, True)):
            result["dev"]["best_f1_thresh"] = threshold
            (tmp_path / "w" / "metrics.json").write_text(json.dumps(result))
            new[4] = str(tmp_path / f"new{threshold}")
            assert cli.main([*new, str(tmp_path / file)]) == 0
            answers = json.loads((tmp_path / new[4] / "predictions.json").read_text())
            assert {bool(text) for text in answers.values()} == {all_answered}


def test_score_command_on_prediction_files(tmp_path, capsys):
    (tmp_path / "dev.tsv").write_text(
        "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tentailment\n1\ta\tc\tnot_entailment\n"
    )
    (tmp_path / "RTE.tsv").write_text("index\tprediction\n0\tentailment\n1\tentailment\n")
    score = ["score", "glue:rte", str(tmp_path / "dev.tsv"), str(tmp_path / "RTE.tsv")]
    assert cli.main(score) == 0
    assert "accuracy                 0.5000" in capsys.readouterr().out
    for benchmark, expected in (
        ("squad3", "no benchmark 'squad3'"),
        ("glue:xyz", "no benchmark 'glue:xyz': choose squad1"),
    ):
        score[1] = benchmark
        assert cli.main(score) == cli.EXIT_USER_ERROR
        assert expected in capsys.readouterr().err
    score[1] = "glue:rte"
    assert cli.main([*score, "--null-odds", "x"]) == cli.EXIT_USER_ERROR
    assert "--null-odds is for squad2" in capsys.readouterr().err
