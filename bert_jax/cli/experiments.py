"""Experiments, and pages of runs."""

import contextlib
import io
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from bert_jax.cli.common import Parser, Verbs
from bert_jax.errors import UserError

_DATA = "$BERT_JAX_DATA"


def add_sweep(verbs: Verbs) -> None:
    """`bert-jax sweep`."""
    sub = verbs.add(
        "sweep",
        _sweep,
        "run all that an experiment is made of, here or elsewhere",
        "  bert-jax sweep experiments/table6_model_size --dry-run\n"
        "  bert-jax sweep experiments/table6_model_size --data ../data --jobs 2\n"
        "  bert-jax sweep experiments/table1_glue --init google-bert/bert-base-uncased \\\n"
        "    --on slurm --launch=--gpus=8 --jobs 20 --runs /shared/runs\n\n"
        "What is finished is skipped, what was interrupted goes on; a line a point goes to the\n"
        "experiment's results.jsonl. exit status: 0 all done, 1 something failed, 75 stopped",
    )
    sub.add_argument("file", metavar="SWEEP", help="a sweep.py, or the folder that holds it")
    sub.add_argument(
        "--scale", choices=("small", "paper"), help="default small; with --init paper"
    )  # fmt: skip
    sub.add_argument(
        "--data", default=os.environ.get("BERT_JAX_DATA", ""), metavar="DIR",
        help="texts and tasks (default: $BERT_JAX_DATA)",
    )  # fmt: skip
    sub.add_argument("--init", default="", metavar="DIR", help="somebody's checkpoint to fine-tune")
    sub.add_argument("--seeds", type=int, default=0, metavar="N", help="default: the sweep's own")
    sub.add_argument(
        "--only", action="append", default=[], metavar="PATTERN",
        help="points by name, with * and ?, and what they need; may be repeated",
    )  # fmt: skip
    sub.add_argument("--dry-run", action="store_true", help="list the points, commands and costs")
    sub.add_argument(
        "--topology", metavar="KIND:SHAPE", help="with --dry-run: hardware to tell times for"
    )
    sub.add_argument("--jobs", type=int, default=1, metavar="N", help="points at a time (1)")
    sub.add_argument(
        "--runs", default="runs/sweeps", metavar="DIR",
        help="folder for all that is made, shared by sweeps (default %(default)s)",
    )  # fmt: skip
    sub.add_argument(
        "--search", type=int, default=0, metavar="N", help="N trials of its get_trial, by Optuna"
    )
    sub.add_argument(
        "--on", default="local", choices=("tpu-vm", "gke", "slurm", "sky", "local"),
        help="engine for pretrain and finetune (default local: processes here); it must see the data "
        "and --runs by the same paths",
    )  # fmt: skip
    sub.add_argument(
        "--launch",
        action="append",
        default=[],
        metavar="ARG",
        help="for `bert-jax launch`; repeated",
    )
    sub.add_argument("--resubmit", action="store_true", help="queue jobs again that have not ended")


def _sweep(options) -> int | None:
    from bert_jax import cli
    from bert_jax.tools import sweep
    from bert_jax.tools.sweep import cost, run, scheduler

    for name in ("jobs", "seeds", "search"):
        if getattr(options, name) < (name == "jobs"):
            raise UserError(f"--{name} {getattr(options, name)}: it must be above 0")
    if options.topology and not options.dry_run:
        raise UserError("--topology tells times for other hardware: add --dry-run")
    if options.launch and options.on == "local":
        raise UserError(f"--launch {options.launch[0]} is for another engine: add --on")
    if options.resubmit and options.on not in scheduler.ASYNCHRONOUS:
        raise UserError(
            "--resubmit is for engines that queue jobs: " + ", ".join(scheduler.ASYNCHRONOUS)
        )
    if options.search and (options.dry_run or options.only):
        raise UserError("--search makes its own points: leave out --dry-run and --only")
    if options.init.startswith(("/", ".", "~")) and not os.path.exists(options.init):
        raise UserError(f"--init {options.init}: there is no such folder")
    # What a dry run shows of data that nobody has told it of is where they would be.
    data = pathlib.Path(options.data).absolute() if options.data else pathlib.Path(_DATA)
    scale = options.scale or ("paper" if options.init else "small")
    given = sweep.SweepArgs(scale, data, options.init, options.seeds)
    found = sweep.select(sweep.load(options.file, given), options.only)
    parser = cli.parser()
    for point in found.points:
        told = point.display_command(data)
        if not options.data and not options.dry_run and any(_DATA in part for part in told):
            raise UserError(f"{point.name} reads texts or tasks: add --data DIR or set {_DATA}")
        command = [
            part.name if isinstance(part, sweep.Point) else str(part) for part in point.command
        ]
        command += [sweep.FOLDER_OPTION[point.verb], "x"]
        _check(f"{found.path}: {point.name}", command, parser)
    engine = scheduler.Engine(options.on, options.launch, options.jobs)
    runs = pathlib.Path(options.runs)
    if options.dry_run:
        print(cost.describe(found, runs.absolute(), engine, _speed(options.topology)))
        return None
    return run.run(found, runs, engine, resubmit=options.resubmit, trials=options.search)


def _check(where: str, command: Sequence[str], parser: Parser) -> None:
    """Refuses a command that would fail when its turn comes, which may be after days.

    Raises:
        UserError: an option, a setting or a program that does not exist.
    """
    from bert_jax import config as config_lib
    from bert_jax import config_flags

    verb, program, *_ = command
    kinds: dict[str, Any] = {
        "pretrain": config_lib.Config,
        "finetune": config_lib.FinetuneConfig,
    }
    settings, rest = config_flags.split(list(command))
    said = io.StringIO()
    try:
        if verb == "python":
            if not os.path.isfile(program) and _DATA not in program:
                raise UserError(f"there is no program {program} (from {os.getcwd()})")
            return
        with contextlib.redirect_stderr(said):
            parser.parse_args(rest)
        if verb in kinds:
            config_flags.load(settings, kinds[verb])
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    except SystemExit:
        raise UserError(f"{where}: {said.getvalue().splitlines()[-1]}") from None


def add_report(verbs: Verbs) -> None:
    """`bert-jax report`."""
    sub = verbs.add(
        "report",
        _report,
        "make a page of runs beside each other, or write an experiment's tables",
        "  bert-jax report runs/mini runs/small --out report.html\n"
        "  bert-jax report runs/mini runs/small --out curves.png\n"
        "  bert-jax report experiments/table6_model_size",
    )
    sub.add_argument(
        "folders", nargs="+", metavar="DIR", help="runs, or experiments with a sweep.py"
    )
    sub.add_argument(
        "--out",
        default="report.html",
        metavar="FILE",
        help="the page (default report.html), or the loss curve alone as .png, .svg or .pdf",
    )
    sub.add_argument(
        "--pictures",
        default="",
        metavar="DIR",
        help="every plot by step, as SVG and PDF, for a paper",
    )


def _report(options) -> None:
    from bert_jax import device

    device.start("cpu")  # shapes are all that is computed

    from bert_jax.tools.report import experiment, runs

    # os.path, for which a name that no file can have is no error.
    experiments = [f for f in options.folders if os.path.exists(os.path.join(f, "sweep.py"))]
    for folder in experiments:
        print(experiment.write_readme(folder))
    if len(experiments) < len(options.folders):
        folders = [folder for folder in options.folders if folder not in experiments]
        for path in runs.write(folders, options.out, options.pictures):
            print(path)


def _speed(topology: str | None) -> float:
    """FLOP/s to expect of a topology, 0 for this machine."""
    if not topology:
        return 0.0
    from bert_jax.tools import preflight
    from bert_jax.tools.sweep.cost import UTILIZATION

    there = preflight.parse_topology(topology)
    return there.chips * there.chip.flops * UTILIZATION
