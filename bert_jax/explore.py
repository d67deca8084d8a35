"""Looking into a model: fill in masks, see what attends to what."""

import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
from jaxtyping import Float, Int

from bert_jax.convert.source import open_model
from bert_jax.data import rows
from bert_jax.data.wordpiece import Vocabulary
from bert_jax.errors import UserError
from bert_jax.model import Bert


class Candidate(NamedTuple):
    """A word piece and the probability that it fills the mask."""

    token: str
    probability: float


def _row(
    vocabulary: Vocabulary, tokens: list[int], a_length: int, most: int, text: str
) -> tuple[Int[jax.Array, "1 T"], rows.Layout]:
    """A row of one sequence; T is a power of two, so that many texts share few compilations.

    Raises:
        UserError: more tokens than `most`; it quotes the text.
    """
    if len(tokens) > most:
        raise UserError(f"{text[:40]!r}… has {len(tokens)} tokens, the model takes {most}")
    room = min(1 << (len(tokens) - 1).bit_length(), most)
    padded = np.full((1, room), vocabulary.pad_id, np.int32)
    padded[0, : len(tokens)] = tokens
    layout = rows.layout(np.array([[len(tokens)]]), np.array([[a_length]]), room)
    return jnp.asarray(padded), rows.Layout(*map(jnp.asarray, layout))


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
        padded, layout = _row(vocabulary, tokens, len(tokens), most, text)
        slots = 1 << (len(masks) - 1).bit_length()
        positions = jnp.asarray([masks + [0] * (slots - len(masks))], jnp.int32)
        logits = self._apply(self._params, padded, layout, positions)
        probabilities, ids = jax.lax.top_k(jax.nn.softmax(logits[0, : len(masks)]), top)
        return [
            [Candidate(vocabulary.tokens[i], float(p)) for i, p in zip(row_ids, row, strict=True)]
            for row_ids, row in zip(np.asarray(ids), np.asarray(probabilities), strict=True)
        ]


class AttentionMaps(NamedTuple):
    """What attends to what in one text, or in a pair of them. T word pieces, L layers, N heads.

    Attributes:
        texts: one or two, as they were given.
        tokens: T word pieces, [CLS] and [SEP] included.
        segments: [T] 0 up to the first [SEP], 1 after it.
        probabilities: [L, N, T, T]; a row is what one word piece attends to and sums to 1.
    """

    texts: tuple[str, ...]
    tokens: list[str]
    segments: Int[np.ndarray, " T"]
    probabilities: Float[np.ndarray, "L N T T"]


class AttentionMapper:
    """Computes the attention of texts in one loaded model, of any kind.

    Args:
        source, which: as `convert.source.open_model` takes them.

    Raises:
        UserError: what `open_model` raises.
    """

    def __init__(self, source: str | pathlib.Path, which: str = "best"):
        self.config, self.vocabulary, self._params, self.step = open_model(str(source), which)
        model = Bert(self.config.model)
        self._apply = jax.jit(
            lambda params, *inputs: model.apply(
                {"params": params}, *inputs, method=Bert.attention_probabilities
            )
        )

    def __call__(self, text: str, text_b: str | None = None) -> AttentionMaps:
        """The attention in `[CLS] text [SEP]` or `[CLS] text [SEP] text_b [SEP]`.

        A "[MASK]" is the token. A model without a second segment embedding takes pairs too, as it
        does in fine-tuning: only [SEP] tells it where the second text begins.

        Raises:
            UserError: a text without a word piece, or more tokens than the model has positions.
        """
        vocabulary = self.vocabulary
        texts = (text,) if text_b is None else (text, text_b)
        for each in texts:
            if len(vocabulary.encode(each, mask=True)) == 2:  # [CLS] and [SEP]
                raise UserError(f"{each[:40]!r} has no word piece: give a text with words")
        a_length = len(vocabulary.encode(text, mask=True))
        tokens = vocabulary.encode(text, text_b, mask=True)
        padded, layout = _row(vocabulary, tokens, a_length, self.config.model.positions, text)
        found = np.asarray(self._apply(self._params, padded, layout))
        count = len(tokens)
        return AttentionMaps(
            texts,
            [vocabulary.tokens[i] for i in tokens],
            np.asarray(layout.segment)[0, :count],
            found[:, 0, :, :count, :count],
        )


def entropy(probabilities: Float[np.ndarray, "*maps T T"]) -> Float[np.ndarray, "*maps"]:
    """How widely a head looks, in nats: from 0 (one token) to log T (all alike).

    The mean over the tokens that attend of -sum_j a_ij log a_ij (Clark et al. 2019, section 3.3).
    """
    return scipy.special.entr(probabilities).sum(-1).mean(-1)


def distance(probabilities: Float[np.ndarray, "*maps T T"]) -> Float[np.ndarray, "*maps"]:
    """How far a head looks, in tokens either way.

    The mean over the tokens that attend of sum_j a_ij |i - j| (Vig and Belinkov 2019).
    """
    place = np.arange(probabilities.shape[-1])
    apart = np.abs(place[:, None] - place).astype(probabilities.dtype)
    return np.einsum("...ij,ij->...", probabilities, apart) / len(place)


def rollout(probabilities: Float[np.ndarray, "L N T T"]) -> Float[np.ndarray, "L T T"]:
    """How much of each word piece's input is in each one's output, layer by layer; rows sum to 1.

    Attention rollout (Abnar and Zuidema 2020): a layer passes on half its heads' mean and half the
    residual, and a layer's result is that times the one below.
    """
    mixed = (probabilities.mean(1) + np.eye(probabilities.shape[-1], dtype=np.float32)) / 2
    mixed /= mixed.sum(-1, keepdims=True)
    found = [mixed[0]]
    for layer in mixed[1:]:
        found.append(layer @ found[-1])
    return np.stack(found)
