"""Sweeps: named runs with dependencies, and a line of results for each.

A sweep is a Python file that yields the points to run. A point depends on the points that its command
contains:

    from bert_jax.tools.sweep import Point, grid

    def get_points(args):
        rows = Point("rows", ("prepare", "--vocab", args.data / "vocab", args.data / "text/*"))
        for size in grid(layers=(2, 4), hidden=(128, 256)):
            name = "L{layers}-H{hidden}-A2".format(**size)
            config = f"configs/pretrain.py:{name},128"
            model = Point(name, ("pretrain", "--config", config, "--rows", rows), size)
            yield Point(f"{name}/rte", ("finetune", "--config", "configs/glue.py:rte", "--init", model), size)

A point is a command of `bert-jax` ("python" for a script) that creates one folder, passed to it as
--workdir or --out. Folder names contain a hash of the command and its dependencies, so that sweeps
share points they have in common. The hash does not cover the contents of files: after changing data,
a config file or a checkpoint in place, use another `--runs`. Inside it, NAME-HASH contains

out/             output of the command
log              its standard output and error
attempts.jsonl   every start, and its end: when, duration, exit status
"""

from bert_jax.tools.sweep.points import SCALES as SCALES
from bert_jax.tools.sweep.points import Point as Point
from bert_jax.tools.sweep.points import Sweep as Sweep
from bert_jax.tools.sweep.points import SweepArgs as SweepArgs
from bert_jax.tools.sweep.points import grid as grid
from bert_jax.tools.sweep.points import load as load
from bert_jax.tools.sweep.points import module_of as module_of
from bert_jax.tools.sweep.points import ordered as ordered
from bert_jax.tools.sweep.points import select as select
