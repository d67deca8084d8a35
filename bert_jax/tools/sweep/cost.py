"""Rough estimates of what points cost."""

import collections
import contextlib
import functools
import itertools
import pathlib
import shlex
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from bert_jax import config as config_lib
from bert_jax import config_flags, workdir
from bert_jax.benchmarks import glue
from bert_jax.config import Config, FinetuneConfig, ModelConfig
from bert_jax.convert import source
from bert_jax.data.compressed import SUFFIXES
from bert_jax.data.workers import cores
from bert_jax.errors import UserError
from bert_jax.model.flops import flops_per_row
from bert_jax.objectives.masking import max_predictions_per_sequence
from bert_jax.objectives.pretraining import DEFAULT_VOCAB_SIZE
from bert_jax.summary import duration
from bert_jax.tools.sweep.points import Point, Sweep, SweepArgs
from bert_jax.tools.sweep.results import RESULTS, Results, key, verb
from bert_jax.tools.sweep.scheduler import LAUNCHED, Engine, PointRun

# Assumed fraction of a chip's peak, and float32 FLOP/s of a CPU core, where nothing was measured.
UTILIZATION, _CORE_FLOPS = 0.4, 2e10
_BYTES_A_TOKEN, _COMPRESSION = 5.0, 3.0


class Cost(NamedTuple):
    """An estimate.

    Attributes:
        flops: FLOPs of training; 0 for other commands.
        seconds: None if unknown.
    """

    flops: float
    seconds: float | None


def cost(point: Point, args: SweepArgs, results: Sequence[dict[str, Any]], speed: float) -> Cost:
    """Estimate the cost of a point from its FLOPs.

    Those of pretraining are known. Those of fine-tuning follow from the tokens of earlier runs on the
    same task or, if there are none, from the size of the training file.

    Args:
        point: the point.
        args: arguments of the sweep.
        results: earlier results of any sweep.
        speed: FLOP/s of the hardware; 0 takes that of the results, or a guess for this CPU.
    """
    before = [r for r in results if verb(r) == point.verb]
    if point.verb not in LAUNCHED:
        seconds = [r["wall_seconds"] for r in before]
        return Cost(0.0, statistics.median(seconds) if seconds else None)
    kind = Config if point.verb == "pretrain" else FinetuneConfig
    config, seeds = _config(point, kind), int(point.options.get("--seeds", 1))
    model, teacher = config.model, _model_at(point, "--teacher")
    if kind is Config:
        model = _model_at(point, "--init") or model
        ends = [0, *config_lib.phase_ends(config)]
        rows = [part for part in point.needs if part.verb == "prepare"]
        model.vocab_size = model.vocab_size or _vocab_size(rows) or DEFAULT_VOCAB_SIZE
        flops = 0.0
        for i, (begin, end, phase) in enumerate(zip(ends, ends[1:], config.phases, strict=False)):
            tokens = phase.tokens or _tokens_of(rows[i] if i < len(rows) else None)
            predictions = (
                tokens if model.causal else max_predictions_per_sequence(config.masking, tokens)
            )
            num_rows = (end - begin) * (phase.batch_size or config.batch_size)
            flops += num_rows * flops_per_row(model, tokens, 1, predictions)
            if teacher:
                flops += num_rows * _forward_flops(teacher, tokens)
    else:
        model = _model_at(point, "--init") or model
        tokens = _tokens_before(point, args, before)
        tokens = tokens or _training_bytes(config, args) / _BYTES_A_TOKEN * config.epochs
        row_tokens = config.task.tokens
        flops = tokens / row_tokens * flops_per_row(model, row_tokens, 1, 0)
        if teacher:
            flops += tokens / row_tokens * _forward_flops(teacher, row_tokens)
        flops *= seeds
    measured, startup = _speed_and_startup(before)
    speed = speed or measured or _CORE_FLOPS * cores()
    return Cost(flops, flops / speed + startup * seeds if flops else None)


def _speed_and_startup(results: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Return the FLOP/s of this CPU, and the seconds of a run besides its steps.

    The latter are for starting, compiling, evaluating and saving. Both are medians over points that
    were run on CPUs, and 0 if there are none. Each seed of a point has a line.
    """
    points = collections.defaultdict(list)
    for line in results:
        if "cpu" in line.get("devices", "") and line["cores"] and line["step_seconds"]:
            points[line["digest"]].append(line)
    if not points:
        return 0.0, 0.0
    speeds, startups = [], []
    for lines in points.values():
        seconds = sum(line["step_seconds"] for line in lines)
        speeds.append(sum(line["flops"] for line in lines) / (seconds * lines[0]["cores"]))
        startups.append(max(lines[0]["wall_seconds"] - seconds, 0.0) / len(lines))
    return statistics.median(speeds) * cores(), statistics.median(startups)


def _measured(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Return results of the sweep in a folder and, if readable, of those in its sibling folders."""
    folder = folder.resolve()
    lines = Results(folder).read()
    for path in folder.parent.glob(f"*/{RESULTS}"):
        if path.parent != folder:
            with contextlib.suppress(UserError):
                lines += Results(path.parent).read()
    # Sweeps that share points have the same lines.
    kept = {
        key(line): line for line in lines if {"command", "digest", "wall_seconds"} <= line.keys()
    }
    return list(kept.values())


def _config(point: Point, kind: type) -> Any:
    """Return the config of a command."""
    return config_flags.load(point.settings, kind)


def _model_at(point: Point, option: str) -> ModelConfig | None:
    """Return the model that an option names; None if it names none, or one that is not on disk."""
    for name, value in itertools.pairwise(point.command):
        if name == option and isinstance(value, Point):
            is_trained = value.verb == "pretrain"
            return (
                _model_at(value, "--init") or _config(value, Config).model if is_trained else None
            )
    name = point.options.get(option, "")
    return _model_of(name) if name and pathlib.Path(name).exists() else None


def _forward_flops(teacher: ModelConfig, tokens: int) -> float:
    """Return the FLOPs of a teacher per row: a third of a training step, without predictions."""
    return flops_per_row(teacher, tokens, 1, 0) / 3


@functools.cache
def _model_of(init: str) -> ModelConfig:
    if workdir.holds_run(init):
        return workdir.read_config(init).model
    return source.read(init).config.model


def _tokens_before(point: Point, args: SweepArgs, before: Sequence[dict[str, Any]]) -> float:
    """Return the tokens per seed of earlier runs on the task at this scale; 0 if there are none."""
    task = point.facts.get("task")
    tokens = [
        line["real_tokens"]
        for line in before
        if task and (line["facts"].get("task"), line["scale"]) == (task, args.scale)
    ]
    return statistics.median(tokens) if tokens else 0.0


def _vocab_size(rows: Sequence[Point]) -> int:
    """Return the vocabulary size of rows; 0 if unknown."""
    vocabs = [part for each in rows[:1] for part in each.needs if part.verb == "vocab"]
    return int(vocabs[0].options.get("--size", DEFAULT_VOCAB_SIZE)) if vocabs else 0


def _tokens_of(rows: Point | None) -> int:
    return int(rows.options.get("--tokens", 128)) if rows else 128


def _training_bytes(config: FinetuneConfig, args: SweepArgs) -> float:
    """Return the uncompressed size of the training files; 0 if they are not on this machine."""
    paths = [pathlib.Path(config.task.train)] if config.task.train else []
    if not paths and config.task.name in glue.TASKS:
        folder = glue.TASKS[config.task.name].folder
        paths = sorted((args.data / "glue" / folder).glob("train.tsv*"))
    sizes = [
        path.stat().st_size * (_COMPRESSION if path.suffix in SUFFIXES else 1.0)
        for path in paths
        if path.is_file()
    ]
    return sum(sizes, 0.0)


def describe(sweep: Sweep, runs: pathlib.Path, engine: Engine, speed: float = 0.0) -> str:
    """Return what `--dry-run` prints: the command and estimated cost of every point."""
    results = _measured(sweep.path.parent)
    point_runs = {p.name: PointRun(p, runs, sweep.args.data) for p in sweep.points}
    lines, total, unknown = [], 0.0, 0
    for point in sweep.points:
        point_run = point_runs[point.name]
        if point_run.is_done:
            lines.append(f"{point.name}: done, {point_run.folder}")
            continue
        estimate = cost(point, sweep.args, results, speed)
        unknown += estimate.seconds is None
        total += estimate.seconds or 0
        flops = f", {estimate.flops:.2g} FLOPs" if estimate.flops else ""
        seconds = "?" if estimate.seconds is None else duration(estimate.seconds)
        lines.append(f"{point.name}: about {seconds}{flops}")
        lines.append(f"  {shlex.join(engine.command(point, point_runs))}")
    left = sum(not point_run.is_done for point_run in point_runs.values())
    rest = f"; {unknown} of unknown duration" if unknown else ""
    estimate_text = (
        f"{'at least' if unknown else 'about'} {duration(total)}{'' if speed else ' on this CPU'}"
    )
    lines.append(f"{len(sweep.points)} points, {left} to run: {estimate_text} in sequence{rest}")
    return "\n".join(lines)
