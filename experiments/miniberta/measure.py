"""Measure masked LM on held-out rows: `measure.py --init RUN --rows ROWS --out FOLDER`.

Losses per word piece depend on the vocabulary; those per word and per byte do not. All are at BERT's
masking rate, whatever the run was trained with.
"""

import argparse
import dataclasses
import json
import pathlib

import subset

from bert_jax import device
from bert_jax.config import MaskingConfig, MeshConfig, PhaseConfig
from bert_jax.data.rows import read_manifest


def heldout_loss(init: str, rows: pathlib.Path) -> tuple[float, int]:
    """Return the loss of a run on the held-out rows in nats, and the word pieces of all rows."""
    device.start("")
    from bert_jax import checkpoint, sharding
    from bert_jax.evaluate import make_evaluate
    from bert_jax.objectives import pretraining

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
    manifest = read_manifest(rows)
    # Without [CLS] and [SEP].
    pieces = sum(s.real_tokens - 2 * s.sequences for s in (manifest.train, manifest.heldout))
    return make_evaluate(phase, mesh)(params)["masked_lm_loss"], pieces


def main() -> None:
    """Write the losses to metrics.json."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--init", required=True)
    parser.add_argument("--rows", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args()
    loss, pieces = heldout_loss(options.init, options.rows)
    words, size = subset.totals()
    metrics = {
        "per_piece": loss,
        "per_word": loss * pieces / words,
        "per_byte": loss * pieces / size,
        "pieces_per_word": pieces / words,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "metrics.json").write_text(json.dumps(metrics))


if __name__ == "__main__":
    main()
