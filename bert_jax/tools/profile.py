"""Where the time of a training step goes: a table made from a profiler trace.

`bert_jax.training.tracing` records a trace of the steps of `config.profile_steps` in
WORKDIR/profile/steps_FIRST_END. `summarize` adds table.txt and table.json, with a row for each of
`PARTS`.

The rows add up to the time of a step. Where several operations run at once (on cores, streams or
devices), each gets an equal share of that time. While none runs, the time counts as waiting for
input or for the host. An operation belongs to a part by the name that `jax.named_scope` and Flax gave
it in the model. The compiler fuses operations of several parts into one kernel, whose time is divided
in proportion to the number of operations of each part (`hlo.instruction_costs`).

Kernels are looked up in the compiled program by name: with CUDA graphs, the default on GPUs, a trace
has no other link to the program. Layers share identical kernels, which are counted with the first of
them. Kernels of libraries (cuBLAS, cuDNN) are classified as attention or matrix products by their
names; a product belongs to the vocabulary head if the kernel before it does. The `xprof` library
(2.24) reports times of such a trace by kernel name, without operations and scopes.
"""

import collections
import pathlib
import re
from typing import Any, NamedTuple

import jax

from bert_jax.storage import files
from bert_jax.tools.preflight import hlo
from bert_jax.training import tracing

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
        dtype: dtype that it computes in.
    """
    summary = {"dtype": dtype, **table(folder, program.as_text(), steps)}
    files.write_json(folder / "table.json", summary)
    files.write(folder / "table.txt", format_table(summary))
    return format_table(summary)


class _Span(NamedTuple):
    """An interval in nanoseconds, and the name of the operation."""

    begin: float
    end: float
    name: str


def table(folder: pathlib.Path, text: str, steps: int) -> dict[str, Any]:
    """Return the time of a step in seconds: as a whole, on the device, and of each of `PARTS`.

    Args:
        folder: folder of the trace, from `tracing.record`.
        text: text of the compiled step (`jax.stages.Compiled.as_text`).
        steps: number of traced steps.
    """
    total_seconds, whole = part_seconds(folder, text)
    seconds = {part: total / steps for part, total in total_seconds.items()}
    return {
        "steps": steps,
        "step_seconds": (whole.end - whole.begin) / 1e9 / steps,
        "device_seconds": sum(seconds.values()) - seconds[_WAIT] - seconds[_HOST],
        "devices": f"{jax.device_count()} x {jax.local_devices()[0].device_kind}",
        "jax": jax.__version__,
        "parts": [{"part": part, "seconds": seconds[part]} for part in PARTS],
    }


def part_seconds(folder: pathlib.Path, text: str) -> tuple[dict[str, float], _Span]:
    """Divide the time of a trace among `PARTS`.

    Args:
        folder: of the trace.
        text: of the compiled program that was traced.

    Returns:
        Seconds by part, and the span of the traced steps.
    """
    program = hlo.instruction_costs(text)
    module = text.split(maxsplit=2)[1].rstrip(",")  # HloModule NAME, …
    spans, waits, whole = _read(folder, module)
    # Kernels on GPUs are named like their instructions, with "_" for ".".
    named = {**{name.replace(".", "_"): i for name, i in program.items()}, **program}
    spans = _with_products_of_the_head(spans, named)
    seconds = dict.fromkeys(PARTS, 0.0)
    for name, nanoseconds in _time_by_operation(spans, waits, whole).items():
        for part, share in _shares(name, named).items():
            seconds[part] += share * nanoseconds / 1e9
    return seconds, whole


def _with_products_of_the_head(
    spans: list[_Span], program: dict[str, dict[str, float]]
) -> list[_Span]:
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


def _time_by_operation(spans: list[_Span], waits: list[_Span], whole: _Span) -> dict[str, float]:
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


def _shares(name: str, program: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return the shares of parts in an operation, by the number of operations fused into it."""
    if name in PARTS:
        return {name: 1.0}
    if not name:
        return {_PROGRAMS: 1.0}
    if name.startswith(hlo.COLLECTIVES):
        return {"collectives": 1.0}
    if name not in program:
        matches = (part for part, words in _KERNELS if re.search(words, name, re.IGNORECASE))
        return {next(matches, _OTHER): 1.0}
    counts: dict[str, float] = collections.defaultdict(float)
    for source, count in program[name].items():
        counts[part_of(source)] += count
    total = sum(counts.values())
    if not total:  # it only moves data
        return {part_of(next(filter(None, program[name]), "")): 1.0}
    return {part: count / total for part, count in counts.items() if count}


def format_table(table: dict[str, Any]) -> str:
    """Format a table as text."""
    step = table["step_seconds"]
    lines = [
        f"{table['steps']} steps in {table['dtype']} on {table['devices']}, JAX {table['jax']}: "
        f"{step * 1e3:,.2f} ms per step, {table['device_seconds'] / step:.1%} of it on the device",
        f"\n{'part':20}{'ms':>10}{'share':>8}",
    ]
    for row in table["parts"]:
        part, seconds = row["part"], row["seconds"]
        lines.append(f"{part:20}{seconds * 1e3:10,.3f}{seconds / step:8.1%}  {PARTS[part]}")
    return "\n".join([*lines, ""])
