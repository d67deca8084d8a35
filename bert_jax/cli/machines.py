"""Verbs for other machines: `launch` and `preflight`."""

import argparse
import json

from bert_jax.cli.common import Verbs, add_config, take_rows
from bert_jax.errors import EXIT_NEGATIVE, UserError


def add_launch(verbs: Verbs) -> None:
    """Add `bert-jax launch`."""
    sub = verbs.add(
        "launch",
        _launch,
        "run pretrain or finetune on a cluster, or in several local processes",
        "  bert-jax launch --on tpu-vm --accelerator v5litepod-16 --zone us-west4-a --spot --bucket gs://mine \\\n"
        "    -- pretrain --config configs/pretrain.py:base,128 --rows /bucket/rows128 --workdir /bucket/runs/base\n"
        "  bert-jax launch --on slurm --nodes 4 --gpus 8 --extra=--partition=long -- pretrain …\n"
        "  bert-jax launch --on local --processes 2 --dry-run -- pretrain …\n\n"
        "Options of another engine are errors. Every engine restarts the command after exit status 75.",
    )
    sub.add_argument(
        "--on", required=True, choices=("tpu-vm", "gke", "slurm", "sky", "local"), help="engine"
    )
    sub.add_argument("--dry-run", action="store_true", help="print the commands as a script")
    sub.add_argument("--name", help="name of the job, slice or workload (default: the workdir's)")
    # No defaults: each engine has its own, for options that are not given.
    engine = sub.add_argument_group("options of engines", argument_default=argparse.SUPPRESS)
    engine.add_argument("--restarts", type=int, metavar="N", help="maximum number of restarts")
    engine.add_argument(
        "--extra", action="append", metavar="ARG", help="passed to the engine's command; repeatable"
    )
    engine.add_argument("--accelerator", metavar="KIND", help="such as v5litepod-16 (sky: H100:8)")
    engine.add_argument("--zone", help="such as us-west4-a (tpu-vm, gke)")
    engine.add_argument("--project", help="default: gcloud's (tpu-vm, gke)")
    engine.add_argument("--spot", action="store_true", help="use preemptible machines")
    engine.add_argument("--bucket", metavar="gs://NAME", help="mounted at /bucket (tpu-vm, sky)")
    engine.add_argument("--runtime", help="TPU VM software version (tpu-vm)")
    engine.add_argument("--keep", action="store_true", help="do not delete the slice (tpu-vm)")
    engine.add_argument("--cluster", help="GKE cluster (gke)")
    engine.add_argument("--slices", type=int, metavar="N", help="TPU slices (gke)")
    engine.add_argument(
        "--image", help="container image with bert-jax (gke; default: this checkout)"
    )
    engine.add_argument("--nodes", type=int, metavar="N", help="machines (slurm, sky)")
    engine.add_argument(
        "--gpus", type=int, metavar="N", help="GPUs per machine, one process each (slurm)"
    )
    engine.add_argument(
        "--processes", type=int, metavar="N", help="number of processes, default 2 (local)"
    )
    engine.add_argument("--devices", type=int, metavar="N", help="CPU devices per process (local)")


def _launch(options) -> int | None:
    from bert_jax import config as config_lib
    from bert_jax import config_flags
    from bert_jax.cli import parser
    from bert_jax.tools import launch

    kinds = {"pretrain": config_lib.Config, "finetune": config_lib.FinetuneConfig}
    if options.command[:1] not in ([verb] for verb in kinds):
        raise UserError(
            "give pretrain or finetune with its arguments after --, as in: bert-jax launch "
            f"--on {options.on} -- pretrain --config configs/pretrain.py:base --rows … --workdir …"
        )
    # Check the command before any machine is requested.
    config, rest = config_flags.split(options.command)
    launched = parser().parse_args(rest)
    config_flags.load(config, kinds[launched.verb])

    engine_options = vars(options).copy()
    for name in ("verb", "run", "takes_config", "config", "command", "on", "dry_run", "name"):
        del engine_options[name]
    file = next(a for a in config if a.startswith("--config=")).removeprefix("--config=")
    plan = launch.plan(
        options.on,
        options.command,
        file.partition(":")[0],
        launched.workdir,
        options.name,
        engine_options,
    )
    if options.dry_run:
        print(launch.script(plan))
        return None
    return launch.run(plan)


def add_preflight(verbs: Verbs) -> None:
    """Add `bert-jax preflight`."""
    sub = verbs.add(
        "preflight",
        _preflight,
        "estimate memory, time and cost of a run on other hardware",
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
