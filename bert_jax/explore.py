"""Looking into a model: fill in masks."""

import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.convert.source import open_model
from bert_jax.data import rows
from bert_jax.errors import UserError
from bert_jax.model import Bert


class Candidate(NamedTuple):
    """A word piece and the probability that it fills the mask."""

    token: str
    probability: float


def _inputs(tokens: np.ndarray, length: int, positions: list[int]) -> tuple[Any, ...]:
    lengths = np.full((1, 1), length, np.int32)
    layout = rows.Layout(*map(jnp.asarray, rows.layout(lengths, lengths, tokens.shape[1])))
    return jnp.asarray(tokens), layout, jnp.asarray([positions], jnp.int32)


class MaskFiller:
    """Fills the masks of texts with one loaded model.

    Args:
        source, which: as `convert.source.open_model` takes them.

    Raises:
        UserError: what `open_model` raises; a model without a masked-LM head, or a causal one.
    """

    def __init__(self, source: str | pathlib.Path, which: str = "best"):
        self.config, self.vocabulary, self._params, self.step = open_model(str(source), which)
        if not self.config.model.masked_lm:
            raise UserError(f"{source} has no masked-LM head: it cannot fill in masks")
        if self.config.model.causal:
            raise UserError(
                f"{source} reads from left to right (config.model.causal): it predicts next tokens and "
                "cannot fill in masks"
            )
        model = Bert(self.config.model)
        self._apply = jax.jit(lambda params, *inputs: model.apply({"params": params}, *inputs)[0])

    def __call__(self, text: str, top: int = 5) -> list[list[Candidate]]:
        """For each `[MASK]` of the text, in order, its `top` candidates.

        Raises:
            UserError: no mask, or more tokens than the model has positions.
        """
        vocabulary, most = self.vocabulary, self.config.model.positions
        if not 0 < top <= len(vocabulary):
            raise UserError(f"{top} candidates: ask for 1 to {len(vocabulary):,}")
        tokens = vocabulary.encode(text, mask=True)
        masks = [i for i, token in enumerate(tokens) if token == vocabulary.mask_id]
        if not masks:
            raise UserError(f"no [MASK] in {text!r}: put one where a word is to be found")
        if len(tokens) > most:
            raise UserError(f"{text[:40]!r}… has {len(tokens)} tokens, the model takes {most}")
        # Powers of two, so that many texts share few compilations.
        room = min(1 << (len(tokens) - 1).bit_length(), most)
        slots = 1 << (len(masks) - 1).bit_length()
        padded = np.full((1, room), vocabulary.pad_id, np.int32)
        padded[0, : len(tokens)] = tokens
        positions = masks + [0] * (slots - len(masks))
        logits = self._apply(self._params, *_inputs(padded, len(tokens), positions))
        probabilities, ids = jax.lax.top_k(jax.nn.softmax(logits[0, : len(masks)]), top)
        return [
            [Candidate(vocabulary.tokens[i], float(p)) for i, p in zip(row_ids, row, strict=True)]
            for row_ids, row in zip(np.asarray(ids), np.asarray(probabilities), strict=True)
        ]
