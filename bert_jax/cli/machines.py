"""Verbs for other machines: `launch` and `preflight`."""

import argparse
import json
import pathlib
import re
from typing import Any

from bert_jax import storage
from bert_jax.cli.common import (
    CONFIG,
    START,
    argument,
    flag,
    load_config,
    number,
    open_start,
    option,
    repeatable,
    verb,
)
from bert_jax.errors import EXIT_NEGATIVE, UserError

# Arguments of the verbs that can be launched: the folder that is written, and paths that are read.
_PATHS = {
    "pretrain": ("workdir", ("init",)),
    "finetune": ("workdir", ("init", "vocab")),
    "prepare": ("out", ("vocab", "sources")),
    "sweep": ("runs", ()),
}
# Keys of configs that are paths.
_CONFIG_PATHS = re.compile(
    r"distill\.teacher|phases\[\d+\]\.(mixture\[\d+\]\.)?rows|task\.(data|train|dev|test|labels)"
)


def _add_engine_options(sub: argparse.ArgumentParser) -> None:
    # No defaults: each engine has its own, for options that are not given.
    engine = sub.add_argument_group("options of engines", argument_default=argparse.SUPPRESS)
    for name, text in (
        (
            "--accelerator",
            "as for preflight: v5e:4x4, v5litepod-16, v5e:4x4,slices=2 (sky: H100:8)",
        ),
        ("--image", "container image with bert-jax (gke, sky, slurm)"),
        ("--zone", "such as us-west4-a (tpu-vm)"),
        ("--project", "default: gcloud's (tpu-vm)"),
        ("--queue", "local queue of Kueue (gke)"),
        ("--service-account", "Kubernetes account that may use the bucket (gke)"),
    ):
        engine.add_argument(name, help=text)
    for name, text in (
        ("--nodes", "machines (slurm, sky)"),
        ("--gpus", "GPUs per machine, one process each (slurm)"),
        ("--cpus", "CPUs per process, default 4 (slurm)"),
        ("--processes", "number of processes, default 2 (local)"),
        ("--devices", "CPU devices per process (local)"),
        ("--restarts", "maximum number of restarts (default 100; local: 0; not sky)"),
    ):
        engine.add_argument(name, type=int, metavar="N", help=text)
    for name, metavar, text in (
        ("--mount", "PATH[:PATH]", "folder of the machine to mount in the container (slurm)"),
        ("--module", "NAME", "environment module to load (slurm)"),
        ("--extra", "ARG", "passed to gcloud, sbatch or sky"),
    ):
        engine.add_argument(name, action="append", metavar=metavar, help=f"{text}; may be repeated")
    engine.add_argument(
        "--dollars-per-chip-hour",
        type=float,
        metavar="X",
        help="print what the slice costs while it waits (tpu-vm)",
    )
    engine.add_argument("--spot", action="store_true", help="use preemptible machines")
    engine.add_argument("--keep", action="store_true", help="do not delete the slice (tpu-vm)")
    sub.set_defaults(engine_options=[action.dest for action in engine._group_actions])


@verb(
    option("job", "status|logs|stop|delete NAME", "show, follow or stop a job", nargs="*"),
    argument("--on", choices=("tpu-vm", "gke", "slurm", "sky", "local"), help="engine"),
    flag("--dry-run", "print the commands as a script"),
    flag("--detach", "follow the run in the background (tpu-vm, local)"),
    argument("--name", help="name of the job, slice or workload (default: the workdir's)"),
    repeatable("--env", "NAME=VALUE", "environment variable of the run"),
    _add_engine_options,
)
def _launch(options) -> int | None:
    r"""Run pretrain, finetune, prepare or sweep on a cluster, or in several local processes.

    bert-jax launch --on tpu-vm --accelerator v5e:4x4 --zone us-west4-a --spot --detach -- pretrain \
      --config configs/pretrain.py:base,128 --rows gs://mine/rows128 --workdir gs://mine/runs/base
    bert-jax launch logs base
    bert-jax launch --on slurm --nodes 4 --gpus 8 --extra=--partition=long -- pretrain …
    bert-jax launch --on gke --accelerator v6e:16x16,slices=2 --image IMAGE --dry-run -- pretrain …

    Options of another engine are errors. Engines restart the command after exit status 75.
    """
    from bert_jax.tools.launch import jobs, plan

    if options.job:
        return _job(options)
    if not options.on:
        raise UserError(
            "give --on ENGINE and a command after --, or status, logs, stop or delete NAME"
        )
    job, made = make_plan(options)
    if options.dry_run:
        print(plan.script(made))
        return None
    if options.detach:
        arguments = [argument for argument in options.arguments if argument != "--detach"]
        return jobs.detach(options.on, job.name, ["launch", *arguments, "--", *options.command])
    return jobs.start(options.on, job.name, made)


def make_plan(options: argparse.Namespace) -> tuple[Any, Any]:
    """Return the job of a parsed `launch` and its plan, both checked."""
    from bert_jax.tools.launch import request

    job = _launched(options)
    engine_options = {
        key: value for key, value in vars(options).items() if key in options.engine_options
    }
    return job, request.make_plan(options.on, job, engine_options)


def _job(options) -> int | None:
    from bert_jax.tools.launch import jobs

    calls = {
        "status": jobs.show_status,
        "logs": jobs.show_logs,
        "stop": jobs.stop,
        "delete": jobs.delete,
    }
    what, *names = options.job
    if what not in calls or len(names) != 1:
        text = " ".join(options.job)
        raise UserError(f"{text}: give status, logs, stop or delete NAME, or a command after --")
    others = ("on", "command", "dry_run", "detach", "name", "env")
    if any(getattr(options, other) for other in others) or any(
        hasattr(options, name) for name in options.engine_options
    ):
        raise UserError(f"{what} {names[0]} takes no options and no command")
    return calls[what](names[0])


def _launched(options) -> Any:
    """Return the job of the command after --, which is checked before any machine is requested."""
    from bert_jax.cli import parse
    from bert_jax.config import flags
    from bert_jax.config.fields import flatten
    from bert_jax.tools.launch import request

    if not options.command or options.command[0] not in _PATHS:
        raise UserError(
            "give pretrain, finetune, prepare or sweep with its arguments after --, as in: bert-jax "
            f"launch --on {options.on} -- pretrain --config base --rows … --workdir …"
        )
    storage.check(options.command)
    launched = parse(options.command)
    folder_option, inputs = _PATHS[launched.verb]
    paths = []
    for key in inputs:
        value = getattr(launched, key)
        paths += value if isinstance(value, list) else [str(value)] if value else []
    file = ""
    if launched.verb_settings.takes_config:
        config = load_config(launched)
        paths += [value for key, value in flatten(config).items() if _CONFIG_PATHS.fullmatch(key)]
        (value,) = (a[9:] for a in launched.config if a.startswith("--config="))
        file = value.partition(":")[0] if flags.is_path(value) else ""
    folder, name = getattr(launched, folder_option), options.name
    if name is None:
        name = request.job_name(folder.rstrip("/").rpartition("/")[2])
    environment = request.parse_environment(options.env)
    return request.Job(options.command, name, folder, environment, file, paths)


@verb(
    *CONFIG,
    option(
        "--topology",
        "KIND:SHAPE",
        "TPUs or GPUs, such as v5e:16x16,slices=4 or h100:64; may be repeated",
        action="append",
        required=True,
    ),
    repeatable("--rows", "DIR", "rows, as for pretrain"),
    *START,
    number("--sequences", 1, "sequences per row if no rows are given"),
    option("--dollars-per-chip-hour", "X", "also print the price", type=float),
    number("--explain", 0, "list the N sources of most main-memory traffic of each compiled step"),
    option("--before", "FILE", "with --explain: compare with an earlier --json"),
    flag("--json", "print one JSON object per topology"),
)
def _preflight(options) -> int:
    r"""Estimate memory, time and cost of a pretraining run on other hardware.

    bert-jax preflight --config configs/pretrain.py:large --topology v5p:4x4x4
    bert-jax preflight --config configs/pretrain.py:base --topology v5e:4x4 --topology v6e:2x2 \
      --dollars-per-chip-hour 1.20
    bert-jax preflight --config base,128 --topology h100:1 --explain 20

    exit status: 0 fits on every topology, 1 does not fit, 2 user error
    """
    config = load_config(options)
    if options.sequences < 1:
        raise UserError(f"--sequences {options.sequences}: must be at least 1")
    if options.dollars_per_chip_hour is not None and options.dollars_per_chip_hour <= 0:
        raise UserError(f"--dollars-per-chip-hour {options.dollars_per_chip_hour}: must be above 0")

    from bert_jax.runtime import device
    from bert_jax.runtime.topology import parse_topology
    from bert_jax.tools.preflight.estimate import preflight
    from bert_jax.tools.preflight.report import format_report

    topologies = [parse_topology(text) for text in options.topology]
    if options.before and (options.json or not options.explain):
        raise UserError("--before: it needs --explain N, without --json")
    earlier = _earlier_reports(options.before, topologies) if options.before else {}
    device.start("cpu", cache=False)
    config, _ = open_start(config, options)
    fits = True
    for i, topology in enumerate(topologies):
        report = preflight(config, topology, options.sequences, options.dollars_per_chip_hour)
        fits = fits and report["fits"]
        if options.json:
            text = json.dumps(report)
        else:
            before = earlier.get(topology.name)
            text = "\n" * (i > 0) + format_report(report, options.explain, before)
        print(text, flush=True)
    return 0 if fits else EXIT_NEGATIVE


def _earlier_reports(path: str, topologies: list) -> dict[str, Any]:
    """Return the reports in a file of `preflight --json` by topology; it must have all `topologies`."""
    try:
        reports = [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]
        by_name = {
            report["topology"]: report for report in reports if report["phases"][0]["kernels"]
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--before {path}: no output of preflight --json ({error})") from None
    if missing := [topology.name for topology in topologies if topology.name not in by_name]:
        raise UserError(f"--before {path}: it has no compiled step of {missing[0]}")
    return by_name
