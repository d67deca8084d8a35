"""Where a step's time goes: a trace of some steps of a run, and a table of it.

`config.profile_steps` names the steps. They leave in WORKDIR/profile/steps_FIRST_END:

table.txt, table.json   a row for each of `PARTS`
plugins/profile/        the trace itself, which XProf shows: `xprof --logdir WORKDIR/profile/steps_…`,
                        or TensorBoard with its profile plugin

The rows add up to the time of a step. Where several operations run at once, on cores, streams or
devices, each gets its share of that time; while none runs, the time is the loop's, which waits for a
batch or does something else. An operation belongs to a part by the name that `jax.named_scope` and Flax
gave it in the model. The compiler fuses operations of several parts into one kernel: its time and bytes
are divided by how many operations each part has in it.

A kernel is looked up in the compiled program by its own name: with CUDA graphs, the default on GPUs, the
trace has no other link to the program. Layers share kernels that are equal, which are then counted by the
first of them. Kernels of libraries (cuBLAS, cuDNN) are not in the program under their names: they
are attention or matrix products by their names, and a product belongs to the vocabulary head where the
kernel before it does. The `xprof` library (2.24) cannot do this: of a trace with CUDA graphs it gives
times by kernel name, but no operation and no scope.

Operations and bytes are counted in the compiled program's text (`bert_jax.tools.hlo`), for one device. Next to
them are the least time that they take at the speed of a large matrix product and of a pass over a large
array, both measured on the spot, and the gap to the time that was taken.
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

# What a step consists of, and what it waits for.
PARTS = {
    "matmul": "the encoder's and the pooler's dense layers",
    "attention": "scores, softmax, and the sums that they weigh",
    "dropout bits": "making random bits and applying them, in attention too",
    "LayerNorm and GELU": "with biases and residuals",
    "embeddings": "looked up, and their gradients added up",
    "vocabulary head": "masked LM and the losses, with the selection of tokens",
    "optimizer": "with the gradient's norms, clipping and guard",
    "masking": "what to predict, and the rows' layout",
    "collectives": "between devices",
    "other": "of the step, by no name above",
    "other programs": "evaluation, copies to and from the device",
    "input wait": "the device idle and no batch there",
    "host": "the device idle for another reason",
}
_OTHER, _PROGRAMS, _WAIT, _HOST = list(PARTS)[-4:]
_HEAD = "vocabulary head"
# By the first of these that is among the names around an operation.
_SCOPES = {
    "dropout": "dropout bits",
    "attend": "attention",
    "optimizer": "optimizer",
    "inputs": "masking",
    "masked_lm": "vocabulary head",
    "loss": "vocabulary head",
    "embeddings": "embeddings",
    **dict.fromkeys(
        "query key value output intermediate pooler next_sentence classifier".split(), "matmul"
    ),
    **dict.fromkeys("norm attention feed_forward".split(), "LayerNorm and GELU"),
    "select": "vocabulary head",  # of predicted tokens; positions are within "embeddings"
}
# Kernels that a GPU's trace has by names of libraries.
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
    """What a device was seen to do at most.

    Attributes:
        operations: of matrix products, a second, 2 a multiply-add.
        bytes: read and written, a second.
    """

    operations: float
    bytes: float


def ceilings(dtype: str) -> Ceilings:
    """Measures a large matrix product, and reading and writing an array, on the first local device."""
    on_cpu = jax.default_backend() == "cpu"
    size = 1024 if on_cpu else 8192
    # Random numbers: products of zeros take less power, and so run at a higher clock.
    x = jax.random.normal(jax.random.key(0), (size, size), dtype)
    multiply = jax.jit(jnp.matmul)
    product = _seconds(lambda _: multiply(x, x), x)
    words = jnp.ones((1 << 26,), jnp.float32)
    size_bytes = words.nbytes
    # In place, for where what is freed goes back to the system a new array is the making of its pages.
    pass_over = _seconds(jax.jit(lambda x: x + 1, donate_argnums=0), words)
    return Ceilings(2 * size**3 / product, 2 * size_bytes / pass_over)


def _seconds(run: Callable[[jax.Array], jax.Array], last: jax.Array) -> float:
    """Of a run, on the result of the one before, in the best of some rounds of a tenth of a second."""
    found: list[float] = []
    for _ in range(7):
        # The first round compiles, the second tells how many runs a tenth of a second are.
        times = max(int(0.1 / min(found[1:])), 4) if len(found) > 1 else 4
        begun = time.perf_counter()
        for _ in range(times):
            last = run(last)
        jax.block_until_ready(last)
        found.append((time.perf_counter() - begun) / times)
    return min(found)


class _Span(NamedTuple):
    """A stretch of time, in nanoseconds, and what was done in it."""

    begin: float
    end: float
    name: str


def table(folder: pathlib.Path, text: str, steps: int, dtype: str) -> dict[str, Any]:
    """Of a trace and of the program's text, where the time of a step went, as table.json has it.

    Args:
        folder: of the trace, made by `tracing.record`.
        text: of the compiled program that the steps ran (`jax.stages.Compiled.as_text`).
        steps: how many they were.
        dtype: what the program computes in, for `ceilings`.
    """
    program = hlo.executed(text)
    times, whole = part_seconds(folder, text, program)
    seconds = {part: spent / steps for part, spent in times.items()}
    try:
        most = ceilings(dtype)
    except jax.errors.JaxRuntimeError:  # the run has left no memory for it
        most = None
    split = re.match(r".*?\bnum_partitions=(\d+)", text)
    devices = min(int(split.group(1)) if split else 1, jax.local_device_count())
    machines = devices if jax.default_backend() == "cpu" else 1  # that many virtual ones are one
    operations, traffic, untold = _work(program)
    rows = []
    for part in PARTS:
        row = {
            "part": part,
            "seconds": seconds[part],
            "operations": machines * operations[part],
            "operations_are_all": part not in untold,
            "bytes": machines * traffic[part],
        }
        if most:
            least = max(row["operations"] / most.operations, row["bytes"] / most.bytes)
            row |= {"least_seconds": least, "gap_seconds": row["seconds"] - least}
        rows.append(row)
    return {
        "steps": steps,
        "step_seconds": (whole.end - whole.begin) / 1e9 / steps,
        "device_seconds": sum(seconds.values()) - seconds[_WAIT] - seconds[_HOST],
        "matrix_operations": machines * hlo.read(text).matrix_flops,
        "measured_operations_per_second": most and most.operations,
        "measured_bytes_per_second": most and most.bytes,
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
        program: what `hlo.executed` reads in it.

    Returns:
        Seconds by part, and the span of the traced steps.
    """
    module = re.match(r"HloModule ([\w\-]+)", text).group(1)
    spans, waits, whole = _read(folder, module)
    # A GPU's kernel is called like the instruction that it was made from, without points.
    named = {**{name.replace(".", "_"): one for name, one in program.items()}, **program}
    spans = _with_products_of_the_head(spans, named)
    seconds = dict.fromkeys(PARTS, 0.0)
    for name, spent in _divide(spans, waits, whole).items():
        for part, share in _shares(name, named).items():
            seconds[part] += share * spent / 1e9
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
    """Read a trace: what devices did (by instruction, "" for other programs), waits, and the whole."""
    (path,) = folder.rglob("*.xplane.pb")
    spans, waits, whole, ends = [], [], None, {}
    on_cpu = jax.default_backend() == "cpu"
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        of_host, of_device = plane.name == "/host:CPU", plane.name.startswith("/device:")
        lines = list(plane.lines)
        if operations := [line for line in lines if line.name == "XLA Ops"]:
            lines = operations  # the other lines say the same again, of programs and of steps
        for line in lines if of_host or of_device else ():
            for event in line.events:
                begin, end, told = event.start_ns, event.end_ns, dict(event.stats)
                if event.name == tracing.STEPS:
                    whole = _Span(begin, end, "")
                elif event.name == tracing.WAITS:
                    waits.append(_Span(begin, end, ""))
                elif event.name.startswith("end: "):
                    # What a CPU goes on with in other threads ends later than its span says.
                    ends[told.get("_c")] = end
                elif of_device or (on_cpu and "hlo_op" in told):
                    own = re.split(r"[.(]", str(told.get("hlo_module", module)))[0] == module
                    name = str(told.get("hlo_op", ""))
                    if not name or name.startswith("command_buffer"):
                        name = event.name.split(" = ")[0].lstrip("%")
                    spans.append((_Span(begin, end, name if own else ""), told.get("_p")))
    done = [span._replace(end=ends.get(key, span.end)) for span, key in spans]
    if whole is None:  # traced not by `tracing.record`
        whole = _Span(min(s.begin for s in done), max(s.end for s in done), "")
    return done, waits, whole


def _divide(spans: list[_Span], waits: list[_Span], whole: _Span) -> dict[str, float]:
    """The time of the whole by what was done, evenly where it is several things."""
    changes = []
    for kind, some in ((0, spans), (1, waits)):
        for begin, end, name in some:
            begin, end = max(begin, whole.begin), min(end, whole.end)
            if begin < end:
                changes += [(begin, 1, kind, name), (end, -1, kind, name)]
    found: collections.Counter[str] = collections.Counter()
    active: collections.Counter[str] = collections.Counter()
    waiting, running, now = 0, 0, whole.begin
    for moment, change, is_wait, name in sorted(changes):
        for doing, count in active.items():
            found[doing] += (moment - now) * count / running
        if not running:
            found[_WAIT if waiting else _HOST] += moment - now
        if is_wait:
            waiting += change
        else:
            running += change
            active[name] += change
            if not active[name]:
                del active[name]
        now = moment
    found[_HOST] += whole.end - now
    return found


def part_of(source: str) -> str:
    """The part that an operation belongs to, by `hlo.Instruction.source`."""
    scopes = set(re.split(r"[/();]+", source))
    return next((part for scope, part in _SCOPES.items() if scope in scopes), _OTHER)


def _shares(name: str, program: dict[str, hlo.Executed]) -> dict[str, float]:
    """To which parts a span's time belongs, by the operations that it has of each."""
    if name in PARTS:
        return {name: 1.0}
    if not name:
        return {_PROGRAMS: 1.0}
    if name.startswith(hlo.COLLECTIVES):
        return {"collectives": 1.0}
    known = program.get(name)
    if known is None:
        matches = (part for part, words in _KERNELS if re.search(words, name, re.IGNORECASE))
        return {next(matches, _OTHER): 1.0}
    found: collections.Counter[str] = collections.Counter()
    for source, count in known.operations.items():
        found[part_of(source)] += count
    if not found.total():  # it only moves something
        return {part_of(next(filter(None, known.operations), "")): 1.0}
    return {part: count / found.total() for part, count in found.items() if count}


def _work(
    program: dict[str, hlo.Executed],
) -> tuple[dict[str, float], dict[str, float], set[str]]:
    """By part the operations of a step, its bytes, and which parts have operations untold."""
    operations: collections.Counter[str] = collections.Counter()
    traffic: collections.Counter[str] = collections.Counter()
    untold: set[str] = set()
    for name, one in program.items():
        if one.inside:  # what is inside is listed too
            continue
        shares = _shares(name, program)
        for source, count in one.operations.items():
            operations[part_of(source)] += one.times * count
        for part, share in shares.items():
            traffic[part] += one.times * share * one.traffic_bytes
        if not one.is_told:
            untold.update(shares)
    return operations, traffic, untold


def describe(found: dict[str, Any]) -> str:
    """A table as text."""
    step, most = found["step_seconds"], found["measured_operations_per_second"]
    lines = [
        f"{found['steps']} steps in {found['dtype']} on {found['devices']}, JAX {found['jax']}: "
        f"{step * 1e3:,.2f} ms a step, {found['device_seconds'] / step:.1%} of it on the device"
    ]
    if most:
        reached = found["matrix_operations"] / step
        lines.append(
            f"measured here: matrix products {most / 1e12:,.4g} TFLOP/s, of which the step's reach "
            f"{reached / most:.1%}; memory {found['measured_bytes_per_second'] / 1e9:,.4g} GB/s"
        )
    lines.append(
        f"\n{'part':20}{'ms':>10}{'share':>8}{'GFLOP':>11}{'GB':>9}{'at least ms':>13}{'gap ms':>10}"
    )
    for row in found["parts"]:
        line, counted, least = f"{row['part']:20}{row['seconds'] * 1e3:10,.3f}", "", ""
        if row["operations"] or row["bytes"]:
            more = "+" * (not row["operations_are_all"])
            counted = f"{row['operations'] / 1e9:,.3f}{more}"
            counted = f"{counted:>11}{row['bytes'] / 1e9:9,.3f}"
            if most:
                least = f"{row['least_seconds'] * 1e3:13,.3f}{row['gap_seconds'] * 1e3:10,.3f}"
        line += f"{row['seconds'] / step:8.1%}{counted:20}{least:23}  {PARTS[row['part']]}"
        lines.append(line)
    if not all(row["operations_are_all"] for row in found["parts"]):
        lines.append("+ and what kernels do that do not tell")
    return "\n".join([*lines, ""])
