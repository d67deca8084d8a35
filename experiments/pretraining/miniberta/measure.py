"""Measure masked LM on held-out rows: `measure.py --init RUN --rows ROWS --out FOLDER`.

Losses per word piece depend on the vocabulary; those per word and per byte do not. All are at BERT's
masking rate, whatever the run was trained with.
"""

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Iterable

from bert_jax.config.schema import MaskingConfig, MeshConfig, PhaseConfig
from bert_jax.data import corpus, vocabulary
from bert_jax.data.rows import read_manifest
from bert_jax.runtime import device


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
    encode = vocabulary.load(vocab).tokenizer().encode_batch
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


def main() -> None:
    """Write the losses to metrics.json."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--init", required=True)
    parser.add_argument("--rows", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args()
    sources = read_manifest(options.rows).settings["sources"]
    metrics = units(heldout_loss(options.init, options.rows), sources, options.rows)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "metrics.json").write_text(json.dumps(metrics))


if __name__ == "__main__":
    main()
