"""A small corpus in Google's text format, with its vocabulary and rows."""

import pathlib
import random

from bert_jax.data import prepare, wordpiece


def write(folder):
    """Write 60 documents generated from a small grammar and return the file."""
    rng = random.Random(0)
    nouns = "king river mountain book child city teacher horse garden winter letter ship".split()
    verbs = "sees follows remembers leaves finds builds crosses describes".split()
    where = ["in the morning", "near the old bridge", "without a word", "after the war"]
    documents = []
    for _ in range(60):
        # Each document has few nouns, so that next-sentence prediction is learnable.
        topic = rng.sample(nouns, 4)
        documents.append(
            "\n".join(
                f"The {rng.choice(topic)} {rng.choice(verbs)} the {rng.choice(topic)} {rng.choice(where)}."
                for _ in range(rng.randint(4, 30))
            )
        )
    path = pathlib.Path(folder) / "text.txt"
    path.write_text("\n\n".join(documents) + "\n")
    return path


def write_rows(text, tokens=32, sequences=3):
    """Prepare rows of `text` in a sibling folder, unless it exists, and return the folder."""
    vocabulary = text.parent / "vocab"
    if not vocabulary.exists():
        wordpiece.train([str(text)], str(vocabulary), size=150)
    folder = text.parent / f"rows_{tokens}_{sequences}"
    if not folder.exists():
        prepare.prepare(
            [str(text)],
            str(vocabulary),
            str(folder),
            tokens=tokens,
            sequences=sequences,
            heldout_fraction=0.1,
            workers=1,
        )
    return folder
