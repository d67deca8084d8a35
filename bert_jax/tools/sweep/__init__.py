"""Sweeps: many runs by name, what each needs first, and a line of results for each.

A sweep is a Python file that says what there is to run; dependencies need no list, they are the
points that a point's command names:

    from bert_jax.tools.sweep import Point, grid

    def get_points(given):
        rows = Point("rows", ("prepare", "--vocab", given.data / "vocab", given.data / "text/*"))
        for size in grid(layers=(2, 4), hidden=(128, 256)):
            name = "L{layers}-H{hidden}-A2".format(**size)
            config = f"configs/pretrain.py:{name},128"
            model = Point(name, ("pretrain", "--config", config, "--rows", rows), size)
            yield Point(f"{name}/rte", ("finetune", "--config", "configs/glue.py:rte", "--init", model), size)

A point is a command of `bert-jax` ("python" for a script) and makes one folder, which is told to it
by --workdir or --out. Folders carry a hash of the command and of those that it stands on, so that
sweeps share what they have in common. What files hold is not in it: with other data below the same
folder, a config file edited or a checkpoint replaced, take another `--runs`. Below it, NAME-HASH holds

out/             what the command makes
log              what it said
attempts.jsonl   every start of it: when, how long, how it ended
"""

from bert_jax.tools.sweep.points import (
    FOLDER_OPTION,
    SCALES,
    Given,
    Point,
    Sweep,
    grid,
    load,
    module_of,
    ordered,
    sample,
    select,
)

__all__ = [
    "FOLDER_OPTION",
    "SCALES",
    "Given",
    "Point",
    "Sweep",
    "grid",
    "load",
    "module_of",
    "ordered",
    "sample",
    "select",
]
