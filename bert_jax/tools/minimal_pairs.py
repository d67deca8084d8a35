"""Minimal pairs: does a model give the grammatical sentence the higher probability?

BLiMP (Warstadt et al. 2020, arXiv 1912.00582) and Zorro (Huebner et al. 2021) have a file per
phenomenon. The score of a sentence is its pseudo-log-likelihood (`sentence_scores.SentenceScorer`).
"""

import pathlib
from collections.abc import Sequence
from typing import NamedTuple

from bert_jax import storage
from bert_jax.convert.source import open_model
from bert_jax.data import tables
from bert_jax.data.compressed import SUFFIXES
from bert_jax.errors import UserError
from bert_jax.inference.sentence_scores import PLL, SentenceScorer
from bert_jax.runtime.progress import Progress

# Where BLiMP's and Zorro's repositories have their files; "" is the folder itself.
_FOLDERS = ("data", "sentences/babyberta", "")
_KINDS = (".jsonl", ".txt")


class Phenomenon(NamedTuple):
    """The minimal pairs of a file.

    Attributes:
        pairs: the grammatical and the ungrammatical sentence.
        linguistics_term, field: the file's, as in BLiMP ("binding", "syntax"); "" if it has none.
    """

    pairs: list[tuple[str, str]]
    linguistics_term: str = ""
    field: str = ""


class Accuracies(NamedTuple):
    """Shares of pairs whose grammatical sentence has the higher probability; a tie is wrong.

    Attributes:
        mean: over phenomena, as in both benchmarks.
        by_phenomenon: by file.
        by_linguistics_term, by_field: means over the phenomena that have one, as in BLiMP.
    """

    mean: float
    by_phenomenon: dict[str, float]
    by_linguistics_term: dict[str, float]
    by_field: dict[str, float]


def read(path: str | pathlib.Path) -> Phenomenon:
    """Return the pairs of a file.

    Args:
        path: .jsonl with `sentence_good` and `sentence_bad`, or .txt with two lines for each pair, the
            ungrammatical one first; may be compressed.
    """
    advice = "use .jsonl with sentence_good and sentence_bad, or .txt with two lines for each pair"
    path, kind = pathlib.Path(path), tables.check_kind(path, _KINDS, advice)
    pairs, term, field = [], "", ""
    if kind == ".jsonl":
        for _, values in tables.read(path, ["sentence_good", "sentence_bad"]):
            pairs.append((values["sentence_good"], values["sentence_bad"]))
            term = str(values.get("linguistics_term", ""))
            # One of BLiMP's files has "syntax/semantics", the others "syntax_semantics".
            field = str(values.get("field", "")).replace("/", "_")
    else:
        records = tables.read(path, ["line"], kind=kind, header=["line"], empty=True)
        lines = [line for line in (fields["line"] for _, fields in records) if line.strip()]
        if len(lines) % 2:
            raise UserError(
                f"{path}: {len(lines)} lines, but pairs need an even number, the ungrammatical one "
                "first; complete the last pair, or remove it"
            )
        pairs = list(zip(lines[1::2], lines[::2], strict=True))
    if not pairs:
        raise UserError(f"{path}: no pairs; add at least one")
    return Phenomenon(pairs, term, field)


def find(path: str | pathlib.Path) -> list[pathlib.Path]:
    """Return the files of pairs in a folder, in order of name, or the file itself.

    The folder may be a copy of BLiMP's or Zorro's repository, or hold the files itself.
    """
    path = pathlib.Path(path)
    if not path.is_dir():
        return [path]
    endings = tuple(kind + suffix for kind in _KINDS for suffix in ("", *SUFFIXES))
    for folder in _FOLDERS:
        files = sorted(p for p in (path / folder).glob("*") if p.name.endswith(endings))
        if files:
            return files
    raise UserError(f"{path}: no .jsonl or .txt files; name the folder of BLiMP or Zorro")


@storage.with_local_inputs("paths")
def evaluate(
    source: str, paths: Sequence[str], count: int = 0, which: str = "best", pll: str = PLL[0]
) -> Accuracies:
    """Return the accuracy of a model on minimal pairs.

    Args:
        source, which: as for `open_model`.
        pll: as for `SentenceScorer`.
        paths: files, as for `read`, or folders, as for `find`.
        count: how many pairs of each file; 0 for all.
    """
    if count < 0:
        raise UserError(f"--pairs {count}: must be 0 (all pairs) or more")
    files = [file for path in paths for file in find(path)]
    phenomena = {file.name.split(".")[0]: read(file) for file in files}
    if len(phenomena) < len(files):
        raise UserError("minimal pairs: two files have the same name; rename one")
    scorer = SentenceScorer(open_model(source, which))
    accuracies = {}
    pairs = {name: phenomenon.pairs[: count or None] for name, phenomenon in phenomena.items()}
    with Progress("minimal pairs", sum(map(len, pairs.values())), "pairs") as progress:
        for name, phenomenon_pairs in pairs.items():
            sentences = [sentence for pair in phenomenon_pairs for sentence in pair]
            scores = scorer(sentences, pll=pll).reshape(-1, 2)
            accuracies[name] = float((scores[:, 0] > scores[:, 1]).mean())
            progress.advance(len(phenomenon_pairs))

    def means(kind: str) -> dict[str, float]:
        groups: dict[str, list[float]] = {}
        for name, phenomenon in phenomena.items():
            if group := getattr(phenomenon, kind):
                groups.setdefault(group, []).append(accuracies[name])
        return {group: sum(values) / len(values) for group, values in sorted(groups.items())}

    mean = sum(accuracies.values()) / len(accuracies)
    return Accuracies(mean, accuracies, means("linguistics_term"), means("field"))
