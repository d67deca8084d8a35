"""Small data sets for every kind of task, and the arguments of a small fine-tuning run."""

import json
import pathlib
import random

from tests.helpers.runs import VOCABULARY

CONFIGS = pathlib.Path(__file__).parent.parent.parent / "configs"


def write_table(folder):
    """Write train.csv, dev.csv, test.csv and a vocabulary.

    The label is "no" for texts that contain w0 and "yes" for texts that contain w1.
    """
    rng = random.Random(0)
    for name, count in (("train", 200), ("dev", 40)):
        lines = ["text,label"]
        for _ in range(count):
            label = rng.choice(["no", "yes"])
            words = [f"w{rng.randrange(2, 30)}" for _ in range(rng.randint(2, 6))]
            words.insert(rng.randrange(len(words)), "w0" if label == "no" else "w1")
            lines.append(f"{' '.join(words)},{label}")
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
    (folder / "test.csv").write_text("text\nw2 w0\nw1 w4 w5\n")
    VOCABULARY.save(folder / "vocab")
    return folder


def arguments(data, workdir, *changes, init="none", options=()):
    """Return the arguments of a small fine-tuning run on the table in the folder `data`."""
    changes = (
        *("model.layers=1", "model.hidden=16", "model.heads=2", "model.feed_forward=32"),
        *("model.positions=32", "task.tokens=32", "model.initializer_stddev=0.2"),
        *("epochs=8", "batch_size=16", "optim.learning_rate=1e-2"),
        *("log_every_steps=5", f"task.train={data}/train.csv", f"task.dev={data}/dev.csv"),
        *changes,
    )
    return [
        *("finetune", f"--config={CONFIGS / 'table.py'}", "--init", str(init)),
        *(("--vocab", str(data / "vocab")) if init == "none" else ()),
        *("--workdir", str(workdir), *options),
        *(f"--config.{change}" for change in changes),
    ]


def squad_file(path):
    """Write SQuAD 2.0 questions: six answerable, eight unanswerable."""
    questions = [
        {
            "id": f"q{i}",
            "question": f"w{i} ?",
            "answers": [{"text": f"w{i + 3}", "answer_start": 3 * (i + 3)}],
        }
        for i in range(6)
    ]
    questions += [{"id": f"n{i}", "question": "w9 ?", "answers": []} for i in range(8)]
    context = " ".join(f"w{i}" for i in range(10))
    paragraphs = [{"context": context, "qas": questions}]
    squad = {"version": "v2.0", "data": [{"title": "t", "paragraphs": paragraphs}]}
    path.write_text(json.dumps(squad))


def conll_file(path):
    """Write sentences with a tag per word, in CoNLL columns."""
    path.write_text("w1 B-a\nw2 I-a\nw3 O\n\nw4 O\nw5 B-b\n\n" * 5)


def choice_file(path):
    """Write a table of two-choice questions."""
    lines = ["question,first,second,label", *["w1 w2,w3,w4 w5,0", "w6,w7 w8,w9,1"] * 6]
    path.write_text("\n".join(lines) + "\n")


def labels_file(path):
    """Write a table of texts with zero or more labels each."""
    lines = ["text,label", *["w1 w2,a", "w3,b|a", "w4 w5 w6,", "w2 w3,b"] * 6]
    path.write_text("\n".join(lines) + "\n")


def scores_file(path):
    """Write a table of texts with one score each."""
    lines = ["text,label", *(f"w{i} w3,{i / 7:.3f}" for i in range(24))]
    path.write_text("\n".join(lines) + "\n")
