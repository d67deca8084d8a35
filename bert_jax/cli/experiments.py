"""Verbs for experiments: `sweep` and `report`."""

import contextlib
import io
import os
import pathlib
from typing import Any

from bert_jax import storage
from bert_jax.cli.common import (
    argument,
    choice,
    flag,
    load_config,
    number,
    option,
    repeatable,
    verb,
)
from bert_jax.errors import UserError, with_user_paths
from bert_jax.tools.sweep.points import FOLDER_OPTION, RUNS, Point

_DATA = "$BERT_JAX_DATA"


@verb(
    option(
        "file",
        "SWEEP",
        "a sweep.py or its folder; with --grid, a folder to write (default sweeps/KEYS)",
        nargs="?",
    ),
    repeatable(
        "--grid",
        "KEY=V,V,…",
        "values of a config key, or of `model`: sweep the command after --, pretrain or finetune, over all "
        "combinations",
    ),
    argument("--scale", choices=("small", "paper"), help="default small, or paper with --init"),
    option(
        "--data", "DIR", "folder or URL of texts and tasks (default: $BERT_JAX_DATA)", default=""
    ),
    option("--init", "DIR", "checkpoint to fine-tune", default=""),
    number("--seeds", 0, "number of seeds; 0 takes the sweep's", least=0),
    repeatable("--only", "PATTERN", "run only matching points (* and ?) and their dependencies"),
    flag("--dry-run", "list the points, their commands and what pretraining costs with --on"),
    number("--jobs", 1, "points to run at a time", least=1),
    option("--runs", "DIR", "folder or URL of the workdirs (default %(default)s)", default=RUNS),
    choice(
        "--on",
        "local tpu-vm gke slurm sky",
        "engine of pretrain and finetune, whose machines read the data and --runs under the same paths",
    ),
    repeatable(
        "--launch",
        "[VERB:]ARG",
        "argument for `bert-jax launch`, of all points or of those of one verb, as in "
        "finetune:--accelerator=v5e-8",
    ),
    option(
        "--dollars-per-chip-hour",
        "X",
        "with --on: print what pretraining costs (--dry-run), and slices that wait (tpu-vm)",
        type=float,
        default=0.0,
    ),
)
def _sweep(options) -> int | None:
    r"""Run the points of an experiment, locally or on a cluster.

    bert-jax sweep experiments/paper/table6 --dry-run
    bert-jax sweep experiments/paper/table6 --data ../data --jobs 2
    bert-jax sweep --grid optim.learning_rate=5e-4,1e-3 --grid model=tiny,mini \
      -- pretrain --config mini,128 --rows rows128 --config.steps=2000
    bert-jax sweep experiments/paper/table1 --init google-bert/bert-base-uncased \
      --on slurm --launch=--gpus=1 --jobs 20 --runs /shared/runs
    bert-jax sweep experiments/paper/table6 --scale paper --data gs://mine/data --runs gs://mine/runs \
      --on tpu-vm --launch=--zone=us-west4-a --launch=pretrain:--accelerator=v5e:4x4 \
      --launch=finetune:--accelerator=v5e-8 --jobs 2

    Finished points are skipped, interrupted points resumed. Each point appends a line to the
    experiment's results.jsonl. exit status: 0 all done, 1 a point failed, 75 interrupted
    """
    from bert_jax.tools import sweep
    from bert_jax.tools.sweep import cost, folders, grid_files, run, scheduler

    options.data = options.data or os.environ.get("BERT_JAX_DATA", "")
    storage.check([options.data, options.runs])
    if options.launch and options.on == "local":
        raise UserError(f"--launch {options.launch[0]}: it needs --on ENGINE")
    if options.init.startswith(("/", ".", "~")) and not os.path.exists(options.init):
        raise UserError(f"--init {options.init}: no such folder")
    # Without --data, a dry run shows the name of the environment variable.
    data = storage.path(options.data or _DATA)
    if options.data and not storage.is_remote(options.data):
        data = data.absolute()
    scale = options.scale or ("paper" if options.init else "small")
    args = sweep.SweepArgs(scale, data, options.init, options.seeds)
    choices = grid_files.parse(options.grid)
    if choices:
        for name in ("scale", "init", "seeds"):
            if value := getattr(options, name):
                raise UserError(f"--{name} {value}: with --grid, put it into the command after --")
        path = pathlib.Path(options.file or f"sweeps/{grid_files.name(choices)}", "sweep.py")
        points = sweep.ordered("--grid", grid_files.points(options.command, choices), data)
        loaded = sweep.Sweep(path, args, points)
    elif options.command:
        raise UserError("a command after -- needs --grid KEY=VALUE,VALUE,…")
    elif not options.file:
        raise UserError("give a sweep.py or its folder, or --grid KEY=VALUE,VALUE,… -- pretrain …")
    else:
        loaded = sweep.load(options.file, args)
    selected = sweep.select(loaded, options.only)
    for point in selected.points:
        words = point.display_command(data)
        if not options.data and not options.dry_run and any(_DATA in word for word in words):
            raise UserError(f"{point.name} reads texts or tasks: add --data DIR or set {_DATA}")
        _check(f"{'--grid' if choices else selected.path}: {point.name}", point)
    if "--keep" in options.launch:
        raise UserError("--launch=--keep: a sweep deletes its slices when no point needs them")
    launch, price = list(options.launch), options.dollars_per_chip_hour
    if options.on == "tpu-vm" and price:
        launch.append(f"--dollars-per-chip-hour={price}")
    engine = scheduler.Engine(options.on, launch, options.jobs)
    runs = folders.Runs(options.runs)
    topology = _check_launches(engine, [folders.PointRun(p, runs, data) for p in selected.points])
    if options.dry_run:

        def estimate(points):
            return cost.estimate(points, _config_of, topology, price) if topology else ({}, [])

        print(run.dry_run(selected, options.runs, engine, estimate))
        return None
    if choices:
        grid_files.write(selected.path.parent, options.command, choices)
    return run.run(selected, options.runs, engine)


def _check_launches(engine: Any, point_runs: list) -> Any:
    """Check the commands of points that run on other machines.

    Returns:
        The topology of the points that pretrain; None if it is unknown.
    """
    from bert_jax.cli import parse
    from bert_jax.cli.machines import make_plan
    from bert_jax.runtime.topology import parse_topology
    from bert_jax.tools.launch.engines.base import python_command

    topology = None
    by_name = {point_run.point.name: point_run for point_run in point_runs}
    for point_run in point_runs:
        if engine.is_launched(point_run.point):
            command = engine.command(point_run.point, by_name)
            options = parse(command[len(python_command()) :])
            make_plan(options)
            if point_run.point.verb == "pretrain":
                with contextlib.suppress(UserError):  # SkyPilot has others
                    topology = parse_topology(getattr(options, "accelerator", "").lower())
    return topology


def _config_of(point: Point) -> Any:
    """Return the config of a point that trains, whose rows are names of points."""
    from bert_jax.cli import parse

    words = point.words(lambda needed: needed.name)
    return load_config(parse([*words, FOLDER_OPTION[point.verb], "x"]))


def _check(where: str, point: Point) -> None:
    """Check a point's command, and the settings in it, before any point runs."""
    from bert_jax.cli import parse

    words = point.words(lambda needed: needed.name)
    stderr = io.StringIO()
    try:
        if point.verb == "python":
            if not os.path.isfile(words[1]) and _DATA not in words[1]:
                raise UserError(f"no such program: {words[1]} (in {os.getcwd()})")
            return
        with contextlib.redirect_stderr(stderr):
            options = parse([*words, FOLDER_OPTION[point.verb], "x"])
        if options.verb_settings.takes_config:
            load_config(options)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    except SystemExit:
        raise UserError(f"{where}: {stderr.getvalue().splitlines()[-1]}") from None


@verb(
    option("folders", "DIR", "runs, or experiments with a sweep.py", nargs="+"),
    option("--out", "FILE", "page (default report.html), or the loss as .png, .svg or .pdf"),
)
def _report(options) -> None:
    """Write a page that compares runs, or an experiment's tables.

    bert-jax report runs/mini runs/small --out report.html
    bert-jax report runs/mini runs/small --out curves.png
    bert-jax report experiments/paper/table6
    """
    from bert_jax.runtime import device

    device.start("cpu")  # only shapes are computed

    from bert_jax.tools.report import runs
    from bert_jax.tools.sweep import experiment

    # os.path returns False for names that no file can have; pathlib raises.
    experiments = [f for f in options.folders if os.path.exists(os.path.join(f, "sweep.py"))]
    if options.out and len(experiments) == len(options.folders):
        raise UserError(f"--out {options.out}: only for runs; an experiment's folder has its own")
    for folder in experiments:
        print(experiment.write_readme(folder))
    if len(experiments) < len(options.folders):
        folders = [folder for folder in options.folders if folder not in experiments]
        print(with_user_paths(str(runs.write(folders, options.out or "report.html"))))
