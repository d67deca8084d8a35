"""Fill in masks with a loaded model or one that trains, and the inputs of a model from texts."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from bert_jax.config.model import ModelConfig
from bert_jax.convert.source import OpenModel
from bert_jax.data import rows
from bert_jax.data.vocabulary import Vocabulary
from bert_jax.errors import UserError
from bert_jax.model.bert import Bert, Params
from bert_jax.runtime import sharding


class Candidate(NamedTuple):
    """A word piece and its probability of filling the mask."""

    token: str
    probability: float


class Inputs(NamedTuple):
    """N texts of at most T tokens, one per row: arguments of the model."""

    tokens: Int[jax.Array, "N T"]
    layout: rows.Layout

    __repr__ = rows.shape_repr


def inputs_of(
    vocabulary: Vocabulary, texts: Sequence[str | tuple[str, str]], max_tokens: int
) -> Inputs:
    """Tokenize texts or pairs, with "[MASK]" as the mask token, into a row each.

    T is a power of two, so that texts share few compilations.
    """
    encoded, a_lengths = [], []
    for text in texts:
        a, b = (text, None) if isinstance(text, str) else text
        encoded.append(vocabulary.encode(a, b, mask=True))
        separators = 0 if b is None else len(vocabulary.separator_ids) - 1
        a_lengths.append(len(vocabulary.encode(a, mask=True)) + separators)
        if len(encoded[-1]) > max_tokens:
            raise UserError(
                f"{a[:40]!r}… has {len(encoded[-1])} tokens, the model takes {max_tokens}: shorten it"
            )
    lengths = [len(tokens) for tokens in encoded]
    row_tokens = min(1 << (max(lengths, default=1) - 1).bit_length(), max_tokens)
    padded = np.full((len(encoded), row_tokens), vocabulary.pad_id, np.int32)
    for row, tokens in zip(padded, encoded, strict=True):
        row[: len(tokens)] = tokens
    layout = rows.layout(np.array(lengths)[:, None], np.array(a_lengths)[:, None], row_tokens)
    return Inputs(jnp.asarray(padded), rows.Layout(*map(jnp.asarray, layout)))


class MaskFiller:
    """Mask filling in texts with a loaded model."""

    def __init__(self, opened: OpenModel):
        self.config, self.vocabulary, self._params, _ = opened
        if not self.config.model.masked_lm:
            raise UserError("the model has no masked-LM head: it cannot fill in masks")
        if self.config.model.causal:
            raise UserError(
                "the model reads from left to right (config.model.causal): it predicts next tokens and "
                "cannot fill in masks"
            )
        model = Bert(self.config.model)

        @jax.jit
        def logits(params, *inputs):
            outputs: Any = model.apply({"params": params}, *inputs, outputs=("masked_lm",))
            return outputs.masked_lm

        self._apply = logits

    def __call__(self, text: str, top: int = 5) -> list[list[Candidate]]:
        """Return the `top` candidates for each `[MASK]` of the text, in order."""
        vocabulary = self.vocabulary
        if not 0 < top <= len(vocabulary):
            raise UserError(f"top is {top}: it must be 1 to {len(vocabulary):,}")
        padded, layout = inputs_of(vocabulary, [text], self.config.model.positions)
        masks = np.flatnonzero(padded[0] == vocabulary.mask_id).tolist()
        if not masks:
            raise UserError(
                f"no {vocabulary.special[4]} in {text!r}: put one where a word should be predicted"
            )
        slots = 1 << (len(masks) - 1).bit_length()
        positions = jnp.asarray([masks + [0] * (slots - len(masks))], jnp.int32)
        logits = self._apply(self._params, padded, layout, positions)
        probabilities, ids = jax.lax.top_k(jax.nn.softmax(logits[0, : len(masks)]), top)
        return [
            [
                Candidate(vocabulary.text_of(int(i)), float(p))
                for i, p in zip(row_ids, row, strict=True)
            ]
            for row_ids, row in zip(np.asarray(ids), np.asarray(probabilities), strict=True)
        ]


class MaskProbe:
    """Mask filling in fixed texts while a model trains.

    Args:
        model, vocabulary: those of the model that trains.
        texts: texts with [MASK].
        mesh: the mesh of the parameters; all its processes call the probe together.
    """

    def __init__(
        self,
        model: ModelConfig,
        vocabulary: Vocabulary,
        texts: Sequence[str],
        mesh: sharding.Mesh,
    ):
        if model.causal or not model.masked_lm:
            raise UserError(
                "config.sample_texts: a causal model or ELECTRA does not fill in masks; set it to ()"
            )
        inputs = jax.device_get(inputs_of(vocabulary, texts, model.positions))
        is_mask = inputs.tokens == vocabulary.mask_id
        counts = is_mask.sum(1)
        for text, count in zip(texts, counts, strict=True):
            if not count:
                raise UserError(f"config.sample_texts: no [MASK] in {text!r}")
        # Positions of the masks first, in order.
        positions = np.argsort(~is_mask, axis=1, kind="stable")[:, : counts.max()]
        self._inputs = (*inputs, positions.astype(np.int32))
        self._texts, self._counts, self._vocabulary, self._mesh = texts, counts, vocabulary, mesh
        # Kernels take rows of some lengths, and as many rows as devices divide.
        bert = Bert(dataclasses.replace(model, attention="xla", kernels="xla"))

        def candidates(params: Params, tokens, layout, positions):
            outputs: Any = bert.apply(
                {"params": params}, tokens, layout, positions, outputs=("masked_lm",)
            )
            return jax.lax.top_k(jax.nn.softmax(outputs.masked_lm), min(5, len(vocabulary)))

        replicated = sharding.replicated(mesh)
        self._candidates = jax.jit(
            candidates,
            in_shardings=(None, *3 * (replicated,)),
            out_shardings=replicated,
        )

    def __call__(self, params: Params) -> list[dict[str, Any]]:
        """Return a line per text: `text`, and for each of its `masks` a list of candidates."""
        with jax.set_mesh(self._mesh):
            probabilities, ids = jax.device_get(self._candidates(params, *self._inputs))
        names = self._vocabulary.tokens
        return [
            {
                "text": text,
                "masks": [
                    [
                        {"token": names[i], "probability": float(p)}
                        for i, p in zip(ids[n, m], probabilities[n, m], strict=True)
                    ]
                    for m in range(self._counts[n])
                ],
            }
            for n, text in enumerate(self._texts)
        ]
