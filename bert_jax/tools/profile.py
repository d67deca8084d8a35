"""Where the time of a training step goes: a table made from a profiler trace.

`bert_jax.training.tracing` records a trace of the steps of `config.profile_steps` in
WORKDIR/profile/steps_FIRST_END. `summarize` adds table.txt and table.json, with a row for each of
`PARTS`. The rows add up to the time of a step: operations that run at once (on cores, streams or
devices) get equal shares of that time, and that of a kernel with operations of several parts is
divided in proportion to their numbers (`hlo.Program.operations`).

Kernels are looked up in the compiled program by name: with CUDA graphs, the default on GPUs, a trace
has no other link to the program. Layers share identical kernels, which count for the first of them.
Kernels of libraries (cuBLAS, cuDNN) are attention or matrix products by their names; a product
belongs to the vocabulary head if the kernel before it does.
"""

import collections
import functools
import pathlib
import re
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int

from bert_jax.storage import files
from bert_jax.tools.preflight import hlo
from bert_jax.training import tracing

# Parts of a step, and what it waits for: a note, and scopes. An operation belongs to the first part
# with one of its scopes; "select" gathers positions within "embeddings", else predicted tokens.
PARTS = {
    "dropout bits": ("generating and applying random bits, also in attention", "dropout"),
    "attention": ("scores, softmax, weighted sums", "attend"),
    "optimizer": ("including gradient norms, clipping and guard", "optimizer"),
    "masking": ("selection of targets, layout of rows", "inputs"),
    "embeddings": ("lookup and gradients", "embeddings"),
    "vocabulary head": ("masked LM, losses", "masked_lm span_boundary loss select"),
    "matmul": (
        "dense layers of the encoder and the pooler",
        "query key value output intermediate gate pooler next_sentence classifier",
    ),
    "LayerNorm and GELU": ("including biases and residuals", "norm attention feed_forward"),
    "collectives": ("between devices", ""),
    "other": ("operations of the step in no scope above", ""),
    "other programs": ("evaluation, transfers to and from the device", ""),
    "input wait": ("device idle, waiting for a batch", ""),
    "host": ("device idle for another reason", ""),
}
_OTHER, _PROGRAMS, _WAIT, _HOST = list(PARTS)[-4:]
_HEAD = "vocabulary head"
# Kernels of libraries on GPUs, by pattern.
_KERNELS = (
    ("attention", "fmha|flash|attention|sdpa|cudnn"),
    ("matmul", "gemm|nvjet|cutlass|xmma|splitK"),
    ("LayerNorm and GELU", "^norm_(forward|backward)"),
    (_HEAD, "^cross_entropy"),
    (_PROGRAMS, "^mem(cpy|set)"),
)


def summarize(folder: pathlib.Path, program: Any, steps: int, dtype: str) -> str:
    """Write table.json and table.txt of a trace to its folder, and return the table as text.

    The arguments are those of `tracing.record`.
    """
    step, parts = part_seconds(folder, program.as_text(), steps)
    table = {
        "dtype": dtype,
        "steps": steps,
        "step_seconds": step,
        "device_seconds": step - parts[_WAIT] - parts[_HOST],
        "devices": f"{jax.device_count()} x {jax.local_devices()[0].device_kind}",
        "jax": jax.__version__,
        "parts": [{"part": part, "seconds": seconds} for part, seconds in parts.items()],
    }
    lines = [
        f"{steps} steps in {dtype} on {table['devices']}, JAX {jax.__version__}: {step * 1e3:,.2f} ms "
        f"per step, {table['device_seconds'] / step:.1%} of it on the device\n",
        f"{'part':20}{'ms':>10}{'share':>8}",
    ]
    for part, seconds in parts.items():
        lines.append(f"{part:20}{seconds * 1e3:10,.3f}{seconds / step:8.1%}  {PARTS[part][0]}")
    text = "\n".join([*lines, ""])
    files.write_json(folder / "table.json", table)
    files.write(folder / "table.txt", text)
    return text


def part_seconds(folder: pathlib.Path, text: str, steps: int) -> tuple[float, dict[str, float]]:
    """Return the seconds of a step, and those of each of `PARTS`, from a trace and the program's text."""
    operations = hlo.Program(text).operations()
    # Kernels on GPUs are named like their instructions, with "_" for ".".
    operations = {k.replace(".", "_"): v for k, v in operations.items()} | operations
    shares_of = functools.cache(lambda name: _shares(name, operations))
    module = text.split(maxsplit=2)[1].rstrip(",")  # HloModule NAME, …
    spans, waits, whole = _read(folder, module)
    begin_end = np.array([(begin, end) for begin, end, _ in spans], float).reshape(-1, 2)
    times, wait, host = divide(begin_end, np.array(waits, float).reshape(-1, 2), whole)
    parts = dict.fromkeys(PARTS, 0.0) | {_WAIT: wait, _HOST: host}
    in_head = False
    for (_, _, name), time in zip(spans, times, strict=True):
        shares = shares_of(name)
        if name in operations:
            in_head = shares.get(_HEAD, 0) > 0.5
        elif in_head and shares == {"matmul": 1.0}:
            shares = {_HEAD: 1.0}
        for part, share in shares.items():
            parts[part] += share * time
    nanoseconds = 1e9 * steps
    return (whole[1] - whole[0]) / nanoseconds, {k: x / nanoseconds for k, x in parts.items()}


def _read(folder: pathlib.Path, module: str) -> tuple[list, list, tuple[float, float]]:
    """Read a trace: its operations, waits for input, and extent.

    They are (begin, end) in nanoseconds, with the name of an operation, "" in another program.
    """
    (path,) = folder.rglob("*.xplane.pb")
    spans, waits, whole, ends = [], [], (0.0, 0.0), {}
    on_cpu = jax.default_backend() == "cpu"
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        is_device, lines = plane.name.startswith("/device:"), list(plane.lines)
        # On TPUs, other lines repeat the operations by program and by step.
        for line in [line for line in lines if line.name == "XLA Ops"] or lines:
            for event in line.events:
                begin, end, stats = event.start_ns, event.end_ns, dict(event.stats)
                if event.name == tracing.STEPS:
                    whole = begin, end
                elif event.name == tracing.WAITS:
                    waits.append((begin, end))
                elif event.name.startswith("end: "):
                    # Work that a CPU continues in other threads ends after its span.
                    ends[stats.get("_c")] = end
                elif is_device or (on_cpu and "hlo_op" in stats):
                    is_own = re.split(r"[.(]", str(stats.get("hlo_module", module)))[0] == module
                    name = str(stats.get("hlo_op", ""))
                    if not name or name.startswith("command_buffer"):
                        name = event.name.split(" = ")[0].lstrip("%")
                    spans.append((begin, end, name if is_own else "", stats.get("_p")))
    spans = [(begin, ends.get(key, end), name) for begin, end, name, key in spans]
    return sorted(spans), waits, whole


def divide(
    spans: Float[np.ndarray, "spans 2"],
    waits: Float[np.ndarray, "waits 2"],
    whole: tuple[float, float],
) -> tuple[Float[np.ndarray, " spans"], float, float]:
    """Divide the time of `whole` among spans of time, evenly where several run at once.

    Returns:
        The time of each span, and that when none runs: during waits for input, and otherwise.
    """
    spans, waits = spans.clip(*whole), waits.clip(*whole)
    edges = np.unique(np.concatenate([spans, waits, [whole]]))

    def active(times: Float[np.ndarray, "spans 2"]) -> Int[np.ndarray, " intervals"]:
        changes = [np.bincount(np.searchsorted(edges, x), minlength=len(edges)) for x in times.T]
        return np.cumsum(changes[0] - changes[1])[:-1]

    durations, running = np.diff(edges), active(spans)
    until = np.concatenate([[0.0], np.cumsum(durations / np.maximum(running, 1))])
    begins, ends = until[np.searchsorted(edges, spans)].T
    idle = durations * (running == 0)
    wait = float(idle[active(waits) > 0].sum())
    return ends - begins, wait, float(idle.sum()) - wait


def part_of(source: str) -> str:
    """Return the part that an operation belongs to, given `hlo.Instruction.source`."""
    scopes = set(re.split(r"[/();]+", source))
    return next((part for part, (_, own) in PARTS.items() if scopes & {*own.split()}), _OTHER)


def _shares(name: str, operations: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return the shares of parts in a kernel, by the number of operations fused into it."""
    if not name:
        return {_PROGRAMS: 1.0}
    if name.startswith(hlo.COLLECTIVES):
        return {"collectives": 1.0}
    if name not in operations:
        matches = (part for part, words in _KERNELS if re.search(words, name, re.IGNORECASE))
        return {next(matches, _OTHER): 1.0}
    counts: dict[str, float] = collections.defaultdict(float)
    for source, count in operations[name].items():
        counts[part_of(source)] += count
    total = sum(counts.values())
    if not total:  # it only moves data
        return {part_of(next(filter(None, operations[name]), "")): 1.0}
    return {part: count / total for part, count in counts.items() if count}
