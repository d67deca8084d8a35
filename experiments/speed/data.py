"""Texts, rows and models of the benchmark, created once in runs/speed."""

import atexit
import gzip
import json
import os
import pathlib
import random
import tempfile
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bert_jax.config import flags
from bert_jax.config.schema import Config
from bert_jax.config.sizes import SIZES
from bert_jax.data import corpus, prepare
from bert_jax.data.loader import Batch
from bert_jax.errors import UserError
from bert_jax.storage import files
from bert_jax.tools.sweep import module_of

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
recipes = module_of(HERE.parent / "paper" / "recipes.py")
WORK = ROOT / "runs" / "speed"


def temporary() -> tempfile.TemporaryDirectory[str]:
    """Return a temporary folder, as a context manager, on the disk of the benchmark."""
    WORK.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(dir=WORK, ignore_cleanup_errors=True)


def scratch() -> pathlib.Path:
    """Return a temporary folder that is deleted when the process ends."""
    folder = temporary()
    atexit.register(folder.cleanup)
    return pathlib.Path(folder.name)


def data_folder() -> pathlib.Path:
    """Return the folder with text/, glue/, squad/, intent/ and vocab/.

    Raises:
        UserError: `BERT_JAX_DATA` is not set.
    """
    folder = os.environ.get("BERT_JAX_DATA")
    if not folder:
        raise UserError("set BERT_JAX_DATA to the folder of text/, glue/, squad/, intent/, vocab/")
    return pathlib.Path(folder)


def vocabulary() -> pathlib.Path:
    """Return Google's uncased vocabulary."""
    return data_folder() / "vocab" / "bert-base-uncased-vocab.txt"


def sources() -> list[str]:
    """Return the sources of eight files of Wikipedia, and of four novels."""
    text = data_folder() / "text"
    articles, novels = (sorted((text / name).iterdir()) for name in ("wikipedia", "books"))
    return [*map(str, articles[:8]), *(f"books:{path}" for path in novels[:4])]


def rows(tokens: int, sequences: int) -> pathlib.Path:
    """Return a folder of rows, which is prepared if it does not exist."""
    folder = WORK / f"rows-{tokens}-{sequences}"
    prepare.prepare(sources(), vocabulary(), folder, tokens=tokens, sequences=sequences)
    return folder


def pretraining(size: str, tokens: int, batch: int, change: Sequence[str] = ()) -> Config:
    """Return the pretraining config of a model size.

    Args:
        size: name of the size, such as "base".
        tokens: T, tokens per row.
        batch: B, rows per step.
        change: config overrides, KEY=VALUE.
    """
    changes = [f"batch_size={batch}", f"model.positions={max(tokens, 512)}", *change]
    # A size named by its shape gets the paper's recipe, also for mini.
    size = "L{}-H{}-A{}".format(*SIZES[size]) if size in SIZES else size
    file = f"--config={ROOT}/configs/pretrain.py:{size},{tokens}"
    return flags.load([file, *(f"--config.{each}" for each in changes)])


def run_steps(step: Callable[[Batch], Any], batches: Iterable[Batch]) -> dict[str, int]:
    """Run a step for each batch, and return the number of steps and of their tokens."""
    counts = {"steps": 0, "real_tokens": 0, "padded_tokens": 0}
    for batch in batches:
        step(batch)
        counts["steps"] += 1
        counts["real_tokens"] += int(batch["length"].sum())
        counts["padded_tokens"] += batch["tokens"].size
    return counts


def articles() -> pathlib.Path:
    """Return a file with the text of eight files of Wikipedia as JSON Lines."""
    path = WORK / "articles.jsonl"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".beside")
        with beside.open("w") as file:
            for name in sources()[:8]:
                for document in corpus.read(corpus.parse_source(name), corpus.Report()):
                    file.write(json.dumps({"text": document.text}) + "\n")
        beside.replace(path)
    return path


def finetuning(name: str) -> tuple[str, list[str]]:
    """Return the config file of a fine-tuning data set, and changes of the config; writes derived data."""
    source, folder = data_folder(), WORK / name
    if name in ("sst2", "qnli"):
        changes = ["task.tokens=128", f"task.data={source}/glue"]
        sample = [f"task.train={source}/glue/QNLI/train_sample_8999.tsv.gz"] * (name == "qnli")
        return f"configs/glue.py:{name}", [*changes, *sample]
    folder.mkdir(parents=True, exist_ok=True)
    if name == "squad1":
        recipes.squad1(source, folder)
        return "configs/squad.py:1", [f"task.data={folder}"]
    with gzip.open(source / "intent" / "clinc150.json.gz") as file:
        splits = json.load(file)
    for split in ("train", "val"):
        lines = (json.dumps({"text": text, "label": label}) for text, label in splits[split])
        files.write(folder / f"{split}.jsonl", "\n".join(lines) + "\n")
    return "configs/table.py", [f"task.train={folder}/train.jsonl", f"task.dev={folder}/val.jsonl"]


def texts(count: int) -> list[str]:
    """Return a shuffled mix of CLINC150's questions, SST-2's sentences and Wikipedia's paragraphs."""

    def lines(path):
        with gzip.open(data_folder() / path, "rt") as file:
            return file.read().split("\n")

    questions = json.loads("".join(lines("intent/clinc150.json.gz")))["test"]
    reviews = lines("glue/SST-2/dev.tsv.gz")[1:-1]
    articles = lines(min((data_folder() / "text/wikipedia").iterdir()))
    kinds = (
        [text for text, _ in questions],
        [line.split("\t")[0] for line in reviews],
        [line for line in articles if len(line) >= 100 and not line.startswith("<doc")],
    )
    rng = random.Random(0)
    sample = [text for kind in kinds for text in rng.sample(kind, count // 3)]
    rng.shuffle(sample)
    return sample
