"""Compile BERT-base and -large for TPU slices of 4 to 1,024 chips, without a TPU.

    python experiments/speed/scale/run.py compile [--minutes 30] [--size base]   # what is missing in results.jsonl
    python experiments/speed/scale/run.py memory                   # predicted and measured, on this CPU
    python experiments/speed/scale/run.py loops                    # a scanned program beside an unrolled one
    python experiments/speed/scale/run.py step                     # one program, to compare commits
    python experiments/speed/scale/report.py                       # README.md from results.jsonl

Needs `pip install -e '.[tpu]'`. `compile` has libtpu compile the training step (bfloat16, layers
scanned, S=1, vocabulary padded to 30,592) for every slice of `plan`, the most informative first; a program
that does not fit is compiled again with the change that preflight suggests. `report.py` compiles nothing: it
extrapolates slices that were not compiled from the nearest compiled one, and marks them.
"""

import argparse
import copy
import ctypes
import json
import pathlib
import platform
import re
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.config.checks import validate
from bert_jax.config.schema import Config, OptimConfig, PhaseConfig
from bert_jax.config.sizes import model_size
from bert_jax.objectives import pretraining
from bert_jax.runs import workdir
from bert_jax.runtime import device, sharding
from bert_jax.tools import preflight
from bert_jax.training import state as state_lib
from bert_jax.training import step as step_lib

HERE = pathlib.Path(__file__).parent
RESULTS = HERE / "results.jsonl"
RECIPE_STEPS = {128: 900_000, 512: 100_000}
CHIPS = (4, 16, 64, 256, 1024)
SLICES = {
    "v5e": ("2x2", "4x4", "8x8", "16x16", "16x16,slices=4"),
    "v5p": ("2x2x1", "2x2x4", "4x4x4", "4x8x8", "8x8x16"),
    "v4": ("2x2x1", "2x2x4", "4x4x4", "4x8x8", "8x8x16"),
    "v6e": ("2x2", "4x4", "8x8", "16x16", "16x16,slices=4"),
}
# You et al., arXiv 1904.00962, table 1: 65,536 sequences of 128, then 32,768 of 512, 8,599 steps in
# 76.19 minutes on a TPU v3 pod of 1,024 chips; nine in ten sequences are short, which splits the steps so.
LAMB = ((128, 65_536, 7_038), (512, 32_768, 1_561))
LAMB_MINUTES, LAMB_CHIPS, V3_FLOPS = 76.19, 1024, 123e12


def recipe(size: str, tokens: int, chips: int) -> Config:
    """Return the config of a phase of the paper's recipe; above 256 chips, several share a row."""
    config = Config(model=model_size(size), phases=(PhaseConfig(tokens=tokens),))
    config.steps = RECIPE_STEPS[tokens]
    config.mesh.tensor = max(chips // config.batch_size, 1)
    return with_defaults(config)


def lamb(tokens: int) -> Config:
    """Return the config of a phase of the 76-minute run."""
    _, batch_size, steps = next(phase for phase in LAMB if phase[0] == tokens)
    config = Config(model=model_size("large"), phases=(PhaseConfig(tokens=tokens),))
    config.optim = OptimConfig(optimizer="lamb")
    config.batch_size, config.steps = batch_size, steps
    return with_defaults(config)


def with_defaults(config: Config) -> Config:
    """Apply the settings common to all runs."""
    config.model.vocab_size = pretraining.DEFAULT_VOCAB_SIZE
    config.model.vocab_multiple = 128
    config.model.dtype = "bfloat16"
    config.model.layer_loop = "scanned"
    validate(config)
    return config


def plan() -> list[tuple[str, str, int, str]]:
    """Return (run, size, T, topology), the most important first."""
    programs = []
    for index in (2, 0, 4, 3, 1):
        for kind, shapes in SLICES.items():
            for size in ("base", "large"):
                for tokens in (128, 512):
                    programs.append(("recipe", size, tokens, f"{kind}:{shapes[index]}"))
        if index == 2:
            for kind in SLICES:
                for tokens in (128, 512):
                    programs.append(("lamb", "large", tokens, f"{kind}:{SLICES[kind][4]}"))
    return programs


def results() -> list[dict]:
    """Return the lines of results.jsonl."""
    return (
        [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    )


def record(**entry) -> None:
    """Append a line with its provenance."""
    import importlib.metadata

    versions = {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
    versions["python"] = platform.python_version()
    with RESULTS.open("a") as file:
        file.write(json.dumps({**entry, **versions, "when": time.strftime("%Y-%m-%d")}) + "\n")


def apply(config: Config, arguments: str) -> None:
    """Apply overrides such as `--config.model.remat=full` to a config."""
    for path, value in re.findall(r"--config\.([\w.]+)=(\w+)", arguments):
        *groups, name = path.split(".")
        target = config
        for group in groups:
            target = getattr(target, group)
        setattr(target, name, int(value) if value.isdigit() else value)


def change_of(report: dict) -> str:
    """Return the arguments with which a one-phase run fits."""
    suggestion = report["phases"][0]["would_fit"]
    return suggestion["arguments"] if suggestion else ""


def compile_all(minutes: float, sizes: list[str]) -> None:
    """Compile the missing programs of the given sizes within a time limit."""
    device.start("cpu", cache=False)
    known = {
        (r["run"], r["size"], r["tokens"], r["topology"])
        for r in results()
        if "refused" in r
        or ("topology" in r and (r["report"]["fits"] or r["change"] or not change_of(r["report"])))
    }
    until = time.monotonic() + 60 * minutes
    for run, size, tokens, name in plan():
        if size not in sizes or (run, size, tokens, name) in known:
            continue
        if time.monotonic() > until:
            print("time limit reached; run again to continue")
            return
        topology = preflight.parse_topology(name)
        config = lamb(tokens) if run == "lamb" else recipe(size, tokens, topology.chips)
        change = ""
        while True:
            try:
                report = preflight.preflight(config, topology)
            except preflight.NotCompiled as error:
                program = {"run": run, "size": size, "tokens": tokens, "topology": name}
                record(**program, change=change, refused=str(error))
                print(run, size, tokens, name, change, error, flush=True)
                break
            record(run=run, size=size, tokens=tokens, topology=name, change=change, report=report)
            seconds = report["phases"][0]["compile_seconds"]
            verdict = "fits" if report["fits"] else "does not fit"
            print(run, size, tokens, name, change, f"{verdict}, {seconds:.0f} s", flush=True)
            if report["fits"] or change or not change_of(report):
                break
            change = change_of(report)
            config = copy.deepcopy(config)
            apply(config, change)


# Memory, predicted and measured on this CPU


def memory_of(name: str, changes: str) -> dict:
    """Run three steps in this process, and return the compiler's bytes and the process's growth."""
    device.start("cpu", cache=False)
    config = Config(model=model_size(name), phases=(PhaseConfig(tokens=128),), batch_size=32)
    config.model.vocab_size = pretraining.DEFAULT_VOCAB_SIZE
    config.model.layer_loop = "scanned"
    apply(config, changes)
    validate(config)
    config, (phase,) = pretraining.abstract_phases(config, 1)
    mesh = sharding.make_mesh(config.mesh, jax.devices("cpu")[:1])
    init, shapes = state_lib.initial_state(config, phase, mesh)
    step = step_lib.compile_step(config, phase, mesh, shapes)
    init = init.lower(jax.ShapeDtypeStruct((), jnp.uint32)).compile()
    analysis = step.memory_analysis()
    ctypes.CDLL("libc.so.6").malloc_trim(0)

    def memory(field: str) -> int:
        status = pathlib.Path("/proc/self/status").read_text()
        return 1024 * int(re.search(rf"{field}:\s+(\d+) kB", status).group(1))

    rng = np.random.default_rng(0)
    batch = {k: np.zeros(x.shape, x.dtype) for k, x in phase.batch_shape.items()}
    batch["tokens"] = rng.integers(1000, 30000, batch["tokens"].shape).astype(batch["tokens"].dtype)
    batch["length"][:], batch["a_length"][:] = 128, 64
    before = memory("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    state = init(jnp.uint32(0))
    for _ in range(3):
        state, sums, _ = step(
            state, {k: jax.device_put(v, sharding.row_sharding(mesh)) for k, v in batch.items()}
        )
        jax.block_until_ready(sums)
    predicted = (
        analysis.argument_size_in_bytes + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes + analysis.temp_size_in_bytes
    )  # fmt: skip
    return {
        "run": "memory", "size": name, "tokens": 128, "batch_size": 32, "changes": changes,
        "state": analysis.argument_size_in_bytes, "temporaries": analysis.temp_size_in_bytes,
        "predicted": predicted, "measured": memory("VmHWM") - before,
    }  # fmt: skip


MEMORY = (
    ("mini", ""),
    ("small", ""),
    ("medium", ""),
    ("medium", "--config.model.remat=full"),
    ("medium", "--config.accumulation=4"),
    ("medium", "--config.batch_size=8"),
    ("base", "--config.batch_size=8"),
)


def memory_all() -> None:
    """Run each config in a new process, since processes rarely return memory."""
    known = {(r["size"], r["changes"]) for r in results() if r["run"] == "memory"}
    for name, changes in MEMORY:
        if (name, changes) not in known:
            command = [sys.executable, __file__, "one", "--", name, changes]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            result = json.loads(done.stdout.splitlines()[-1])
            record(**result)
            print(result)


def loops() -> None:
    """Compile a model scanned and unrolled, with and without rematerialization, for v5e:2x2."""
    device.start("cpu", cache=False)
    known = {(r["layer_loop"], r["remat"]) for r in results() if r["run"] == "loops"}
    topology = preflight.parse_topology("v5e:2x2")
    for remat in ("none", "full"):
        for layer_loop in ("scanned", "unrolled"):
            if (layer_loop, remat) in known:
                continue
            config = recipe("small", 128, 4)
            config.model.layer_loop, config.model.remat = layer_loop, remat
            report = preflight.preflight(config, topology)
            record(run="loops", size="small", layer_loop=layer_loop, remat=remat, report=report)
            print(layer_loop, remat, report["phases"][0]["compile_seconds"])


# The program that compares commits: two layers of base, one sequence in each of four slots.
STEP = {
    "size": "L2-H768-A12",
    "tokens": 128,
    "sequences": 4,
    "batch_size": 256,
    "target": "v5e:2x2",
}


def step() -> None:
    """Compile the training step of `STEP` in bfloat16 with XLA's attention and record its costs.

    With another checkout first in PYTHONPATH, its step is compiled, and recorded under its commit.
    """
    device.start("cpu", cache=False)
    model = model_size(STEP["size"])
    model.dtype, model.vocab_multiple = "bfloat16", 128
    model.attention, model.attention_dropout = "xla", 0.0
    config = Config(model=model, phases=(PhaseConfig(tokens=STEP["tokens"]),))
    config.batch_size = STEP["batch_size"]
    config, (phase,) = pretraining.abstract_phases(config, STEP["sequences"])
    devices = preflight.tpu_devices(preflight.parse_topology(STEP["target"]))
    mesh = sharding.make_mesh(config.mesh, list(devices))
    _, shapes = state_lib.initial_state(config, phase, mesh)
    begun = time.monotonic()
    program = step_lib.compile_step(config, phase, mesh, shapes)
    seconds = time.monotonic() - begun
    memory, costs = program.memory_analysis(), program.cost_analysis()
    scatters = re.findall(r"= (\w+\[[\d,]*\])\S* scatter\(", program.as_text())
    line = {
        "run": "step", "commit": workdir.commit(), "jax": jax.__version__, **STEP,
        "scatters": sorted(scatters), "bytes_accessed": costs["bytes accessed"],
        "temporaries": memory.temp_size_in_bytes, "arguments": memory.argument_size_in_bytes,
        "flops": costs["flops"], "compile_seconds": round(seconds, 1),
    }  # fmt: skip
    record(**line)
    print(json.dumps(line))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    compiling = verbs.add_parser("compile")
    compiling.add_argument("--minutes", type=float, default=30)
    sizes = ["base", "large"]
    compiling.add_argument("--size", choices=sizes, action="append", help="default: both")
    for name in ("memory", "loops", "step"):
        verbs.add_parser(name)
    one = verbs.add_parser("one")
    one.add_argument("name")
    one.add_argument("changes")
    options = parser.parse_args()
    if options.verb == "compile":
        compile_all(options.minutes, options.size or sizes)
    elif options.verb == "memory":
        memory_all()
    elif options.verb == "loops":
        loops()
    elif options.verb == "step":
        step()
    else:
        print(json.dumps(memory_of(options.name, options.changes)))


if __name__ == "__main__":
    main()
