"""Lines printed at the start and end of a run, and warnings about its settings."""

import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from bert_jax.config.schema import Config, TrainConfig, model_at
from bert_jax.errors import counted, with_user_paths
from bert_jax.model import attention
from bert_jax.model.bert import Params
from bert_jax.model.flops import parameter_count
from bert_jax.objectives import warm_start
from bert_jax.objectives.base import Phase
from bert_jax.runs import workdir
from bert_jax.runtime import device, sharding
from bert_jax.training.log import sources_text

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

    The arguments are those of `train`; `params` are the parameters or their shapes.
    """
    model = config.model
    hardware = (mesh.devices.flat[0].platform, mesh.shape["tensor"])
    yield sharding.mesh_line(mesh)
    yield from device.unused_gpu(config.platform, hardware[0])
    yield (
        f"model: L{model.layers}-H{model.hidden}-A{model.heads}, "
        f"{parameter_count(params, model):,} parameters, vocabulary of {model.vocab_size:,}"
        + ("; no next-sentence prediction" * (model.masked_lm and not model.next_sentence))
    )
    if isinstance(config, Config):
        if "init" in data[0]:
            yield from map(with_user_paths, warm_start.describe_start(data[0]["init"]))
        epochs = _epochs(phases, data)
        epochs = f"{epochs:,.0f}" if epochs >= 10 else f"{epochs:.2g}"
        different = {rows["digest"]: rows for rows in data}.values()  # phases may share rows
        train, tokens, heldout = (
            sum(rows[split][key] for rows in different)
            for split, key in (("train", "rows"), ("train", "real_tokens"), ("heldout", "rows"))
        )
        for phase in phases:
            parts = (
                f"{name} {x.share:.1%} of the tokens, {x.epochs:.2g} epochs"
                for name, x in phase.sources.items()
            )
            yield from ["mixture: " + "; ".join(parts)] * bool(phase.sources)
        yield (
            f"data: {counted(train, 'row')} with {tokens:,} real tokens, "
            f"{epochs} epochs; {counted(heldout, 'row')} held out"
        )
    kept = workdir.attention_at(folder, -2)  # before this start
    sizes = [f"{counted(p.batch_size, 'row')} of T={p.tokens} ({p.batch_size * p.tokens:,} tokens)" for p in phases]  # fmt: skip
    yield (
        f"batch: {', then '.join(dict.fromkeys(sizes))}; {model.compute_dtype}; "
        + attention.attention_line(config, *hardware, [p.tokens for p in phases], kept)
    )
    thetas = [model_at(config, phase.end_step).rope_theta for phase in phases]
    if len(set(thetas)) > 1:
        yield "rope_theta: " + ", then ".join(
            f"{x:,.0f} at T={p.tokens}" for x, p in zip(thetas, phases, strict=True)
        )
    yield with_user_paths(
        f"workdir: {folder}; {counted(config.steps, 'step')}; log: {folder / workdir.LOG}"
    )
    yield from _changes(folder)


def _changes(folder: pathlib.Path) -> Iterator[str]:
    """Yield a line if a run resumes with other versions, devices or kernels than at its last start."""
    starts = workdir.read_steps(folder / "starts.jsonl")[-2:]
    if len(starts) < 2 or not starts[1]["step"]:
        return
    names = ("devices", "attention", "kernels")
    before, now = ({**x.get("versions", {}), **{k: x.get(k) for k in names}} for x in starts)
    changed = [k for k in now if before.get(k) not in (None, "auto", now[k])]
    differ = [f"{k} {before[k]}, now {now[k]}" for k in changed]
    if differ:
        yield (
            f"warning: the last start had other versions, devices or kernels ({'; '.join(differ)}): "
            "results may differ in their last bits from those of an uninterrupted run"
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
    epochs = _epochs(phases, data)
    if epochs < _MIN_EPOCHS:
        yield f"warning: the run sees {epochs:.0%} of the rows: for all of them, raise config.steps"
    if epochs > _MAX_EPOCHS:
        yield (
            f"warning: the run sees all rows {epochs:,.0f} times: it will overfit; lower config.steps "
            "or prepare more text"
        )
    if not config.model.next_sentence and any(rows["pairs"] == "nsp" for rows in data):
        yield (
            "warning: half of the rows' pairs are of unrelated sentences, but the model has no next-sentence "
            "prediction: prepare rows with --pairs none, or set --config.model.next_sentence=true"
        )
    targets = math.inf
    for heldout in (rows["heldout"] for rows in data):
        evaluated = (config.evaluate_rows or math.inf) / max(heldout["rows"], 1)  # 0 means all
        targets = min(targets, heldout["real_tokens"] * min(evaluated, 1.0))
    if not config.model.causal:
        targets *= config.masking.final_rate or config.masking.rate
    if targets < _MIN_HELDOUT_TARGETS:
        yield (
            f"warning: held-out losses are means over {targets:,.0f} tokens, too few to compare runs: "
            "prepare more text, or with a larger --heldout-fraction"
        )


def end_lines(end: dict[str, Any]) -> Iterator[str]:
    """Yield lines about how a run ended (`session.describe_end`)."""
    yield f"finished step {end['step']:,} after {duration(end['seconds'])}"
    result = ""
    if end["best"] is not None:
        result = f"best held-out {end['metric']} {end['best']:.4f} at step {end['best_step']:,}{sources_text(end)}; "
    yield f"{result}checkpoint: {end['checkpoint']}"


def duration(seconds: float) -> str:
    """Return a duration as "45 s", "13.4 min" or "2.5 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _epochs(phases: Sequence[Phase], data: Sequence[dict[str, Any]]) -> float:
    """Return how often the phases see their rows, all in all."""
    return sum(
        phase.batch_size * (phase.end_step - phase.first_step) / rows["train"]["rows"]
        for phase, rows in zip(phases, data, strict=True)
    )
