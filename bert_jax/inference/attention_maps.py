"""Compute and summarize attention maps."""

from typing import Any, NamedTuple

import jax
import numpy as np
import scipy.special
from jaxtyping import Float, Int

from bert_jax.convert.source import OpenModel
from bert_jax.data.rows import shape_repr
from bert_jax.errors import UserError
from bert_jax.inference.fill_mask import inputs_of
from bert_jax.model.bert import Bert
from bert_jax.model.encoder import attention_probabilities


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

    __repr__ = shape_repr


class AttentionMapper:
    """Attention maps of texts from a loaded model of any kind."""

    def __init__(self, opened: OpenModel):
        self.config, self.vocabulary, self._params, _ = opened
        model = Bert(self.config.model)

        @jax.jit
        def probabilities(params, tokens, layout):
            outputs: Any = model.apply({"params": params}, tokens, layout, outputs=("states",))
            return attention_probabilities(model.config, params, outputs.states, layout)

        self._apply = probabilities

    def __call__(self, text: str, text_b: str | None = None) -> AttentionMaps:
        """Return the attention in `[CLS] text [SEP]` or `[CLS] text [SEP] text_b [SEP]`.

        "[MASK]" is read as the mask token. Models without segment embeddings also take pairs, as in
        fine-tuning; the texts are then separated by [SEP] only.
        """
        vocabulary = self.vocabulary
        texts = (text,) if text_b is None else (text, text_b)
        for part in texts:
            if len(vocabulary.encode(part, mask=True)) == 2:  # [CLS] and [SEP]
                raise UserError(f"{part[:40]!r} has no word piece: give a text with words")
        tokens = vocabulary.encode(text, text_b, mask=True)
        pair = text if text_b is None else (text, text_b)
        padded, layout = inputs_of(vocabulary, [pair], self.config.model.positions)
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
