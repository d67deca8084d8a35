"""Verbs for other machines: `launch` and `preflight`."""

import argparse
import json
import re
from typing import Any

from bert_jax import storage
from bert_jax.cli.common import (
    Verbs,
    add_config,
    add_start,
    open_start,
    split_command,
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
    r"distill\.teacher|phases\[\d+\]\.rows|task\.(data|train|dev|test|labels)"
)


def add_launch(verbs: Verbs) -> None:
    """Add `bert-jax launch`."""
    sub = verbs.add(
        "launch",
        _launch,
        "run pretrain, finetune, prepare or sweep on a cluster, or in several local processes",
        "  bert-jax launch --on tpu-vm --accelerator v5e:4x4 --zone us-west4-a --spot --detach -- pretrain \\\n"
        "    --config configs/pretrain.py:base,128 --rows gs://mine/rows128 --workdir gs://mine/runs/base\n"
        "  bert-jax launch logs base\n"
        "  bert-jax launch --on slurm --nodes 4 --gpus 8 --extra=--partition=long -- pretrain …\n"
        "  bert-jax launch --on gke --accelerator v6e:16x16,slices=2 --image IMAGE --dry-run -- pretrain …\n\n"
        "Options of another engine are errors. Engines restart the command after exit status 75.",
    )
    sub.add_argument(
        "job", nargs="*", metavar="status|logs|stop NAME", help="show, follow or stop a job"
    )
    sub.add_argument("--on", choices=("tpu-vm", "gke", "slurm", "sky", "local"), help="engine")
    sub.add_argument("--dry-run", action="store_true", help="print the commands as a script")
    sub.add_argument(
        "--detach", action="store_true", help="follow the run in the background (tpu-vm, local)"
    )
    sub.add_argument("--name", help="name of the job, slice or workload (default: the workdir's)")
    sub.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="environment variable of the run; repeatable",
    )
    # No defaults: each engine has its own, for options that are not given.
    engine = sub.add_argument_group("options of engines", argument_default=argparse.SUPPRESS)
    engine.add_argument(
        "--restarts",
        type=int,
        metavar="N",
        help="maximum number of restarts (default 100; local: 0; not sky)",
    )
    engine.add_argument(
        "--extra",
        action="append",
        metavar="ARG",
        help="passed to gcloud, sbatch or sky; repeatable",
    )
    engine.add_argument(
        "--accelerator",
        metavar="KIND",
        help="as for preflight: v5e:4x4, v5litepod-16 or v5e:4x4,slices=2 (sky: H100:8)",
    )
    engine.add_argument("--image", help="container image with bert-jax (gke, sky, slurm)")
    engine.add_argument("--spot", action="store_true", help="use preemptible machines")
    engine.add_argument("--zone", help="such as us-west4-a (tpu-vm)")
    engine.add_argument("--project", help="default: gcloud's (tpu-vm)")
    engine.add_argument("--runtime", help="TPU VM software version (tpu-vm)")
    engine.add_argument("--keep", action="store_true", help="do not delete the slice (tpu-vm)")
    engine.add_argument("--queue", help="local queue of Kueue (gke)")
    engine.add_argument("--namespace", help="default: kubectl's (gke)")
    engine.add_argument(
        "--service-account", metavar="NAME", help="Kubernetes account that may use the bucket (gke)"
    )
    engine.add_argument("--nodes", type=int, metavar="N", help="machines (slurm, sky)")
    engine.add_argument(
        "--gpus", type=int, metavar="N", help="GPUs per machine, one process each (slurm)"
    )
    engine.add_argument(
        "--mount",
        action="append",
        metavar="PATH[:PATH]",
        help="folder of the machine to mount in the container; repeatable (slurm)",
    )
    engine.add_argument(
        "--module",
        action="append",
        metavar="NAME",
        help="environment module to load; repeatable (slurm)",
    )
    engine.add_argument(
        "--processes", type=int, metavar="N", help="number of processes, default 2 (local)"
    )
    engine.add_argument("--devices", type=int, metavar="N", help="CPU devices per process (local)")
    sub.set_defaults(engine_options=[action.dest for action in engine._group_actions])


def _launch(options) -> int | None:
    from bert_jax.tools import launch

    if options.job:
        return _job(options)
    if not options.on:
        raise UserError(
            "give --on ENGINE and a command after --, or status, logs or stop and a NAME"
        )
    request = _request(options)
    engine_options = {
        key: value for key, value in vars(options).items() if key in options.engine_options
    }
    name, plan = launch.make_plan(options.on, request, engine_options)
    if options.dry_run:
        print(launch.script(plan))
        return None
    if options.detach:
        arguments = [argument for argument in options.arguments if argument != "--detach"]
        return launch.detach(options.on, name, ["launch", *arguments, "--", *options.command])
    return launch.start(options.on, name, plan)


def _job(options) -> int:
    from bert_jax.tools import launch

    calls = {"status": launch.show_status, "logs": launch.show_logs, "stop": launch.stop}
    what, *names = options.job
    if what not in calls or len(names) != 1:
        raise UserError(
            f"{' '.join(options.job)}: give status, logs or stop and the NAME of a job, or a command "
            "after --"
        )
    others = (
        options.on,
        options.command,
        options.dry_run,
        options.detach,
        options.name,
        options.env,
    )
    if any(others) or any(hasattr(options, name) for name in options.engine_options):
        raise UserError(f"{what} {names[0]} takes no options and no command")
    return calls[what](names[0])


def _request(options) -> Any:
    """Check the command after --, before any machine is requested."""
    from bert_jax import config as config_lib
    from bert_jax import config_flags
    from bert_jax.cli import parse
    from bert_jax.tools import launch

    if not options.command or options.command[0] not in _PATHS:
        raise UserError(
            "give pretrain, finetune, prepare or sweep with its arguments after --, as in: bert-jax "
            f"launch --on {options.on} -- pretrain --config configs/pretrain.py:base --rows … "
            "--workdir …"
        )
    storage.check(options.command)
    command, _ = split_command(options.command)
    settings, rest = config_flags.split(command)
    launched = parse(rest)
    folder, inputs = _PATHS[launched.verb]
    paths = []
    for key in inputs:
        value = getattr(launched, key)
        paths += value if isinstance(value, list) else [str(value)] if value else []
    kinds = {"pretrain": config_lib.Config, "finetune": config_lib.FinetuneConfig}
    file = ""
    if launched.verb in kinds:
        if launched.teacher:
            settings.append(f"--config.distill.teacher={launched.teacher}")
        config = config_flags.load(settings, kinds[launched.verb])
        if launched.verb == "pretrain":
            config_lib.take_rows(config, launched.rows)
        elif launched.data:
            config.task.data = launched.data
        paths += [
            value
            for key, value in config_lib.flatten(config).items()
            if _CONFIG_PATHS.fullmatch(key)
        ]
        value = next(a for a in settings if a.startswith("--config=")).removeprefix("--config=")
        file = value if config_flags.is_path(value) else ""
    elif settings:
        raise UserError(f"{launched.verb} does not take --config")
    for key in ("runs", "data") if launched.verb == "sweep" else ():
        if storage.is_remote(path := getattr(launched, key)):
            raise UserError(
                f"--{key} {path}: a sweep needs a local folder, or one on a shared disk"
            )
    return launch.Request(
        options.command,
        getattr(launched, folder),
        file.partition(":")[0],
        paths,
        options.env,
        options.name,
    )


def add_preflight(verbs: Verbs) -> None:
    """Add `bert-jax preflight`."""
    sub = verbs.add(
        "preflight",
        _preflight,
        "estimate memory, time and cost of a pretraining run on other hardware",
        "  bert-jax preflight --config configs/pretrain.py:large --topology v5p:4x4x4\n"
        "  bert-jax preflight --config configs/pretrain.py:base --topology v5e:4x4 --topology v6e:2x2 \\\n"
        "    --config.model.dtype=bfloat16 --dollars-per-chip-hour 1.20\n\n"
        "exit status: 0 fits on every topology, 1 does not fit, 2 user error",
        takes_config=True,
    )
    add_config(sub)
    sub.add_argument(
        "--topology",
        action="append",
        required=True,
        metavar="KIND:SHAPE",
        help="TPU kind and slice shape, such as v5e:4x4 or v5e:16x16,slices=4, or GPUs such as h100:64; repeatable",
    )
    sub.add_argument(
        "--rows", action="append", default=[], metavar="DIR", help="rows, as for pretrain"
    )
    add_start(sub)
    sub.add_argument(
        "--sequences",
        type=int,
        default=1,
        help="sequences per row if no rows are given (default 1)",
    )
    sub.add_argument(
        "--dollars-per-chip-hour", type=float, metavar="X", help="also print the price"
    )
    sub.add_argument("--json", action="store_true", help="print one JSON object per topology")


def _preflight(options) -> int:
    from bert_jax import config_flags
    from bert_jax.config import take_rows

    config = config_flags.load(options.config)
    take_rows(config, options.rows)
    if options.sequences < 1:
        raise UserError(f"--sequences {options.sequences}: must be at least 1")
    if options.dollars_per_chip_hour is not None and options.dollars_per_chip_hour <= 0:
        raise UserError(f"--dollars-per-chip-hour {options.dollars_per_chip_hour}: must be above 0")

    from bert_jax import device
    from bert_jax.tools import preflight

    topologies = [preflight.parse_topology(text) for text in options.topology]
    device.start("cpu", cache=False)
    config, _ = open_start(config, options)
    fits = True
    for i, topology in enumerate(topologies):
        report = preflight.preflight(
            config, topology, options.sequences, options.dollars_per_chip_hour
        )
        fits = fits and report["fits"]
        if options.json:
            print(json.dumps(report), flush=True)
        else:
            print(("\n" if i else "") + preflight.describe(report), flush=True)
    return 0 if fits else EXIT_NEGATIVE
