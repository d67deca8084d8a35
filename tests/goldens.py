"""Record what small runs compute, to the bit, so that a change of the code that moves a number shows.

    python tests/goldens.py        # runs all cases and writes tests/data/goldens.json

`tests/test_goldens.py` runs the same cases and compares. Bits depend on the version of JAX and on the
processor's instructions and cores, so digests are kept for each of these.
"""

import hashlib
import json
import os
import pathlib
import platform
import shutil
import sys
import tempfile

if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
    os.environ["JAX_PLATFORMS"], os.environ["XLA_FLAGS"] = "cpu", ""

import jax
import numpy as np
from flax import traverse_util

from bert_jax.runs import checkpoint
from tests.helpers import corpus, processes, tasks
from tests.helpers.runs import command, python

# The emitters of users, unlike those of conftest.py.
FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
ONE_DEVICE = {**os.environ, "XLA_FLAGS": FLAGS.replace("count=8", "count=1")}
FILE = pathlib.Path(__file__).parent / "data" / "goldens.json"
INSTRUCTIONS = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")

PRETRAINING = (
    "steps=24 model.vocab_multiple=128 phases[0].fraction=0.75 phases[1].fraction=0.25 phases[1].batch_size=4 "
    "accumulation=2 evaluate_every_steps=12 checkpoint.every_steps=8 checkpoint.keep_last=9 log_every_steps=2"
).split()
FINETUNING = "model.layers=2 epochs=2 batch_size=4 model.dropout=0.1 log_every_steps=2".split()
# The config file, the data and the settings of each fine-tuning head.
HEADS = {
    "class": ("table.py", None, ()),
    "classes": ("table.py:classes", tasks.labels_file, ()),
    "number": ("table.py:number", tasks.scores_file, ()),
    "choice": (
        "swag.py:own",
        tasks.choice_file,
        ("task.kind=choice", "task.text_a=question", "task.choices=('first','second')"),
    ),
    "token": ("tagging.py", tasks.conll_file, ()),
    "span": ("squad.py:2", tasks.squad_file, ("task.question_tokens=8", "task.stride_tokens=8")),
}


def key() -> str:
    """What the bits of a run depend on besides the code."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
        flags = set(text.split("flags", 1)[-1].split("\n", 1)[0].split())
    except OSError:
        flags = set()
    parts = (jax.__version__, platform.machine(), *(name for name in INSTRUCTIONS if name in flags))
    return " ".join([*parts, f"{len(os.sched_getaffinity(0))} cores"])


def digest(workdir: pathlib.Path) -> dict[str, str]:
    """Digests of a run's metrics and of the parameters of its last checkpoint."""
    params = checkpoint.load_model(workdir, "latest")[2]
    hashed = hashlib.sha256()
    for path, value in sorted(traverse_util.flatten_dict(jax.device_get(params), sep="/").items()):
        value = np.asarray(value)
        hashed.update(f"{path} {value.dtype} {value.shape}".encode())
        hashed.update(value.tobytes())
    metrics = (workdir / "metrics.jsonl").read_bytes()
    return {"metrics": hashlib.sha256(metrics).hexdigest(), "params": hashed.hexdigest()}


def _run(argv, env):
    done = processes.run(argv, env=env)
    assert done.returncode == 0, done.stderr


def pretraining(folder: pathlib.Path) -> dict[str, dict[str, str]]:
    """Two phases of packed rows: whole, resumed at step 8, and on a mesh of eight devices."""
    text = corpus.write(folder)
    rows = [corpus.write_rows(text, tokens, sequences) for tokens, sequences in ((32, 3), (64, 4))]
    whole, resumed, eight = (folder / name for name in ("whole", "resumed", "eight"))
    _run(command(whole, rows, *PRETRAINING, size="L2-H32-A2", phases=",32,64"), ONE_DEVICE)
    shutil.copytree(whole, resumed)
    for step in (16, 24):
        shutil.rmtree(resumed / "checkpoints" / str(step))
    _run(command(resumed, rows, *PRETRAINING, size="L2-H32-A2", phases=",32,64"), ONE_DEVICE)
    mesh = ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", "phases[1].batch_size=8")
    argv = command(eight, rows, *PRETRAINING, *mesh, size="L2-H32-A2", phases=",32,64")
    _run(argv, ONE_DEVICE | {"XLA_FLAGS": FLAGS})
    return {path.name: digest(path) for path in (whole, resumed, eight)}


def finetuning(folder: pathlib.Path, head: str) -> dict[str, str]:
    """A fine-tuning of one head on a small table of its kind, from random weights."""
    config, write, changes = HEADS[head]
    tasks.write_table(folder)
    files = ()
    if write is not None:
        path = folder / {"squad.py:2": "d.json", "tagging.py": "d.txt"}.get(config, "d.csv")
        write(path)
        files = tuple(f"task.{split}={path}" for split in ("train", "dev"))
    argv = tasks.arguments(folder, folder / head, *files, *FINETUNING, *changes)
    argv[1] = f"--config={tasks.CONFIGS / config}"
    _run(python(*argv), ONE_DEVICE)
    return digest(folder / head)


def record() -> dict[str, dict[str, str]]:
    """Run every case; return the digests by case."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        result = {f"pretrain, {case}": value for case, value in pretraining(folder).items()}
        for head in HEADS:
            (folder / f"data_{head}").mkdir()
            result[f"finetune, {head}"] = finetuning(folder / f"data_{head}", head)
    return result


def read() -> dict[str, dict[str, dict[str, str]]]:
    """The recorded digests by `key()` and case."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps({**read(), key(): record()}, indent=1, sort_keys=True) + "\n")
    print(f"{FILE}: {key()}")
