"""Measure the training step on one GPU, for all attentions and kernels, against transformers.

    python experiments/speed/gpu.py --plan                     print the rows and their cost
    python experiments/speed/gpu.py --out DIR                  measure them; no network needed
    python experiments/speed/gpu.py --out DIR --only 'torch*' --only '*dropout'    measure selected rows
    python experiments/speed/gpu.py --out DIR --smoke          the plan on tiny models, any device
    cp DIR/gpu.jsonl experiments/speed/ && bert-jax report experiments/speed

It needs JAX, Flax, Optax and Orbax, PyTorch and transformers for the baseline, and a checkout of
bert_jax, installed or not. What a row measures, by its kind:

    ceilings   the speed of a large matrix product and of reading and writing memory
    step       the training step of `bert-jax pretrain` in bfloat16 with dropout 0.1 on hidden states, on
               packed rows of random tokens: nine of ten sequences fill a row, the rest are shorter
    parity     50 of these steps, twice: the losses, and whether both runs end with the same bits
    torch      transformers' BertForPreTraining: SDPA, autocast to bfloat16, fused AdamW, eager or with
               torch.compile; the same sequences, one a row, masked and on the GPU before the clock starts

The plan takes two calls of ten minutes: rows that do not fit are "not run", and `--only` selects them.
Rows with the same environment share a process, and a crash costs the row it happened in. Each result is
appended to DIR/gpu.jsonl immediately. A row that does not fit into the remaining time is recorded as not
run. Speeds count real tokens, without padding.
"""

import argparse
import fnmatch
import itertools
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
VOCABULARY, PREDICTED, SEPARATOR, MASK = 30_522, 0.15, 3, 4
# Seconds on an H100 to start a process, and after the deadline until it is killed.
START, GRACE = 14, 20
ROUNDS, ROUND_SECONDS, WARM_STEPS = 3, 1.5, 3
Batch = Line = dict[str, Any]


class Row(NamedTuple):
    """A row of the plan.

    Attributes:
        seconds: estimated seconds on an H100, most of them of compilation.
        settings: what is measured; the first fields of its result.
    """

    seconds: int
    settings: dict[str, Any]

    @property
    def name(self) -> str:
        """A readable name."""
        if self.settings["kind"] == "ceilings":
            return "ceilings"
        kind, size, tokens, rows, attention, dropout = itertools.islice(self.settings.values(), 6)
        name = f"{kind} {size} T={tokens}, {rows:,} rows, {attention}"
        name += " with attention dropout" * bool(dropout)
        name += "".join(
            f" {self.settings[key]}" for key in ("kernels", "activation") if key in self.settings
        )
        name += " deterministic" * self.settings["deterministic"]
        return name + " compiled" * self.settings.get("compiled", False)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the process that measures the row."""
        if self.settings["kind"] == "torch":
            # bert_jax runs in this process too, and must not take the GPU's memory.
            return {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
        value = str(self.settings.get("deterministic", False)).lower()
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_deterministic_ops={value}"
        return {"XLA_FLAGS": flags.strip()}


def plan(smoke: bool = False, only: Sequence[str] = ()) -> list[Row]:
    """Return what to measure, the most important first.

    Args:
        smoke: the same for a tiny model, which a CPU measures except for cudnn; own kernels are interpreted.
        only: patterns of the names of rows; none for all.
    """
    names = ("kind", "size", "tokens", "rows", "attention", "attention_dropout")

    def row(seconds, *values, deterministic=False, **more):
        settings = dict(zip(names, values, strict=True))
        return Row(seconds, {**settings, "deterministic": deterministic, **more})

    base, own = ("base", 128, 256), {"kernels": "pallas"}
    rows = [
        Row(8, {"kind": "ceilings"}),
        row(47, "step", *base, "xla", 0.1),
        row(35, "step", *base, "packed", 0.1, **own),
        row(35, "step", *base, "packed", 0.1, **own, activation="gelu_tanh"),
        row(68, "torch", *base, "sdpa", 0.1, compiled=not smoke),
        row(35, "step", *base, "packed", 0.1, **own, deterministic=True),
        row(31, "step", *base, "xla", 0.1, deterministic=True),
        row(45, "parity", *base, "packed", 0.1, **own, deterministic=True),
        row(60, "parity", *base, "xla", 0.1, deterministic=True),
        row(35, "step", *base, "packed", 0.1),
        row(40, "step", *base, "xla", 0.1, **own),
        row(50, "step", "base", 128, 1024, "packed", 0.1, **own, activation="gelu_tanh"),
        row(35, "step", "base", 512, 64, "packed", 0.1, **own),
        row(31, "step", "base", 512, 64, "cudnn", 0.0),
        row(60, "step", "large", 512, 64, "packed", 0.1, **own),
        row(60, "step", "large", 512, 64, "cudnn", 0.0),
        row(31, "step", *base, "cudnn", 0.0),
        row(45, "step", "base", 128, 1024, "cudnn", 0.0),
        row(31, "step", *base, "xla", 0.0),
        row(20, "torch", *base, "sdpa", 0.1, compiled=False),
    ]
    if smoke:
        tiny = {"size": "L1-H32-A2", "tokens": 32, "rows": 4}
        tiny = [Row(s, {**x, **tiny} if "size" in x else x) for s, x in rows]
        rows = list({row.name: row for row in tiny}.values())
    return [row for row in rows if any(fnmatch.fnmatch(row.name, p) for p in only or "*")]


def describe_plan(rows: Sequence[Row]) -> str:
    """Return the plan as text, with the seconds of each row and their running total."""
    lines, total = [], 0
    for _, process in itertools.groupby(rows, key=lambda row: row.environment):
        total += START
        lines.append(f"{START:5} s{total:6} s  start a process")
        for row in process:
            total += row.seconds
            lines.append(f"{row.seconds:5} s{total:6} s    {row.name}")
    return "\n".join(lines)


# --- The process that starts the others -----------------------------------------------------------


def measure_all(rows: Sequence[Row], out: pathlib.Path, options: argparse.Namespace) -> list[Line]:
    """Measure rows, write the results to out/gpu.jsonl, and return them."""
    import bench

    out.mkdir(parents=True, exist_ok=True)
    deadline, results = time.time() + 60 * options.minutes, []
    about = bench.machine() | ({"commit": options.commit} if options.commit else {})
    with (
        tempfile.TemporaryDirectory() as cache,
        (out / "gpu.log").open("w") as log,
        (out / "gpu.jsonl").open("w") as file,
    ):
        while left := rows[len(results) :]:
            environment, group = next(itertools.groupby(left, key=lambda row: row.environment))
            environment = {**environment, "JAX_COMPILATION_CACHE_DIR": cache}
            task = {"rows": list(group), "deadline": deadline}
            task["round_seconds"] = 0 if options.smoke else ROUND_SECONDS
            for row, line in zip(left, run(task, environment, log), strict=False):
                program = "as committed"
                if line["kind"] == "torch":
                    program = "transformers" + " + torch.compile" * line["compiled"]
                results.append({**line, "program": program, **about})
                file.write(json.dumps(results[-1]) + "\n")
                file.flush()
                os.fsync(file.fileno())
                outcome = line.get("why") or line.get("real_tokens_per_second") or "done"
                print(f"{deadline - time.time():4.0f} s left. {row.name}: {outcome}", flush=True)
    return results


def run(task: dict[str, Any], environment: dict[str, str], log: IO[str]) -> Iterator[Line]:
    """Measure rows in a process, and yield their results up to the row in which the process ends."""
    rows, left = task["rows"], task["deadline"] - time.time()
    environment = {
        "CUDA_VISIBLE_DEVICES": "0",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
        "XLA_CLIENT_MEM_FRACTION": "0.92",
        **environment,
    }
    # Twice the estimate, so that a row that hangs does not take the time of all others.
    limit = min(2 * (START + sum(row.seconds for row in rows)), left + GRACE)
    process = subprocess.Popen(
        [sys.executable, __file__, "--job", json.dumps(task)],
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env=environment,
        start_new_session=True,
    )
    # torch.compile starts processes of its own, which would keep the pipe open.
    timer = threading.Timer(limit, os.killpg, (process.pid, signal.SIGKILL))
    timer.start()
    measured = 0
    try:
        for text in process.stdout:
            if text.startswith('{"kind"'):
                yield json.loads(text)
                measured += 1
        status = process.wait()
    finally:
        timer.cancel()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if measured < len(rows):
        outcome = "failed" if time.time() < task["deadline"] else "not run"
        why = f"the process ended with {status}; see gpu.log"
        yield {**rows[measured].settings, "status": outcome, "why": why}


# --- The process that measures --------------------------------------------------------------------


def work(task: dict[str, Any]) -> None:
    """Measure rows, and print a line of JSON for each."""
    from bert_jax.runtime import device

    device.use_eigen_matmul()  # for smoke runs, as verbs do on a CPU
    for seconds, settings in task["rows"]:
        if time.time() + seconds > task["deadline"]:
            result = {"status": "not run", "why": "no time left"}
        else:
            try:
                result = MEASURES[settings["kind"]](settings, task["round_seconds"])
            except Exception as error:  # the other rows are still worth measuring
                traceback.print_exc()
                why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                result = {"status": "failed", "why": why[:300]}
        print(json.dumps({**settings, **result}), flush=True)


def ceilings(settings: Line, round_seconds: float) -> Line:
    """Measure a matrix product in bfloat16, and reading and writing memory."""
    import jax
    import jax.numpy as jnp

    from bert_jax.runtime import chips

    size = 8192 if round_seconds else 256
    # Random values: products of zeros take less power and run at a higher clock.
    x = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    words = jnp.ones((size * size,), jnp.float32)
    multiply, increment = jax.jit(jnp.matmul), jax.jit(lambda x: x + 1)

    def seconds(run):
        return min(timed(run, jax.block_until_ready, 7, round_seconds / 50))

    chip = jax.devices()[0].device_kind
    sheet = chips.find(chip)
    return {
        "device": chip,
        "operations_per_second": 2 * size**3 / seconds(lambda: multiply(x, x)),
        "bytes_per_second": 2 * words.nbytes / seconds(lambda: increment(words)),
        "sheet_operations_per_second": sheet and sheet.flops,
        "sheet_bytes_per_second": sheet and sheet.memory_bandwidth,
    }


def timed(step: Callable, wait: Callable, rounds: int, round_seconds: float) -> list[float]:
    """Return the seconds per step of each round; `wait` waits for the result of a step."""

    def run(steps):
        begun = time.perf_counter()
        for _ in range(steps):
            last = step()
        wait(last)
        return (time.perf_counter() - begun) / steps

    run(WARM_STEPS)
    steps = max(int(round_seconds / run(1)), 3)
    return [run(steps) for _ in range(rounds)]


def abstract_phase(settings: dict[str, Any], attention: str) -> tuple[Any, Any]:
    """Return the config and the phase of a row; no files of rows are needed."""
    import cases
    import data

    from bert_jax.objectives import pretraining

    tokens = settings["tokens"]
    changes = {
        "deterministic": settings["deterministic"],
        "model.attention": attention,
        "model.attention_dropout": settings["attention_dropout"],
        "model.kernels": settings.get("kernels", "xla"),
        "model.activation": settings.get("activation", "gelu"),
        "model.dtype": "bfloat16",
        "model.vocab_size": VOCABULARY,
        "model.vocab_multiple": 128,
    }
    change = [f"{key}={value}" for key, value in changes.items()]
    config = data.pretraining(settings["size"], tokens, settings["rows"], change)
    config, (phase,) = pretraining.abstract_phases(config, cases.SEQUENCES.get(tokens, 3))
    return config, phase


def random_batches(tokens: int, rows: int, sequences: int, count: int = 4) -> list[Batch]:
    """Return batches of packed rows of random sentence pairs, with the lengths of Google's BERT.

    Nine of ten pairs fill a row (`create_pretraining_data.py`). Rows are shuffled: all batches are alike.
    """
    import numpy as np

    from bert_jax.data.rows import Example, RowFormat

    rng, row_format = np.random.default_rng(0), RowFormat(tokens, sequences, VOCABULARY)

    def example():
        length = tokens if rng.random() < 0.9 else int(rng.integers(5, tokens + 1))
        ids = rng.integers(5, VOCABULARY, length).astype(np.uint16)
        return Example(ids, int(rng.integers(3, length - 1)), int(rng.integers(2)))

    packed = row_format.pack(example() for _ in range(2 * count * rows))
    packed = packed[np.random.default_rng(1).permutation(len(packed))[: count * rows]]
    batches = (packed[i : i + rows] for i in range(0, count * rows, rows))
    return [row_format.decode(row_format.encode(batch)) for batch in batches]


def speed(seconds: list[float], batches: Sequence[Batch], phase: Any) -> dict[str, Any]:
    """Return the fields common to both kinds of training step."""
    real = sum(int(batch["length"].sum()) for batch in batches)
    size = batches[0]["tokens"].size
    fraction = real / len(batches) / size
    return {
        "seconds": seconds,
        "real_fraction": fraction,
        "real_tokens_per_second": fraction * size / statistics.median(seconds),
        # As bert_jax counts them, whatever the baseline computes.
        "operations_per_token": phase.objective.flops_per_row / batches[0]["tokens"].shape[1],
    }


def supported_phase(settings: Line, round_seconds: float) -> tuple[Any, Any]:
    """Return the config and the phase of a row, which the device supports or, in a smoke run, interprets."""
    import jax

    from bert_jax.model import attention, kernels

    config, phase = abstract_phase(settings, settings["attention"])
    if round_seconds or settings["attention"] == "cudnn":
        platform = jax.devices()[0].platform
        attention.check(config, platform, 1)
        kernels.check(config, platform)
    return config, phase


def parity(settings: Line, round_seconds: float) -> Line:
    """Run steps twice from the same seed; return their losses, and whether the bits are the same."""
    import jax
    import numpy as np
    import ours

    config, phase = supported_phase(settings, round_seconds)
    sequences = phase.objective.masker.sequences
    batches, runs = random_batches(settings["tokens"], settings["rows"], sequences), []
    for _ in range(2):
        training = ours.Training(config, phase)
        seen = [training.step(each) for each in itertools.islice(itertools.cycle(batches), 50)]
        losses = [float(each.loss_and_grad_norm[0]) for each in seen]
        runs.append((losses, jax.tree.map(np.asarray, jax.device_get(training.state.params))))
    same = jax.tree.map(np.array_equal, *(params for _, params in runs))
    return {
        "losses": runs[0][0],
        "same_bits": runs[0][0] == runs[1][0] and all(jax.tree.leaves(same)),
    }


def step(settings: Line, round_seconds: float) -> Line:
    """Measure bert_jax's training step."""
    import jax
    import ours

    config, phase = supported_phase(settings, round_seconds)
    begun = time.perf_counter()
    training = ours.Training(config, phase)
    compile_seconds, memory = time.perf_counter() - begun, training.compiled.memory_analysis()
    sequences = phase.objective.masker.sequences
    batches = random_batches(settings["tokens"], settings["rows"], sequences)
    # Of the first step, with the same parameters, rows and masks for all implementations of attention.
    loss, gradient_norm = map(float, training.step(batches[0]).loss_and_grad_norm)
    endless = itertools.cycle(batches)
    seconds = timed(
        lambda: training.step(next(endless)), jax.block_until_ready, ROUNDS, round_seconds
    )
    kinds = {"temp": 1, "argument": 1, "output": 1, "alias": -1}
    return {
        **speed(seconds, batches, phase),
        "device": jax.devices()[0].device_kind,
        "layer_loop": config.model.layer_loop,
        "compile_seconds": compile_seconds,
        "loss": loss,
        "gradient_norm": gradient_norm,
        "memory_bytes": memory
        and sum(sign * getattr(memory, f"{kind}_size_in_bytes") for kind, sign in kinds.items()),
    }


def torch(settings: Line, round_seconds: float) -> Line:
    """Measure transformers' training step."""
    import types

    import peers
    import torch

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config, phase = abstract_phase(settings, "xla")
    config.model.vocab_size += -VOCABULARY % config.model.vocab_multiple
    training = peers.Training(config, False, settings["compiled"], device)

    def mask(ids, special):
        masked = (torch.rand(ids.shape) < PREDICTED) & ~special
        return torch.where(masked, MASK, ids), torch.where(masked, ids, -100)

    separator = types.SimpleNamespace(sep_token_id=SEPARATOR)
    collator = types.SimpleNamespace(torch_mask_tokens=mask, tokenizer=separator)
    batches = random_batches(settings["tokens"], settings["rows"], 1)
    inputs = (peers.inputs(batch, config.model.segments, collator) for batch in batches)
    on_device = [{name: x.to(device) for name, x in each.items()} for each in inputs]
    loss, endless = training.step(on_device[0]).item(), itertools.cycle(on_device)
    seconds = timed(
        lambda: training.step(next(endless)), lambda loss: loss.item(), ROUNDS, round_seconds
    )
    return {
        **speed(seconds, batches, phase),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "loss": loss,
        "memory_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
    }


MEASURES = {"ceilings": ceilings, "step": step, "parity": parity, "torch": torch}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plan", action="store_true", help="print the plan and its seconds")
    parser.add_argument("--out", default=os.environ.get("OUT"), help="folder (default $OUT)")
    parser.add_argument("--minutes", type=float, default=9.0, help="limit (default: %(default)s)")
    parser.add_argument("--commit", help="commit of this checkout, if git is not available")
    parser.add_argument(
        "--only", action="append", metavar="PATTERN", help="names of rows; may be repeated"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny models, on any device")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        work(options.job)
        return
    rows = plan(options.smoke, options.only)
    if options.plan:
        print(describe_plan(rows))
        return
    if not options.out:
        parser.error("--out: missing; name the folder for the results")
    sys.path.insert(0, str(ROOT))  # the checkout need not be installed
    from bert_jax.tools.sweep import module_of

    lines = measure_all(rows, pathlib.Path(options.out), options)
    print("\n".join(module_of(ROOT / "experiments/speed/sweep.py").gpu_section(lines)))


if __name__ == "__main__":
    main()
