"""What the pretraining points of a sweep cost on a topology, before any of them runs."""

import argparse
import copy
from collections.abc import Callable, Sequence

from bert_jax.config.schema import Config
from bert_jax.errors import UserError
from bert_jax.runtime.topology import Topology, parse_topology
from bert_jax.tools.sweep.points import Point


class Costs:
    """Estimates of pretraining points by formula (`preflight`), and their sum.

    Args:
        topology: the chips of each point.
        config_of: returns the config of a point that pretrains; its rows need not exist.
        dollars_per_chip_hour: price; 0 if it is unknown.
    """

    def __init__(
        self,
        topology: Topology,
        config_of: Callable[[Point], Config],
        dollars_per_chip_hour: float = 0.0,
    ):
        self._topology, self._config_of = topology, config_of
        self._price = dollars_per_chip_hour or None
        self._hours: list[float] = []
        self._others = 0
        self._factor = ""

    def lines(self, point: Point) -> list[str]:
        """Return the cost of a point as a line; none for points that do not pretrain."""
        from bert_jax.tools.preflight.estimate import preflight

        if point.verb != "pretrain":
            self._others += point.verb == "finetune"
            return []
        config, sequences = _without_rows(self._config_of(point), point)
        report = preflight(config, self._topology, sequences, self._price, compiles=False)
        self._hours.append(report["expected_hours"])
        used = report["utilization"]
        self._factor = f"{used['share']:.0%} of the peak, {used['measured']}"
        if used["assumed"]:
            self._factor += f": no {self._topology.kind} has timed it"
        return [f"  about {self._text(report['expected_hours'])}"]

    def total(self, jobs: int) -> list[str]:
        """Return lines about all points, of which `jobs` run at a time."""
        if not self._hours:
            return []
        hours = sum(self._hours)
        lines = [
            f"pretraining on {self._topology.name}: about {self._text(hours)}"
            + (f"; {hours / jobs:,.1f} hours with {jobs} at a time" if jobs > 1 else ""),
            f"estimated by formula, at {self._factor}; `bert-jax preflight` compiles the step",
        ]
        if self._others:
            lines.append(f"not estimated: {self._others} points that fine-tune")
        return lines

    def _text(self, hours: float) -> str:
        chip_hours = hours * self._topology.chips
        price = f", ${chip_hours * self._price:,.2f}" if self._price else ""
        return f"{hours:,.1f} hours, {chip_hours:,.0f} chip-hours{price}"


def _without_rows(config: Config, point: Point) -> tuple[Config, int]:
    """Return a config whose phases have T in place of rows, and S, from the points that prepare them."""
    config = copy.deepcopy(config)
    prepared = [needed.options for needed in point.needs if needed.verb == "prepare"]
    sequences = 1
    for i, phase in enumerate(config.phases):
        phase.rows = ""
        options = prepared[min(i, len(prepared) - 1)] if prepared else {}
        phase.tokens = int(options.get("--tokens", 0)) or phase.tokens
        sequences = max(sequences, int(options.get("--sequences", 1)))
    return config, sequences


def of_options(
    arguments: Sequence[str], config_of: Callable[[Point], Config], dollars_per_chip_hour: float
) -> Costs | None:
    """Return the costs on the accelerator among the options of `launch`; None without one that is known."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--accelerator", default="")
    accelerator = parser.parse_known_args(list(arguments))[0].accelerator
    try:
        return Costs(parse_topology(accelerator.lower()), config_of, dollars_per_chip_hour)
    except UserError:
        return None
