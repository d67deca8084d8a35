"""Measure a pretrained model.

    python experiments/pretraining/measure.py --init RUN --rows ROWS --out FOLDER       losses, predicted words
    python experiments/pretraining/measure.py --init MODEL --data DATA --out FOLDER     BLiMP and Zorro

Losses per word piece depend on the vocabulary; those per word and per byte do not. All are at BERT's
masking rate, whatever the run was trained with.
"""

import argparse
import dataclasses
import json
import pathlib
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

from bert_jax.config.schema import MaskingConfig, MeshConfig, PhaseConfig
from bert_jax.data import corpus, vocabulary_files
from bert_jax.data.rows import read_manifest
from bert_jax.runtime import device

TEXTS = (
    "The capital of [MASK] is Paris.",
    "He was born in [MASK] and died in 1902.",
    "The king and the [MASK] were married in the church.",
    "She opened the [MASK] and went into the room.",
    "The band released their second [MASK] in 1985.",
)


def heldout_loss(init: str, rows: str | pathlib.Path) -> float:
    """Return the loss of a run on held-out rows, in nats per word piece."""
    device.start("")
    from bert_jax.objectives import pretraining
    from bert_jax.runs import checkpoint
    from bert_jax.runtime import sharding
    from bert_jax.training.evaluate import make_evaluate

    config, _, params, _ = checkpoint.load_model(init)
    config = dataclasses.replace(
        config,
        phases=(PhaseConfig(rows=str(rows)),),
        masking=MaskingConfig(),
        evaluate_rows=0,
        batch_size=8,
    )
    _, _, _, (phase,) = pretraining.make_phases(config)
    mesh = sharding.make_mesh(MeshConfig())
    return make_evaluate(phase, mesh)(params)["masked_lm_loss"]


def units(per_piece: float, sources: Iterable[str], vocab: str | pathlib.Path) -> dict[str, float]:
    """Return a loss per word piece, per word and per byte of texts, and how many of each they have.

    Counts the texts rather than rows, because rows without pairs leave out the ends of long sentences.
    """
    encode = vocabulary_files.load(vocab).tokenizer().encode_batch
    pieces = words = size = 0
    for source in map(corpus.parse_source, sources):
        for path in source.files:
            texts = [
                d.text
                for d in corpus.read(dataclasses.replace(source, files=(path,)), corpus.Report())
            ]
            pieces += sum(map(len, encode(texts, add_special_tokens=False)))
            words += sum(len(text.split()) for text in texts)
            size += sum(len(text.encode()) for text in texts)
    return {
        "per_piece": per_piece,
        "per_word": per_piece * pieces / words,
        "per_byte": per_piece * pieces / size,
        "pieces_per_word": pieces / words,
        "pieces": pieces,
        "words": words,
        "bytes": size,
    }


def fill_masks(init: str) -> list[dict[str, Any]]:
    """Return the answers of `bert-jax fill-mask` for five texts."""
    command = [sys.executable, "-m", "bert_jax", "fill-mask", "--json", "--init", init, *TEXTS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def minimal_pairs(init: str, data: pathlib.Path, pairs: int) -> dict[str, Any]:
    """Return the mean accuracies on BLiMP and Zorro, and those of every phenomenon."""
    device.start("")
    from bert_jax.tools import minimal_pairs

    metrics = {}
    for name in ("blimp", "zorro"):
        scores = minimal_pairs.evaluate(init, [str(data / name)], pairs)
        metrics |= {name: scores.mean, f"{name}_files": scores.by_phenomenon}
    return metrics


def main() -> None:
    """Write the measurements to metrics.json."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--init", required=True)
    parser.add_argument("--rows", type=pathlib.Path)
    parser.add_argument("--data", type=pathlib.Path)
    parser.add_argument("--pairs", type=int, default=0, help="of each paradigm (default: all)")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args()
    metrics: dict[str, Any] = {}
    if options.rows:
        sources = read_manifest(options.rows).settings["sources"]
        metrics = {"fill_mask": fill_masks(options.init)}
        metrics |= units(heldout_loss(options.init, options.rows), sources, options.rows)
    if options.data:
        metrics |= minimal_pairs(options.init, options.data, options.pairs)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "metrics.json").write_text(json.dumps(metrics))


if __name__ == "__main__":
    main()
