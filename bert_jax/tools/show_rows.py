"""Describe a folder of rows, and show rows as text with their masks (`bert-jax rows`)."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax import storage
from bert_jax.config.schema import MaskingConfig
from bert_jax.data import rows as rows_lib
from bert_jax.data import vocabulary_files as vocabularies
from bert_jax.data.instances import IS_NEXT, IS_RANDOM
from bert_jax.data.loader import RowDataset
from bert_jax.data.vocabulary import Vocabulary
from bert_jax.errors import UserError, counted
from bert_jax.objectives.masking import Masker

_LABELS = {IS_NEXT: "next sentence", IS_RANDOM: "random sentence", rows_lib.NO_LABEL: ""}
_SAMPLE, _REMOTE_SAMPLE = (
    20_000,
    300,
)  # rows whose labels are counted; on storage, their shards are copied


def summary_lines(folder: str) -> Iterator[str]:
    """Yield lines that describe the rows: their format, and statistics of both splits."""
    manifest = rows_lib.read_manifest(folder)
    yield (
        f"rows of T={manifest.tokens} tokens with up to S={manifest.sequences} sequences, pairs "
        f"{manifest.pairs}, vocabulary of {manifest.vocab_size:,}"
    )
    for name in ("train", "heldout"):
        split: rows_lib.Split = getattr(manifest, name)
        if not split.rows:
            yield f"{name}: empty"
            continue
        line = (
            f"{name}: {counted(split.documents, 'document')}, {counted(split.sequences, 'sequence')} in "
            f"{counted(split.rows, 'row')}, {split.real_tokens:,} tokens, {split.fill_fraction:.1%} full"
        )
        sample = _REMOTE_SAMPLE if storage.is_remote(folder) else _SAMPLE
        labels = RowDataset(folder, name).read(range(min(split.rows, sample)))["label"]
        known = labels[labels != rows_lib.NO_LABEL]
        if len(known):
            line += f", {np.mean(known == IS_RANDOM):.1%} of pairs random"
        yield line
    counts = np.array(manifest.length_histogram)
    if total := counts.sum():
        ranks = np.array([0, 0.25, 0.5, 0.75, 1]) * (total - 1)
        quartiles = ", ".join(map(str, np.searchsorted(counts.cumsum(), ranks, "right")))
        mean = counts @ np.arange(len(counts)) / total
        yield f"tokens per training sequence: mean {mean:.1f}, quartiles {quartiles}"
    yield from (f"warning: {warning}" for warning in manifest.warnings)


def show(folder: str, split: str, indices: Sequence[int], seed: int = 0) -> Iterator[str]:
    """Yield lines that show rows: each sequence as text, and the masks of one step.

    Args:
        folder: folder of rows.
        split: "train" or "heldout".
        indices: indices of the rows.
        seed: seed of the masks, which are drawn with the default `MaskingConfig`.
    """
    opened, vocabulary = RowDataset(folder, split), vocabularies.load(folder)
    if not vocabulary.is_wordpiece:
        vocabulary = vocabulary.resized(opened.manifest.vocab_size)
    for index in indices:
        if not 0 <= index < len(opened):
            valid = f"choose 0 to {len(opened) - 1}" if len(opened) else "the split is empty"
            raise UserError(f"{folder} has no row {index} in {split}: {valid}")
    batch = opened.read(list(indices))
    targets = _mask(batch, opened.manifest, vocabulary, seed)
    for row, index in enumerate(indices):
        yield f"row {index}"
        start = 0
        for slot, length in enumerate(batch["length"][row].tolist()):
            if not length:
                break
            tokens = batch["tokens"][row, start : start + length].tolist()
            label = _LABELS[int(batch["label"][row, slot])]
            yield f"  sequence {slot}, {length} tokens{', ' + label if label else ''}"
            yield f"    {' '.join(vocabulary.tokens[i] for i in tokens)}"
            masked = [
                f"{position - start}: {vocabulary.tokens[label]} -> {vocabulary.tokens[token]}"
                for position, label, token in targets[row]
                if start <= position < start + length
            ]
            yield f"    predict {', '.join(masked) or 'nothing'}"
            start += length


def _mask(
    batch: dict[str, np.ndarray], manifest: rows_lib.Manifest, vocabulary: Vocabulary, seed: int
) -> list[list[tuple[int, int, int]]]:
    """Return (position, label, input token) of the predictions of each row."""
    masker = Masker(
        MaskingConfig(),
        manifest.tokens,
        manifest.sequences,
        manifest.vocab_size,
        vocabulary.mask_id,
        vocabulary.continuation(),
    )
    tokens, length, a_length = (
        jnp.asarray(batch[name].astype(np.int32)) for name in ("tokens", "length", "a_length")
    )
    layout = rows_lib.layout(length, a_length, manifest.tokens)
    key, mask = jax.random.key(seed), jax.jit(masker.__call__)
    masked: Any = jax.device_get(mask(tokens, length, a_length, layout, key))
    return [
        [
            (int(position), int(label), int(inputs[position]))
            for position, label, weight in zip(positions, labels, weights, strict=True)
            if weight
        ]
        for inputs, positions, labels, weights in zip(*masked, strict=True)
    ]
