"""Measure a model on BLiMP and Zorro: `measure.py DATA --init MODEL --out FOLDER [--pairs N]`."""

import argparse
import json
import pathlib

from bert_jax.runtime import device


def main() -> None:
    """Write the mean accuracies, and those of every phenomenon, to metrics.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=pathlib.Path)
    parser.add_argument("--init", required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--pairs", type=int, default=0)
    options = parser.parse_args()
    device.start("")
    from bert_jax.tools import minimal_pairs

    metrics = {}
    for name in ("blimp", "zorro"):
        scores = minimal_pairs.evaluate(options.init, [str(options.data / name)], options.pairs)
        metrics |= {name: scores.mean, f"{name}_files": scores.by_phenomenon}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "metrics.json").write_text(json.dumps(metrics))


if __name__ == "__main__":
    main()
