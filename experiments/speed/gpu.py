"""How fast a training step is on one GPU, with each attention and beside transformers, in one call.

    python experiments/speed/gpu.py --out DIR [--minutes 9]   on a machine with a GPU, without a network
    python experiments/speed/gpu.py --out NEW --after DIR/gpu.jsonl    what time was too short for
    python experiments/speed/gpu.py --out DIR --smoke         tiny sizes, on whatever device there is
    python experiments/speed/gpu.py --table DIR/gpu.jsonl     the tables, from what was measured

Needs JAX, Flax, Optax and Orbax, and for the comparison PyTorch and transformers, as they are there;
bert_jax need not be installed. In the order of `plan`, as far as time goes, it measures

    ceilings   what a large matrix product, and reading and writing an array, reach
    parity     how far bfloat16 is from float32: gradients with each attention, losses of some steps.
               An attention that is unsound, too far away or refused, reaches no target
    step       the training step of `bert-jax pretrain`, dropout 0.1 on hidden states, and on attention
               where the table says so (the paper's; only `xla` has it), on packed rows of random tokens:
               nine tenths of the sequences fill a row, the others are shorter, as
               BERT's are. Rows a step grow until memory ends or the speed no longer does. Layers are
               scanned, which compiles sooner; then unrolled, with the best number of rows
    torch      transformers' BertForPreTraining with SDPA, torch.compile, autocast to bfloat16 and fused
               AdamW, its vocabulary filled up to a multiple of 128 as ours is; the same sequences, one
               a row, masked before the clock starts
    profile    where the time of a step goes (`bert_jax.profile`), without CUDA graphs, whose kernels
               a trace does not tell apart

A measurement is a process of its own and a line of DIR/gpu.jsonl the moment it is there, so that
neither a time limit nor a crash loses another; what was left out for want of time is a line too.
Speeds are in real tokens: padding counts as nothing done.
"""

import argparse
import collections
import functools
import gzip
import importlib.metadata
import json
import os
import pathlib
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = "gpu.jsonl"
VOCABULARY, PREDICTED = 30_522, 0.15
# Sequences a row: as many short ones find room.
SEQUENCES = {128: 4, 512: 16}
BATCHES = {
    ("base", 128): [256, 512, 1024],
    ("base", 512): [64, 128, 256],
    ("large", 128): [128, 256, 512],
    ("large", 512): [32, 64, 128],
}
# By name: `config.model.attention`, and dropout of what it attends with.
ATTENTIONS = {
    "cudnn": ("cudnn", 0.0),
    "xla, with dropout": ("xla", 0.1),
    "xla": ("xla", 0.0),
    "pallas": ("pallas", 0.0),
}
# Of the data sheet's peak, what is wanted.
TARGETS = {("base", 128): 0.45, ("large", 512): 0.50}
# So much faster a larger batch must be for a still larger one to be tried.
GAIN = 1.02
# Less time than this is not enough for anything.
LEAST_SECONDS = 20
# Gradients of some layers in bfloat16, with 8 bits of mantissa, are a few hundredths from float32's; a
# kernel that computes something else is farther away, and farther than XLA's own attention.
WRONG, WRONG_TIMES = 0.1, 2
ROUNDS, WARM_STEPS = 3, 3


def plan(smoke):
    """What to measure, the most important first: (seconds at most, job)."""
    if smoke:
        one = {"size": "L1-H32-A2", "tokens": 32, "batches": [2]}
        torch = {"kind": "torch", **one, "attention_dropout": 0.1, "compile": False}
        steps = [
            {"kind": "step", **one, "attention": name} for name in ("xla, with dropout", "cudnn")
        ]
        jobs = [
            {"kind": "ceilings"},
            {"kind": "parity", **one, "attentions": ["xla", "cudnn"]},
            *steps,
            torch,
            {"kind": "profile", "of": one["size"], "tokens": 32},
            {"kind": "step", **one, "attention": "xla, with dropout", "batches": "best", "loop": "unrolled"},
        ]  # fmt: skip
        return [(900, {"smoke": True, **job}) for job in jobs]

    def step(size, tokens, attention, loop="scanned"):
        batches = BATCHES[size, tokens] if loop == "scanned" else "best"
        return {"kind": "step", "size": size, "tokens": tokens, "attention": attention, "batches": batches, "loop": loop}  # fmt: skip

    def torch(size, tokens, rate):
        batches = BATCHES[size, tokens]
        return {"kind": "torch", "size": size, "tokens": tokens, "batches": batches, "attention_dropout": rate, "compile": True}  # fmt: skip

    some = {"size": "L4-H768-A12", "tokens": 128, "batches": [64]}
    return [
        (90, {"kind": "ceilings"}),  # of a machine that has just been started
        (110, step("base", 128, "cudnn")),
        (110, step("large", 512, "cudnn")),
        (90, step("base", 128, "xla, with dropout")),
        (120, {"kind": "parity", **some, "attentions": list(ATTENTIONS)}),
        (120, torch("base", 128, 0.1)),
        (120, torch("base", 128, 0.0)),
        (120, {"kind": "profile", "of": "base", "tokens": 128}),
        (90, step("base", 128, "cudnn", "unrolled")),
        (90, step("large", 512, "xla, with dropout")),
        (90, step("base", 512, "cudnn")),
        (90, step("large", 128, "cudnn")),
        (90, step("base", 128, "xla")),
        (90, step("base", 128, "pallas")),
        (120, step("large", 512, "cudnn", "unrolled")),
        (90, step("large", 512, "pallas")),
        (90, step("large", 512, "xla")),
        (120, torch("large", 512, 0.1)),
        *[
            (90, step(size, tokens, attention))
            for size, tokens in (("base", 512), ("large", 128))
            for attention in ("xla, with dropout", "xla", "pallas")
        ],
        (120, torch("base", 512, 0.1)),
        (120, torch("large", 128, 0.1)),
    ]


def name_of(job):
    """What a job is called, in its lines and on the page."""
    told = ("kind", "size", "of", "tokens", "attention", "attention_dropout", "loop")
    return " ".join(str(job[key]) for key in told if key in job)


# --- All of it ------------------------------------------------------------------------------------


def measure_all(out, minutes, smoke, earlier=()):
    """Runs the jobs one after the other while there is time; those that are done earlier are not."""
    out.mkdir(parents=True, exist_ok=True)
    path, end = out / RESULTS, time.monotonic() + 60 * minutes
    results = [line for line in earlier if line["kind"] != "left out"]
    path.write_text("".join(json.dumps(line) + "\n" for line in results))
    undone = {line["name"] for line in earlier if line["kind"] == "left out"}
    done = {line["name"] for line in earlier} - undone

    def keep(name, line):
        line = {**line, "name": name}
        results.append(line)
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        print(json.dumps(line)[:300], flush=True)

    # What several jobs compile is compiled once.
    with tempfile.TemporaryDirectory() as cache:
        for most, job in plan(smoke):
            begun, name = time.monotonic(), name_of(job)
            if name in done:
                continue
            if end - begun < LEAST_SECONDS:
                why = "the time was over"
            else:
                seconds = min(most, end - begun)
                tell_it = functools.partial(keep, name)
                why = fill_in(job, results) or run(job, out, seconds, cache, tell_it)
            if why:
                keep(name, {"kind": "left out", "why": why})
            print(f"{name}: {time.monotonic() - begun:.0f} s", flush=True)


def unsound(results):
    """Attentions that were seen to compute something else, or nothing."""
    seen = [line for line in results if line["kind"] == "parity"]
    found = {line["attention"]: line.get("gradient_difference", float("inf")) for line in seen}
    limits = {
        name: WRONG_TIMES * found.get("xla, with dropout" if ATTENTIONS[name][1] else "xla", WRONG)
        for name in found
    }
    return {name for name, far in found.items() if far > min(WRONG, limits[name])}


def best(results, size, tokens, attention=None):
    """The fastest step of a model, with one attention or any that is sound; None if there is none."""
    own = [
        line
        for line in results
        if line["kind"] == "step"
        and (line["size"], line["tokens"]) == (size, tokens)
        and attention in (None, line["attention"])
        and line["attention"] not in unsound(results)
    ]
    return max(own, key=lambda line: line["real_tokens_per_second"], default=None)


def fill_in(job, results):
    """What a job takes from earlier ones; why it cannot be, if it cannot."""
    if job["kind"] == "profile":
        found = best(results, job["of"], job["tokens"])
    elif job.get("batches") == "best":
        found = best(results, job["size"], job["tokens"], job["attention"])
    else:
        return None
    if found is None:
        return "nothing was measured that it could go on from"
    job["batches"] = [found["batch"]]
    if job["kind"] == "profile":
        job.update(size=found["size"], attention=found["attention"], loop=found["loop"])
    return None


def run(job, out, seconds, cache, keep):
    """A job in a process of its own, whose lines are kept as they come; why it broke off, if it did."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        "PYTHONUNBUFFERED": "1",
        "XLA_CLIENT_MEM_FRACTION": "0.92",
        "JAX_COMPILATION_CACHE_DIR": cache,
        "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    if job["kind"] == "torch":
        environment["JAX_PLATFORMS"] = "cpu"  # bert_jax is imported, and must take no memory
    if job["kind"] == "profile" and not job.get("smoke"):
        flags = environment.get("XLA_FLAGS", "")
        environment["XLA_FLAGS"] = f"{flags} --xla_gpu_enable_command_buffer=".strip()
    late = threading.Event()
    with open(out / "gpu.log", "a") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, "--out", str(out), "--job", json.dumps(job)],
            stdout=subprocess.PIPE, stderr=log, text=True, env=environment, start_new_session=True,
        )  # fmt: skip

        def stop():
            late.set()
            os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(seconds, stop)
        timer.start()
        try:
            for text in process.stdout:
                if text.startswith("{"):
                    keep(json.loads(text))
            status = process.wait()
        finally:
            timer.cancel()
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if late.is_set():
        return f"broken off after {seconds:.0f} s"
    return f"it ended with status {status}: see gpu.log" if status else None


def tell(kind, **facts):
    """A line of the results."""
    print(json.dumps({"kind": kind, **facts}), flush=True)


# --- Jobs: each imports what it needs --------------------------------------------------------------


def ceilings(job):
    import jax

    from bert_jax import device, profile

    jax_device = jax.local_devices()[0]
    most, sheet = profile.ceilings("bfloat16"), device.chip(jax_device.device_kind)
    packages = (
        "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "torch", "transformers",
    )  # fmt: skip
    versions = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    tell(
        "ceilings",
        smoke=job.get("smoke", False),
        device=jax_device.device_kind,
        operations_per_second=most.operations,
        bytes_per_second=most.bytes,
        sheet_operations_per_second=sheet and sheet.flops,
        sheet_bytes_per_second=sheet and sheet.memory_bandwidth,
        python=platform.python_version(),
        **versions,
    )


def model_of(job, dtype="bfloat16"):
    from bert_jax.config import model_size

    model = model_size(job["size"])
    model.dtype, model.layer_loop = dtype, job.get("loop", "scanned")
    model.vocab_size, model.vocab_multiple = 300 if job.get("smoke") else VOCABULARY, 128
    return model


def stage_of(job, model, batch):
    """A config and its stage, as if there were rows."""
    from bert_jax.config import Config, OptimConfig, Phase
    from bert_jax.tasks import pretraining

    sequences = SEQUENCES.get(job["tokens"], 3)
    # Without warm-up, for twenty steps of it change next to nothing: parity would compare no updates.
    optim = OptimConfig(warmup_steps=0)
    phases = (Phase(tokens=job["tokens"]),)
    config = Config(model=model, phases=phases, batch_size=batch, optim=optim)
    config, (stage,) = pretraining.stages_without_rows(config, sequences)
    return config, stage


def sequences_of(tokens, vocabulary, count):
    """Random pairs of sentences, of BERT's lengths (`create_pretraining_data.py`)."""
    import numpy as np

    from bert_jax.data.rows import Example

    rng = np.random.default_rng(0)
    for _ in range(count):
        length = tokens if rng.random() < 0.9 else int(rng.integers(5, tokens + 1))
        ids = rng.integers(5, vocabulary, length).astype(np.uint16)
        yield Example(ids, int(rng.integers(3, length - 1)), int(rng.integers(2)))


def packed_batches(stage, sequences, vocabulary, count):
    """So many batches of packed rows, each from all of the packing's beginning and end."""
    import numpy as np

    from bert_jax.data.rows import RowFormat

    form = RowFormat(stage.tokens, sequences, vocabulary)
    wanted = count * stage.batch_size
    rows = form.pack(sequences_of(stage.tokens, vocabulary, 2 * wanted))
    rows = rows[np.random.default_rng(1).permutation(len(rows))[:wanted]]
    batches = [rows[i : i + stage.batch_size] for i in range(0, wanted, stage.batch_size)]
    return [form.decode(form.encode(batch)) for batch in batches]


class Trainer:
    """The training step of a job with a batch size, compiled, and data for it."""

    def __init__(self, job, model, batch):
        import jax
        import jax.numpy as jnp

        from bert_jax import attention, sharding
        from bert_jax.train import compile_step, initial_state

        self.config, self.stage = stage_of(job, model, batch)
        self.mesh = sharding.make_mesh(self.config.mesh, jax.devices()[:1])
        attention.check(model, jax.devices()[0].platform, 1)
        init, shapes = initial_state(self.config, self.stage, self.mesh)
        begun = time.perf_counter()
        self.compiled = compile_step(self.config, self.stage, self.mesh, shapes)
        self.compile_seconds = time.perf_counter() - begun
        self.state = init(jnp.uint32(0))
        sequences = self.stage.task.masker.sequences
        self.data = packed_batches(self.stage, sequences, model.vocab_size, 4)
        self._next = 0

    def __call__(self):
        """A step; its sums, which are there when it is done."""
        from bert_jax.evaluate import put

        batch = self.data[self._next % len(self.data)]
        self._next += 1
        self.state, sums, self.seen = self.compiled(self.state, put(batch, self.mesh))
        return sums

    @property
    def real_fraction(self):
        real = sum(int(batch["length"].sum()) for batch in self.data)
        return real / sum(batch["tokens"].size for batch in self.data)


def timed(step, wait, smoke):
    """Seconds a step, of each of some rounds, after a warm-up."""
    for _ in range(WARM_STEPS):
        last = step()
    wait(last)
    begun = time.perf_counter()
    wait(step())
    steps = 1 if smoke else max(int(1.5 / (time.perf_counter() - begun)), 3)
    found = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        for _ in range(steps):
            last = step()
        wait(last)
        found.append((time.perf_counter() - begun) / steps)
    return found


def searched(job, measure, out_of_memory):
    """Measures with more rows a step as long as that makes it faster."""
    fastest = 0.0
    for batch in job["batches"]:
        try:
            line = measure(batch)
        except Exception as error:
            if not out_of_memory(error):
                raise
            tell("does not fit", batch=batch, why=str(error).split("\n")[0][:300])
            return
        seconds = line["seconds"]
        rate = batch * job["tokens"] * line["real_fraction"] / statistics.median(seconds)
        told = {key: job.get(key) for key in ("size", "tokens", "attention", "loop")}
        tell(**told, **line, batch=batch, real_tokens_per_second=rate)
        if rate < GAIN * fastest:
            return
        fastest = max(fastest, rate)


def step(job):
    import jax

    job.setdefault("loop", "scanned")
    model = model_of(job)
    model.attention, model.attention_dropout = ATTENTIONS[job["attention"]]

    def measure(batch):
        trainer = Trainer(job, model, batch)
        seconds = timed(trainer, jax.block_until_ready, job.get("smoke"))
        memory = jax.devices()[0].memory_stats() or {}
        return {
            "kind": "step",
            "seconds": seconds,
            "real_fraction": trainer.real_fraction,
            "operations_per_token": trainer.stage.task.flops_per_row / job["tokens"],
            "compile_seconds": trainer.compile_seconds,
            "loss": float(trainer.seen.figures[0]),
            "memory_bytes": memory.get("peak_bytes_in_use"),
        }

    searched(job, measure, lambda error: "RESOURCE_EXHAUSTED" in str(error))


def parity(job):
    """Gradients in bfloat16 with each attention, and the losses of 20 steps, beside float32's."""
    import jax
    import jax.numpy as jnp

    from bert_jax.attention import check
    from bert_jax.dropout import generator_key

    (batch,) = job["batches"][:1]
    key = generator_key(jax.random.key(1), "hash")
    # Of float32 both, whatever is computed in: the same for all.
    model = model_of(job)
    _, stage = stage_of(job, model, batch)
    start = jax.jit(stage.task.init)(jax.random.key(0))
    (data,) = packed_batches(stage, stage.task.masker.sequences, model.vocab_size, 1)
    inputs = jax.jit(stage.task.inputs)(data, jax.random.key(2))

    def gradient(dtype, name):
        model = model_of(job, dtype)
        model.attention, model.attention_dropout = ATTENTIONS[name]
        check(model, jax.devices()[0].platform, 1)
        task = stage_of(job, model, batch)[1].task

        @jax.jit
        @jax.value_and_grad
        def run(params):
            pairs, weights = task.pairs(params, inputs, key), task.weights(inputs)
            return sum(pairs[name][0] / weight for name, weight in weights.items())

        loss, found = run(start)
        parts = {part: jax.tree.leaves(each) for part, each in found.items()}
        return float(loss), {k: jnp.concatenate([x.ravel() for x in v]) for k, v in parts.items()}

    exact = {}
    for name in job["attentions"]:
        rate = ATTENTIONS[name][1]
        if rate not in exact:
            with jax.default_matmul_precision("highest"):
                exact[rate] = gradient("float32", "xla, with dropout" if rate else "xla")
        try:
            loss, found = gradient("bfloat16", name)
        except (
            Exception
        ) as error:  # a kernel that fails must not keep the others from being looked at
            tell("parity", attention=name, refused=str(error).split("\n")[0][:300])
            continue
        loss_exact, wanted = exact[rate]
        tell(
            "parity",
            attention=name,
            loss_difference=abs(loss - loss_exact) / loss_exact,
            gradient_difference=max(
                float(jnp.linalg.norm(found[part] - wanted[part]) / jnp.linalg.norm(wanted[part]))
                for part in wanted
            ),
        )
    losses = {}
    for dtype in ("float32", "bfloat16"):
        model = model_of(job, dtype)
        losses[dtype] = []
        with jax.default_matmul_precision("highest"):  # of bfloat16 there is one
            trainer = Trainer(job, model, batch)
            for _ in range(3 if job.get("smoke") else 20):
                trainer()
                losses[dtype].append(float(trainer.seen.figures[0]))
    differ = max(abs(a - b) / a for a, b in zip(*losses.values(), strict=True))
    tell("parity of steps", losses=losses, loss_difference=differ)


def torch(job):
    import numpy as np
    import torch
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model, tokens = model_of(job), job["tokens"]
    config = transformers.BertConfig(
        vocab_size=-(-model.vocab_size // model.vocab_multiple) * model.vocab_multiple,
        hidden_size=model.hidden,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        intermediate_size=model.feed_forward,
        attention_probs_dropout_prob=job["attention_dropout"],
        attn_implementation="sdpa",
    )
    network = transformers.BertForPreTraining(config).to(device).train()
    settings = {"fused": True} if device == "cuda" else {}
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, weight_decay=0.01, **settings)
    forward = torch.compile(network, dynamic=False) if job["compile"] else network
    # As bert_jax counts them, whatever this model computes.
    _, stage = stage_of(job, model, job["batches"][0])
    operations = stage.task.flops_per_row / tokens

    def made(rows):
        ids = np.zeros((len(rows), tokens), np.int64)
        masks, segments, labels = np.zeros_like(ids), np.zeros_like(ids), np.full_like(ids, -100)
        rng = np.random.default_rng(2)
        for i, (own, a_length, _) in enumerate(rows):
            n = len(own)
            ids[i, :n], masks[i, :n], segments[i, a_length:n] = own, 1, 1
            chosen = rng.permutation(n)[: max(round(PREDICTED * n), 1)]
            labels[i, chosen], ids[i, chosen] = ids[i, chosen], 4
        arrays = {
            "input_ids": ids, "attention_mask": masks, "token_type_ids": segments, "labels": labels,
            "next_sentence_label": np.array([row.label for row in rows]),
        }  # fmt: skip
        given = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return {k: v.pin_memory() if device == "cuda" else v for k, v in given.items()}

    def measure(batch):
        rows = list(sequences_of(tokens, model.vocab_size, 4 * batch))
        data = collections.deque(made(rows[i : i + batch]) for i in range(0, len(rows), batch))

        def step():
            data.rotate()
            given = {k: v.to(device, non_blocking=True) for k, v in data[0].items()}
            with torch.autocast(device, torch.bfloat16):
                loss = forward(**given).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss

        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = timed(step, lambda loss: loss.item(), job.get("smoke"))
        return {
            "kind": "torch",
            "seconds": seconds,
            "real_fraction": sum(len(row.tokens) for row in rows) / (len(rows) * tokens),
            "operations_per_token": operations,
            "attention_dropout": job["attention_dropout"],
            "compiled": job["compile"],
            "loss": step().item(),
            "memory_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
        }

    searched(job, measure, lambda error: isinstance(error, torch.OutOfMemoryError))


def profile(job):
    import jax

    from bert_jax import profile

    model = model_of(job)
    model.attention, model.attention_dropout = ATTENTIONS[job["attention"]]
    trainer, steps = Trainer(job, model, job["batches"][0]), 5
    for _ in range(WARM_STEPS):
        jax.block_until_ready(trainer())
    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(folder) / "profile"
        recorded = profile.recorded(place, trainer.compiled, steps, model.dtype, lambda _: None)
        with recorded:
            for _ in range(steps):
                sums = trainer()
            jax.block_until_ready((sums, trainer.state))
        table = json.loads((place / "table.json").read_text())
        (trace,) = place.rglob("*.xplane.pb")
        kept = gzip.compress(trace.read_bytes())
    (pathlib.Path(job["out"]) / "profile.xplane.pb.gz").write_bytes(kept)
    told = {key: job[key] for key in ("size", "tokens", "attention", "loop")}
    tell("profile", **told, batch=job["batches"][0], table=table)


JOBS = {
    "ceilings": ceilings, "parity": parity, "step": step, "torch": torch, "profile": profile,
}  # fmt: skip


def work(job, out):
    """A job, in the process that `run` made for it."""
    from bert_jax.errors import UserError

    try:
        JOBS[job["kind"]]({**job, "out": str(out)})
    except UserError as error:
        tell("left out", why=str(error))


# --- The page -------------------------------------------------------------------------------------


def read(path):
    """The results, none where there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(results):
    """Markdown of what was measured; what was not is said."""
    found = {line["kind"]: line for line in results}
    if "ceilings" not in found:
        return "Speed on a GPU: not measured.\n"
    top = found["ceilings"]
    sheet = top["sheet_operations_per_second"]
    of_sheet = f" (data sheet {sheet / 1e12:,.0f})" if sheet else ""
    bytes_of_sheet = f" ({top['sheet_bytes_per_second'] / 1e12:,.1f})" if sheet else ""
    lines = [
        f"One {top['device']}, JAX {top['jax']}, Flax {top['flax']}, PyTorch {top['torch']}, transformers "
        f"{top['transformers']}. Measured in bfloat16: matrix products "
        f"{top['operations_per_second'] / 1e12:,.4g} TFLOP/s{of_sheet}, memory "
        f"{top['bytes_per_second'] / 1e12:,.3g} TB/s{bytes_of_sheet}.",
        "",
        "| model | T | what | rows a step | ms a step, median (range) | real tokens/s | "
        "of the data sheet | of what was measured |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for key, own in fastest(results).items():
        size, tokens, what = key
        if own is None:
            lines.append(f"| {size} | {tokens} | {what} | not measured | | | | |")
            continue
        what += "; **unsound**" * (own.get("attention") in unsound(results))
        ms = [1e3 * value for value in own["seconds"]]
        rate = own["real_tokens_per_second"] * own["operations_per_token"]
        lines.append(
            f"| {size} | {tokens} | {what} | {own['batch']:,} | "
            f"{statistics.median(ms):,.4g} ({min(ms):,.4g} to {max(ms):,.4g}) | "
            f"{own['real_tokens_per_second']:,.0f} | {f'{rate / sheet:.1%}' if sheet else 'unknown'} | "
            f"{rate / top['operations_per_second']:.1%} |"
        )
    lines.append("")
    for (size, tokens), wanted in TARGETS.items():
        own = best(results, size, tokens)
        reached = "not measured"
        if own and sheet:
            share = own["real_tokens_per_second"] * own["operations_per_token"] / sheet
            reached = f"{share:.1%}, {'reached' if share >= wanted else 'not reached'}"
        lines.append(
            f"- Wanted of {size} at T={tokens}: {wanted:.0%} of the data sheet's peak; {reached}."
        )
    lines += ["", *parity_lines(results), *profile_lines(found.get("profile"))]
    if missing := [line for line in results if line["kind"] in ("left out", "does not fit")]:
        lines += ["Left out:", ""]
        for line in missing:
            full = f"{line['batch']:,} rows a step do not fit: " if "batch" in line else ""
            lines.append(f"- {line['name']}: {full}{line['why']}")
        lines.append("")
    return "\n".join(lines)


def fastest(results):
    """By (model, T, what) the fastest; of what was planned and is not there None."""
    found = {}
    jobs = [job for _, job in plan(any(line.get("smoke") for line in results))]
    for line in [*jobs, *results]:
        if line["kind"] not in ("step", "torch"):
            continue
        if line["kind"] == "step":
            rate = ATTENTIONS[line["attention"]][1]
            name = line["attention"].removesuffix(", with dropout")
            what = f"{name}, attention dropout {rate:g}; layers {line.get('loop', 'scanned')}"
        else:
            what = f"transformers, attention dropout {line['attention_dropout']:g}"
        key = line["size"], line["tokens"], what
        before = found.setdefault(key, None)
        rate = line.get("real_tokens_per_second", 0)
        if rate > (before or {"real_tokens_per_second": 0})["real_tokens_per_second"]:
            found[key] = line
    return found


def parity_lines(results):
    # By attention, for a second call may have looked again.
    own = {line["attention"]: line for line in results if line["kind"] == "parity"}.values()
    steps = [line for line in results if line["kind"] == "parity of steps"]
    if not own:
        return ["bfloat16 beside float32: not measured.", ""]
    lines = [
        "| bfloat16 beside float32 | loss | gradient, of its worst part | |",
        "|---|---|---|---|",
    ]
    for line in own:
        if "refused" in line:
            lines.append(f"| {line['attention']} | {line['refused']} | | |")
        else:
            verdict = "**unsound**" if line["attention"] in unsound(results) else "sound"
            lines.append(
                f"| {line['attention']} | {line['loss_difference']:.2%} | "
                f"{line['gradient_difference']:.2%} | {verdict} |"
            )
    for line in steps:
        count = len(line["losses"]["float32"])
        lines += ["", f"Losses of {count} steps differ by {line['loss_difference']:.2%} at most."]
    return [*lines, ""]


def profile_lines(line):
    if line is None:
        return ["Where a step's time goes: not measured.", ""]
    step = line["table"]["step_seconds"]
    lines = [
        f"{line['size']}, T={line['tokens']}, {line['attention']}, {line['batch']:,} rows: {step * 1e3:,.4g} ms "
        "a step without CUDA graphs, traced.",
        "",
        "| part | ms | share | GFLOP | GB | ms at least | gap |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in line["table"]["parts"]:
        more = "" if row["operations_are_all"] else "+"
        least = f"{row['least_seconds'] * 1e3:,.3f} | {row['gap_seconds'] * 1e3:,.3f}" if "gap_seconds" in row else " | "  # fmt: skip
        lines.append(
            f"| {row['part']} | {row['seconds'] * 1e3:,.3f} | {row['seconds'] / step:.1%} | "
            f"{row['operations'] / 1e9:,.2f}{more} | {row['bytes'] / 1e9:,.3f} | {least} |"
        )
    return [*lines, ""]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--out", type=pathlib.Path, default=os.environ.get("OUT"), help="the folder"
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="time for all of it")
    parser.add_argument(
        "--after",
        type=pathlib.Path,
        metavar="FILE",
        help="gpu.jsonl of a call before, to go on from",
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on any device")
    parser.add_argument("--table", type=pathlib.Path, metavar="FILE", help="only print the tables")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.table:
        print(table(read(arguments.table)), end="")
        return
    if arguments.out is None:
        parser.error("--out names the folder for what is measured")
    out = pathlib.Path(arguments.out)
    if arguments.job:
        work(arguments.job, out)
        return
    if arguments.after and not arguments.after.exists():
        parser.error(f"--after: there is no {arguments.after}")
    earlier = read(arguments.after) if arguments.after else []
    measure_all(out, arguments.minutes, arguments.smoke, earlier)
    text = table(read(out / RESULTS))
    (out / "gpu.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
