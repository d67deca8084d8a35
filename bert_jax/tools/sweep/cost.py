"""What the pretraining points of a sweep cost on a topology, before any of them runs."""

import copy
from collections.abc import Callable, Sequence

from bert_jax.config.schema import Config
from bert_jax.runtime.topology import Topology
from bert_jax.tools.sweep.points import Point


def estimate(
    points: Sequence[Point],
    config_of: Callable[[Point], Config],
    topology: Topology,
    dollars_per_chip_hour: float = 0.0,
) -> tuple[dict[str, str], list[str]]:
    """Return the cost of each pretraining point by name, by formula (`preflight`), and lines about all.

    `config_of` returns the config of such a point, whose rows need not exist; each point runs on `topology`.
    """
    from bert_jax.tools.preflight.estimate import preflight

    def text(hours: float) -> str:
        chip_hours = hours * topology.chips
        dollars = chip_hours * dollars_per_chip_hour
        price = f", ${dollars:,.2f}" if dollars else ""
        return f"about {hours:,.1f} hours, {chip_hours:,.0f} chip-hours{price}"

    reports = {
        point.name: preflight(*_without_rows(config_of(point), point, topology), compiles=False)
        for point in points
        if point.verb == "pretrain"
    }
    if not reports:
        return {}, []
    hours = {name: report["expected_hours"] for name, report in reports.items()}
    used = next(iter(reports.values()))["utilization"]
    never = f": no {topology.kind} has timed it" if used["assumed"] else ""
    others = sum(point.verb == "finetune" for point in points)
    return {name: text(each) for name, each in hours.items()}, [
        f"pretraining on {topology.name}: {text(sum(hours.values()))}, one point after the other",
        f"estimated by formula, at {used['share']:.0%} of the peak, {used['measured']}{never}; `bert-jax "
        "preflight` compiles the step",
        *([f"not estimated: {others} points that fine-tune"] if others else []),
    ]


def _without_rows(config: Config, point: Point, topology: Topology) -> tuple[Config, Topology, int]:
    """Return a config whose phases have T in place of rows, the topology and S, as the rows are prepared."""
    config = copy.deepcopy(config)
    prepared = [needed.options for needed in point.needs if needed.verb == "prepare"]
    for phase, options in zip(config.phases, [*prepared, *[{}] * len(config.phases)], strict=False):
        phase.rows, phase.mixture = "", ()
        phase.tokens = int(options.get("--tokens", 0)) or phase.tokens
    return config, topology, max([1, *(int(each.get("--sequences", 1)) for each in prepared)])
