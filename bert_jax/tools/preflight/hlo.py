"""Read what a compiled program computes, moves and sends, per chip and run, from its text (HLO).

XLA's cost analysis counts the body of a loop once; `Program` counts it once per iteration.
"""

import collections
import dataclasses
import functools
import math
import re
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
# Instructions without memory traffic of their own.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call",
    "after-all", "partition-id", "replica-id", "opt-barrier", "add-dependency", "iota",
}  # fmt: skip
_SLICES = ("slice", "dynamic-slice", "gather")
_SHOWN = 3  # arrays of a kernel that are named
# Instructions that compute nothing but move data.
_MOVES = _FREE | {
    *_SLICES, "copy", "transpose", "broadcast", "reshape", "dynamic-update-slice", "concatenate", "pad",
    "reverse", "convert", "bitcast-convert", "fusion", "custom-call", "rng-get-and-update-state",
}  # fmt: skip

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{$")
_END = re.compile(r"^\}(, [\w=\"]+)*$")
# NAME = TYPE OPERATION(OPERANDS), ATTRIBUTES
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
# An array has a type, dimensions and a layout, with S(SPACE) outside of main memory.
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{(?:[^{}]*S\((\d+)\))?[^{}]*\})?")
_CALLED = re.compile(r"\b(?:calls|to_apply|\w+_computations?)=(\{[^}]*\}|%?[\w.\-]+)")


class Shape(NamedTuple):
    """Type, dimensions and memory space of an array."""

    type: str
    dimensions: tuple[int, ...]
    # 0 is main memory (HBM); other spaces, such as VMEM on TPUs, cause no main-memory traffic.
    space: int

    def __str__(self) -> str:
        return f"{self.type}[{','.join(map(str, self.dimensions))}]"

    @property
    def bytes(self) -> int:
        """Size without padding, in bytes."""
        match = re.search(r"\d+", self.type)  # none in tokens, which have no size
        bits = int(match.group()) if match else 8 * (self.type == "pred")
        return math.prod(self.dimensions) * bits // 8

    @property
    def traffic(self) -> int:
        """Bytes in main memory."""
        return 0 if self.space else self.bytes


@dataclasses.dataclass(eq=False)
class Instruction:
    """An instruction of a computation.

    Attributes:
        shapes: of the result; several of a tuple.
        operands: the instructions whose results it takes.
        attributes: the text after the name of the operation.
        source: name stack in the JAX program, such as `jit(step)/jvp(Bert)/encoder/…`, or "". An
            instruction that the compiler added has that of a user, or else of an operand.
    """

    name: str
    op: str
    shapes: list[Shape]
    operands: list["Instruction"]
    attributes: str
    is_root: bool
    source: str

    @property
    def number(self) -> int:
        """The number in the parentheses of a parameter or constant."""
        return int(self.attributes.partition(")")[0])

    def attribute(self, name: str) -> str:
        """Return the name that an attribute has as its value."""
        return _groups(rf"\b{name}=%?([\w.\-]+)", self.attributes)[0]


class Kernel(NamedTuple):
    """An instruction that runs by itself, with what all its executions in a run of the program cost.

    Attributes:
        kind: "products" (with the operations fused into them), "attention" (kernels, whose products are
            not in the program's text), "collectives" or "other".
        source: name scope in the JAX program, with " (backward)" for gradients.
        shape: the arrays that it returns.
        times: number of executions.
        flops: FLOPs of its matrix products.
        bytes: main-memory traffic, each array once per execution.
        cycles: the compiler's own estimate, which only TPUs have.
    """

    kind: str
    source: str
    shape: str
    times: int
    flops: float
    bytes: int
    cycles: int | None


class Collective(NamedTuple):
    """A collective operation.

    Attributes:
        kind: one of `COLLECTIVES`.
        bytes: size of the whole array that is reduced, gathered or exchanged within a group.
        group: indices in the mesh of the devices of the first group; the others are like it.
        times: number of executions in a run of the program.
    """

    kind: str
    bytes: int
    group: Int[np.ndarray, " members"]
    times: int

    @property
    def sent_bytes(self) -> float:
        """Bytes that a chip sends in total with ring algorithms."""
        n = len(self.group)
        share = {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1.0}
        return self.times * self.bytes * share.get(self.kind, (n - 1) / n)


class Program:
    """A compiled program.

    Args:
        text: its text (`jax.stages.Compiled.as_text`).
    """

    def __init__(self, text: str):
        self._computations: dict[str, list[Instruction]] = {}
        name = self._entry = unfinished = ""
        known: dict[str, Instruction] = {}
        for line in text.splitlines():
            if unfinished or (name and _INSTRUCTION.match(line)):
                unfinished += line
                if not _is_open(unfinished):
                    instruction = _instruction(unfinished, known)
                    known[instruction.name], unfinished = instruction, ""
            elif name and _END.match(line):
                self._computations[name] = _with_sources(list(known.values()))
                name = ""
            elif not name and (head := _COMPUTATION.match(line)):
                name, known = head.group(2), {}
                self._entry = name if head.group(1) else self._entry
            elif name or _INSTRUCTION.match(line):
                raise ValueError(f"cannot read this line of a program: {line[:80]}")
        if name or not self._entry:
            raise ValueError(
                f"the text of a program ends in the computation {name or 'before ENTRY'}"
            )

    @functools.cached_property
    def _executed(self) -> list[tuple[Instruction, str, int, bool]]:
        """Instructions with their computation, number of executions, and whether inside a fusion."""
        executed, waiting = [], [(self._entry, 1, False)]
        while waiting:
            name, times, fused = waiting.pop()
            for i in self._computations[name]:
                executed.append((i, name, times, fused))
                inside = fused or i.op == "fusion"
                waiting += [(called, times * more, inside) for called, more in self._called(i)]
        return executed

    @functools.cached_property
    def kernels(self) -> list[Kernel]:
        """The instructions outside fusions that compute, move or send anything."""
        kernels = []
        for i, _, times, fused in self._executed:
            flops, traffic = 0.0, 0
            if not fused:
                flops, traffic = times * self._flops(i), times * self._traffic(i)
            if flops or traffic:
                arrays = [*map(str, i.shapes)]
                shape = ", ".join(arrays[:_SHOWN]) + ", …" * (len(arrays) > _SHOWN)
                cycles = re.search(r'"estimated_cycles":"(\d+)"', i.attributes)
                kernels.append(
                    Kernel(
                        self._kind(i, flops),
                        scope(i.source),
                        shape,
                        times,
                        flops,
                        traffic,
                        times * int(cycles[1]) if cycles else None,
                    )
                )
        return kernels

    def _kind(self, i: Instruction, flops: float) -> str:
        if flops:
            return "products"
        parts = self._computations[i.attribute("calls")] if i.op == "fusion" else [i]
        if any(part.op.startswith(COLLECTIVES) for part in parts):
            return "collectives"
        # Of cuDNN, Triton and Mosaic.
        is_kernel = i.op == "custom-call" and re.search(r"/attend/|fmha", i.source + i.attributes)
        return "attention" if is_kernel else "other"

    def _flops(self, i: Instruction) -> float:
        """Return the FLOPs of the matrix products of an instruction, with those fused into it."""
        if i.op != "fusion":
            return _matrix_flops(i)
        return sum(self._flops(j) for j in self._computations[i.attribute("calls")])

    @property
    def collectives(self) -> list[Collective]:
        """The collectives, in no particular order."""
        # An asynchronous collective may appear several times (start, overlapped, done) with the same
        # channel.
        channels: dict[str, Collective] = {}
        for i, name, times, _ in self._executed:
            kind = i.op.removesuffix("-start")
            if kind not in COLLECTIVES:
                continue
            if kind == "all-reduce" and "all-reduce-scatter" in name:
                kind = "reduce-scatter"
            group = first_group(i.attributes)
            size = sum(s.bytes for operand in i.operands for s in operand.shapes)
            size *= len(group) if kind == "all-gather" else 1
            channel = re.search(r"channel_id=(\d+)", i.attributes)
            key = channel.group(1) if channel else f"{name} {i.name}"
            if len(group) > 1 and (key not in channels or channels[key].times < times):
                channels[key] = Collective(kind, size, group, times)
        return list(channels.values())

    def operations(self) -> dict[str, dict[str, float]]:
        """Return the operations of each executed instruction, by its name, as in traces.

        They are those of one execution by `Instruction.source`: 2 per multiply-add of a matrix
        product, 1 per element of any other result, 0 for moves.
        """
        idle = _FREE - {"while", "call", "conditional"}
        return {
            i.name: self._operations(i)
            for i, _, _, fused in self._executed
            if not fused and i.op not in idle
        }

    def _operations(self, i: Instruction) -> dict[str, float]:
        """Return operations by source; called instructions without a source inherit it from `i`."""
        operations = collections.defaultdict(float, {i.source: _own_operations(i)})
        for called, times in self._called(i):
            for inner in self._computations[called]:
                for source, count in self._operations(inner).items():
                    operations[source or i.source] += times * count
        return dict(operations)

    def _called(self, i: Instruction) -> list[tuple[str, int]]:
        """Return the computations that an instruction calls, and how often."""
        if i.op == "while":
            return [(i.attribute("body"), self._trips(i))]
        if i.op not in ("fusion", "call", "conditional", "async-start"):
            return []
        # All branches of a conditional are counted.
        names = " ".join(_CALLED.findall(i.attributes))
        return [(name, 1) for name in re.findall(r"[\w.\-]+", names)]

    def _trips(self, i: Instruction) -> int:
        """Return the iterations of a loop: as annotated, or the constant in the loop condition."""
        if match := re.search(r'"known_trip_count":\{"n":"(\d+)"', i.attributes):
            return int(match.group(1))
        condition = self._computations[i.attribute("condition")]
        fused = [self._computations[j.attribute("calls")] for j in condition if j.op == "fusion"]
        constants = [j for c in [condition, *fused] for j in c if j.op == "constant"]
        return max((j.number for j in constants if re.match(r"\d+\)", j.attributes)), default=1)

    def _traffic(self, i: Instruction) -> int:
        """Return the main-memory traffic of an instruction outside fusions, in bytes."""
        if i.op in _FREE or i.op.endswith("-done") or "AllocateBuffer" in i.attributes:
            return 0
        if i.op == "fusion":
            fused = self._computations[i.attribute("calls")]
            parameters = [j for j in fused if j.op == "parameter" and j.shapes]
            read = sum(self._read(fused, p) for p in parameters if not p.shapes[0].space)
            return read + _written(fused, i)
        operands = [operand.shapes[0] for operand in i.operands if operand.shapes]
        if i.op in (*_SLICES, "slice-start"):
            result = i.shapes[i.op == "slice-start"]  # there it follows the operand
            return (not operands[0].space) * result.bytes + result.traffic
        if i.op == "dynamic-update-slice":
            return 2 * (not operands[0].space) * operands[1].bytes
        written = i.shapes[:1] if i.op.endswith("-start") else i.shapes
        return sum(shape.traffic for shape in [*operands, *written])

    def _read(self, fused: list[Instruction], value: Instruction) -> int:
        """Return the bytes that a fusion reads of an operand: only the slices, if only those are used."""
        whole, total = value.shapes[0].bytes, 0
        for user in fused:
            if value not in user.operands:
                continue
            is_first = user.operands[0] is value
            if user.op in _SLICES and is_first:
                total += user.shapes[0].bytes
            elif user.op == "bitcast" and not user.is_root:
                total += self._read(fused, user)
            elif user.op == "fusion":
                inner = self._computations[user.attribute("calls")]
                for p in inner:
                    if p.op == "parameter" and user.operands[p.number] is value:
                        total += self._read(inner, p)
            elif not (user.op == "dynamic-update-slice" and is_first):
                return whole
        return min(total, whole)


def scope(source: str) -> str:
    """Return the name scope of `Instruction.source`, without its operation, and the pass if backward."""
    # The compiler joins the names of instructions that it combines.
    names = [part for part in source.split("/")[:-1] if re.fullmatch(r"(?!cond$|branch_)\w+", part)]
    scope = "/".join(names[:8]) or "step"
    return f"{scope} (backward)" if "transpose(" in source else scope


def _is_open(line: str) -> bool:
    """Whether an instruction goes on in the next line, as attributes of Pallas kernels do."""
    text = re.sub(r'"(?:\\.|[^"\\])*"', "", line)
    return text.count("{") > text.count("}")


def _instruction(line: str, known: dict[str, Instruction]) -> Instruction:
    is_root, name, result, op, attributes = _INSTRUCTION.findall(line)[0]
    shapes = [
        Shape(kind, tuple(int(d) for d in dimensions.split(",") if d), int(space or 0))
        for kind, dimensions, space in _ARRAY.findall(result)
    ]
    before_attributes = re.split(r"\)(?:,|$)", attributes)[0]
    operands = [known[operand] for operand in re.findall(r"%([\w.\-]+)", before_attributes)]
    (source,) = re.findall(r'op_name="([^"]*/[^"]*)"', attributes)[:1] or [""]
    return Instruction(name, op, shapes, operands, attributes, bool(is_root), source)


def _with_sources(computation: list[Instruction]) -> list[Instruction]:
    """Give the instructions that the compiler added the source of a user, or else of an operand."""
    for i in reversed(computation):
        for operand in i.operands:
            operand.source = operand.source or i.source
    for i in computation:
        i.source = i.source or next((j.source for j in i.operands if j.source), "")
    return computation


def _groups(pattern: str, text: str) -> tuple[str, ...]:
    """Return the groups of a pattern that the text must contain."""
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"no {pattern} in {text[:120]}")
    return match.groups("")


def _own_operations(i: Instruction) -> float:
    if matrix := _matrix_flops(i):
        return matrix
    if i.op in _MOVES or i.op.startswith(COLLECTIVES) or i.op.endswith(("-start", "-done")):
        return 0.0
    # Reductions and scatters are counted by the elements of the input and of the updates.
    operand = {"reduce": 0, "reduce-window": 0, "scatter": -1}.get(i.op)
    array = i if operand is None else i.operands[operand]
    return float(math.prod(array.shapes[0].dimensions)) if array.shapes else 0.0


def _written(fused: list[Instruction], fusion: Instruction) -> int:
    """Return the bytes that a fusion writes: only the slice of in-place updates."""
    root, written = next(i for i in fused if i.is_root), 0
    results = root.operands if root.op == "tuple" else [root]
    for result, shape in zip(results, fusion.shapes, strict=False):
        while result.op == "bitcast":
            result = result.operands[0]
        if result.op == "dynamic-update-slice":
            written += 0 if shape.space else result.operands[1].shapes[0].bytes
        else:
            written += shape.traffic
    return written


def _matrix_flops(i: Instruction) -> float:
    if i.op == "convolution":
        left, right = (operand.shapes[0].dimensions for operand in i.operands[:2])
        return convolution_flops(left, right, i.shapes[0].dimensions, i.attributes)
    # Of a dot, or in the backend configuration of a cuBLAS call.
    pattern = r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)'
    if i.op != "dot" and not (i.op == "custom-call" and re.search(pattern, i.attributes)):
        return 0.0
    left = i.operands[0].shapes[0].dimensions
    (contracted,) = _groups(pattern, i.attributes)
    summed = math.prod(left[int(d)] for d in re.findall(r"\d+", contracted))
    return 2.0 * math.prod(i.shapes[0].dimensions) * summed


def convolution_flops(
    left: tuple[int, ...], right: tuple[int, ...], result: tuple[int, ...], attributes: str
) -> float:
    """Return the FLOPs of a convolution as XLA's HloCostAnalysis does, without padding.

    On TPUs matrix products are convolutions whose batch dimensions become dilated windows.
    """
    labels = _groups(r"dim_labels=(\w+)_(\w+)->(\w+)", attributes)
    inputs, kernel, outputs = (
        dict(zip(*pair, strict=True)) for pair in zip(labels, (left, right, result), strict=True)
    )
    settings = _groups(r"window=\{([^}]*)\}", attributes)[0] if "window={" in attributes else ""
    window = {
        name: [int(value.partition("_")[0]) for value in values.split("x")]  # a padding is LOW_HIGH
        for name, values in re.findall(r"(\w+)=([\dx_\-]+)", settings)
    }
    valid = 1
    for d, label in enumerate(sorted(filter(str.isdigit, inputs))):
        defaults = {"size": 1, "stride": 1, "pad": 0, "lhs_dilate": 1, "rhs_dilate": 1}
        size, stride, pad, spread, rhs_spread = (
            window[name][d] if name in window else default for name, default in defaults.items()
        )
        starts = np.arange(outputs[label])[:, None] * stride - pad
        position = starts + np.arange(size) * rhs_spread
        real = (position % spread == 0) & (position >= 0) & (position // spread < inputs[label])
        valid *= int(np.sum(real))
    groups = re.search(r"batch_group_count=(\d+)", attributes)
    # The kernel's input features are those of one feature group.
    return 2.0 * inputs["b"] / int(groups[1] if groups else 1) * kernel["i"] * kernel["o"] * valid


def first_group(attributes: str) -> Int[np.ndarray, " members"]:
    """Return the first group of a collective, from any notation of HLO.

    The notations are `{{0,1},{2,3}}`, `[2,2]<=[4]`, `[2,2]<=[2,2]T(1,0)`, or `mesh['a'=2,'b'=2], device_ids=(…)
    {'a'}`: groups along the named axes of a mesh; and `{}` without groups.
    """
    (text,) = _groups(r"(?:replica_groups|source_target_pairs)=(.*)", attributes)
    if match := re.match(r"\{\{([\d,]+)\}", text):
        return np.array(match[1].split(","), int)
    if match := re.match(r"\[\d+,(\d+)\]<=(\S+)", text):
        return _iota(match[2])[: int(match[1])]
    if match := re.match(r"mesh\[(.*?)\](?:, device_ids=\((\S+)\))? ?\{([^}:]*)\}", text):
        axes = re.findall(r"'([^']*)'=(\d+)", match[1])
        sizes = [int(size) for _, size in axes]
        grid = (_iota(match[2]) if match[2] else np.arange(math.prod(sizes))).reshape(sizes)
        along = (slice(None if f"'{axis}'" in match[3] else 1) for axis, _ in axes)
        return grid[tuple(along)].ravel()
    if text.startswith("{}"):
        return np.zeros(1, int)
    raise ValueError(f"cannot read the groups {text[:120]}")


def _iota(text: str) -> Int[np.ndarray, " devices"]:
    """Return `[2,4]T(1,0)` as a flat array: 0, 1, … in that shape, transposed."""
    shape, order = _groups(r"^\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    sizes = [int(d) for d in shape.split(",")]
    axes = [int(d) for d in order.split(",")] if order else None
    return np.transpose(np.arange(math.prod(sizes)).reshape(sizes), axes).ravel()
