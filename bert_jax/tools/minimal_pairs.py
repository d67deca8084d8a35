"""Minimal pairs: does a model give the grammatical sentence the higher probability?

BLiMP (Warstadt et al. 2020, arXiv 1912.00582) and Zorro (Huebner et al. 2021) have a file per
phenomenon. The score of a sentence is its pseudo-log-likelihood (`inference.SentenceScorer`).
"""

import json
import pathlib
from collections.abc import Sequence

from bert_jax import storage
from bert_jax.data.compressed import damage, decompressed
from bert_jax.errors import UserError
from bert_jax.inference import SentenceScorer
from bert_jax.progress import Progress

MEAN = "mean"


def read(path: str | pathlib.Path) -> list[tuple[str, str]]:
    """Return the pairs of a file, the grammatical sentence first.

    Args:
        path: .jsonl with `sentence_good` and `sentence_bad`, or .txt with two lines for each pair, the
            ungrammatical one first; may be compressed.

    Raises:
        UserError: the file cannot be read, or is neither.
    """
    path = pathlib.Path(path)
    with damage(path), decompressed(path) as stream:
        lines = stream.read().decode(errors="replace").splitlines()
    lines = [line for line in lines if line.strip()]
    if lines and lines[0].startswith("{"):
        pairs = []
        for number, line in enumerate(lines, 1):
            try:
                values = json.loads(line)
                pairs.append((str(values["sentence_good"]), str(values["sentence_bad"])))
            except (ValueError, KeyError, TypeError, RecursionError):
                raise UserError(
                    f"{path}:{number}: not JSON with sentence_good and sentence_bad, as in BLiMP"
                ) from None
    elif len(lines) % 2:
        raise UserError(f"{path}: {len(lines)} lines; pairs need an even number, the bad one first")
    else:
        pairs = list(zip(lines[1::2], lines[::2], strict=True))
    if not pairs:
        raise UserError(f"{path}: no pairs")
    return pairs


@storage.reads("paths")
def evaluate(
    source: str, paths: Sequence[str], count: int = 0, which: str = "best"
) -> dict[str, float]:
    """Return the share of pairs whose grammatical sentence is more probable, by file, and the mean.

    The mean is over files, as in both benchmarks. Ties count half.

    Args:
        source, which: as in `convert.source.open_model`.
        paths: files, as for `read`.
        count: how many pairs of each file; 0 for all.

    Raises:
        UserError: as for `read` and `SentenceScorer`; two files of one name.
    """
    pairs = {pathlib.Path(path).name.split(".")[0]: read(path)[: count or None] for path in paths}
    if len(pairs) < len(paths):
        raise UserError("minimal pairs: two files have the same name")
    scorer = SentenceScorer(source, which)
    accuracies = {}
    with Progress("minimal pairs", sum(map(len, pairs.values())), "pairs") as progress:
        for name, own in pairs.items():
            scores = scorer([sentence for pair in own for sentence in pair]).reshape(-1, 2)
            gap = scores[:, 0] - scores[:, 1]
            accuracies[name] = float(((gap > 0) + 0.5 * (gap == 0)).mean())
            progress.advance(len(own))
    return {**accuracies, MEAN: sum(accuracies.values()) / len(accuracies)}
