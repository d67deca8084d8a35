"""Sweeps: order, shared points, kills, failures, job queues, and results of real runs."""

import dataclasses
import io
import json
import os
import pathlib
import re
import signal
import threading
import time

import pytest
from rich.console import Console

from bert_jax import cli
from bert_jax.config.schema import Config, PhaseConfig
from bert_jax.config.sizes import model_size
from bert_jax.errors import UserError
from bert_jax.objectives import pretraining
from bert_jax.runs import workdir
from bert_jax.tools import sweep
from bert_jax.tools.sweep import Point, SweepArgs
from bert_jax.tools.sweep import results as results_lib
from bert_jax.tools.sweep.display import note_of, table_of
from bert_jax.tools.sweep.folders import PointRun, Runs
from bert_jax.tools.sweep.results import Results
from bert_jax.tools.sweep.scheduler import Engine
from bert_jax.tools.sweep.scheduler import Scheduler as Queue
from bert_jax.training.summary import duration
from tests.helpers.launch import has_ended, make_programs
from tests.helpers.runs import VOCABULARY, refused
from tests.helpers.sweeps import WAITING, background, run_sweep

# Reading


def test_points_with_equal_facts_are_rejected(make_point):
    """Otherwise the results of only one of them would be shown."""
    points = [make_point("a", facts={"rate": 1}), make_point("b", facts={"rate": 1})]
    with pytest.raises(UserError, match="'a' and 'b'"):
        sweep.ordered("x", points, pathlib.Path())
    assert sweep.ordered("x", [make_point("a"), make_point("b")], pathlib.Path())


def test_digest_covers_dependencies_but_not_the_data_path():
    def points(data, option):
        rows = Point("rows", ("prepare", f"{data}/text/*.gz", "--tokens", option))
        model = Point("m", ("pretrain", "--rows", rows), {"any": 1})
        return [p.digest(pathlib.Path(data)) for p in (rows, model)]

    assert points("/here/data", 128) == points("/elsewhere", 128)
    assert not set(points("/here", 128)) & set(points("/here", 64))
    other = Point("m", ("pretrain", "--rows", "/here/data2"))
    assert "/here/data2" in other.display_command("/here/data")  # not a path prefix
    command = ("prepare", "/mnt/d/x", "/a+/d", "books:/d/y", "--x=/d", "/d,/d/z", "/d.gz")
    named = "/mnt/d/x /a+/d books:$BERT_JAX_DATA/y --x=$BERT_JAX_DATA $BERT_JAX_DATA,$BERT_JAX_DATA/z /d.gz"
    assert Point("x", command).display_command("/d")[1:] == named.split()
    assert Point("x", ("python", "/d")).display_command("/d") == ["python", "$BERT_JAX_DATA"]


def test_digest_covers_the_program_text(tmp_path):
    def digest(text):
        (tmp_path / "x.py").write_text(text)
        return Point("x", ("python", tmp_path / "x.py")).digest("")

    assert digest("a = 1") == digest("a = 1") != digest("a = 2")


def points_of(text):
    """Return a sweep file that yields these points."""
    return f"def get_points(args): return [{text}]"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1", "get_points(args)"),
        (points_of("1 / 0"), "get_points: ZeroDivisionError"),
        (points_of("3"), "yielded 3"),
        (points_of("Point('a', ('embed', 'x'))"), "'embed'"),
        (points_of("Point('a', ('vocab', n)) for n in 'xy'"), "the name 'a'"),
        (points_of("Point('a', ('vocab', 't', '--sise', 3))"), "a: bert-jax vocab: --sise: "),
        (points_of("Point('a', ('python', 'no.py'))"), "no such program: no.py"),
        (
            "def get_points(args):\n"
            "    rows = Point('r', ('prepare', 't', '--vocab', 'v'))\n"
            "    where = ('--config', 'configs/pretrain.py:mini,128', '--rows', rows)\n"
            "    return [Point('a', ('pretrain', *where, '--config.optim.learning_rat=1'))]",
            "a: config.optim.learning_rat: ",
        ),
    ],
)
def test_invalid_sweep_file_is_rejected(write_sweep_file, capsys, text, expected):
    line = refused(capsys, "sweep", write_sweep_file(text), "--dry-run")
    assert "sweep.py" in line
    assert expected in line


def test_missing_data_or_init_is_rejected(write_sweep_file, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("BERT_JAX_DATA", raising=False)
    text = "def get_points(args): return [Point('a', ('vocab', args.data / 'text'))]"
    command = ["sweep", str(write_sweep_file(text)), "--runs", str(tmp_path / "runs")]
    assert "$BERT_JAX_DATA" in refused(capsys, *command)
    assert cli.main([*command, "--dry-run"]) == 0
    # It replaces what a killed attempt may have left.
    assert re.search(r"vocab '.BERT_JAX_DATA/text' --out \S+ --force", capsys.readouterr().out)
    assert "--init ./nothing" in refused(capsys, *command, "--init", "./nothing")


def test_init_defaults_to_paper_scale(write_sweep_file, tmp_path, capsys):
    """`--scale` overrides this default."""
    text = "def get_points(args): return [Point(args.scale, ('vocab', args.init))]"
    command = ["sweep", str(write_sweep_file(text)), "--dry-run", "--data", str(tmp_path)]
    for more, scale in (
        ([], "small"),
        (["--init", "google/bert"], "paper"),
        (["--init", "google/bert", "--scale", "small"], "small"),
    ):
        assert cli.main([*command, *more]) == 0
        assert capsys.readouterr().out.startswith(f"{scale}: ")


# Running


def test_each_point_runs_once_and_records_one_result(make_point, tmp_path, capsys):
    a = make_point("a")
    points = [make_point("bb", a, facts={"size": 2}), make_point("ccc", a)]
    status, results = run_sweep(points, tmp_path)
    assert status == 0
    assert sorted(make_point.calls()) == ["a", "bb", "ccc"]
    by = {line["point"]: line for line in results}
    assert by["bb"]["metrics"] == {"score": 2.0}
    assert by["bb"]["facts"] == {"size": 2}
    assert {"digest", "command", "wall_seconds", "jax", "cores", "scale"} <= by["bb"].keys()
    assert str(tmp_path) not in by["bb"]["command"]  # no paths of this machine
    again, same = run_sweep(points, tmp_path)
    assert (again, same) == (0, results)
    assert len(make_point.calls()) == 3
    assert "3 of 3 points are already done" in capsys.readouterr().err


def test_point_shared_by_two_sweeps_runs_once(make_point, tmp_path):
    first = make_point("a")
    run_sweep([first], tmp_path)
    renamed = dataclasses.replace(first, name="called_otherwise")
    status, results = run_sweep([make_point("b", renamed)], tmp_path)
    assert status == 0
    assert make_point.calls() == ["a", "b"]
    assert {line["point"] for line in results} == {"a", "b"}  # one line per point, by any name


def test_failure_skips_only_dependent_points(make_point, tmp_path, capsys):
    bad = make_point("bad", "fails")
    points = [make_point("c", make_point("b", bad)), make_point("good")]
    status, results = run_sweep(points, tmp_path)
    assert status == 1
    assert [line["point"] for line in results] == ["good"]
    output = capsys.readouterr().err
    for part in ("bad failed: bert-jax: the one line that says why (", ": b, c", "1 of 4 points"):
        assert part in output


def test_unreadable_results_stop_the_sweep_and_its_processes(make_point, tmp_path):
    with pytest.raises(UserError, match=r"results of a in .*/a-"):
        run_sweep([make_point("b", "waits"), make_point("a", "second", "breaks")], tmp_path, jobs=2)
    wait_for(lambda: (tmp_path / "b.saved").exists())


def test_jobs_limits_the_number_of_running_points(make_point, tmp_path):
    status, _ = run_sweep([make_point("x", "meets"), make_point("y", "meets")], tmp_path, jobs=2)
    assert status == 0
    status, _ = run_sweep([make_point(name, "alone") for name in "abc"], tmp_path)
    assert status == 0


def test_interrupted_point_is_restarted(make_point, tmp_path):
    status, results = run_sweep([make_point("a", "again")], tmp_path)
    assert (status, make_point.calls()) == (0, ["a", "a"])
    assert results[0]["attempts"] == 2


def wait_for(condition, process=None):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.01)


def test_orphaned_process_of_a_killed_sweep_is_waited_for(
    make_point, tmp_path, write_sweep_file, capsys
):
    file = write_sweep_file(WAITING)
    process = background(tmp_path, file, "--data", str(tmp_path))
    wait_for(lambda: (tmp_path / "calls").exists() and "b" in make_point.calls(), process)
    process.kill()
    process.wait()
    args = SweepArgs(data=tmp_path)
    points = sweep.load(file, args).points
    queue = Queue(points, Runs(tmp_path / "runs"), args, Engine(), print)
    for _ in range(3):
        queue.update()
        assert queue.state == {"a": "done", "b": "waiting"}  # b's process holds the lock
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(rf"b: waiting: .*/b-.* is in use by another process \(pid {process.pid} ", line)
    (tmp_path / "go").touch()
    wait_for(lambda: queue.update() or queue.is_over)
    assert queue.state == {"a": "done", "b": "done"}
    assert make_point.calls() == ["a", "b", "b"]  # the second call finds the first one's output
    assert [len(queue.point_runs[name].attempts()) for name in "ab"] == [1, 2]


def test_sigterm_is_forwarded_to_running_points(make_point, tmp_path, capsys):
    def send():
        wait_for(lambda: (tmp_path / "calls").exists())
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=send)
    sender.start()
    status, results = run_sweep([make_point("b", make_point("a", "waits"))], tmp_path)
    sender.join()
    assert (status, results, make_point.calls()) == (cli.EXIT_INTERRUPTED, [], ["a"])
    assert (tmp_path / "a.saved").exists()
    assert "same command" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["stop", "kill"])
def test_signals_reach_the_processes_that_a_point_has_started(method, tmp_path):
    script, child = tmp_path / "work.py", tmp_path / "child"
    script.write_text(
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "pathlib.Path(sys.argv[1]).write_text(f'{child.pid}\\n')\n"
        "time.sleep(600)\n"
    )
    points = [Point("a", ("python", script, child))]
    args = SweepArgs(data=tmp_path / "d")
    queue = Queue(points, Runs(tmp_path), args, Engine(), print)
    queue.update()
    wait_for(lambda: child.exists() and child.read_text().endswith("\n"))
    getattr(queue, method)()
    wait_for(lambda: has_ended(int(child.read_text())))


def test_time_left_covers_all_seeds(tmp_path):
    point_run = PointRun(Point("m", ("finetune", "--seeds=3")), Runs(tmp_path), tmp_path)
    for seed in range(2):
        run_ = point_run.files / f"seed_{seed}"
        run_.mkdir(parents=True)
        (run_ / "config.json").write_text(json.dumps({"config": {"steps": 100}}))
        (run_ / "starts.jsonl").write_text(json.dumps({"step": 0}) + "\n")
        (run_ / "metrics.jsonl").write_text(json.dumps({"step": 20, "loss": 1.0}) + "\n")
        os.utime(run_ / "metrics.jsonl", (seed, seed))
    began = (run_ / "starts.jsonl").stat().st_mtime
    # 80 steps of this seed and 100 of the third remain, at 1 s each.
    assert note_of(point_run, began + 20, "")["left"] == duration(180.0)


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["a", "b"], ["a", "b"]),
        (
            [f"learning_rate={rate}, model=L2-H128-A2" for rate in ("5e-4", "1e-3")],
            ["5e-4, L2-H128-A2", "1e-3, L2-H128-A2"],
        ),
        (  # the ends differ
            [f"{'pretrained-on-books/' * 3}L2-H128-A2/{task}" for task in ("rte", "cola")],
            ["…ained-on-books/L2-H128-A2/rte", "…ined-on-books/L2-H128-A2/cola"],
        ),
        (  # only the beginnings differ
            [f"{size}/{'fine-tuned-on-' * 3}cola" for size in ("tiny", "mini")],
            ["tiny/fi…-on-fine-tuned-on-cola", "mini/fi…-on-fine-tuned-on-cola"],
        ),
        ([f"{'x' * 40}{n}{'y' * 40}" for n in "ab"], [f"{i} {'x' * 27}…" for i in (1, 2)]),
    ],
)
def test_table_fits_in_80_columns(names, shown, tmp_path):
    points = [Point(name, ("python", "x.py", name)) for name in names]
    args = SweepArgs(data=tmp_path)
    queue = Queue(points, Runs(tmp_path), args, Engine(), print)
    console = Console(width=80, file=io.StringIO())
    queue.state[names[0]] = "running"
    out = queue.point_runs[names[0]].files
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps({"config": {"steps": 1_000_000}}))
    (out / "starts.jsonl").write_text(json.dumps({"step": 0}) + "\n")
    (out / "metrics.jsonl").write_text(json.dumps({"step": 999_999, "loss": 10.1234}) + "\n")
    queue.state[names[1]] = "failed"
    queue.point_runs[names[1]].log.parent.mkdir()
    queue.point_runs[names[1]].log.write_text("bert-jax: why it failed, in many words\n" * 9)
    console.print(table_of(queue, 80))
    _, first, second = console.file.getvalue().splitlines()
    assert max(len(first), len(second)) <= 80
    assert re.search(r"running +999,999/1,000,000 +10\.123 +0 s", first)
    assert re.search(r"failed .*…", second)
    assert [re.split("  +", line)[0] for line in (first, second)] == shown


def test_queued_job_is_asked_for_until_it_ends(tmp_path, monkeypatch, capsys):
    programs = make_programs(tmp_path, monkeypatch)
    programs.program("sbatch")
    monkeypatch.setenv("BERT_JAX_LAUNCH", str(tmp_path / "jobs"))
    monkeypatch.setenv("BERT_JAX_LAUNCH_WAIT_SECONDS", "0")
    monkeypatch.setenv("BERT_JAX_SWEEP_QUERY_SECONDS", "0.01")
    config = ("--config", "configs/pretrain.py:mini,128", "--config.steps=7")
    engine = Engine("slurm", ("--gpus=4",))
    (tmp_path / "runs").mkdir()

    def start():
        points = [Point("m", ("pretrain", "--rows", "r", *config))]
        args = SweepArgs(data=tmp_path)
        return Queue(points, Runs(tmp_path / "runs"), args, engine, print)

    def until(condition):
        wait_for(lambda: queue.update() or condition())

    programs.program("squeue", "echo PENDING", records=False)
    queue = start()
    point_run = queue.point_runs["m"]
    until(lambda: "waiting" in queue.note("m"))
    queue.stop()
    assert queue.state == {"m": "stopped"}
    (job,) = programs.calls()
    assert "--gpus-per-node=4" in job
    assert job[1].startswith(f"--job-name={point_run.folder.name}-")
    assert job[-3:] == ["--config.steps=7", "--workdir", point_run.out]

    queue = start()  # does not submit it again
    for answer, note in (
        ("exit 1", "unknown squeue exited with status 1"),
        ("echo RUNNING", "running"),
    ):
        programs.program("squeue", answer, records=False)
        until(lambda note=note: queue.note("m") == note)
    assert queue.state == {"m": "running"}
    assert not programs.calls()
    # What may pass is tried again under another name, what would fail again is not.
    programs.program("sacct", f"[[ $* == *{job[1][11:]}' '* ]] || echo 'FAILED|2:0'", records=False)
    programs.program("squeue", records=False)
    until(lambda: queue.state == {"m": "failed"})
    (again,) = programs.calls()
    assert again[1].startswith(f"--job-name={point_run.folder.name}-")
    assert again[1] != job[1]
    assert "failed: FAILED" in point_run.log.read_text()
    assert [attempt["status"] for attempt in point_run.attempts()] == [1, 2]
    assert capsys.readouterr().err.count("lost m-") == 1


def test_lost_job_is_done_if_its_workdir_is_complete(tmp_path, monkeypatch):
    point_run = PointRun(Point("m", ("pretrain", "--config", "mini,128")), Runs(tmp_path), tmp_path)
    out = point_run.files
    out.mkdir(parents=True)
    config = Config(model=model_size("mini"), phases=(PhaseConfig(rows="r"),), steps=7)
    best = {"best_by": "x", "highest": False}
    workdir.write_or_check_config(out, config, [{"digest": ""}], best, False, VOCABULARY)
    assert not point_run.has_ended()
    (out / "checkpoints" / "7").mkdir(parents=True)
    assert point_run.has_ended()
    # The sweep's own clock and machine are not those of the job.
    point_run.add(status=0, seconds=0.1, on="slurm")
    own = {"step_seconds": 7.5, "devices": "4 NVIDIA H100", "jax": "0.12"}
    monkeypatch.setattr(results_lib, "_of_run", lambda folder: own)
    (line,) = results_lib.lines_of(point_run, SweepArgs(data=tmp_path))
    assert (line["wall_seconds"], line["jax"]) == (7.5, "0.12")
    assert (line["cores"], line["load"], line["processor"]) == (None, None, None)


# Options


def test_dry_run_runs_nothing(make_point, tmp_path, write_sweep_file, capsys):
    file = write_sweep_file(WAITING)
    options = ["--data", str(tmp_path), "--runs", str(tmp_path / "runs"), "--dry-run"]
    assert cli.main(["sweep", str(file), *options]) == 0
    output = capsys.readouterr().out
    assert "2 points, 2 to run" in output
    assert not {tmp_path / "calls", tmp_path / "runs"} & {*tmp_path.iterdir()}
    assert cli.main(["sweep", str(file), *options, "--only", "a"]) == 0
    assert "1 points, 1 to run" in capsys.readouterr().out
    assert "zz; choose from a, b" in refused(capsys, "sweep", file, *options, "--only", "zz")
    assert cli.main(["sweep", str(file), *options[:-1], "--only", "a"]) == 0
    assert cli.main(["sweep", str(file), *options]) == 0
    output = capsys.readouterr().out
    assert f"a: done, {tmp_path / 'runs' / 'a-'}" in output
    assert "2 points, 1 to run" in output


def test_options_of_launch_for_one_verb():
    options = ("--zone=z", "finetune:--accelerator=v5e-8", "pretrain:--accelerator=v5e:4x4")
    engine = Engine("tpu-vm", options)
    assert engine.options_of("pretrain") == ["--zone=z", "--accelerator=v5e:4x4"]
    assert engine.options_of("finetune") == ["--zone=z", "--accelerator=v5e-8"]
    assert engine.slice_kind("pretrain") != engine.slice_kind("finetune")
    assert Engine("tpu-vm", ("--zone=z",)).slice_kind("pretrain") == ""


def test_dry_run_prints_what_pretraining_costs(write_sweep_file, tmp_path, capsys):
    text = points_of(
        "Point(f'm{n}', ('pretrain', '--config', 'base,128', '--rows', Point(f'r{n}', ('prepare', 'gs://b/t', "
        "'--vocab', 'v', '--tokens', 128, '--passes', n)), f'--config.steps={n}000000')) for n in (1, 3)"
    )
    command = ["sweep", str(write_sweep_file(text)), "--dry-run", "--on", "slurm"]
    assert cli.main([*command, "--runs", str(tmp_path)]) == 0
    assert "hours" not in capsys.readouterr().out
    gke = ["--on", "gke", "--launch=--accelerator=v5e:4x4", "--launch=--image=i"]
    command = [*command[:-2], *gke, "--runs", "/shared/runs", "--dollars-per-chip-hour", "2"]
    assert cli.main(command) == 0
    output = capsys.readouterr().out
    pattern = r"about ([\d.]+) hours, ([\d,]+) chip-hours, \$([\d,.]+)"
    costs = [[float(x.replace(",", "")) for x in each] for each in re.findall(pattern, output)]
    one, three, total = (hours for hours, *_ in costs)
    assert (three, total) == (pytest.approx(3 * one, rel=0.02), pytest.approx(4 * one, rel=0.02))
    for hours, chip_hours, dollars in costs:
        assert (chip_hours, dollars) == (
            pytest.approx(16 * hours, rel=0.02),
            pytest.approx(32 * hours, rel=0.02),
        )
    assert "no v5e has timed it" in output


def test_options_without_effect_are_rejected(write_sweep_file, tmp_path, capsys):
    argv = ["sweep", write_sweep_file(WAITING), "--data", tmp_path, "--launch=--gpus=8"]
    assert "--on" in refused(capsys, *argv)


# A real run

REAL = """
def get_points(args):
    text = args.data / "text.txt"
    vocab = Point("vocab", ("vocab", text, "--size", 150))
    rows = Point("rows", ("prepare", text, "--vocab", vocab, "--tokens", 32, "--sequences", 2,
        "--heldout-fraction", 0.2, "--workers", 1))
    model = Point("L1-H16-A2", ("pretrain", "--config", "configs/pretrain.py:L1-H16-A2,32",
        "--rows", rows, "--config.steps=6", "--config.batch_size=4", "--config.evaluate_rows=8",
        "--config.evaluate_every_steps=3", "--config.log_every_steps=2"), {"layers": 1})
    yield Point("L1-H16-A2/mine", ("finetune", "--config", "configs/table.py", "--init", model,
        "--config.task.train", args.data / "train.csv", "--config.task.dev",
        args.data / "train.csv", "--config.task.tokens=32", "--seeds", 2, "--config.epochs=1",
        "--config.batch_size=4"), {"layers": 1, "task": "mine"})
"""


@pytest.mark.slow
def test_real_sweep_from_text_to_results(tmp_path, corpus, write_sweep_file):
    data = tmp_path / "data"
    data.mkdir()
    (data / "text.txt").write_text(corpus.read_text())
    lines = ["text,label", *(f"the king {i},{'ab'[i % 2]}" for i in range(8))]
    (data / "train.csv").write_text("\n".join(lines) + "\n")
    file = write_sweep_file(REAL)
    process = background(tmp_path, file, "--data", str(data))
    _, result = process.communicate(timeout=500)
    assert process.returncode == 0, result
    vocab, rows, model, *seeds = Results(file.parent).read()
    assert (vocab["point"], rows["point"]) == ("vocab", "rows")
    assert rows["metrics"]["train_rows"] > 0
    assert str(tmp_path) not in json.dumps([vocab, rows, model, seeds])
    assert '"$BERT_JAX_DATA/text.txt"' in rows["command"]
    assert f"--rows runs/sweeps/rows-{rows['digest']}/out " in model["command"]
    out = next((tmp_path / "runs").glob("L1-H16-A2-*")) / "out"
    heldout = [m for m in workdir.read_lines(out / "metrics.jsonl") if m["split"] == "heldout"]
    assert model["curve"]["step"] == [3, 6]
    assert model["curve"]["loss"] == [m["masked_lm_loss"] for m in heldout]
    assert model["metrics"]["masked_lm_perplexity"] == heldout[-1]["masked_lm_perplexity"]
    assert model["step"] == 6
    assert 6 * 4 * 32 * 0.7 < model["real_tokens"] <= 6 * 4 * 32
    (phase,) = pretraining.make_phases(workdir.read_config(out))[3]
    assert model["flops"] == pytest.approx(6 * 4 * phase.objective.flops_per_row)
    assert [line["seed"] for line in seeds] == [0, 1]
    assert all(line["metrics"]["dev.accuracy"] >= 0 and line["step"] > 0 for line in seeds)
