"""Generate the blocks of an experiment's README from its results.

A sweep.py may define blocks by name:

    def get_blocks(results):
        return {"sizes": Table(rows, columns, paper), "claims": Claims(...), "curve": Curves(...)}

The README contains the lines `<!-- NAME -->` and `<!-- /NAME -->` for each block. The text between
them is generated from results.jsonl; everything else is written by hand.
"""

import dataclasses
import pathlib
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from bert_jax.errors import UserError
from bert_jax.tools import sweep
from bert_jax.tools.report import page, plots
from bert_jax.tools.sweep.results import Results, current, verb

Result = dict[str, Any]
_SIGNIFICANCE = 0.05


class Block(Protocol):
    """A generated block of a README."""

    def markdown(self, results: Sequence[Result], folder: pathlib.Path) -> str:
        """Return the block as Markdown; write its pictures to `folder`."""
        ...


def matching(results: Sequence[Result], facts: Mapping[str, Any]) -> list[Result]:
    """Return the results that have all of the given facts."""
    return [line for line in results if all(line["facts"].get(k) == v for k, v in facts.items())]


def table(head: Sequence[Any], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Return the lines of a Markdown table, or "not run" without rows."""
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (head, *rows)]
    return [lines[0], f"|{'---|' * len(head)}", *lines[1:]] if len(lines) > 1 else ["not run"]


def with_block(text: str, name: str, lines: Sequence[str], path: pathlib.Path) -> str:
    """Replace the lines between `<!-- NAME -->` and `<!-- /NAME -->` of the page at a path."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, _, rest = text.partition(f"{begin}\n")
    _, marker, after = rest.partition(end)
    if not marker:
        raise UserError(f"{path}: add the lines {begin} and {end}")
    return "\n".join([before + begin, *lines, end + after])


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table."""

    metric: str
    # Facts of its results, in addition to the row's.
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    factor: float | int = 100.0  # multiplier of the values, such as 100 for percent
    digits: int = 1  # number of decimals

    def values(self, results: Sequence[Result]) -> list[float]:
        """Return the values of the results that have the metric, one per seed."""
        return [line["metrics"][self.metric] for line in results if self.metric in line["metrics"]]

    def cell(self, values: Sequence[float]) -> str:
        """Format the mean, standard deviation and number of seeds."""
        if not values:
            return "not run"
        values = [value * self.factor for value in values]
        mean = f"{statistics.fmean(values):.{self.digits}f}"
        if len(values) == 1:
            return mean
        return f"{mean} ± {statistics.stdev(values):.{self.digits}f} ({len(values)})"


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of results with the paper's numbers."""

    rows: Mapping[str, Mapping[str, Any]]  # facts of each row's results, by label
    columns: Mapping[str, Column]  # by label
    # The paper's numbers by row and column, in the displayed units.
    paper: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    title: str = ""  # of the first column
    average: bool = False  # whether to add a last column with the mean of complete rows

    def markdown(self, results: Sequence[Result], folder: pathlib.Path) -> str:
        """Return the table: mean ± standard deviation (seeds) [paper]."""
        rows = []
        for label, facts in self.rows.items():
            paper, cells, means = self.paper.get(label, {}), [], []
            for name, column in self.columns.items():
                values = column.values(matching(results, {**facts, **column.facts}))
                means += [column.factor * statistics.fmean(values)] if values else []
                reference = f" [{paper[name]}]" if name in paper else ""
                cells.append(column.cell(values) + reference)
            if self.average:
                is_complete = len(means) == len(self.columns)
                mean = Column("", factor=1).cell([statistics.fmean(means)] if is_complete else [])
                cells.append(f"{mean} [{statistics.fmean(paper.values()):.1f}]" if paper else mean)
            rows.append([label, *cells])
        lines = table([self.title, *self.columns, *["average"] * self.average], rows)
        if any(self.paper.get(label, {}).keys() & self.columns.keys() for label in self.rows):
            lines += ["", "In brackets: the paper's numbers."]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claim of the paper: one row is better than another in a column; all are labels."""

    column: str
    above: str  # the better row
    below: str  # the worse row
    lower: bool = False  # whether lower is better, as for perplexity


@dataclasses.dataclass(frozen=True)
class Claims:
    """Claims of the paper, tested on the results of a table.

    A difference counts if Welch's two-sided t-test over pretraining seeds, with Holm's correction for
    the number of tests, gives p < 0.05; it is positive if it agrees with the claim. Seeds of
    fine-tuning are averaged, as those of one pretrained model are not independent.
    """

    table: Table
    claims: Sequence[Claim]

    def markdown(self, results: Sequence[Result], folder: pathlib.Path) -> str:
        """Return a line per claim, and notes on the p-values."""
        pairs = [[self._values(results, c, x) for x in (c.above, c.below)] for c in self.claims]
        tests = holm([welch(*pair) for pair in pairs])
        lines = list(map(self._line, self.claims, pairs, tests))
        if any(p is not None for p in tests):
            lines += ["", "Welch's test over pretraining seeds, p with Holm's correction."]
        if any(line.endswith("(p: -).") for line in lines):
            lines += ["", "p: - where a side has one pretraining seed: not tested."]
        return "\n".join(lines)

    def _values(self, results: Sequence[Result], claim: Claim, row: str) -> list[float]:
        """Return the mean of each pretraining seed; all runs of another checkpoint count as one."""
        column, by_seed = self.table.columns[claim.column], {}
        for line in matching(results, {**self.table.rows[row], **column.facts}):
            own = line["seed"] if verb(line) == "pretrain" else 0
            seed = line["facts"].get("pretraining_seed", own)
            by_seed.setdefault(seed, []).extend(column.values([line]))
        return [statistics.fmean(values) for values in by_seed.values() if values]

    def _line(self, claim: Claim, values: Sequence[list[float]], p: float | None) -> str:
        column, (above, below) = self.table.columns[claim.column], values
        text = f"- {claim.column}: {claim.above} better than {claim.below}"
        rows = [self.table.paper.get(row, {}) for row in (claim.above, claim.below)]
        if all(claim.column in row for row in rows):
            text += " (paper: {} and {})".format(*(row[claim.column] for row in rows))
        if not above or not below:
            return f"{text}: not run."
        sign = -1 if claim.lower else 1
        gap = sign * (statistics.fmean(above) - statistics.fmean(below)) * column.factor
        if p is None:
            outcome = "yes" if gap > 0 else "no"
            return f"{text}: {outcome}, by {abs(gap):.{column.digits}f} (p: -)."
        if p >= _SIGNIFICANCE:
            return f"{text}: not significant (difference {gap:+.{column.digits}f}, p = {p:.2g})."
        outcome = "yes" if gap > 0 else "the opposite"
        return f"{text}: **{outcome}**, by {abs(gap):.{column.digits}f}, p = {p:.2g}."


def welch(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Return the p-value of Welch's two-sided t-test; None with fewer than two values on a side."""
    from scipy import stats

    if min(len(one), len(other)) < 2:
        return None
    if statistics.variance(one) + statistics.variance(other) == 0:  # SciPy returns NaN
        return float(statistics.fmean(one) == statistics.fmean(other))
    return float(stats.ttest_ind(one, other, equal_var=False).pvalue)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Return p-values corrected for the number of tests (Holm 1979); None stays None."""
    adjusted, largest = list(p_values), 0.0
    order = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    for rank, (p, i) in enumerate(order):
        adjusted[i] = largest = max(largest, min(1.0, (len(order) - rank) * p))
    return adjusted


@dataclasses.dataclass(frozen=True)
class Curves:
    """A plot with a curve for each series of results."""

    file: str  # file name, such as curve.svg
    series: Mapping[str, Mapping[str, Any]]  # facts of the results of each curve, by label
    x: str  # a fact, or "step", "real_tokens" or "seconds" of the held-out curve of pretraining runs
    y: str  # a metric, or "loss" of the held-out curve
    labels: tuple[str, str]  # of the x and y axis

    def points(self, results: Sequence[Result], facts: Mapping) -> list[tuple[float, float]]:
        """Return the points of a series: means over seeds."""
        # By step or fact, since seeds reach a step with slightly different tokens and seconds.
        values: dict[float, list[tuple[float, float]]] = {}
        for line in matching(results, facts):
            if "curve" in line and self.y == "loss":
                curve = line["curve"]
                for step, x, y in zip(curve["step"], curve[self.x], curve["loss"], strict=True):
                    values.setdefault(step, []).append((x, y))
            elif self.x in line["facts"] and self.y in line["metrics"]:
                x = line["facts"][self.x]
                values.setdefault(x, []).append((x, line["metrics"][self.y]))
        return sorted(
            (statistics.fmean(x for x, _ in each), statistics.fmean(y for _, y in each))
            for each in values.values()
        )

    def markdown(self, results: Sequence[Result], folder: pathlib.Path) -> str:
        """Draw the plot, and return a link to it."""
        drawn = {label: self.points(results, facts) for label, facts in self.series.items()}
        if not any(drawn.values()):
            return "not run"
        axes = _axes(4.0, xlabel=self.labels[0], ylabel=self.labels[1])
        for label, points in drawn.items():
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", ms=3, label=label)
        axes.legend(frameon=False)
        return _save(axes, folder / self.file, f"{self.labels[1]} by {self.labels[0]}")


@dataclasses.dataclass(frozen=True)
class Intervals:
    """A plot of each metric: the mean of each row and, with two seeds or more, its 95% t-interval."""

    rows: Mapping[str, Mapping[str, Any]]  # facts of each row's results, by label
    metrics: Sequence[str]

    def markdown(self, results: Sequence[Result], folder: pathlib.Path) -> str:
        """Draw the plots, and return links to them."""
        links = [self._draw(results, folder, metric) for metric in self.metrics]
        return "\n".join(links) or "not run"

    def _draw(self, results: Sequence[Result], folder: pathlib.Path, metric: str) -> str:
        from scipy import stats

        axes = _axes(0.8 + 0.3 * len(self.rows), xlabel=metric, ylim=(len(self.rows) - 0.5, -0.5))
        axes.set_yticks(range(len(self.rows)), self.rows)  # the first one at the top
        for y, facts in enumerate(self.rows.values()):
            values = Column(metric).values(matching(results, facts))
            dof = len(values) - 1
            error = stats.sem(values) * stats.t.ppf(0.975, dof) if dof > 0 else None
            if values:
                axes.errorbar(statistics.fmean(values), y, xerr=error, fmt="C0o")
        return _save(axes, folder / f"{metric}.svg", metric)


def _axes(height: float, **settings: Any) -> Any:
    """Return the axes of a new figure of a height in inches."""
    from matplotlib.figure import Figure

    axes = Figure(figsize=(7, height), layout="constrained").add_subplot(**settings)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def _save(axes: Any, path: pathlib.Path, title: str) -> str:
    plots.save(axes.figure, path)
    return f"![{title}]({path.name})"


def readme(folder: str | pathlib.Path) -> str:
    """Return an experiment's README with its blocks regenerated from results.jsonl.

    `folder` has sweep.py, README.md and optionally results.jsonl; pictures are written to it.
    """
    folder = pathlib.Path(folder)
    module = sweep.module_of(folder / "sweep.py")
    path = folder / "README.md"
    if not path.exists():
        raise UserError(f"{folder} has no README.md")
    results = current(Results(folder).read())
    blocks = module.get_blocks(results) if hasattr(module, "get_blocks") else {}
    text = path.read_text()
    for name in re.findall(r"^<!-- (\w+) -->$", text, re.MULTILINE):
        if name not in blocks:
            raise UserError(f"{path}: get_blocks of sweep.py does not define block {name!r}")
    for name, block in blocks.items():
        text = with_block(text, name, [block.markdown(results, folder)], path)
    return text


def write_readme(folder: str | pathlib.Path) -> pathlib.Path:
    """Regenerate an experiment's README, and return its path."""
    return page.write(pathlib.Path(folder) / "README.md", readme(folder))
