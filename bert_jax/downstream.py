"""Fine-tuning runs: from a checkpoint and data to scored predictions, with one or several seeds."""

import copy
import dataclasses
import functools
import json
import pathlib
import statistics
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax

from bert_jax import checkpoint, files, sharding, storage
from bert_jax.benchmarks.base import FinetuneDataset, Logits
from bert_jax.benchmarks.metrics import LOWER_IS_BETTER
from bert_jax.benchmarks.squad import Squad
from bert_jax.config import EmbedConfig, FinetuneConfig, MeshConfig, TaskConfig
from bert_jax.convert.source import open_model
from bert_jax.data import tables
from bert_jax.data import vocabulary as vocabularies
from bert_jax.data.examples import Examples
from bert_jax.data.wordpiece import Vocabulary
from bert_jax.errors import UserError
from bert_jax.evaluate import predictions
from bert_jax.model import attention
from bert_jax.model.bert import Params
from bert_jax.objectives import finetuning, initial
from bert_jax.progress import Progress
from bert_jax.tracing import Summarize
from bert_jax.train import train

METRICS, PREDICTIONS = "metrics.json", "predictions"
# Fields of a task that are paths.
_PATH_FIELDS = ("data", "train", "dev", "test")
# Value of `init` for random weights instead of a checkpoint.
SCRATCH = "none"


def load_dataset(
    task: TaskConfig, vocabulary: Vocabulary, labels: tuple[str, ...] = (), **options: Any
) -> FinetuneDataset:
    """Read and tokenize the data of a task.

    Args:
        task: the task and where its data are.
        vocabulary: the model's vocabulary.
        labels: labels of a model that is already fine-tuned.
        options: further arguments of the dataset's class.

    Raises:
        UserError: the data are malformed; names the row.
    """
    if options.get("new") and task.kind == "pairs":
        raise UserError(
            "a model that was fine-tuned on pairs has vectors, no predictions: use `bert-jax embed`, or "
            "`bert-jax evaluate-embeddings` for data with answers"
        )
    if options.get("new") == tables.STANDARD_INPUT and task.kind in ("squad", "choice"):
        raise UserError(
            f"lines from standard input do not suffice for a task of kind {task.kind!r}: pass a file "
            "in the layout of the fine-tuning data"
        )
    local_paths = {name: str(storage.local(getattr(task, name))) for name in _PATH_FIELDS}
    task = dataclasses.replace(task, **local_paths)
    if task.kind == "squad":
        kind = Squad
    elif task.kind == "pairs":
        from bert_jax.benchmarks.pairs import Pairs as kind
    elif task.kind == "tagging":
        from bert_jax.benchmarks.conll import TokenClassification as kind
    elif task.kind == "choice":
        from bert_jax.benchmarks.swag import MultipleChoice as kind
    elif task.name:
        from bert_jax.benchmarks.glue import Glue as kind
    else:
        from bert_jax.benchmarks.tables import Classification as kind
    return kind(task, vocabulary, labels=labels, **options)


@storage.mirrors("folder")
def finetune(
    config: FinetuneConfig,
    init: str,
    folder: str | pathlib.Path,
    *,
    seeds: int = 1,
    vocab: str = "",
    which: str = "best",
    force: bool = False,
    summarize_trace: Summarize | None = None,
    keys: Collection[str] = (),
) -> dict[str, Any]:
    """Fine-tune, evaluate the best checkpoint on every split and write its predictions.

    Args:
        config: validated config.
        init: a checkpoint, as in `open_model`, or `SCRATCH`.
        folder: the workdir; with several seeds, each has a workdir inside it.
        seeds: number of seeds, from `config.seed` on.
        vocab: folder of the vocabulary, for `SCRATCH`.
        which: which checkpoint to start from if `init` is a run.
        force, summarize_trace: as in `train`.
        keys: keys of the config that the user has set one by one. Settings of the checkpoint replace
            others that are at their defaults.

    Returns:
        The content of metrics.json.

    Raises:
        UserError: the config, data, checkpoint or workdir cannot be used.
        Interrupted: stopped after saving.
    """
    if jax.process_count() > 1:
        raise UserError(
            "fine-tuning runs in one process, on all devices of one machine: start it once, without "
            "BERT_JAX_COORDINATOR"
        )
    folder = pathlib.Path(folder)
    _require_same_kind(folder, seeds)
    start, params, source_embed = None, None, EmbedConfig()
    if init == SCRATCH:
        if not vocab:
            raise UserError("--init none needs a vocabulary: add --vocab DIR")
        if config.reset_layers:
            raise UserError(
                "config.reset_layers must be 0 with --init none, which initializes all layers"
            )
        if config.lora.rank:
            raise UserError(
                f"config.lora.rank is {config.lora.rank}: it must be 0 with --init none, as adapters "
                "leave the random encoder frozen"
            )
        vocabulary = vocabularies.load(vocab)
        vocabularies.check_segments(vocabulary, config.model.segments)
    else:
        if vocab:
            raise UserError(
                f"--vocab {vocab} is only for --init none: {init} has its own vocabulary; remove it"
            )
        source_config, vocabulary, params, _ = open_model(init, which)
        start, params = source_config.model, jax.device_get(params)
        source_embed = source_config.embed
    if start is None:
        config = dataclasses.replace(
            config, model=dataclasses.replace(config.model, vocab_size=len(vocabulary))
        )
    dataset = load_dataset(config.task, vocabulary)
    if config.task.kind == "classification":  # a task of GLUE has its own
        config.task = dataclasses.replace(config.task, objective=dataset.objective)
    config.model = finetuning.model_config(config, start, dataset, keys)
    if config.task.kind == "pairs":
        config.embed = finetuning.embed_config(config, source_embed, keys)
    attention.resolve(config)
    mesh = sharding.make_mesh(config.mesh)
    all_seeds = range(config.seed, config.seed + seeds)
    config, data, plan, phase = finetuning.make_phase(
        config, dataset, all_seeds, sharding.num_row_shards(mesh), vocabulary
    )
    init_params, new = {}, ["everything"]
    if start is not None and params is not None:
        init_params, new = finetuning.restored(config, start, params)
    data[0]["start"] = initial.params_digest(init_params)
    _print_run(dataset, config, phase, init, new)
    compiled: dict[int, Any] = {}
    results = []
    for seed in all_seeds:
        seed_config = dataclasses.replace(copy.deepcopy(config), seed=seed)
        seed_phase = dataclasses.replace(phase, batches=functools.partial(plan.batches, seed))
        seed_folder = folder / f"seed_{seed}" if seeds > 1 else folder
        if seeds > 1:
            print(f"seed {seed}", flush=True)
        train(
            seed_config,
            vocabulary,
            data,
            [seed_phase],
            seed_folder,
            force,
            init_params,
            compiled,
            summarize_trace,
        )
        results.append(evaluate_run(seed_folder, dataset, MeshConfig()))
    summary = results[0] if seeds == 1 else _over_seeds(results)
    if seeds > 1:
        files.write_json(folder / METRICS, summary)
    return summary


def _require_same_kind(folder: pathlib.Path, seeds: int) -> None:
    """Refuse to mix a run of one seed with runs of several: both write the same metrics.json."""
    seed_configs = sorted(folder.glob("seed_*/config.json"))
    if seed_configs and seeds == 1:
        raise UserError(
            f"{folder} holds runs of several seeds ({seed_configs[0].parent.name}, …): add --seeds, "
            "or choose another workdir"
        )
    if seeds > 1 and (folder / "config.json").exists():
        raise UserError(
            f"{folder} holds a run of one seed: choose another workdir for {seeds} seeds"
        )


def _print_run(
    dataset: FinetuneDataset, config: FinetuneConfig, phase, init: str, new: Sequence[str]
) -> None:
    counts = ", ".join(f"{len(e):,} {name}" for name, e in dataset.splits.items())
    outputs = f"; {len(dataset.labels)} outputs: {_abbreviate(dataset.labels)}"
    print(f"{counts} examples{outputs if dataset.labels else ''}")
    for line in dataset.report:
        print(f"  {line}")
    row_counts = " or ".join(map(str, [*phase.smaller_batch_sizes, phase.batch_size]))
    print(
        f"{config.steps:,} steps of {config.batch_size} examples in {row_counts} rows of "
        f"T={phase.tokens}; from {init}, new: {', '.join(new) or 'nothing'}",
        flush=True,
    )


def _abbreviate(names: Sequence[str], max_names: int = 6) -> str:
    return ", ".join(names[:max_names]) + (", …" if len(names) > max_names else "")


@storage.mirrors("folder")
def evaluate_run(
    folder: str | pathlib.Path, dataset: FinetuneDataset | None = None, mesh: MeshConfig | None = None,
    which: str = "best",
) -> dict[str, Any]:  # fmt: skip
    """Score a run's checkpoint on every split except training, and write its predictions.

    The files are metrics.json and predictions/; of a checkpoint that was chosen by `which`, they are
    metrics_STEP.json and predictions_STEP/, so that the run's own results stay as they are.

    Args:
        folder: the workdir.
        dataset: the run's data; None reads the splits to evaluate.
        mesh: the devices to use.
        which: as in `checkpoint.load_model`.

    Returns:
        The content of the metrics' file: the step, and the metrics by split.
    """
    folder = pathlib.Path(folder)
    config, vocabulary, params, step = checkpoint.load_model(folder, which)
    assert isinstance(config, FinetuneConfig)
    if dataset is None:
        dataset = load_dataset(config.task, vocabulary, config.model.labels, training=False)
    suffix = "" if which == "best" else f"_{step}"
    results: dict[str, Any] = {"step": step, "seed": config.seed, "best_by": dataset.best_by}
    for split, examples in dataset.splits.items():
        if split != "train" and len(examples):
            logits = predict(config, params, dataset, split, mesh or MeshConfig())
            metrics = dataset.score(split, logits) if has_labels(examples) else {}
            if split == "dev" and isinstance(dataset, Squad):
                tuned = dataset.tuned(metrics)
                if tuned is not dataset:
                    dataset, metrics = tuned, tuned.score(split, logits)
            results[split] = metrics
            dataset.write(split, logits, _make_folder(folder / f"{PREDICTIONS}{suffix}" / split))
    files.write_json(folder / f"metrics{suffix}.json", results)
    return results


def _make_folder(folder: pathlib.Path) -> pathlib.Path:
    with files.one_line_errors(f"cannot write {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def has_labels(examples: Examples) -> bool:
    """Whether any example is labeled."""
    if "label" in examples.targets:
        labels = examples.targets["label"]
        return bool((labels == labels).any() if labels.dtype.kind == "f" else (labels >= 0).any())
    return any((labels >= 0).any() for labels in examples.token_targets.get("label", []))


def predict(
    config: FinetuneConfig, params: Params, dataset: FinetuneDataset, split: str, mesh: MeshConfig
) -> Logits:
    """Return the logits of all examples of a split, in order."""
    device_mesh = sharding.make_mesh(mesh)
    examples = dataset.splits[split]
    plan = finetuning.evaluation_plan(config, examples, sharding.num_row_shards(device_mesh))
    objective = finetuning.make_objective(config.model, dataset, split, plan, config.embed)
    with Progress(f"predict {split}", plan.steps, "batches") as progress:

        def batches_and_outputs() -> Iterator[Any]:
            batches = plan.batches(0, 0, plan.steps)
            for result in predictions(objective, params, batches, device_mesh):
                progress.advance()
                yield result

        return objective.logits(split, batches_and_outputs())


@storage.reads("folder")
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
    config: FinetuneConfig,
    vocabulary: Vocabulary,
    params: Params,
    source: str,
    folder: str | pathlib.Path,
    step: int,
) -> tuple[FinetuneDataset, Logits]:
    """Return new data and the logits of a fine-tuned model for its only split, "new".

    Args:
        config, vocabulary, params: the model.
        source: new data, as for `predict_file`.
        folder: the workdir, whose metrics have the threshold of SQuAD 2.0.
        step: step of the parameters.
    """
    dataset = load_dataset(config.task, vocabulary, config.model.labels, new=source)
    if isinstance(dataset, Squad):
        dataset = dataset.tuned(read_metrics(folder, step).get("dev", {}))
    return dataset, predict(config, params, dataset, "new", MeshConfig())


@storage.reads("folder", "source")
@storage.writes("out", new=True)
def predict_file(
    folder: str | pathlib.Path, source: str, out: str | pathlib.Path, which: str = "best"
) -> None:
    """Run a fine-tuned model on a file of new data and write its predictions to a new folder.

    Args:
        folder: the workdir.
        source: new data in a format that the dataset's class reads; "-" for standard input.
        out: the new folder.
        which: as in `checkpoint.load_model`.

    Raises:
        UserError: the workdir is not a fine-tuning run, or the source is malformed.
    """
    files.check_new(out)
    config, vocabulary, params, step = checkpoint.load_model(folder, which)
    if not isinstance(config, FinetuneConfig):
        raise UserError(f"{folder} is not a fine-tuning run: it has no task to predict")
    dataset, logits = predict_new(config, vocabulary, params, source, folder, step)
    for line in dataset.report:
        print(line, flush=True)
    with files.new_folder(out) as new_folder:
        dataset.write("new", logits, new_folder)


def _over_seeds(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
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


def describe(summary: dict[str, Any]) -> str:
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
