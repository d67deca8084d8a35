"""Model inspection: fill in masks, compute and summarize attention maps."""

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
from bert_jax.model.bert import Bert


class Candidate(NamedTuple):
    """A word piece and its probability of filling the mask."""

    token: str
    probability: float


def _row(
    vocabulary: Vocabulary, tokens: list[int], a_length: int, max_tokens: int, text: str
) -> tuple[Int[jax.Array, "1 T"], rows.Layout]:
    """Build a row of one sequence; T is a power of two, so that texts share few compilations.

    Raises:
        UserError: there are more than `max_tokens` tokens; quotes the text.
    """
    if len(tokens) > max_tokens:
        raise UserError(
            f"{text[:40]!r}… has {len(tokens)} tokens, the model takes {max_tokens}: shorten it"
        )
    row_tokens = min(1 << (len(tokens) - 1).bit_length(), max_tokens)
    padded = np.full((1, row_tokens), vocabulary.pad_id, np.int32)
    padded[0, : len(tokens)] = tokens
    layout = rows.layout(np.array([[len(tokens)]]), np.array([[a_length]]), row_tokens)
    return jnp.asarray(padded), rows.Layout(*map(jnp.asarray, layout))


class MaskFiller:
    """Mask filling in texts with a loaded model.

    Args:
        source, which: as in `convert.source.open_model`.

    Raises:
        UserError: the model cannot be loaded, has no masked-LM head, or is causal.
    """

    def __init__(self, source: str | pathlib.Path, which: str = "best"):
        self.config, self.vocabulary, self._params, self.step = open_model(str(source), which)
        if not self.config.model.masked_lm:
            raise UserError(f"{source} has no masked-LM head: it cannot fill in masks")
        if self.config.model.causal:
            raise UserError(
                f"{source} reads from left to right (config.model.causal): it predicts next tokens "
                "and cannot fill in masks"
            )
        model = Bert(self.config.model)
        self._apply = jax.jit(lambda params, *inputs: model.apply({"params": params}, *inputs)[0])

    def __call__(self, text: str, top: int = 5) -> list[list[Candidate]]:
        """Return the `top` candidates for each `[MASK]` of the text, in order.

        Raises:
            UserError: the text has no mask, or more tokens than the model has positions.
        """
        vocabulary, max_tokens = self.vocabulary, self.config.model.positions
        if not 0 < top <= len(vocabulary):
            raise UserError(f"{top} candidates: ask for 1 to {len(vocabulary):,}")
        tokens = vocabulary.encode(text, mask=True)
        masks = [i for i, token in enumerate(tokens) if token == vocabulary.mask_id]
        if not masks:
            raise UserError(f"no [MASK] in {text!r}: put one where a word should be predicted")
        padded, layout = _row(vocabulary, tokens, len(tokens), max_tokens, text)
        slots = 1 << (len(masks) - 1).bit_length()
        positions = jnp.asarray([masks + [0] * (slots - len(masks))], jnp.int32)
        logits = self._apply(self._params, padded, layout, positions)
        probabilities, ids = jax.lax.top_k(jax.nn.softmax(logits[0, : len(masks)]), top)
        return [
            [Candidate(vocabulary.tokens[i], float(p)) for i, p in zip(row_ids, row, strict=True)]
            for row_ids, row in zip(np.asarray(ids), np.asarray(probabilities), strict=True)
        ]


class AttentionMaps(NamedTuple):
    """Attention in a text or a pair of texts with T word pieces, of L layers with N heads.

    Attributes:
        texts: the text or the pair.
        tokens: T word pieces, including [CLS] and [SEP].
        segments: [T], 0 up to the first [SEP], then 1.
        probabilities: [L, N, T, T], from the query (row) to the keys; rows sum to 1.
    """

    texts: tuple[str, ...]
    tokens: list[str]
    segments: Int[np.ndarray, " T"]
    probabilities: Float[np.ndarray, "L N T T"]


class AttentionMapper:
    """Attention maps of texts from a loaded model of any kind.

    Args:
        source, which: as in `convert.source.open_model`.

    Raises:
        UserError: the model cannot be loaded.
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
        """Return the attention in `[CLS] text [SEP]` or `[CLS] text [SEP] text_b [SEP]`.

        "[MASK]" is read as the mask token. Models without segment embeddings also take pairs, as in
        fine-tuning; the texts are then separated by [SEP] only.

        Raises:
            UserError: a text has no word pieces, or there are more tokens than positions.
        """
        vocabulary = self.vocabulary
        texts = (text,) if text_b is None else (text, text_b)
        for part in texts:
            if len(vocabulary.encode(part, mask=True)) == 2:  # [CLS] and [SEP]
                raise UserError(f"{part[:40]!r} has no word piece: give a text with words")
        a_length = len(vocabulary.encode(text, mask=True))
        tokens = vocabulary.encode(text, text_b, mask=True)
        padded, layout = _row(vocabulary, tokens, a_length, self.config.model.positions, text)
        probabilities = np.asarray(self._apply(self._params, padded, layout))
        count = len(tokens)
        return AttentionMaps(
            texts,
            [vocabulary.tokens[i] for i in tokens],
            np.asarray(layout.token_type_ids)[0, :count],
            probabilities[:, 0, :, :count, :count],
        )


def entropy(probabilities: Float[np.ndarray, "*maps T T"]) -> Float[np.ndarray, "*maps"]:
    """Return the entropy of attention in nats, from 0 (one token) to log T (uniform).

    Averaged over queries i: -sum_j a_ij log a_ij (Clark et al. 2019, section 3.3).
    """
    return scipy.special.entr(probabilities).sum(-1).mean(-1)


def mean_distance(probabilities: Float[np.ndarray, "*maps T T"]) -> Float[np.ndarray, "*maps"]:
    """Return the mean attention distance in tokens, in either direction.

    Averaged over queries i: sum_j a_ij |i - j| (Vig and Belinkov 2019).
    """
    positions = np.arange(probabilities.shape[-1])
    distances = np.abs(positions[:, None] - positions).astype(probabilities.dtype)
    return np.einsum("...ij,ij->...", probabilities, distances) / len(positions)


def rollout(probabilities: Float[np.ndarray, "L N T T"]) -> Float[np.ndarray, "L T T"]:
    """Return the attention rollout from the input to each layer; rows sum to 1.

    Entry [l, i, j] is the contribution of input piece j to piece i after layer l. Each layer passes
    on half the mean of its heads and half the residual (Abnar and Zuidema 2020).
    """
    mixed = (probabilities.mean(1) + np.eye(probabilities.shape[-1], dtype=np.float32)) / 2
    mixed /= mixed.sum(-1, keepdims=True)
    rollouts = [mixed[0]]
    for layer in mixed[1:]:
        rollouts.append(layer @ rollouts[-1])
    return np.stack(rollouts)
