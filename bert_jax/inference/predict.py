"""Predictions of fine-tuned models: scores of a run's splits, and predictions for new data."""

import copy
import json
import pathlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from bert_jax import storage
from bert_jax.config.schema import FinetuneConfig, MeshConfig
from bert_jax.convert.source import OpenModel
from bert_jax.data.loader import HELDOUT_SEED, Batch
from bert_jax.errors import UserError
from bert_jax.model.bert import Bert, Params
from bert_jax.objectives import finetuning
from bert_jax.objectives.supervised import Supervised
from bert_jax.runs import checkpoint, workdir
from bert_jax.runtime import distributed, sharding
from bert_jax.runtime.progress import Progress
from bert_jax.storage import files
from bert_jax.tasks.base import NEW, FinetuneDataset, Logits, Text
from bert_jax.tasks.load import load_dataset
from bert_jax.tasks.metrics import LOWER_IS_BETTER

METRICS = "metrics.json"

# Jitted functions of `predict` by all that they depend on.
_PREDICT: dict[tuple[type, str], Callable[[Params, Any], dict[str, jax.Array]]] = {}


@storage.mirrors("folder")
def evaluate_run(
    folder: str | pathlib.Path, dataset: FinetuneDataset | None = None, which: str = "best"
) -> dict[str, Any]:
    """Score a run's checkpoint on every split except training, and write its predictions.

    The files are metrics.json and predictions/; of a checkpoint that was chosen by `which`, they are
    metrics_STEP.json and predictions_STEP/, so that the run's own results stay as they are.

    Args:
        folder, which: the workdir and its checkpoint, as in `checkpoint.load_model`.
        dataset: the run's data; None reads the splits to evaluate.

    Returns:
        The content of the metrics' file: the step, and the metrics by split.
    """
    folder = pathlib.Path(folder)
    config, vocabulary, params, step = checkpoint.load_model(folder, which)
    assert isinstance(config, FinetuneConfig)
    if dataset is None:
        dataset = load_dataset(config.task, vocabulary, config.model.head.labels, training=False)
        for data in workdir.read_data(folder):
            for split, digest in data.get("splits", {}).items():
                if split in dataset.splits and finetuning.digest(dataset, [split]) != digest:
                    raise UserError(
                        f"{getattr(config.task, split, '') or config.task.data}: the {split} examples "
                        f"are not those of {folder}: restore them, or score others with `bert-jax predict`"
                    )
    suffix = "" if which == "best" else f"_{step}"
    results: dict[str, Any] = {"step": step, "seed": config.seed, "best_by": dataset.best_by}
    for split, examples in dataset.splits.items():
        if split != "train" and len(examples):
            logits = predict(config, params, dataset, split)
            results[split] = dataset.score(split, logits)
            if split == "dev" and (tuned := dataset.tuned(results[split])) is not dataset:
                dataset, results[split] = tuned, tuned.score(split, logits)
            out = folder / f"predictions{suffix}" / split
            with files.one_line_errors(f"cannot write {out}"):
                out.mkdir(parents=True, exist_ok=True)
                dataset.write(split, logits, out)
    files.write_json(folder / f"metrics{suffix}.json", results)
    return results


def predict(config: FinetuneConfig, params: Params, dataset: FinetuneDataset, split: str) -> Logits:
    """Return the logits of all examples of a split, in order, computed on all devices."""
    mesh = sharding.make_mesh(MeshConfig())
    examples = dataset.splits[split]
    plan = finetuning.evaluation_plan(config, examples, sharding.num_row_shards(mesh))
    objective = finetuning.make_objective(config.model, dataset, split, plan, config.embed)
    run = _program(objective)
    params = jax.device_put(params, sharding.replicated(mesh))
    with Progress(f"predict {split}", plan.steps, "batches") as progress:

        def outputs() -> Iterator[tuple[Batch, dict[str, np.ndarray]]]:
            for batch in plan.batches(0, 0, plan.steps):
                computed = run(params, sharding.shard_batch(batch, mesh))
                yield distributed.to_hosts(batch), distributed.to_hosts(computed)
                progress.advance()

        return objective.logits(split, outputs())


def _program(objective: Supervised) -> Callable[[Params, Batch], dict[str, jax.Array]]:
    """Return a jitted function from parameters and rows to the objective's outputs."""
    kind = type(objective), repr((objective.model.config, objective.pooling))
    if kind not in _PREDICT:
        kept = copy.copy(objective)
        del kept.dataset  # not used, and large
        kept.model = Bert(copy.deepcopy(objective.model.config))  # configs are mutable
        _PREDICT[kind] = jax.jit(
            lambda params, batch: kept.predict(
                params, kept.make_inputs(batch, jax.random.key(HELDOUT_SEED))
            )
        )
    return _PREDICT[kind]


@storage.with_local_inputs("folder")
def read_metrics(folder: str | pathlib.Path, step: int) -> dict[str, Any]:
    """Return the metrics of a run's checkpoint as `evaluate_run` wrote them; empty if it did not."""
    for name in (METRICS, f"metrics_{step}.json"):
        path = pathlib.Path(folder).expanduser() / name
        if path.exists():
            metrics = json.loads(path.read_text())
            if metrics.get("step") == step:
                return metrics
    return {}


def predict_new(
    opened: OpenModel, new: str | Sequence[Text], folder: str | pathlib.Path
) -> tuple[FinetuneDataset, Logits]:
    """Return new data and the logits of a fine-tuned model for its only split, "new".

    Args:
        opened: the model.
        new: texts, or a file of new data in a format that the dataset's class reads; "-" for standard
            input.
        folder: the workdir, whose metrics have the threshold of SQuAD 2.0.
    """
    config, vocabulary, params, step = opened
    if not isinstance(config, FinetuneConfig):
        raise UserError(
            f"{folder} is not a fine-tuning run: it has no head that predicts from texts"
        )
    dataset = load_dataset(config.task, vocabulary, config.model.head.labels, new=new)
    if config.task.kind == "squad":
        dataset = dataset.tuned(read_metrics(folder, step).get("dev", {}))
    return dataset, predict(config, params, dataset, NEW)


@storage.with_local_inputs("folder", "source")
@storage.with_uploaded_output("out", new=True)
def predict_file(
    folder: str | pathlib.Path, source: str, out: str | pathlib.Path, which: str = "best"
) -> None:
    """Run a fine-tuned model on a file of new data and write its predictions to a new folder.

    Args:
        folder, which: the workdir and its checkpoint, as in `checkpoint.load_model`.
        source: as `new` of `predict_new`.
        out: the new folder.
    """
    files.check_new(out)
    dataset, logits = predict_new(OpenModel(*checkpoint.load_model(folder, which)), source, folder)
    for line in dataset.report:
        print(line, flush=True)
    with files.new_folder(out) as new_folder:
        dataset.write(NEW, logits, new_folder)


def over_seeds(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Summarize every metric over the seeds: mean, standard deviation, median and best."""
    summary: dict[str, Any] = {
        "seeds": [r["seed"] for r in results],
        "best_by": results[0]["best_by"],
    }
    for split, metrics in results[0].items():
        if isinstance(metrics, dict):
            summary[split] = {
                name: _statistics([r[split][name] for r in results], name in LOWER_IS_BETTER)
                for name, value in metrics.items()
                # Entity types that only some seeds predict have a metric in those runs only.
                if isinstance(value, int | float) and all(name in r[split] for r in results)
            }
    return summary


def _statistics(values: Sequence[float], lower_is_better: bool = False) -> dict[str, Any]:
    return {
        "mean": statistics.fmean(values),
        "sd": statistics.stdev(values) if len(values) > 1 else 0.0,
        "median": statistics.median(values),
        "best": min(values) if lower_is_better else max(values),
        "values": list(values),
    }


def format_metrics(summary: dict[str, Any]) -> str:
    """Format metrics for printing, one per line."""
    lines = []
    for split, metrics in summary.items():
        if not isinstance(metrics, dict):
            continue
        lines.append(split)
        for name, value in metrics.items():
            if isinstance(value, dict):
                text = (
                    f"{value['mean']:.4f} ± {value['sd']:.4f}, median {value['median']:.4f}, "
                    f"best {value['best']:.4f}"
                )
            else:
                text = f"{value:.4f}" if isinstance(value, float) else str(value)
            lines.append(f"  {name:24} {text}")
    return "\n".join(lines)
