"""Lines printed at the start and end of a run, and warnings about its settings."""

import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from bert_jax.config.schema import Config, TrainConfig
from bert_jax.errors import with_user_paths
from bert_jax.model import attention
from bert_jax.model.bert import Params
from bert_jax.model.flops import parameter_count
from bert_jax.objectives import warm_start
from bert_jax.objectives.base import Phase
from bert_jax.runs import workdir
from bert_jax.runtime import device, sharding

# Held-out losses of fewer masked tokens have a standard error above 0.1 nats.
_MIN_HELDOUT_TARGETS = 500
_MIN_EPOCHS, _MAX_EPOCHS = 1, 100


def start_lines(
    config: TrainConfig,
    mesh: sharding.Mesh,
    phases: Sequence[Phase],
    data: Sequence[dict[str, Any]],
    params: Params,
    folder: pathlib.Path,
) -> Iterator[str]:
    """Yield lines about devices, model, what it starts from, data, batch, and where files go.

    Args:
        config, mesh, phases, data, folder: as in `train`.
        params: the parameters or their shapes.
    """
    model = config.model
    hardware = (mesh.devices.flat[0].platform, mesh.shape["tensor"])
    yield sharding.mesh_line(mesh)
    yield from device.unused_gpu(config.platform, hardware[0])
    yield (
        f"model: L{model.layers}-H{model.hidden}-A{model.heads}, "
        f"{parameter_count(params, model):,} parameters, vocabulary of {model.vocab_size:,}"
    )
    if isinstance(config, Config):
        if "init" in data[0]:
            yield from map(with_user_paths, warm_start.describe_start(data[0]["init"]))
        different = {rows["digest"]: rows for rows in data}.values()  # phases may share rows
        train, tokens, heldout = (
            sum(rows[split][key] for rows in different)
            for split, key in (("train", "rows"), ("train", "real_tokens"), ("heldout", "rows"))
        )
        yield (
            f"data: {train:,} rows with {tokens:,} real tokens, "
            f"{_count(sum(_epochs(phases, data)))} epochs; {heldout:,} rows held out"
        )
    sizes = [f"{p.batch_size:,} rows of T={p.tokens} ({p.batch_size * p.tokens:,} tokens)" for p in phases]  # fmt: skip
    yield (
        f"batch: {', then '.join(dict.fromkeys(sizes))}; {model.dtype}; "
        f"{attention.attention_line(config, *hardware, [phase.tokens for phase in phases])}"
    )
    yield with_user_paths(f"workdir: {folder}; {config.steps:,} steps; log: {folder / workdir.LOG}")
    yield from _changes(folder)


def _changes(folder: pathlib.Path) -> Iterator[str]:
    """Yield a line if a run resumes with other versions or devices than those of its last start."""
    starts = workdir.read_steps(folder / "starts.jsonl")[-2:]
    if len(starts) < 2 or not starts[1]["step"]:
        return
    before, now = (
        {**start.get("versions", {}), "devices": start.get("devices")} for start in starts
    )
    if differ := [
        f"{name} {before.get(name)}, now {now[name]}"
        for name in now
        if before.get(name) != now[name]
    ]:
        yield (
            f"warning: the last start had other versions or devices ({'; '.join(differ)}): results may "
            "differ in their last bits from those of an uninterrupted run"
        )


def warnings(
    config: TrainConfig, phases: Sequence[Phase], data: Sequence[dict[str, Any]]
) -> Iterator[str]:
    """Yield a line for each setting that is likely a mistake, such as a warm-up that never ends."""
    warmup = config.optim.warmup_steps
    if warmup >= config.steps:
        yield (
            f"warning: config.optim.warmup_steps is {warmup:,} and config.steps {config.steps:,}: the "
            "learning rate does not reach its peak; set --config.optim.warmup_steps="
            f"{config.steps // 16 or 1}"
        )
    if not isinstance(config, Config):
        return
    epochs = sum(_epochs(phases, data))
    if epochs < _MIN_EPOCHS:
        yield f"warning: the run sees {epochs:.0%} of the rows: for all of them, raise config.steps"
    if epochs > _MAX_EPOCHS:
        yield (
            f"warning: the run sees all rows {epochs:,.0f} times: it will overfit; lower config.steps "
            "or prepare more text"
        )
    targets = min(
        rows["heldout"]["real_tokens"] * _evaluated_fraction(config, rows["heldout"]["rows"])
        for rows in data
    )
    if not config.model.causal:
        targets *= config.masking.final_rate or config.masking.rate
    if targets < _MIN_HELDOUT_TARGETS:
        yield (
            f"warning: held-out losses are means over {targets:,.0f} tokens, too few to compare runs: "
            "prepare more text, or with a larger --heldout-fraction"
        )


class End(NamedTuple):
    """How a run ended.

    Attributes:
        step: the last step.
        seconds: duration of the last start, with compilation and evaluations.
        metric: name of the held-out metric that selects the best checkpoint.
        best_step, best: step and value of its best evaluation; None if there was none.
        checkpoint: folder of the best checkpoint that is kept, or of the last if none has metrics.
    """

    step: int
    seconds: float
    metric: str
    best_step: int | None
    best: float | None
    checkpoint: str

    def lines(self) -> Iterator[str]:
        """Yield what to print."""
        yield f"finished step {self.step:,} after {duration(self.seconds)}"
        result = ""
        if self.best is not None:
            result = f"best held-out {self.metric} {self.best:.4f} at step {self.best_step:,}; "
        yield f"{result}checkpoint: {self.checkpoint}"


def duration(seconds: float) -> str:
    """Return a duration as "45 s", "13.4 min" or "2.5 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _evaluated_fraction(config: Config, heldout_rows: int) -> float:
    """Return the fraction of the held-out rows that evaluations during the run use."""
    if not config.evaluate_rows or not heldout_rows:  # 0 means all
        return 1.0
    return min(config.evaluate_rows / heldout_rows, 1.0)


def _count(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def _epochs(phases: Sequence[Phase], data: Sequence[dict[str, Any]]) -> Iterator[float]:
    """Yield how often each phase sees its rows."""
    for phase, rows in zip(phases, data, strict=True):
        yield phase.batch_size * (phase.end_step - phase.first_step) / rows["train"]["rows"]
