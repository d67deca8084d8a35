"""An experiment's README from its results.

A sweep's file may say what its README shows, by name:

    def get_blocks(results):
        return {"sizes": Table(rows, columns, paper), "found": Claims(...), "curve": Curves(...)}

The README is written by hand around a line `<!-- NAME -->` and a line `<!-- /NAME -->` for each;
what is between them is written here, from results.jsonl alone.
"""

import dataclasses
import pathlib
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from bert_jax import files
from bert_jax.errors import UserError
from bert_jax.tools import sweep
from bert_jax.tools.sweep.results import Results, current

Line = dict[str, Any]
_TOLD_BELOW = 0.05


class Block(Protocol):
    """A part of a README that follows from results."""

    def markdown(self, results: Sequence[Line], folder: pathlib.Path) -> str:
        """Its text; pictures are written to the folder."""


def matching(results: Sequence[Line], facts: Mapping[str, Any]) -> list[Line]:
    """Those of the results that have all of the facts."""
    return [line for line in results if all(line["facts"].get(k) == v for k, v in facts.items())]


def values_of(results: Sequence[Line], facts: Mapping[str, Any], metric: str) -> list[float]:
    """A metric of all matching results that have it, a value a seed."""
    return [
        line["metrics"][metric] for line in matching(results, facts) if metric in line["metrics"]
    ]


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        metric: of the results.
        facts: of its results, besides the row's.
        factor: what values are multiplied by, such as 100 for percent.
        digits: after the point.
    """

    metric: str
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    factor: float | int = 100.0
    digits: int = 1

    def cell(self, values: Sequence[float]) -> str:
        """Mean, deviation and number of seeds."""
        if not values:
            return "not run"
        values = [value * self.factor for value in values]
        mean = f"{statistics.fmean(values):.{self.digits}f}"
        if len(values) == 1:
            return mean
        return f"{mean} ± {statistics.stdev(values):.{self.digits}f} ({len(values)})"


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of results beside the paper's.

    Attributes:
        rows: for each label the facts of its results.
        columns: by label.
        paper: what the paper has, by row and column, in the units that are shown.
        title: of the first column.
        average: whether a last column has the mean of a row's others, where they are all there.
    """

    rows: Mapping[str, Mapping[str, Any]]
    columns: Mapping[str, Column]
    paper: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    title: str = ""
    average: bool = False

    def markdown(self, results: Sequence[Line], folder: pathlib.Path) -> str:
        """Rows; the paper's numbers in parentheses; a number after a deviation counts seeds."""
        names = [*self.columns, *(["average"] if self.average else [])]
        lines = [f"| {self.title} | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
        for label, facts in self.rows.items():
            beside, cells, means = self.paper.get(label, {}), [], []
            for name, column in self.columns.items():
                values = values_of(results, {**facts, **column.facts}, column.metric)
                means += [column.factor * statistics.fmean(values)] if values else []
                told = f" [{beside[name]}]" if name in beside else ""
                cells.append(column.cell(values) + told)
            if self.average:
                whole = len(means) == len(self.columns)
                told = f" [{statistics.fmean(beside.values()):.1f}]" if beside else ""
                cells.append((f"{statistics.fmean(means):.1f}" if whole else "not run") + told)
            lines.append(f"| {label} | {' | '.join(cells)} |")
        if any(self.paper.get(label, {}).keys() & self.columns.keys() for label in self.rows):
            lines += ["", "In brackets: the paper's."]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Claim:
    """What the paper orders: one row above another in a column.

    Attributes:
        column: its label.
        above, below: labels of rows; higher is better unless `lower`.
        lower: the better value is the lower one, as of a perplexity.
    """

    column: str
    above: str
    below: str
    lower: bool = False


@dataclasses.dataclass(frozen=True)
class Claims:
    """Whether the paper's order is seen in a table's results.

    A difference is told where Welch's test over seeds finds p < 0.05, of two sides.
    """

    table: Table
    claims: Sequence[Claim]

    def markdown(self, results: Sequence[Line], folder: pathlib.Path) -> str:
        """A line a claim."""
        return "\n".join(self._line(results, claim) for claim in self.claims)

    def _line(self, results: Sequence[Line], claim: Claim) -> str:
        column = self.table.columns[claim.column]
        above, below = (
            values_of(results, {**self.table.rows[row], **column.facts}, column.metric)
            for row in (claim.above, claim.below)
        )
        what = f"- {claim.column}: {claim.above} better than {claim.below}"
        paper = [
            self.table.paper.get(row, {}).get(claim.column) for row in (claim.above, claim.below)
        ]
        if None not in paper:
            what += f" (paper: {paper[0]} and {paper[1]})"
        if not above or not below:
            return f"{what}: not run."
        sign = -1 if claim.lower else 1
        gap = sign * (statistics.fmean(above) - statistics.fmean(below)) * column.factor
        if min(len(above), len(below)) < 2:
            seen = "so it is" if gap > 0 else "not so"
            return f"{what}: {seen}, by {abs(gap):.{column.digits}f}; one seed, which tells little."
        p = _welch(above, below)
        told = f"{abs(gap):.{column.digits}f}, p = {p:.2g}"
        if p >= _TOLD_BELOW:
            return f"{what}: cannot be told here (apart by {told})."
        return f"{what}: **{'so it is' if gap > 0 else 'the other way round'}**, by {told}."


def _welch(one: Sequence[float], other: Sequence[float]) -> float:
    """p of two means being as far apart by chance (Welch's t-test)."""
    from scipy import stats

    if statistics.variance(one) + statistics.variance(other) == 0:  # of which it says NaN
        return float(statistics.fmean(one) == statistics.fmean(other))
    return float(stats.ttest_ind(one, other, equal_var=False).pvalue)


@dataclasses.dataclass(frozen=True)
class Curves:
    """A picture: a line for each of some results.

    Attributes:
        file: its name, such as curve.svg.
        series: for each label the facts of its results.
        x: a fact, or of a pretraining run's held-out curve "step", "real_tokens" or "seconds".
        y: a metric; of the curve "loss".
        labels: of the axes.
    """

    file: str
    series: Mapping[str, Mapping[str, Any]]
    x: str
    y: str
    labels: tuple[str, str]

    def points(
        self, results: Sequence[Line], facts: Mapping[str, Any]
    ) -> list[tuple[float, float]]:
        """What is drawn for a series: means over seeds."""
        found: dict[float, list[float]] = {}
        for line in matching(results, facts):
            if "curve" in line and self.y == "loss":
                for x, y in zip(line["curve"][self.x], line["curve"]["loss"], strict=True):
                    found.setdefault(x, []).append(y)
            elif self.x in line["facts"] and self.y in line["metrics"]:
                found.setdefault(line["facts"][self.x], []).append(line["metrics"][self.y])
        return [(float(x), statistics.fmean(found[x])) for x in sorted(found)]

    def markdown(self, results: Sequence[Line], folder: pathlib.Path) -> str:
        """Draws, and links to the picture."""
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        drawn = {label: self.points(results, facts) for label, facts in self.series.items()}
        if not any(drawn.values()):
            return "not run"
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot()
        for label, points in drawn.items():
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", ms=3, label=label)
        axes.set(xlabel=self.labels[0], ylabel=self.labels[1])
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        path = folder / self.file
        # The same picture is the same file.
        with files.replacing(path) as beside, rc_context({"svg.hashsalt": "bert_jax"}):
            figure.savefig(beside, format=path.suffix[1:], dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)  # fmt: skip
        return f"![{self.labels[1]} by {self.labels[0]}]({self.file})"


@dataclasses.dataclass(frozen=True)
class Runs:
    """What the results cost: a line a point."""

    def markdown(self, results: Sequence[Line], folder: pathlib.Path) -> str:
        """Points with seeds, steps, tokens, time, machine and commit."""
        lines = ["| point | seed | steps | real tokens | minutes | load | on | commit |", "|---|---|---|---|---|---|---|---|"]  # fmt: skip
        for r in results:
            if "step" in r:
                on = r["devices"] + (f", {r['cores']} cores" if r["cores"] else "")
                cells = [r["point"], r["seed"], f"{r['step']:,}", f"{r['real_tokens']:,}", f"{r['step_seconds'] / 60:.1f}", r["load"], on, r["commit"]]  # fmt: skip
                lines.append(f"| {' | '.join(map(str, cells))} |")
        return "\n".join(lines) if len(lines) > 2 else "not run"


def readme(folder: str | pathlib.Path) -> str:
    """An experiment's README with its blocks written anew from results.jsonl.

    Args:
        folder: holds sweep.py, README.md and perhaps results.jsonl; pictures are written to it.

    Raises:
        UserError: no such files; a block that one of the two files does not have.
    """
    folder = pathlib.Path(folder)
    module = sweep.module_of(folder / "sweep.py")
    path = folder / "README.md"
    if not path.exists():
        raise UserError(f"{folder} has no README.md to write the tables into")
    results = current(Results(folder).read())
    blocks = module.get_blocks(results) if hasattr(module, "get_blocks") else {}
    text = path.read_text()
    for name in re.findall(r"^<!-- (\w+) -->$", text, re.MULTILINE):
        if name not in blocks:
            raise UserError(f"{path}: get_blocks of sweep.py knows no block {name!r}")
    for name, block in blocks.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        if begin not in text or end not in text:
            raise UserError(f"{path} has no lines {begin.strip()} and {end} for a block")
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}{block.markdown(results, folder)}\n{end}{after}"
    return text


def write_readme(folder: str | pathlib.Path) -> pathlib.Path:
    """Writes what `readme` gives; the README's path."""
    path = pathlib.Path(folder) / "README.md"
    text = readme(folder)
    with files.one_line_errors(f"cannot write {path}"):
        files.write(path, text)
    return path
