"""Where the time of a training step goes: a table made from a profiler trace.

`bert_jax.tracing` records a trace of the steps of `config.profile_steps` in
WORKDIR/profile/steps_FIRST_END. `summarize` adds table.txt and table.json, with a row for each of
`PARTS`.

The rows add up to the time of a step. Where several operations run at once (on cores, streams or
devices), each gets an equal share of that time. While none runs, the time counts as waiting for
input or for the host. An operation belongs to a part by the name that `jax.named_scope` and Flax gave
it in the model. The compiler fuses operations of several parts into one kernel, whose time and bytes
are divided in proportion to the number of operations of each part.

Kernels are looked up in the compiled program by name: with CUDA graphs, the default on GPUs, a trace
has no other link to the program. Layers share identical kernels, which are counted with the first of
them. Kernels of libraries (cuBLAS, cuDNN) are classified as attention or matrix products by their
names; a product belongs to the vocabulary head if the kernel before it does. The `xprof` library
(2.24) reports times of such a trace by kernel name, without operations and scopes.

Operations and bytes are counted in the text of the compiled program (`hlo`), for one device. The
table also has the least time that they take at the measured speed of a large matrix product and of a
pass over a large array, and the gap to the time taken.
"""

import collections
import pathlib
import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bert_jax import files, tracing
from bert_jax.tools import hlo

# Parts of a step, and what it waits for.
PARTS = {
    "matmul": "the encoder's and the pooler's dense layers",
    "attention": "scores, softmax, weighted sums",
    "dropout bits": "generating and applying random bits, also in attention",
    "LayerNorm and GELU": "including biases and residuals",
    "embeddings": "lookup and gradients",
    "vocabulary head": "masked LM, losses, gathering of tokens",
    "optimizer": "including gradient norms, clipping and guard",
    "masking": "selection of targets, layout of rows",
    "collectives": "between devices",
    "other": "operations of the step in no scope above",
    "other programs": "evaluation, transfers to and from the device",
    "input wait": "device idle, waiting for a batch",
    "host": "device idle for another reason",
}
_OTHER, _PROGRAMS, _WAIT, _HOST = list(PARTS)[-4:]
_HEAD = "vocabulary head"
# The first of these scopes that an operation is in decides its part.
_SCOPES = {
    "dropout": "dropout bits",
    "attend": "attention",
    "optimizer": "optimizer",
    "inputs": "masking",
    "masked_lm": "vocabulary head",
    "span_boundary": "vocabulary head",
    "loss": "vocabulary head",
    "embeddings": "embeddings",
    **dict.fromkeys(
        "query key value output intermediate gate pooler next_sentence classifier".split(), "matmul"
    ),
    **dict.fromkeys("norm attention feed_forward".split(), "LayerNorm and GELU"),
    "select": "vocabulary head",  # predicted tokens; that of positions is within "embeddings"
}
# Kernels of libraries on GPUs, by pattern.
_KERNELS = (
    ("attention", "fmha|flash|attention|sdpa|cudnn"),
    ("matmul", "gemm|nvjet|cutlass|xmma|splitK"),
    (_PROGRAMS, "^mem(cpy|set)"),
)


def summarize(folder: pathlib.Path, program: Any, steps: int, dtype: str) -> str:
    """Write table.json and table.txt of a trace to its folder, and return the table as text.

    Args:
        folder: folder of the trace.
        program: the compiled program that was executed (`jax.stages.Compiled`).
        steps: how often it was executed.
        dtype: dtype that it computes in, for `ceilings`.
    """
    summary = table(folder, program.as_text(), steps, dtype)
    files.write_json(folder / "table.json", summary)
    files.write(folder / "table.txt", describe(summary))
    return describe(summary)


class Ceilings(NamedTuple):
    """Measured peak speeds of a device.

    Attributes:
        operations: FLOP/s of matrix products; a multiply-add is 2.
        bytes: bytes read and written per second.
    """

    operations: float
    bytes: float


def ceilings(dtype: str) -> Ceilings:
    """Measure a large matrix product and a pass over a large array on the first local device."""
    on_cpu = jax.default_backend() == "cpu"
    size = 1024 if on_cpu else 8192
    # Random values: products of zeros take less power and run at a higher clock.
    x = jax.random.normal(jax.random.key(0), (size, size), dtype)
    multiply = jax.jit(jnp.matmul)
    product = _seconds(lambda _: multiply(x, x), x)
    words = jnp.ones((1 << 26,), jnp.float32)
    size_bytes = words.nbytes
    # In place: allocating a new array would measure page faults where freed memory is returned.
    pass_over = _seconds(jax.jit(lambda x: x + 1, donate_argnums=0), words)
    return Ceilings(2 * size**3 / product, 2 * size_bytes / pass_over)


def _seconds(run: Callable[[jax.Array], jax.Array], last: jax.Array) -> float:
    """Return the time of a call on the previous result: the best of several rounds of 0.1 s."""
    rounds: list[float] = []
    for _ in range(7):
        # The first round compiles, the second measures how many calls take 0.1 s.
        num_calls = max(int(0.1 / min(rounds[1:])), 4) if len(rounds) > 1 else 4
        start = time.perf_counter()
        for _ in range(num_calls):
            last = run(last)
        jax.block_until_ready(last)
        rounds.append((time.perf_counter() - start) / num_calls)
    return min(rounds)


class _Span(NamedTuple):
    """An interval in nanoseconds, and the name of the operation."""

    begin: float
    end: float
    name: str


def table(folder: pathlib.Path, text: str, steps: int, dtype: str) -> dict[str, Any]:
    """Return the content of table.json: the time of a step by part.

    Args:
        folder: folder of the trace, from `tracing.record`.
        text: text of the compiled step (`jax.stages.Compiled.as_text`).
        steps: number of traced steps.
        dtype: dtype that the program computes in, for `ceilings`.
    """
    program = hlo.executed(text)
    total_seconds, whole = part_seconds(folder, text, program)
    seconds = {part: total / steps for part, total in total_seconds.items()}
    try:
        peak = ceilings(dtype)
    except jax.errors.JaxRuntimeError:  # the run left too little memory
        peak = None
    partitions = re.match(r".*?\bnum_partitions=(\d+)", text)
    devices = min(int(partitions.group(1)) if partitions else 1, jax.local_device_count())
    # Virtual CPU devices share the time of one machine, so count the work of all of them.
    factor = devices if jax.default_backend() == "cpu" else 1
    operations, traffic, incomplete = _work(program)
    rows = []
    for part in PARTS:
        row = {
            "part": part,
            "seconds": seconds[part],
            "operations": factor * operations[part],
            "operations_are_all": part not in incomplete,
            "bytes": factor * traffic[part],
        }
        if peak:
            least = max(row["operations"] / peak.operations, row["bytes"] / peak.bytes)
            row |= {"least_seconds": least, "gap_seconds": row["seconds"] - least}
        rows.append(row)
    return {
        "steps": steps,
        "step_seconds": (whole.end - whole.begin) / 1e9 / steps,
        "device_seconds": sum(seconds.values()) - seconds[_WAIT] - seconds[_HOST],
        "matrix_operations": factor * hlo.read(text).matrix_flops,
        "measured_operations_per_second": peak and peak.operations,
        "measured_bytes_per_second": peak and peak.bytes,
        "dtype": dtype,
        "devices": f"{devices} x {jax.local_devices()[0].device_kind}",
        "jax": jax.__version__,
        "parts": rows,
    }


def part_seconds(
    folder: pathlib.Path, text: str, program: dict[str, hlo.Executed]
) -> tuple[dict[str, float], _Span]:
    """Divide the time of a trace among `PARTS`.

    Args:
        folder: of the trace.
        text: of the compiled program that was traced.
        program: result of `hlo.executed` for the text.

    Returns:
        Seconds by part, and the span of the traced steps.
    """
    module = text.split(maxsplit=2)[1].rstrip(",")  # HloModule NAME, …
    spans, waits, whole = _read(folder, module)
    # Kernels on GPUs are named like their instructions, with "_" for ".".
    named = {**{name.replace(".", "_"): i for name, i in program.items()}, **program}
    spans = _with_products_of_the_head(spans, named)
    seconds = dict.fromkeys(PARTS, 0.0)
    for name, nanoseconds in _divide(spans, waits, whole).items():
        for part, share in _shares(name, named).items():
            seconds[part] += share * nanoseconds / 1e9
    return seconds, whole


def _with_products_of_the_head(spans: list[_Span], program: dict[str, hlo.Executed]) -> list[_Span]:
    """Rename library products that follow a kernel of the vocabulary head to that part."""
    result, in_head = [], False
    for span in sorted(spans):
        if span.name in program:
            in_head = _shares(span.name, program).get(_HEAD, 0) > 0.5
        elif in_head and _shares(span.name, program) == {"matmul": 1.0}:
            span = span._replace(name=_HEAD)
        result.append(span)
    return result


def _read(folder: pathlib.Path, module: str) -> tuple[list[_Span], list[_Span], _Span]:
    """Read a trace: operations ("" for those of other programs), waits for input, and its extent."""
    (path,) = folder.rglob("*.xplane.pb")
    spans, waits, whole, ends = [], [], None, {}
    on_cpu = jax.default_backend() == "cpu"
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        is_host, is_device = plane.name == "/host:CPU", plane.name.startswith("/device:")
        lines = list(plane.lines)
        if operations := [line for line in lines if line.name == "XLA Ops"]:
            lines = operations  # other lines repeat them by program and by step
        for line in lines if is_host or is_device else ():
            for event in line.events:
                begin, end, stats = event.start_ns, event.end_ns, dict(event.stats)
                if event.name == tracing.STEPS:
                    whole = _Span(begin, end, "")
                elif event.name == tracing.WAITS:
                    waits.append(_Span(begin, end, ""))
                elif event.name.startswith("end: "):
                    # Work that a CPU continues in other threads ends after its span.
                    ends[stats.get("_c")] = end
                elif is_device or (on_cpu and "hlo_op" in stats):
                    is_own = re.split(r"[.(]", str(stats.get("hlo_module", module)))[0] == module
                    name = str(stats.get("hlo_op", ""))
                    if not name or name.startswith("command_buffer"):
                        name = event.name.split(" = ")[0].lstrip("%")
                    spans.append((_Span(begin, end, name if is_own else ""), stats.get("_p")))
    finished = [span._replace(end=ends.get(key, span.end)) for span, key in spans]
    if whole is None:  # traced not by `tracing.record`
        whole = _Span(min(s.begin for s in finished), max(s.end for s in finished), "")
    return finished, waits, whole


def _divide(spans: list[_Span], waits: list[_Span], whole: _Span) -> dict[str, float]:
    """Divide the time of `whole` by operation, evenly where several run at once."""
    changes = []
    for is_wait, intervals in ((0, spans), (1, waits)):
        for begin, end, name in intervals:
            begin, end = max(begin, whole.begin), min(end, whole.end)
            if begin < end:
                changes += [(begin, 1, is_wait, name), (end, -1, is_wait, name)]
    times: dict[str, float] = collections.defaultdict(float)
    active: collections.Counter[str] = collections.Counter()
    waiting, running, now = 0, 0, whole.begin
    for moment, change, is_wait, name in sorted(changes):
        for operation, count in active.items():
            times[operation] += (moment - now) * count / running
        if not running:
            times[_WAIT if waiting else _HOST] += moment - now
        if is_wait:
            waiting += change
        else:
            running += change
            active[name] += change
            if not active[name]:
                del active[name]
        now = moment
    times[_HOST] += whole.end - now
    return times


def part_of(source: str) -> str:
    """Return the part that an operation belongs to, given `hlo.Instruction.source`."""
    scopes = set(re.split(r"[/();]+", source))
    return next((part for scope, part in _SCOPES.items() if scope in scopes), _OTHER)


def _shares(name: str, program: dict[str, hlo.Executed]) -> dict[str, float]:
    """Return the shares of parts in an operation, by the number of operations fused into it."""
    if name in PARTS:
        return {name: 1.0}
    if not name:
        return {_PROGRAMS: 1.0}
    if name.startswith(hlo.COLLECTIVES):
        return {"collectives": 1.0}
    instruction = program.get(name)
    if instruction is None:
        matches = (part for part, words in _KERNELS if re.search(words, name, re.IGNORECASE))
        return {next(matches, _OTHER): 1.0}
    counts: dict[str, float] = collections.defaultdict(float)
    for source, count in instruction.operations.items():
        counts[part_of(source)] += count
    total = sum(counts.values())
    if not total:  # it only moves data
        return {part_of(next(filter(None, instruction.operations), "")): 1.0}
    return {part: count / total for part, count in counts.items() if count}


def _work(
    program: dict[str, hlo.Executed],
) -> tuple[dict[str, float], dict[str, float], set[str]]:
    """Return operations and bytes of a step by part, and the parts whose operations are incomplete."""
    operations: dict[str, float] = collections.defaultdict(float)
    traffic: dict[str, float] = collections.defaultdict(float)
    incomplete: set[str] = set()
    for name, instruction in program.items():
        if instruction.inside:  # its instructions are listed too
            continue
        shares = _shares(name, program)
        for source, count in instruction.operations.items():
            operations[part_of(source)] += instruction.times * count
        for part, share in shares.items():
            traffic[part] += instruction.times * share * instruction.traffic_bytes
        if not instruction.is_known:
            incomplete.update(shares)
    return operations, traffic, incomplete


def describe(table: dict[str, Any]) -> str:
    """Format a table as text."""
    step, peak = table["step_seconds"], table["measured_operations_per_second"]
    lines = [
        f"{table['steps']} steps in {table['dtype']} on {table['devices']}, JAX {table['jax']}: "
        f"{step * 1e3:,.2f} ms per step, {table['device_seconds'] / step:.1%} of it on the device"
    ]
    if peak:
        reached = table["matrix_operations"] / step
        lines.append(
            f"measured here: matrix products {peak / 1e12:,.4g} TFLOP/s, of which the step reaches "
            f"{reached / peak:.1%}; memory {table['measured_bytes_per_second'] / 1e9:,.4g} GB/s"
        )
    lines.append(
        f"\n{'part':20}{'ms':>10}{'share':>8}{'GFLOP':>11}{'GB':>9}{'at least ms':>13}{'gap ms':>10}"
    )
    for row in table["parts"]:
        line, counted, least = f"{row['part']:20}{row['seconds'] * 1e3:10,.3f}", "", ""
        if row["operations"] or row["bytes"]:
            more = "+" * (not row["operations_are_all"])
            counted = f"{row['operations'] / 1e9:,.3f}{more}"
            counted = f"{counted:>11}{row['bytes'] / 1e9:9,.3f}"
            if peak:
                least = f"{row['least_seconds'] * 1e3:13,.3f}{row['gap_seconds'] * 1e3:10,.3f}"
        line += f"{row['seconds'] / step:8.1%}{counted:20}{least:23}  {PARTS[row['part']]}"
        lines.append(line)
    if not all(row["operations_are_all"] for row in table["parts"]):
        lines.append("+ plus operations of kernels that do not report them")
    return "\n".join([*lines, ""])
