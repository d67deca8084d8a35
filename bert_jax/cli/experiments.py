"""Verbs for experiments: `sweep` and `report`."""

import contextlib
import io
import os
import pathlib

from bert_jax.cli.common import (
    argument,
    check_local,
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
    option("--data", "DIR", "folder of texts and tasks (default: $BERT_JAX_DATA)", default=""),
    option("--init", "DIR", "checkpoint to fine-tune", default=""),
    number("--seeds", 0, "number of seeds; 0 takes the sweep's", least=0),
    repeatable("--only", "PATTERN", "run only matching points (* and ?) and their dependencies"),
    flag("--dry-run", "list the points and their commands"),
    number("--jobs", 1, "points to run at a time", least=1),
    option("--runs", "DIR", "folder of the workdirs (default %(default)s)", default=RUNS),
    choice(
        "--on",
        "local tpu-vm gke slurm sky",
        "engine of pretrain and finetune, whose machines have the data and --runs under the same paths",
    ),
    repeatable("--launch", "ARG", "argument for `bert-jax launch`"),
    flag("--resubmit", "queue unfinished jobs again"),
)
def _sweep(options) -> int | None:
    r"""Run the points of an experiment, locally or on a cluster.

    bert-jax sweep experiments/paper/table6 --dry-run
    bert-jax sweep experiments/paper/table6 --data ../data --jobs 2
    bert-jax sweep --grid optim.learning_rate=5e-4,1e-3 --grid model=tiny,mini \
      -- pretrain --config mini,128 --rows rows128 --config.steps=2000
    bert-jax sweep experiments/paper/table1 --init google-bert/bert-base-uncased \
      --on slurm --launch=--gpus=1 --jobs 20 --runs /shared/runs

    Finished points are skipped, interrupted points resumed. Each point appends a line to the
    experiment's results.jsonl. exit status: 0 all done, 1 a point failed, 75 interrupted
    """
    from bert_jax.tools import sweep
    from bert_jax.tools.launch.engines import SUBMITTED
    from bert_jax.tools.sweep import grid_files, run, scheduler

    options.data = options.data or os.environ.get("BERT_JAX_DATA", "")
    if options.launch and options.on == "local":
        raise UserError(f"--launch {options.launch[0]}: it needs --on ENGINE")
    if options.resubmit and options.on not in SUBMITTED:
        raise UserError("--resubmit applies to engines that queue jobs: " + ", ".join(SUBMITTED))
    check_local(options)
    if options.init.startswith(("/", ".", "~")) and not os.path.exists(options.init):
        raise UserError(f"--init {options.init}: no such folder")
    # Without --data, a dry run shows the name of the environment variable.
    data = pathlib.Path(options.data).absolute() if options.data else pathlib.Path(_DATA)
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
    engine = scheduler.Engine(options.on, options.launch, options.jobs)
    runs = pathlib.Path(options.runs)
    if options.dry_run:
        print(run.dry_run(selected, runs.absolute(), engine))
        return None
    if choices:
        grid_files.write(selected.path.parent, options.command, choices)
    return run.run(selected, runs, engine, resubmit=options.resubmit)


def _check(where: str, point: Point) -> None:
    """Check a point's command, and the settings in it, before any point runs."""
    from bert_jax.cli import parse

    words = [part.name if isinstance(part, Point) else str(part) for part in point.command]
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
