"""Fine-tuning runs, from a checkpoint and data to scored predictions; one seed or several."""

import copy
import dataclasses
import functools
import json
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

import jax

from bert_jax import attention, checkpoint, files, sharding
from bert_jax.config import FinetuneConfig, MeshConfig, TaskConfig
from bert_jax.convert.source import open_model
from bert_jax.data import tables, wordpiece
from bert_jax.data.examples import Examples
from bert_jax.data.wordpiece import Vocabulary
from bert_jax.errors import UserError
from bert_jax.evaluate import outputs
from bert_jax.metrics import LOWER_IS_BETTER
from bert_jax.model import Params
from bert_jax.progress import Progress
from bert_jax.tasks import finetuning
from bert_jax.tasks.problem import Logits, Problem
from bert_jax.tasks.squad import Squad
from bert_jax.train import train

METRICS, PREDICTIONS = "metrics.json", "predictions"
# From random weights instead of a checkpoint.
SCRATCH = "none"


def problem_of(
    task: TaskConfig, vocabulary: Vocabulary, labels: tuple[str, ...] = (), **options: Any
) -> Problem:
    """Reads and tokenizes the data of a task.

    Args:
        task: what and where.
        vocabulary: of the model.
        labels: those of a model that is fine-tuned already.
        options: as the problem's class takes them.

    Raises:
        UserError: a row of the data that is not as it should be; the line names it.
    """
    if options.get("new") == tables.STANDARD_INPUT and task.kind in ("squad", "choice"):
        raise UserError(
            f"lines from standard input say too little for a task of kind {task.kind!r}: name a file "
            "of the layout it was fine-tuned on"
        )
    if task.kind == "squad":
        kind = Squad
    elif task.kind == "tagging":
        from bert_jax.tasks.tagging import Tagging as kind
    elif task.kind == "choice":
        from bert_jax.tasks.choice import Choice as kind
    elif task.name:
        from bert_jax.tasks.glue import Glue as kind
    else:
        from bert_jax.tasks.classification import Classification as kind
    return kind(task, vocabulary, labels=labels, **options)


def finetune(
    config: FinetuneConfig,
    init: str,
    folder: str | pathlib.Path,
    *,
    seeds: int = 1,
    vocab: str = "",
    which: str = "best",
    force: bool = False,
) -> dict[str, Any]:
    """Fine-tunes, evaluates the best checkpoint on every split and writes its predictions.

    Args:
        config: validated.
        init: a checkpoint, as `open_model` takes it, or `SCRATCH`.
        folder: the workdir; with several seeds each has a workdir inside.
        seeds: how many, from `config.seed` on.
        vocab: for `SCRATCH`, the vocabulary.
        which: of a run, its checkpoint.
        force: as `train` takes it.

    Returns:
        What metrics.json says.

    Raises:
        UserError: something a person can mend.
        Interrupted: stopped and saved.
    """
    if jax.process_count() > 1:
        raise UserError(
            "fine-tuning runs in one process, on all the devices of one machine: start it once, "
            "without BERT_JAX_COORDINATOR"
        )
    folder = pathlib.Path(folder)
    _require_same_kind(folder, seeds)
    start, params = None, None
    if init == SCRATCH:
        if not vocab:
            raise UserError("--init none needs a vocabulary: add --vocab DIR")
        if config.reset_layers:
            raise UserError("config.reset_layers: with --init none all layers start anew already")
        vocabulary = wordpiece.load(vocab)
    else:
        if vocab:
            raise UserError(
                f"--vocab {vocab} is for --init none: {init} has a vocabulary of its own"
            )
        from_, vocabulary, params, _ = open_model(init, which)
        start, params = from_.model, jax.device_get(params)
    if start is None:
        config = dataclasses.replace(
            config, model=dataclasses.replace(config.model, vocab_size=len(vocabulary))
        )
    problem = problem_of(config.task, vocabulary)
    config.model = finetuning.model_config(config, start, problem)
    attention.resolve(config)
    mesh = sharding.make_mesh(config.mesh)
    all_seeds = range(config.seed, config.seed + seeds)
    config, data, plan, stage = finetuning.stage(
        config, problem, all_seeds, sharding.row_shards(mesh)
    )
    begin, new = {}, ["everything"]
    if start is not None:
        begin, new = finetuning.restored(config, start, params)
    data[0]["start"] = finetuning.weights_digest(begin)
    _tell(problem, config, stage, init, new)
    compiled: dict[int, Any] = {}
    results = []
    for seed in all_seeds:
        own = dataclasses.replace(copy.deepcopy(config), seed=seed)
        own_stage = dataclasses.replace(stage, batches=functools.partial(plan.batches, seed))
        own_folder = folder / f"seed_{seed}" if seeds > 1 else folder
        if seeds > 1:
            print(f"seed {seed}", flush=True)
        train(own, vocabulary, data, [own_stage], own_folder, force, begin, compiled)
        results.append(evaluate_run(own_folder, problem, MeshConfig()))
    summary = results[0] if seeds == 1 else _over_seeds(results)
    if seeds > 1:
        files.write_json(folder / METRICS, summary)
    return summary


def _require_same_kind(folder: pathlib.Path, seeds: int) -> None:
    """Refuses to mix a run of one seed and the runs of several: both have one metrics.json."""
    several = sorted(folder.glob("seed_*/config.json"))
    if several and seeds == 1:
        raise UserError(
            f"{folder} holds runs of several seeds ({several[0].parent.name}, …): add --seeds, or "
            "choose another workdir"
        )
    if seeds > 1 and (folder / "config.json").exists():
        raise UserError(f"{folder} holds a run of one seed: choose another workdir for {seeds}")


def _tell(problem: Problem, config: FinetuneConfig, stage, init: str, new: Sequence[str]) -> None:
    counts = ", ".join(f"{len(e):,} {name}" for name, e in problem.splits.items())
    print(f"{counts} examples; {len(problem.labels)} outputs: {_few(problem.labels)}")
    for line in problem.report:
        print(f"  {line}")
    row_counts = " or ".join(map(str, [*stage.smaller_batches, stage.batch_size]))
    print(
        f"{config.steps:,} steps of {config.batch_size} examples in {row_counts} rows of "
        f"T={stage.tokens}; from {init}, new: {', '.join(new)}",
        flush=True,
    )


def _few(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


def evaluate_run(
    folder: str | pathlib.Path, problem: Problem | None = None, mesh: MeshConfig | None = None,
    which: str = "best",
) -> dict[str, Any]:  # fmt: skip
    """Scores a run's checkpoint on every split but the training's, and writes its predictions.

    Args:
        folder: the workdir.
        problem: its data, if they are at hand; else they are read again.
        mesh: the devices to use.
        which: as `checkpoint.load_model` takes it.

    Returns:
        What metrics.json in the workdir says: the step, and the metrics by split.
    """
    folder = pathlib.Path(folder)
    config, vocabulary, params, step = checkpoint.load_model(folder, which)
    if problem is None:
        problem = problem_of(config.task, vocabulary, config.model.labels)
    found: dict[str, Any] = {"step": step, "seed": config.seed, "best_by": problem.best_by}
    for split, examples in problem.splits.items():
        if split != "train" and len(examples):
            logits = predict(config, params, problem, split, mesh or MeshConfig())
            metrics = problem.score(split, logits) if has_labels(examples) else {}
            if split == "dev" and _tuned(problem, metrics) is not problem:
                problem = _tuned(problem, metrics)
                metrics = problem.score(split, logits)
            found[split] = metrics
            problem.write(split, logits, _made(folder / PREDICTIONS / split))
    files.write_json(folder / METRICS, found)
    return found


def _tuned(problem: Problem, dev: dict[str, float]) -> Problem:
    """Predicting as was found best on the dev set: SQuAD 2.0's threshold for no answer."""
    return problem.tuned(dev) if isinstance(problem, Squad) else problem


def _made(folder: pathlib.Path) -> pathlib.Path:
    with files.one_line_errors(f"cannot write {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def has_labels(examples: Examples) -> bool:
    """Whether there is anything to score predictions by."""
    if "label" in examples.targets:
        labels = examples.targets["label"]
        return bool((labels == labels).any() if labels.dtype.kind == "f" else (labels >= 0).any())
    return any((each >= 0).any() for each in examples.token_targets.get("label", []))


def predict(
    config: FinetuneConfig, params: Params, problem: Problem, split: str, mesh: MeshConfig
) -> Logits:
    """A model's logits of all examples of a split, in order."""
    devices = sharding.make_mesh(mesh)
    examples = problem.splits[split]
    plan = finetuning.evaluation_plan(config, examples, sharding.row_shards(devices))
    task = finetuning.Finetuning(config.model, problem, split, plan)
    with Progress(f"predict {split}", plan.steps, "batches") as progress:
        found = []
        for result in outputs(task, params, plan.batches(0, 0, plan.steps), devices):
            found.append(result)
            progress.advance()
        return task.logits(split, found)


def predict_file(
    folder: str | pathlib.Path, source: str, out: str | pathlib.Path, which: str = "best"
) -> None:
    """Runs a fine-tuned model on a file of new data and writes its predictions to a new folder.

    Args:
        folder: the workdir.
        source: as the problem's class reads new data; "-" for lines from standard input.
        out: the folder.
        which: as `checkpoint.load_model` takes it.

    Raises:
        UserError: no fine-tuned model there, or something in the source that is no such data.
    """
    files.check_new(out)
    config, vocabulary, params, _ = checkpoint.load_model(folder, which)
    if not isinstance(config, FinetuneConfig):
        raise UserError(f"{folder} is no fine-tuning run: it has no task to predict")
    problem = problem_of(config.task, vocabulary, config.model.labels, new=source)
    scored = pathlib.Path(folder) / METRICS
    if scored.exists():
        problem = _tuned(problem, json.loads(scored.read_text()).get("dev", {}))
    for line in problem.report:
        print(line, flush=True)
    logits = predict(config, params, problem, "new", MeshConfig())
    with files.new_folder(out) as written:
        problem.write("new", logits, written)


def _over_seeds(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean, standard deviation, median and best of every metric over the seeds."""
    summary: dict[str, Any] = {
        "seeds": [r["seed"] for r in results],
        "best_by": results[0]["best_by"],
    }
    for split, metrics in results[0].items():
        if isinstance(metrics, dict):
            summary[split] = {
                name: _spread([r[split][name] for r in results], name in LOWER_IS_BETTER)
                for name, value in metrics.items()
                # A type of entity that only some seeds find has a score with those alone.
                if isinstance(value, int | float) and all(name in r[split] for r in results)
            }
    return summary


def _spread(values: Sequence[float], lower_is_better: bool = False) -> dict[str, Any]:
    return {
        "mean": statistics.fmean(values),
        "sd": statistics.stdev(values) if len(values) > 1 else 0.0,
        "median": statistics.median(values),
        "best": min(values) if lower_is_better else max(values),
        "values": list(values),
    }


def describe(summary: dict[str, Any]) -> str:
    """Metrics for people, a line each."""
    lines = []
    for split, metrics in summary.items():
        if not isinstance(metrics, dict):
            continue
        lines.append(split)
        for name, value in metrics.items():
            if isinstance(value, dict):
                text = f"{value['mean']:.4f} ± {value['sd']:.4f}, median {value['median']:.4f}, best {value['best']:.4f}"
            else:
                text = f"{value:.4f}" if isinstance(value, float) else str(value)
            lines.append(f"  {name:24} {text}")
    return "\n".join(lines)
