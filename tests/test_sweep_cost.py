"""Sweeps: cost estimates, and results of real runs."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import pytest
import transformers

from bert_jax import cli, workdir
from bert_jax.architectures import model_size
from bert_jax.config import Config, PhaseConfig
from bert_jax.data.rows import read_manifest
from bert_jax.data.workers import cores
from bert_jax.model.flops import flops_per_row
from bert_jax.objectives import pretraining
from bert_jax.tools.sweep import Point, SweepArgs
from bert_jax.tools.sweep.cost import cost
from bert_jax.tools.sweep.results import Results
from tests.helpers.runs import VOCABULARY
from tests.helpers.sweeps import WAITING, background


@pytest.mark.parametrize("size", ["L2-H128-A2", "base", "L24-H1024-A16"])
def test_pretrain_cost_matches_the_flops_formula(size):
    vocab = Point("vocab", ("vocab", "text", "--size", 1000))
    rows = Point("rows", ("prepare", "text", "--vocab", vocab, "--tokens", 128, "--sequences", 1))
    changes = ("--config.steps=1000", "--config.batch_size=64")
    config = f"configs/pretrain.py:{size},128"
    point = Point("m", ("pretrain", "--config", config, "--rows", rows, *changes))
    result = cost(point, SweepArgs(), [], speed=1e12)
    model = dataclasses.replace(model_size(size), vocab_size=1000)
    expected = 64_000 * flops_per_row(model, 128, 1, 20)
    assert result.flops == pytest.approx(expected)
    assert result.seconds == pytest.approx(result.flops / 1e12)

    def line(digest, flops, seconds, wall, verb="pretrain", devices="1 cpu"):
        command = {"command": f"bert-jax {verb} --config x", "digest": digest, "devices": devices}
        return {
            **command,
            "flops": flops,
            "step_seconds": seconds,
            "wall_seconds": wall,
            "cores": 2,
        }

    # Two seeds of a point ran in sequence on two cores. The rest of the wall time (2.5 s per seed,
    # and 1.5 s) is added to the step time. Other commands and chips do not count.
    before = [line("a", 1e9, 1.0, 9.0), line("a", 3e9, 3.0, 9.0), line("b", 9e9, 3.0, 4.5)]
    before.append(line("c", 1e15, 1.0, 1.0, "finetune"))
    before.append(line("d", 1e15, 1.0, 1.0, devices="8 NVIDIA H100"))
    estimate = cost(point, SweepArgs(), before, speed=0.0)
    assert estimate.seconds == pytest.approx(estimate.flops / (1e9 * cores()) + 2.0)


def test_finetune_cost_depends_on_the_initial_model(tmp_path):
    """Use the model in the --init folder, not the config's, and token counts of the same task."""
    file = tmp_path / "train.tsv"
    file.write_text("x" * 5000)
    model = model_size("mini")
    run = tmp_path / "run"
    run.mkdir()
    config = Config(model=model, phases=(PhaseConfig(rows="r"),), steps=7)
    workdir.write_or_check_config(
        run, config, [{"digest": ""}], {"best_by": "x", "highest": False}, False, VOCABULARY
    )
    exported = tmp_path / "exported"
    exported.mkdir()
    transformers.BertModel(
        transformers.BertConfig(
            vocab_size=60, hidden_size=32, num_hidden_layers=3, num_attention_heads=2,
            intermediate_size=96, max_position_embeddings=16,
        )
    ).save_pretrained(exported)  # fmt: skip
    (exported / "vocab.txt").write_text(
        "".join(f"{token}\n" for token in ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
        + "".join(f"w{i}\n" for i in range(55))
    )

    def estimate(init, task=None, results=()):
        settings = [f"--config.task.train={file}", "--config.epochs=2", *init, "--seeds=3"]
        facts = {"task": task} if task else {}
        point = Point("f", ("finetune", "--config", "configs/table.py", *settings), facts)
        return cost(point, SweepArgs(), results, speed=1e12).flops

    def of(layers, hidden, feed_forward):  # per token: forward, twice that backward; no pooler
        return 3 * layers * (8 * hidden**2 + 4 * hidden * feed_forward + 4 * 128 * hidden)

    assert estimate(["--init", run]) == pytest.approx(of(4, 256, 1024) * 6000, rel=1e-3)
    assert estimate(["--init", exported]) == pytest.approx(of(3, 32, 96) * 6000, rel=1e-3)
    for unseen in ([], ["--init", "google-bert/bert-base-uncased"]):
        assert estimate(unseen) == pytest.approx(of(12, 768, 3072) * 6000, rel=1e-3)

    def line(tokens, task, scale="small"):
        facts = {"facts": {"task": task}, "scale": scale, "real_tokens": tokens}
        return {"command": "bert-jax finetune --config x", **facts}

    before = [line(40, "SQuAD"), line(60, "SQuAD"), line(1, "SQuAD", "paper"), line(7, "SWAG")]
    assert estimate(["--init", run], "SQuAD", before) == pytest.approx(
        of(4, 256, 1024) * 3 * 50, rel=1e-3
    )
    assert estimate(["--init", run], "RTE", before) == pytest.approx(
        of(4, 256, 1024) * 6000, rel=1e-3
    )


def test_cost_uses_the_results_of_sibling_sweeps(tmp_path, capsys, monkeypatch):
    """Unreadable files and files of another kind are ignored."""
    folders = [tmp_path / name for name in ("mine", "other", "third", "fourth")]
    for folder in folders:
        folder.mkdir()
    (folders[0] / "sweep.py").write_text(
        "from bert_jax.tools.sweep import Point\n"
        "def get_points(args):\n    yield Point('vocab', ('vocab', 'text'))\n"
    )
    line = {
        "command": "bert-jax vocab text", "digest": "a", "wall_seconds": 77.0,
        "point": "p", "scale": "small", "facts": {}, "metrics": {},
    }  # fmt: skip
    command = ["sweep", str(folders[0]), "--dry-run", "--runs", str(tmp_path / "runs")]
    assert cli.main(command) == 0
    assert "vocab: about ?" in capsys.readouterr().out
    other = {**line, "digest": "b", "wall_seconds": 27.0}
    (folders[1] / "results.jsonl").write_text(f"{json.dumps(line)}\n{json.dumps(other)}\n")
    # Two sweeps may share a point.
    (folders[2] / "results.jsonl").write_text(json.dumps(line) + '\n{"case": "another"}\n')
    (folders[3] / "results.jsonl").write_bytes(b"\xff{")
    assert cli.main(command) == 0
    assert "vocab: about 52 s" in capsys.readouterr().out
    monkeypatch.chdir(folders[0])
    assert cli.main([command[0], ".", *command[2:]]) == 0
    assert "vocab: about 52 s" in capsys.readouterr().out


def test_dry_run_runs_nothing(bench, tmp_path, file_of, capsys):
    file = file_of(WAITING)
    options = ["--data", str(tmp_path), "--runs", str(tmp_path / "runs"), "--dry-run"]
    assert cli.main(["sweep", str(file), *options]) == 0
    output = capsys.readouterr().out
    assert "2 points, 2 to run" in output
    assert not (tmp_path / "calls").exists()
    assert not (tmp_path / "runs").exists()
    assert cli.main(["sweep", str(file), *options, "--only", "a"]) == 0
    assert "1 points, 1 to run" in capsys.readouterr().out
    assert cli.main(["sweep", str(file), *options, "--only", "zz"]) == cli.EXIT_USER_ERROR
    assert "no point matches zz; choose from a, b" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--resubmit"], "--resubmit applies to engines that queue jobs: slurm, gke, sky"),
        (["--search", "3", "--only", "a"], "--search creates its own points"),
        (["--search", "3", "--dry-run"], "--search creates its own points"),
        (["--topology", "v5e:2x2"], "add --dry-run"),
        (["--launch=--gpus=8"], "has no effect on local processes: add --on"),
        (["--jobs", "0"], "--jobs 0: must be above 0"),
    ],
)
def test_options_without_effect_are_rejected(file_of, tmp_path, capsys, options, expected):
    argv = ["sweep", str(file_of(WAITING)), "--data", str(tmp_path), *options]
    assert cli.main(argv) == cli.EXIT_USER_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line


REAL = """
def get_points(args):
    text = args.data / "text.txt"
    vocab = Point("vocab", ("vocab", text, "--size", 150))
    rows = Point("rows", ("prepare", text, "--vocab", vocab, "--tokens", 32, "--sequences", 2,
        "--heldout-fraction", 0.2))
    model = Point("L1-H16-A2", ("pretrain", "--config", "configs/pretrain.py:L1-H16-A2,32",
        "--rows", rows, "--config.steps=6", "--config.batch_size=4", "--config.evaluate_rows=8",
        "--config.evaluate_every_steps=3", "--config.log_every_steps=2"), {"layers": 1})
    yield Point("L1-H16-A2/mine", ("finetune", "--config", "configs/table.py", "--init", model,
        "--config.task.train", args.data / "train.csv", "--config.task.dev",
        args.data / "train.csv", "--config.task.tokens=32", "--seeds", 2, "--config.epochs=1",
        "--config.batch_size=4"), {"layers": 1, "task": "mine"})
"""


@pytest.mark.slow
def test_real_sweep_from_text_to_results(tmp_path, corpus, file_of):
    data = tmp_path / "data"
    data.mkdir()
    (data / "text.txt").write_text(corpus.read_text())
    lines = ["text,label", *(f"the king {i},{'ab'[i % 2]}" for i in range(8))]
    (data / "train.csv").write_text("\n".join(lines) + "\n")
    file = file_of(REAL)
    process = background(tmp_path, file, "--data", str(data))
    _, result = process.communicate(timeout=500)
    assert process.returncode == 0, result
    vocab, rows, model, *seeds = Results(file.parent).read()
    assert (vocab["point"], rows["point"]) == ("vocab", "rows")
    assert rows["metrics"]["train_rows"] > 0
    assert str(tmp_path) not in json.dumps([vocab, rows, model, seeds])
    assert '"$BERT_JAX_DATA/text.txt"' in rows["command"]
    assert f"--rows runs/sweeps/rows-{rows['digest']}/out " in model["command"]
    # The recorded commands can be rerun, here in another folder.
    environment = os.environ | {"BERT_JAX_DATA": str(data), "PYTHONPATH": str(pathlib.Path.cwd())}
    environment["PATH"] = f"{pathlib.Path(sys.executable).parent}:{environment['PATH']}"
    for line in (vocab, rows):
        subprocess.run(line["command"], shell=True, check=True, cwd=tmp_path, env=environment)
    first, again = (
        read_manifest(tmp_path / runs / f"rows-{rows['digest']}" / "out").digest
        for runs in ("runs", "runs/sweeps")
    )
    assert first == again
    out = next((tmp_path / "runs").glob("L1-H16-A2-*")) / "out"
    heldout = [m for m in workdir.read_lines(out / "metrics.jsonl") if m["split"] == "heldout"]
    assert model["curve"]["step"] == [3, 6]
    assert model["curve"]["loss"] == [m["masked_lm_loss"] for m in heldout]
    assert model["metrics"]["masked_lm_perplexity"] == heldout[-1]["masked_lm_perplexity"]
    assert model["step"] == 6
    assert 6 * 4 * 32 * 0.7 < model["real_tokens"] <= 6 * 4 * 32
    assert model["config"]["steps"] == 6
    (phase,) = pretraining.make_phases(workdir.read_config(out))[3]
    assert model["flops"] == pytest.approx(6 * 4 * phase.objective.flops_per_row)
    assert [line["seed"] for line in seeds] == [0, 1]
    assert all(line["metrics"]["dev.accuracy"] >= 0 and line["step"] > 0 for line in seeds)
    assert {line["config_hash"] for line in seeds} != {model["config_hash"]}
