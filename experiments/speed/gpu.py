"""Measure the training step on one GPU in nine minutes, for all attentions, against transformers.

    python experiments/speed/gpu.py --plan                             print the rows and their cost
    python experiments/speed/gpu.py --out DIR                          measure them; no network needed
    python experiments/speed/gpu.py --out DIR --after DIR2/gpu.jsonl   measure what is missing there
    python experiments/speed/gpu.py --out DIR --only 'torch*' --only '*dropout'    measure selected rows
    python experiments/speed/gpu.py --out DIR --smoke                  the plan on tiny models, any device
    cp DIR/gpu.jsonl experiments/speed/ && bert-jax report experiments/speed

It needs JAX, Flax, Optax and Orbax, PyTorch and transformers for the baseline, and a checkout of
bert_jax, installed or not. What a row measures, by its kind:

    ceilings   the speed of a large matrix product and of reading and writing memory
    step       the training step of `bert-jax pretrain` in bfloat16 with dropout 0.1 on hidden states, on
               packed rows of random tokens: nine of ten sequences fill a row, the rest are shorter
    torch      transformers' BertForPreTraining: SDPA, torch.compile, autocast to bfloat16, fused AdamW;
               the same sequences, one a row, masked before the clock starts
    parity     the distance of bfloat16 gradients from float32 gradients
    profile    where the time of a step goes (`bert_jax.tools.profile`)

Each process measures the rows of one (size, T) and reuses the data; a crash costs the row it happened
in. Each result is appended to DIR/gpu.jsonl immediately. A row that does not fit into the remaining
time is recorded as not run. Speeds count real tokens, without padding.
"""

import argparse
import collections
import fnmatch
import functools
import gzip
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
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = "gpu.jsonl"
# Keys that identify a row.
KEYS = ("kind", "size", "tokens", "rows", "attention", "attention_dropout", "deterministic")
VOCABULARY, PREDICTED = 30_522, 0.15
# At most this many sequences share a row.
SEQUENCES = {128: 4, 512: 16}
# Seconds on an H100: to start a process, to measure a compiled step, and after the deadline until the
# process of the last row is killed.
START, MEASURE, GRACE = 14, 6, 20
COMPILE = {"base": 25, "large": 50}
COLD = 16  # additional seconds of the first compilation on a fresh machine
ROUNDS, ROUND_SECONDS, WARM_STEPS = 3, 1.5, 3


class Job(NamedTuple):
    """Rows measured by one process.

    Attributes:
        environment: environment variables of the process.
        rows: (estimated seconds, row), the most important first.
    """

    environment: dict[str, str]
    rows: list[tuple[int, dict]]


def plan(smoke: bool = False) -> list[Job]:
    """Return what to measure, the most important first; with `smoke`, the same for a tiny model."""
    paper = {"attention": "xla", "attention_dropout": 0.1}
    xla, cudnn = ({"attention": name, "attention_dropout": 0.0} for name in ("xla", "cudnn"))
    kernel = xla if smoke else cudnn  # so that a CPU runs most rows; it refuses cudnn
    deterministic = {"deterministic": True}

    def row(kind, seconds, size, tokens, rows, *parts):
        settings = {"size": size, "tokens": tokens, "rows": rows, "deterministic": False}
        settings |= {key: value for part in parts for key, value in part.items()}
        if smoke:
            settings |= {"size": "L1-H32-A2", "tokens": 32, "rows": 4}
        return seconds, {"kind": kind, **settings}

    def step(size, tokens, rows, *parts, more=0):
        return row("step", COMPILE[size] + MEASURE + more, size, tokens, rows, *parts)

    base, small = ("base", 128, 256), ("L2-H256-A4", 128, 128)
    torch = {"attention": "sdpa", "attention_dropout": 0.1, "compiled": not smoke}
    # bert_jax runs in the process of transformers too, and must not take the GPU's memory.
    torch_environment = {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_deterministic_ops=".strip()
    default, fixed = ({"XLA_FLAGS": f"{flags}{value}"} for value in ("false", "true"))
    jobs = [
        Job(default, [
            (8, {"kind": "ceilings"}),
            step(*base, paper, more=COLD),
            step(*base, cudnn),
            row("profile", 10, *base, kernel),
            step("base", 128, 1024, kernel, more=14),
            step(*base, xla),
        ]),
        Job(torch_environment, [row("torch", 68, *base, torch)]),
        Job(fixed, [
            step(*base, paper, deterministic),
            step(*base, xla, deterministic),
            # JAX 0.11.2 fails to compile this, within seconds.
            row("step", 15, *base, cudnn, deterministic),
        ]),
        Job(default, [step("large", 512, 64, kernel, more=4)]),
        Job(default, [
            step("base", 512, 64, kernel),
            row("parity", 20, *small, xla),
            row("parity", 8, *small, cudnn),
            row("parity", 12, *small, paper),
        ]),
    ]  # fmt: skip
    if smoke:  # all sizes are the same now: a process for each environment, and a row only once
        rows = [(job.environment, *pair) for job in jobs for pair in job.rows]
        jobs = [
            Job(each, list({key_of(row): (s, row) for x, s, row in rows if x == each}.values()))
            for each in (default, torch_environment, fixed)
        ]
    return jobs


def selected(jobs: list[Job], patterns: list[str]) -> list[Job]:
    """Return the jobs with only those rows whose names match one of the patterns, if there are any."""
    if not patterns:
        return jobs
    chosen = [
        job._replace(
            rows=[
                (seconds, row)
                for seconds, row in job.rows
                if any(fnmatch.fnmatch(name_of(row), pattern) for pattern in patterns)
            ]
        )
        for job in jobs
    ]
    return [job for job in chosen if job.rows]


def describe_plan(jobs: list[Job]) -> str:
    """Return the plan as text, with the seconds of each row and their running total."""
    lines, total = [], 0
    for job in jobs:
        total += START
        lines.append(f"{START:5} s{total:6} s  start a process")
        for seconds, row in job.rows:
            total += seconds
            lines.append(f"{seconds:5} s{total:6} s    {name_of(row)}")
    return "\n".join(lines)


def key_of(row: dict) -> tuple:
    """Return the key of a row, or of a line of the results."""
    return tuple(row.get(key) for key in KEYS)


def name_of(row: dict) -> str:
    """Return a readable name of a row."""
    words = [row["kind"]]
    if "size" in row:
        words.append(f"{row['size']} T={row['tokens']}, {row['rows']:,} rows, {row['attention']}")
        words.append("with attention dropout" * bool(row["attention_dropout"]))
        words.append("deterministic" * row["deterministic"])
    return " ".join(filter(None, words))


# --- The process that starts the others -----------------------------------------------------------


def read(path: pathlib.Path) -> list[dict]:
    """Return the lines of a results file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def measure_all(out, minutes, smoke=False, earlier=(), commit=None, only=()) -> list[dict]:
    """Measure the rows of the plan that have no result in `earlier`, and write all to out/gpu.jsonl.

    Args:
        out: folder for the results; created if it does not exist.
        minutes: time limit; rows that are not expected to finish within it are not started.
        smoke: measure tiny models.
        earlier: lines of an earlier call; those that were not run are measured now.
        commit: commit of the checkout; None to get it from git.
        only: patterns of the names of rows to measure; none for all.

    Returns:
        The lines of gpu.jsonl.
    """
    import bench

    deadline = time.time() + 60 * minutes
    out.mkdir(parents=True, exist_ok=True)
    results = [line for line in earlier if line.get("status") != "not run"]
    path, done = out / RESULTS, set(map(key_of, results))
    path.write_text("".join(json.dumps(line) + "\n" for line in results))
    about = {**bench.machine(), **({"commit": commit} if commit else {})}

    def keep(line):
        program = "transformers + torch.compile" if line["kind"] == "torch" else "as committed"
        results.append({**line, "program": program, **about})
        with path.open("a") as file:
            file.write(json.dumps(results[-1]) + "\n")
            file.flush()
            os.fsync(file.fileno())
        outcome = line.get("why") or line.get("real_tokens_per_second") or "done"
        print(f"{deadline - time.time():4.0f} s left. {name_of(line)}: {outcome}", flush=True)

    with tempfile.TemporaryDirectory() as cache:
        for job in selected(plan(smoke), only):
            rows = [(seconds, row) for seconds, row in job.rows if key_of(row) not in done]
            while rows:
                unfinished = run(job._replace(rows=rows), out, deadline, smoke, cache, keep)
                # The process ended in the first remaining row: start another one for the others.
                if unfinished:
                    keep(unfinished)
                measured = set(map(key_of, results))
                rows = [(seconds, row) for seconds, row in rows if key_of(row) not in measured]
    return results


def run(job, out, deadline, smoke, cache, keep) -> dict | None:
    """Measure the rows of a job in a process, and pass each line to `keep` as soon as it is read.

    Returns:
        A line for the row in which the process ended; None if it measured all rows.
    """
    rows = [row for _, row in job.rows]
    left = deadline - time.time()
    if left < START + min(seconds for seconds, _ in job.rows):
        for row in rows[1:]:
            keep({**row, "status": "not run", "why": "no time left"})
        return {**rows[0], "status": "not run", "why": "no time left"}
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
        "XLA_CLIENT_MEM_FRACTION": "0.92",
        "JAX_COMPILATION_CACHE_DIR": cache,
        **job.environment,
    }
    task = {"rows": job.rows, "deadline": deadline, "round_seconds": 0 if smoke else ROUND_SECONDS}
    # Twice the estimate, so that a row that hangs does not take the time of all others.
    limit = min(2 * (START + sum(seconds for seconds, _ in job.rows)), left + GRACE)
    killed = threading.Event()
    with open(out / "gpu.log", "a") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, "--out", str(out), "--job", json.dumps(task)],
            stdout=subprocess.PIPE, stderr=log, text=True, env=environment, start_new_session=True,
        )  # fmt: skip

        def kill():
            killed.set()
            os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(limit, kill)
        timer.start()
        try:
            for text in process.stdout:
                if text.startswith('{"kind"'):
                    keep(json.loads(text))
                    rows = rows[1:]
            status = process.wait()
        finally:
            timer.cancel()
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if not rows:
        return None
    if killed.is_set() and time.time() >= deadline:
        return {**rows[0], "status": "not run", "why": "stopped at the deadline"}
    why = f"stopped after {limit:.0f} s" if killed.is_set() else f"the process ended with {status}"
    return {**rows[0], "status": "failed", "why": f"{why}; see gpu.log"}


# --- The process that measures --------------------------------------------------------------------


def work(task: dict, out: pathlib.Path) -> None:
    """Measure rows, and print a line of JSON for each."""
    global ROUND_SECONDS
    ROUND_SECONDS = task["round_seconds"]
    for seconds, row in task["rows"]:
        if time.time() + seconds > task["deadline"]:
            result = {"status": "not run", "why": "no time left"}
        else:
            try:
                result = MEASURES[row["kind"]](row, out)
            except Exception as error:  # the other rows are still worth measuring
                traceback.print_exc()
                why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                result = {"status": "failed", "why": why[:300]}
        print(json.dumps({**row, **result}), flush=True)


def ceilings(row, out):
    import jax
    import jax.numpy as jnp

    from bert_jax.runtime import chips

    # Random values: products of zeros take less power and run at a higher clock.
    size, words = 8192, jnp.ones((1 << 26,), jnp.float32)
    x = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    multiply, increment = jax.jit(jnp.matmul), jax.jit(lambda x: x + 1)

    def seconds(run):
        jax.block_until_ready(run())
        rounds = []
        for _ in range(7):
            start = time.perf_counter()
            jax.block_until_ready([run() for _ in range(16)])
            rounds.append((time.perf_counter() - start) / 16)
        return min(rounds)

    chip = jax.devices()[0].device_kind
    sheet = chips.find(chip)
    return {
        "device": chip,
        "operations_per_second": 2 * size**3 / seconds(lambda: multiply(x, x)),
        "bytes_per_second": 2 * words.nbytes / seconds(lambda: increment(words)),
        "sheet_operations_per_second": sheet and sheet.flops,
        "sheet_bytes_per_second": sheet and sheet.memory_bandwidth,
    }


def phase_at_step(row, dtype="bfloat16"):
    """Return the config and the phase of a row; no files of rows are needed."""
    from bert_jax.config.schema import Config, PhaseConfig
    from bert_jax.config.sizes import model_size
    from bert_jax.objectives import pretraining

    model = model_size(row["size"])
    model.dtype, model.vocab_size, model.vocab_multiple = dtype, VOCABULARY, 128
    model.attention, model.attention_dropout = row["attention"], row["attention_dropout"]
    config = Config(
        model=model,
        phases=(PhaseConfig(tokens=row["tokens"]),),
        batch_size=row["rows"],
        deterministic=row["deterministic"],
    )
    sequences = SEQUENCES.get(row["tokens"], 3)
    config, (phase,) = pretraining.abstract_phases(config, sequences)
    return config, phase


def sequences_of(tokens, count):
    """Yield random pairs of sentences with the lengths of BERT's (`create_pretraining_data.py`)."""
    import numpy as np

    from bert_jax.data.rows import Example

    rng = np.random.default_rng(0)
    for _ in range(count):
        length = tokens if rng.random() < 0.9 else int(rng.integers(5, tokens + 1))
        ids = rng.integers(5, VOCABULARY, length).astype(np.uint16)
        yield Example(ids, int(rng.integers(3, length - 1)), int(rng.integers(2)))


@functools.cache
def packed_batches(tokens, rows, sequences, count=4):
    """Return `count` batches of packed rows, shuffled so that all batches are alike."""
    import numpy as np

    from bert_jax.data.rows import RowFormat

    row_format = RowFormat(tokens, sequences, VOCABULARY)
    packed = row_format.pack(sequences_of(tokens, 2 * count * rows))
    packed = packed[np.random.default_rng(1).permutation(len(packed))[: count * rows]]
    batches = (packed[i : i + rows] for i in range(0, count * rows, rows))
    return [row_format.decode(row_format.encode(batch)) for batch in batches]


def random_params(shapes):
    """Return parameters with the distribution of BERT's initial values.

    Compiling the jitted `init` takes most of a minute on a GPU; NumPy takes a second.
    """
    import jax
    import numpy as np

    rng = np.random.default_rng(0)

    def make(path, shape):
        name = path[-1].key
        if name in ("scale", "bias"):
            return np.full(shape.shape, name == "scale", shape.dtype)
        return 0.02 * rng.standard_normal(shape.shape, shape.dtype)

    return jax.tree_util.tree_map_with_path(make, shapes)


class Trainer:
    """A compiled training step of a row, its state and data."""

    def __init__(self, row):
        import jax
        import numpy as np

        from bert_jax.model import attention
        from bert_jax.runtime import sharding
        from bert_jax.training import guard
        from bert_jax.training.state import initial_state
        from bert_jax.training.step import compile_step

        self.config, self.phase = phase_at_step(row)
        self.mesh = sharding.make_mesh(self.config.mesh, jax.devices()[:1])
        attention.check(self.config, jax.devices()[0].platform, 1)
        _, shapes = initial_state(self.config, self.phase, self.mesh)
        begun = time.perf_counter()
        self.compiled = compile_step(self.config, self.phase, self.mesh, shapes)
        self.compile_seconds = time.perf_counter() - begun
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
        state = zeros._replace(params=random_params(shapes.params), recent=guard.init_history())
        self.state = jax.device_put(state, jax.tree.map(lambda x: x.sharding, shapes))
        masker = self.phase.objective.masker
        self.data = packed_batches(row["tokens"], row["rows"], masker.sequences)
        self._steps = 0

    def __call__(self):
        """Start a training step, and return its sums, which are ready when it is done."""
        from bert_jax.runtime.sharding import shard_batch

        batch = shard_batch(self.data[self._steps % len(self.data)], self.mesh)
        self._steps += 1
        self.state, sums, self.seen = self.compiled(self.state, batch)
        return sums


@functools.lru_cache(maxsize=1)
def _trainer(values):
    return Trainer(dict(zip(KEYS[1:], values, strict=True)))


def trainer_of(row):
    """Return the `Trainer` of a row, reused if only the kind differs."""
    return _trainer(key_of(row)[1:])


def timed(step, wait):
    """Return the seconds per step of each round."""
    for _ in range(WARM_STEPS):
        last = step()
    wait(last)
    begun = time.perf_counter()
    wait(step())
    steps = max(int(ROUND_SECONDS / (time.perf_counter() - begun)), 3)
    seconds = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        for _ in range(steps):
            last = step()
        wait(last)
        seconds.append((time.perf_counter() - begun) / steps)
    return seconds


def speed(row, step, wait, data, phase):
    """Time a step, and return the fields common to both kinds of training step."""
    seconds = timed(step, wait)
    real = sum(int(batch["length"].sum()) for batch in data)
    fraction = real / sum(batch["tokens"].size for batch in data)
    rate = row["rows"] * row["tokens"] * fraction / statistics.median(seconds)
    return {
        "seconds": seconds,
        "real_fraction": fraction,
        "real_tokens_per_second": rate,
        # As bert_jax counts them, whatever the baseline computes.
        "operations_per_token": phase.objective.flops_per_row / row["tokens"],
    }


def step(row, out):
    import jax

    trainer = trainer_of(row)
    memory = trainer.compiled.memory_analysis()
    kinds = {"temp": 1, "argument": 1, "output": 1, "alias": -1}
    return {
        **speed(row, trainer, jax.block_until_ready, trainer.data, trainer.phase),
        "device": jax.devices()[0].device_kind,
        "layer_loop": trainer.config.model.layer_loop,
        "compile_seconds": trainer.compile_seconds,
        "loss": float(trainer.seen.loss_and_grad_norm[0]),
        "memory_bytes": memory
        and sum(sign * getattr(memory, f"{kind}_size_in_bytes") for kind, sign in kinds.items()),
    }


def profile(row, out):
    import jax

    from bert_jax.tools import profile
    from bert_jax.training import tracing

    trainer, steps = trainer_of(row), 5
    for _ in range(WARM_STEPS):
        sums = trainer()
    jax.block_until_ready((sums, trainer.state))
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary) / "profile"
        arguments = (trainer.compiled, steps, "bfloat16", lambda _: None, profile.summarize)
        with tracing.record(folder, *arguments):
            for _ in range(steps):
                sums = trainer()
            jax.block_until_ready((sums, trainer.state))
        (trace,) = folder.rglob("*.xplane.pb")
        (out / "profile.xplane.pb.gz").write_bytes(gzip.compress(trace.read_bytes()))
        return {"table": json.loads((folder / "table.json").read_text())}


@functools.cache
def gradients(dtype, *values):
    """Return the loss and the gradients by part of the model, computed in `dtype`."""
    import jax
    import jax.numpy as jnp

    from bert_jax.model import attention
    from bert_jax.model.dropout import generator_key

    row = dict(zip(KEYS[1:], values, strict=True))
    config, phase = phase_at_step(row, dtype)
    attention.check(config, jax.devices()[0].platform, 1)
    objective = phase.objective
    params = random_params(jax.eval_shape(objective.init, jax.random.key(0)))
    batch = packed_batches(row["tokens"], row["rows"], objective.masker.sequences)[0]
    inputs = jax.jit(objective.prepare)(batch, jax.random.key(2))

    @jax.jit
    @jax.value_and_grad
    def run(params):
        terms = objective.loss_terms(params, inputs, generator_key(jax.random.key(1), "hash"))
        return sum(
            terms[name][0] / weight for name, weight in objective.normalizers(inputs).items()
        )

    with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
        loss, grads = run(params)
    parts = {name: jnp.concatenate([x.ravel() for x in jax.tree.leaves(part)]) for name, part in grads.items()}  # fmt: skip
    return float(loss), parts


def parity(row, out):
    import jax.numpy as jnp

    exact_loss, exact = gradients("float32", *key_of({**row, "attention": "xla"})[1:])
    loss, grads = gradients("bfloat16", *key_of(row)[1:])
    norm = jnp.linalg.norm
    worst = max(float(norm(grads[name] - exact[name]) / norm(exact[name])) for name in exact)
    return {"loss_difference": abs(loss - exact_loss) / exact_loss, "gradient_difference": worst}


def torch(row, out):
    import dataclasses
    import types

    import peers
    import torch

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    config, phase = phase_at_step({**row, "attention": "xla"})
    padded = -(-VOCABULARY // config.model.vocab_multiple) * config.model.vocab_multiple
    model = dataclasses.replace(config.model, vocab_size=padded)
    network = peers.build(model, model.positions).to(device).train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, weight_decay=0.01, fused=on_gpu)
    forward = torch.compile(network, dynamic=False) if row["compiled"] else network

    def mask(ids, special):
        masked = (torch.rand(ids.shape) < PREDICTED) & ~special
        return torch.where(masked, 4, ids), torch.where(masked, ids, -100)

    collator = types.SimpleNamespace(
        torch_mask_tokens=mask, tokenizer=types.SimpleNamespace(sep_token_id=3)
    )
    data = packed_batches(row["tokens"], row["rows"], 1)
    names = [*peers._ENCODER, "labels", "next_sentence_label"]
    queue = collections.deque()
    for batch in data:
        inputs = peers.inputs(batch, config.model.segments, collator)
        queue.append(
            {name: inputs[name].pin_memory() if on_gpu else inputs[name] for name in names}
        )

    def step():
        queue.rotate()
        inputs = {name: x.to(device, non_blocking=True) for name, x in queue[0].items()}
        with torch.autocast(device, torch.bfloat16):
            loss = peers.full_loss(forward, inputs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return {
        **speed(row, step, lambda loss: loss.item(), data, phase),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "loss": step().item(),
        "memory_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
    }


MEASURES = {"ceilings": ceilings, "step": step, "torch": torch, "parity": parity, "profile": profile}  # fmt: skip


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plan", action="store_true", help="print the plan and its seconds")
    parser.add_argument("--out", type=pathlib.Path, help="folder for the results (default $OUT)")
    parser.add_argument(
        "--minutes",
        type=float,
        default=9.0,
        help="time limit; rows that would end later are not started",
    )
    parser.add_argument(
        "--after", type=pathlib.Path, metavar="FILE", help="gpu.jsonl of an earlier call"
    )
    parser.add_argument("--commit", help="commit of this checkout, if git is not available")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATTERN",
        help="measure rows whose names, as --plan prints them, match; may be repeated",
    )
    parser.add_argument("--smoke", action="store_true", help="tiny models, on any device")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plan:
        print(describe_plan(selected(plan(), options.only)))
        return
    out = options.out or (os.environ.get("OUT") and pathlib.Path(os.environ["OUT"]))
    if not out:
        parser.error("--out: missing; name the folder for the results")
    if options.job:
        work(options.job, out)
        return
    if options.after and not options.after.exists():
        parser.error(f"--after: {options.after} does not exist")
    earlier = read(options.after) if options.after else []
    sys.path.insert(0, str(ROOT))  # the checkout need not be installed
    from bert_jax.tools.sweep import module_of

    lines = measure_all(out, options.minutes, options.smoke, earlier, options.commit, options.only)
    print("\n".join(module_of(ROOT / "experiments/speed/sweep.py").gpu_section(lines)))


if __name__ == "__main__":
    main()
