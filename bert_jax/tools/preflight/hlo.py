"""Count matrix products, memory traffic and collectives of a compiled program per chip and run.

XLA's cost analysis counts the body of a loop once. This module parses the compiled program's text
(HLO) and counts the body once per iteration (`read`), or the operations of each instruction
(`instruction_costs`).
"""

import collections
import dataclasses
import functools
import math
import re
from typing import NamedTuple

import numpy as np

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
# Instructions without memory traffic of their own.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call",
    "after-all", "partition-id", "replica-id", "opt-barrier", "add-dependency", "iota",
}  # fmt: skip
_SLICES = ("slice", "dynamic-slice", "gather")
# Instructions that compute nothing but move data.
_MOVES = _FREE | {
    *_SLICES, "copy", "transpose", "broadcast", "reshape", "dynamic-update-slice", "concatenate", "pad",
    "reverse", "convert", "bitcast-convert", "fusion", "custom-call", "rng-get-and-update-state",
}  # fmt: skip

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{$")
_END = re.compile(r"^\}(, [\w=\"]+)*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^{}]*)\})?")
_CALLED = re.compile(
    r"\b(?:calls|body|to_apply|true_computation|false_computation)=%?([\w.\-]+)"
    r"|branch_computations=\{([^}]*)\}"
)


class Shape(NamedTuple):
    """Type, dimensions and memory space of an array."""

    type: str
    dimensions: tuple[int, ...]
    # 0 is main memory (HBM); other spaces, such as VMEM on TPUs, cause no main-memory traffic.
    space: int

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


class Instruction(NamedTuple):
    """An instruction of a computation."""

    name: str
    op: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    @property
    def source(self) -> str:
        """Name stack in the JAX program, such as `jit(step)/jvp(Bert)/encoder/…`, or ""."""
        match = re.search(r'op_name="([^"]*/[^"]*)"', self.attributes)
        return match.group(1) if match else ""


class Collective(NamedTuple):
    """A collective operation.

    Attributes:
        kind: one of `COLLECTIVES`.
        bytes: size of the whole array that is reduced, gathered or exchanged within a group.
        groups: [groups, members] indices of the devices in the mesh.
        times: number of executions in a run of the program.
    """

    kind: str
    bytes: int
    groups: np.ndarray
    times: int

    @property
    def sent_bytes(self) -> float:
        """Bytes that a chip sends in total with ring algorithms."""
        n = self.groups.shape[1]
        share = {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1.0}
        return self.times * self.bytes * share.get(self.kind, (n - 1) / n)


@dataclasses.dataclass
class Program:
    """Totals of one run on one chip.

    Attributes:
        argument_bytes: size of the arguments, without the padding of their layouts.
        matrix_flops: FLOPs of matrix products and convolutions, 2 per multiply-add.
        traffic_bytes: bytes read from and written to main memory, counting each array once per
            instruction.
        collectives: in no particular order.
    """

    argument_bytes: int = 0
    matrix_flops: float = 0.0
    traffic_bytes: float = 0.0
    collectives: list[Collective] = dataclasses.field(default_factory=list)


def read(text: str) -> Program:
    """Return the totals of a compiled program's text (`jax.stages.Compiled.as_text`)."""
    return _Reader(text).program()


def instruction_costs(text: str) -> dict[str, dict[str, float]]:
    """Return the operations of each executed instruction, by its name, as in traces.

    They are FLOPs of one execution by `Instruction.source`: 2 per multiply-add of a matrix product, 1
    per element of any other result, 0 for moves. Instructions that the compiler added count for the
    source that they serve.
    """
    return _Reader(text).instruction_costs()


class _Reader:
    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry = ""
        lines: list[str] | None = None  # of the instructions of a computation
        name = ""
        for line in text.splitlines():
            if lines is None:
                if head := _COMPUTATION.match(line):
                    name, lines = head.group(2), []
                    self.entry = name if head.group(1) else self.entry
            elif _END.match(line):
                self.computations[name] = {i.name: i for i in map(_instruction, lines)}
                lines = None
            elif _INSTRUCTION.match(line):
                lines.append(line)
            elif lines:  # attributes of a Pallas kernel contain line breaks
                lines[-1] += line
            else:
                raise ValueError(f"this line of a program is no instruction: {line[:80]}")
        if lines is not None:
            raise ValueError(f"the text of a program ends in the computation {name}")

    def program(self) -> Program:
        entry = self.computations[self.entry].values()
        arguments = [shape for i in entry if i.op == "parameter" for shape in i.shapes]
        program = Program(sum(shape.bytes for shape in arguments))
        # An asynchronous collective may appear several times (start, overlapped, done) with the same
        # channel.
        channels: dict[str, Collective] = {}
        for name, times, fused in self._runs():
            computation = self.computations[name]
            reduce_scatters = "all-reduce-scatter" in name
            for instruction in computation.values():
                program.matrix_flops += times * self._matrix_flops(computation, instruction)
                if not fused:
                    program.traffic_bytes += times * self._traffic(computation, instruction)
                kind = instruction.op.removesuffix("-start")
                if kind not in COLLECTIVES:
                    continue
                if reduce_scatters and kind == "all-reduce":
                    kind = "reduce-scatter"
                collective = self._collective(computation, instruction, kind, times)
                channel = re.search(r"channel_id=(\d+)", instruction.attributes)
                key = channel.group(1) if channel else f"{name} {instruction.name}"
                is_longest = key not in channels or channels[key].times < times
                if collective.groups.shape[1] > 1 and is_longest:
                    channels[key] = collective
        program.collectives = list(channels.values())
        return program

    def instruction_costs(self) -> dict[str, dict[str, float]]:
        called = ("while", "call", "conditional")
        return {
            i.name: dict(self._operations(name, i))
            for name, _, fused in self._runs()
            for i in (() if fused else self.computations[name].values())
            if i.op in called or i.op not in _FREE
        }

    def _operations(self, name: str, i: Instruction) -> dict[str, float]:
        """Return operations by source; called instructions without a source inherit it from `i`."""
        own_source = self._sources(name)[i.name]
        operations = collections.defaultdict(float)
        operations[own_source] = self._own_operations(self.computations[name], i)
        for called, times in self._called(i):
            for inner in self.computations[called].values():
                for source, count in self._operations(called, inner).items():
                    operations[source or own_source] += times * count
        return operations

    @functools.cache  # noqa: B019 (a reader lives as long as its text is read)
    def _sources(self, name: str) -> dict[str, str]:
        """Return the source of each instruction.

        Instructions that the compiler added take the source of a user or else of an operand.
        """
        computation = self.computations[name]
        sources = {i.name: i.source for i in computation.values()}
        for i in reversed(computation.values()):
            for operand in i.operands:
                sources[operand] = sources.get(operand) or sources[i.name]
        for i in computation.values():
            of_operands = (sources[operand] for operand in i.operands)
            sources[i.name] = sources[i.name] or next(filter(None, of_operands), "")
        return sources

    def _own_operations(self, computation: dict[str, Instruction], i: Instruction) -> float:
        if matrix := self._matrix_flops(computation, i):
            return matrix
        if i.op in _MOVES or i.op.startswith(COLLECTIVES) or i.op.endswith(("-start", "-done")):
            return 0.0
        # Reductions and scatters are counted by the elements of the input and of the updates.
        operand = {"reduce": 0, "reduce-window": 0, "scatter": -1}.get(i.op)
        array = i if operand is None else computation[i.operands[operand]]
        return float(math.prod(array.shapes[0].dimensions)) if array.shapes else 0.0

    def _called(self, instruction: Instruction) -> list[tuple[str, int]]:
        """Return the computations that an instruction calls, and how often."""
        op = instruction.op
        if op == "while":
            return [(_attribute(instruction, "body"), self._trips(instruction))]
        if op not in ("fusion", "call", "conditional", "async-start"):
            return []
        # All branches of a conditional are counted.
        return [
            (called, 1)
            for one, several in _CALLED.findall(instruction.attributes)
            for called in re.findall(r"[\w.\-]+", several) or [one]
        ]

    def _runs(self) -> list[tuple[str, int, bool]]:
        """Return the computations that run: (name, number of times, whether inside a fusion)."""
        runs, waiting = [], [(self.entry, 1, False)]
        while waiting:
            name, times, fused = waiting.pop()
            runs.append((name, times, fused))
            for instruction in self.computations[name].values():
                for called, more in self._called(instruction):
                    waiting.append((called, times * more, fused or instruction.op == "fusion"))
        return runs

    def _trips(self, instruction: Instruction) -> int:
        """Return the iterations of a loop: as annotated, or the constant in the loop condition."""
        if match := re.search(r'"known_trip_count":\{"n":"(\d+)"', instruction.attributes):
            return int(match.group(1))
        condition = self.computations[_attribute(instruction, "condition")]
        fused = [self.computations[_attribute(i, "calls")] for i in condition.values() if i.op == "fusion"]  # fmt: skip
        constants = [i for c in [condition, *fused] for i in c.values() if i.op == "constant"]
        return max((_number(i) for i in constants if re.match(r"\d+\)", i.attributes)), default=1)

    def _matrix_flops(self, computation: dict[str, Instruction], i: Instruction) -> float:
        if i.op == "convolution":
            left, right = (computation[name].shapes[0].dimensions for name in i.operands[:2])
            return _convolution_flops(left, right, i.shapes[0].dimensions, i.attributes)
        # Of a dot, or in the backend configuration of a cuBLAS call.
        pattern = r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)'
        if i.op != "dot" and not (i.op == "custom-call" and re.search(pattern, i.attributes)):
            return 0.0
        left = computation[i.operands[0]].shapes[0].dimensions
        (contracted,) = _groups(pattern, i.attributes)
        summed = math.prod(left[int(d)] for d in re.findall(r"\d+", contracted))
        return 2.0 * math.prod(i.shapes[0].dimensions) * summed

    def _traffic(self, computation: dict[str, Instruction], i: Instruction) -> int:
        """Return the main-memory traffic of an instruction outside fusions, in bytes."""
        if i.op in _FREE or i.op.endswith("-done") or "AllocateBuffer" in i.attributes:
            return 0
        if i.op == "fusion":
            fused = self.computations[_attribute(i, "calls")]
            read = sum(
                self._read(fused, p)
                for p in fused.values()
                if p.op == "parameter" and p.shapes and not p.shapes[0].space
            )
            return read + sum(_written(fused, i))
        arrays = [computation[name].shapes for name in i.operands if name in computation]
        operands = [shapes[0] for shapes in arrays if shapes]
        if i.op in _SLICES:
            return (not operands[0].space) * i.shapes[0].bytes + i.shapes[0].traffic
        if i.op == "slice-start":  # the result follows the operand
            return (not operands[0].space) * i.shapes[1].bytes + i.shapes[1].traffic
        if i.op == "dynamic-update-slice":
            return 2 * (not operands[0].space) * operands[1].bytes
        written = i.shapes[:1] if i.op.endswith("-start") else i.shapes
        return sum(s.traffic for s in operands) + sum(s.traffic for s in written)

    def _read(self, fused: dict[str, Instruction], value: Instruction) -> int:
        """Return the bytes that a fusion reads of an operand: only the slices, if only those are used."""
        whole, total = value.shapes[0].bytes, 0
        for user in fused.values():
            if value.name not in user.operands:
                continue
            is_first = user.operands[0] == value.name
            if user.op in _SLICES and is_first:
                total += user.shapes[0].bytes
            elif user.op == "bitcast" and not user.is_root:
                total += self._read(fused, user)
            elif user.op == "fusion":
                inner = self.computations[_attribute(user, "calls")]
                for p in inner.values():
                    if p.op == "parameter" and user.operands[_number(p)] == value.name:
                        total += self._read(inner, p)
            elif not (user.op == "dynamic-update-slice" and is_first):
                return whole
        return min(total, whole)

    def _collective(
        self, computation: dict[str, Instruction], i: Instruction, kind: str, times: int
    ) -> Collective:
        size = sum(s.bytes for name in i.operands for s in computation[name].shapes)
        if kind == "collective-permute":
            (pairs,) = _groups(r"source_target_pairs=\{(.*?\})\}", i.attributes)
            groups = np.array([p.split(",") for p in re.findall(r"\{([\d,]+)\}", pairs)], int)
            return Collective(kind, size, groups, times)
        groups = replica_groups(i.attributes)
        return Collective(
            kind, size * groups.shape[1] if kind == "all-gather" else size, groups, times
        )


def _instruction(line: str) -> Instruction:
    is_root, name, rest = _INSTRUCTION.findall(line)[0]
    # A type (an array, or a tuple of types in parentheses), then op(operands), attributes.
    kind, rest = _split(rest, " ")
    op, _, rest = rest.partition("(")
    shapes = tuple(_shape(*array) for array in _ARRAY.findall(kind))
    operands = tuple(re.findall(r"%([\w.\-]+)", _split(rest, ")")[0]))
    return Instruction(name, op, shapes, operands, rest, bool(is_root))


def _split(text: str, end: str) -> tuple[str, str]:
    """Split a text at the first `end` outside of brackets."""
    depth = 0
    for i, character in enumerate(text):
        if character == end and depth == 0:
            return text[:i], text[i + 1 :]
        depth += (character in "({[") - (character in ")}]")
    return text, ""


def _shape(kind: str, dimensions: str, layout: str) -> Shape:
    space = re.search(r"S\((\d+)\)", layout)
    sizes = tuple(int(d) for d in dimensions.split(",") if d)
    return Shape(kind, sizes, int(space.group(1)) if space else 0)


def _number(instruction: Instruction) -> int:
    """Return the number in the parentheses of a parameter or constant."""
    return int(instruction.attributes.partition(")")[0])


def _attribute(instruction: Instruction, name: str) -> str:
    match = re.search(rf"\b{name}=%?([\w.\-]+)", instruction.attributes)
    return match.group(1) if match else ""


def _groups(pattern: str, text: str) -> tuple[str, ...]:
    """Return the groups of a pattern that the text must contain."""
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"no {pattern} in {text[:120]}")
    return match.groups("")


def _written(fused: dict[str, Instruction], fusion: Instruction) -> list[int]:
    """Return the bytes written by each result of a fusion: only the slice of in-place updates."""
    root = next(i for i in fused.values() if i.is_root)
    results = [fused[name] for name in root.operands] if root.op == "tuple" else [root]
    written = []
    for result, shape in zip(results, fusion.shapes, strict=False):
        while result.op == "bitcast":
            result = fused[result.operands[0]]
        if result.op == "dynamic-update-slice":
            written.append(0 if shape.space else fused[result.operands[1]].shapes[0].bytes)
        else:
            written.append(shape.traffic)
    return written


def _convolution_flops(
    left: tuple[int, ...], right: tuple[int, ...], result: tuple[int, ...], attributes: str
) -> float:
    """Return the FLOPs of a convolution as XLA's HloCostAnalysis does, without padding.

    On TPUs matrix products are convolutions whose batch dimensions become dilated windows.
    """
    labels = _groups(r"dim_labels=(\w+)_(\w+)->(\w+)", attributes)
    settings = _groups(r"window=\{([^}]*)\}", attributes)[0] if "window={" in attributes else ""
    window = dict(re.findall(r"(\w+)=([\dx_\-]+)", settings))
    spatial = sorted(c for c in labels[0] if c.isdigit())

    def option(name: str, d: int, default: int = 1) -> int:
        values = window[name].split("x") if name in window else []
        return int(values[d].partition("_")[0]) if values else default  # a padding is LOW_HIGH

    valid = 1
    for d, label in enumerate(spatial):
        extent, dilation = left[labels[0].index(label)], option("lhs_dilate", d)
        position = (
            np.arange(result[labels[2].index(label)])[:, None] * option("stride", d)
            - option("pad", d, 0)
            + np.arange(option("size", d))[None, :] * option("rhs_dilate", d)
        )
        real = (position % dilation == 0) & (position >= 0)
        valid *= int(np.sum(real & (position // dilation < extent)))
    groups = re.search(r"batch_group_count=(\d+)", attributes)
    batch = left[labels[0].index("b")] / int(groups[1] if groups else 1)
    # The kernel's input features are those of one feature group.
    return 2.0 * batch * right[labels[1].index("i")] * right[labels[1].index("o")] * valid


@functools.cache
def replica_groups(attributes: str) -> np.ndarray:
    """Return the groups of a collective, [groups, members], from any notation of HLO.

    The notations are `{{0,1},{2,3}}`, `[2,2]<=[4]`, `[2,2]<=[2,2]T(1,0)`, or `mesh['a'=2,'b'=2], device_ids=(…)
    {'a'}`: groups along the named axes of a mesh.
    """
    text = attributes[attributes.index("replica_groups=") + len("replica_groups=") :]
    if text.startswith("mesh["):
        axes = re.findall(r"'([^']*)'=(\d+)", text[: text.index("]")])
        names, sizes = [a for a, _ in axes], [int(n) for _, n in axes]
        rest = text[text.index("]") + 1 :]
        ids = re.match(r", device_ids=\((.*?\]?(?:T\([\d,]*\))?)\)", rest)
        order = _iota(ids.group(1)) if ids else np.arange(math.prod(sizes))
        (along,) = _groups(r"\{((?:'[^']*'(?::\([^)]*\)\d+)?(?:, ?)?)*)\}", rest)
        if ":" in along:
            raise ValueError(f"part of a mesh axis in {text[:120]}")
        chosen = [names.index(a) for a in re.findall(r"'([^']*)'", along)]
        others = [i for i in range(len(names)) if i not in chosen]
        grid = order.reshape(sizes).transpose(*others, *chosen)
        return grid.reshape(-1, math.prod(sizes[i] for i in chosen))
    if text.startswith("{"):
        groups = re.findall(r"\{([\d,]+)\}", text[: text.index("}}") + 1]) if "}}" in text else []
        return np.array([g.split(",") for g in groups], int) if groups else np.zeros((1, 1), int)
    shape, source = _groups(r"^\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", text)
    return _iota(source).reshape([int(d) for d in shape.split(",")])


def _iota(text: str) -> np.ndarray:
    """Return `[2,4]T(1,0)` as a flat array: 0, 1, … in that shape, transposed."""
    shape, order = _groups(r"^\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    shape = [int(d) for d in shape.split(",")]
    ids = np.arange(math.prod(shape)).reshape(shape)
    return (ids.transpose([int(d) for d in order.split(",")]) if order else ids).ravel()
