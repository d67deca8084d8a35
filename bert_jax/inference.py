"""Model inspection: fill in masks, score sentences, compute and summarize attention maps."""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
from jaxtyping import Float, Int

from bert_jax import sharding
from bert_jax.config import ModelConfig
from bert_jax.convert.source import OpenModel, open_model
from bert_jax.data import rows
from bert_jax.data.wordpiece import Vocabulary
from bert_jax.errors import UserError
from bert_jax.model.bert import Bert, Params
from bert_jax.objectives.losses import label_logits

# Pseudo-log-likelihoods: what is masked with a word piece, nothing or the rest of its word.
PLL = ("original", "word-l2r")

# Tokens per batch of `SentenceScorer`.
_BATCH_TOKENS = 1 << 13


class Candidate(NamedTuple):
    """A word piece and its probability of filling the mask."""

    token: str
    probability: float


class Inputs(NamedTuple):
    """N texts of at most T tokens, one per row: arguments of the model."""

    tokens: Int[jax.Array, "N T"]
    layout: rows.Layout


def _open(source: str | pathlib.Path | OpenModel, which: str) -> OpenModel:
    return source if isinstance(source, OpenModel) else open_model(str(source), which)


def _name(source: str | pathlib.Path | OpenModel) -> str:
    return "the model" if isinstance(source, OpenModel) else str(source)


def inputs_of(
    vocabulary: Vocabulary, texts: Sequence[str | tuple[str, str]], max_tokens: int
) -> Inputs:
    """Tokenize texts or pairs, with "[MASK]" as the mask token, into a row each.

    T is a power of two, so that texts share few compilations.

    Raises:
        UserError: a text has more than `max_tokens` tokens; quotes it.
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
    """Mask filling in texts with a loaded model.

    Args:
        source, which: as in `convert.source.open_model`, or a model that it returned.

    Raises:
        UserError: the model cannot be loaded, has no masked-LM head, or is causal.
    """

    def __init__(self, source: str | pathlib.Path | OpenModel, which: str = "best"):
        self.config, self.vocabulary, self._params, self.step = _open(source, which)
        if not self.config.model.masked_lm:
            raise UserError(f"{_name(source)} has no masked-LM head: it cannot fill in masks")
        if self.config.model.causal:
            raise UserError(
                f"{_name(source)} reads from left to right (config.model.causal): it predicts next tokens "
                "and cannot fill in masks"
            )
        model = Bert(self.config.model)
        self._apply = jax.jit(lambda params, *inputs: model.apply({"params": params}, *inputs)[0])

    def __call__(self, text: str, top: int = 5) -> list[list[Candidate]]:
        """Return the `top` candidates for each `[MASK]` of the text, in order.

        Raises:
            UserError: the text has no mask, or more tokens than the model has positions.
        """
        vocabulary = self.vocabulary
        if not 0 < top <= len(vocabulary):
            raise UserError(f"{top} candidates: ask for 1 to {len(vocabulary):,}")
        tokens = vocabulary.encode(text, mask=True)
        masks = [i for i, token in enumerate(tokens) if token == vocabulary.mask_id]
        if not masks:
            raise UserError(
                f"no {vocabulary.special[4]} in {text!r}: put one where a word should be predicted"
            )
        padded, layout = inputs_of(vocabulary, [text], self.config.model.positions)
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


class MaskSampler:
    """Mask filling in fixed texts while a model trains.

    Args:
        model: config of the model.
        vocabulary: its vocabulary.
        texts: texts with [MASK].
        mesh: the mesh of the parameters; all its processes call the sampler together.
        top: number of candidates for each mask.

    Raises:
        UserError: a text has no mask or is too long, or the model is causal or ELECTRA.
    """

    def __init__(
        self,
        model: ModelConfig,
        vocabulary: Vocabulary,
        texts: Sequence[str],
        mesh: jax.sharding.Mesh,
        top: int = 5,
    ):
        if model.causal or not model.masked_lm:
            raise UserError(
                "config.sample_texts: a causal model or ELECTRA does not fill in masks; set it to ''"
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
        # Kernels for long rows do not take those of a few tokens.
        bert = Bert(dataclasses.replace(model, attention="xla"))

        def candidates(params: Params, tokens, layout, positions):
            logits = bert.apply({"params": params}, tokens, layout, positions)[0]
            return jax.lax.top_k(jax.nn.softmax(logits), min(top, len(vocabulary)))

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


class TokenScore(NamedTuple):
    """A word piece of a text and its log-probability in nats."""

    token: str
    log_probability: float


class SentenceScorer:
    """Log-probabilities of texts from a loaded model with a token head.

    The score of a text is its pseudo-log-likelihood: the sum over word pieces of log p(piece | all
    others), each masked in turn (Salazar et al. 2020, arXiv 1910.14659, equation 1). With
    pll="word-l2r", the pieces of the same word to the right of a masked piece are masked too, so that
    a word cannot be predicted from its own end (Kauf and Ivanova 2023, arXiv 2305.10588,
    "PLL-word-l2r"). For a causal model the score is the log-likelihood: the sum of log p(piece |
    those before). [CLS] and [SEP] are not scored.

    Args:
        source, which: as in `convert.source.open_model`, or a model that it returned.

    Raises:
        UserError: the model cannot be loaded, or has no head that predicts tokens.
    """

    def __init__(self, source: str | pathlib.Path | OpenModel, which: str = "best"):
        self.config, self.vocabulary, self._params, self.step = _open(source, which)
        if not self.config.model.masked_lm:
            raise UserError(f"{_name(source)} has no masked-LM head: it cannot score sentences")
        self._name, self._continuation = _name(source), self.vocabulary.continuation()
        model = Bert(self.config.model)

        @jax.jit
        def log_probabilities(params, tokens, layout, positions, targets):
            logits = model.apply({"params": params}, tokens, layout, positions)[0]
            return label_logits(logits, targets) - jax.nn.logsumexp(logits, -1)

        self._log_probabilities = log_probabilities

    def __call__(
        self,
        texts: Sequence[str],
        advance: Callable[[int], None] = lambda count: None,
        pll: str = PLL[0],
    ) -> Float[np.ndarray, " N"]:
        """Return the scores of N texts in nats; 0 for a text without word pieces.

        Args:
            texts: the texts.
            advance: called with the number of predicted pieces after each batch.
            pll: one of `PLL`.

        Raises:
            UserError: a text has more tokens than the model has positions; `pll` is unknown, or not
                the default for a causal model.
        """
        return np.array([scores.sum() for _, scores in self._scores(texts, advance, pll)])

    def tokens(self, texts: Sequence[str], pll: str = PLL[0]) -> list[list[TokenScore]]:
        """Return the log-probability of each word piece of each text, whose sum is its score.

        Raises:
            UserError: as for a call.
        """
        tokens = self.vocabulary.tokens
        return [
            [TokenScore(tokens[i], float(x)) for i, x in zip(ids, scores, strict=True)]
            for ids, scores in self._scores(texts, lambda count: None, pll)
        ]

    def _scores(
        self, texts: Sequence[str], advance: Callable[[int], None], pll: str
    ) -> list[tuple[Int[np.ndarray, " n"], Float[np.ndarray, " n"]]]:
        """Return the ids and the log-probabilities of each text's pieces."""
        if pll not in PLL:
            raise UserError(f"pll: unknown value {pll!r}; choose one of {', '.join(PLL)}")
        if pll != PLL[0] and self.config.model.causal:
            raise UserError(
                f"{self._name} reads from left to right (config.model.causal): its scores are "
                f"log-likelihoods, without masks; leave out {pll}"
            )
        causal, max_tokens = self.config.model.causal, self.config.model.positions
        encoded = [np.array(self.vocabulary.encode(text), np.int32) for text in texts]
        # (text, position of its first target) by T, a power of two, so that texts share compilations.
        jobs: dict[int, list[tuple[int, int]]] = {}
        for i, tokens in enumerate(encoded):
            if len(tokens) > max_tokens:
                raise UserError(
                    f"{texts[i][:40]!r}… has {len(tokens)} tokens, the model takes {max_tokens}: "
                    "shorten it"
                )
            size = max(min(1 << (len(tokens) - 1).bit_length(), max_tokens), 8)
            targets = range(1, min(len(tokens) - 1, 2) if causal else len(tokens) - 1)
            jobs.setdefault(size, []).extend((i, target) for target in targets)
        scores = [np.zeros(len(tokens) - 2) for tokens in encoded]
        for size, all_jobs in sorted(jobs.items()):
            batch_size = max(_BATCH_TOKENS // size, 1)
            for first in range(0, len(all_jobs), batch_size):
                batch = all_jobs[first : first + batch_size]
                masked = [(encoded[i], target, target + 1) for i, target in batch]
                if pll == "word-l2r":
                    masked = [
                        (ids, target, self._word_end(ids, target)) for ids, target, _ in masked
                    ]
                rows_of_scores = self._batch(masked, size, batch_size)
                for (i, target), row in zip(batch, rows_of_scores, strict=True):
                    part = scores[i] if causal else scores[i][target - 1 : target]
                    part[:] = row[: len(part)]
                advance(sum(len(scores[i]) for i, _ in batch) if causal else len(batch))
        return [(ids[1:-1], text_scores) for ids, text_scores in zip(encoded, scores, strict=True)]

    def _word_end(self, ids: Int[np.ndarray, " n"], position: int) -> int:
        """Return the index after the last piece of the word at a position; [SEP] follows them all."""
        rest = self._continuation[ids[position + 1 :]]
        return position + 1 + int(rest.argmin())

    def _batch(
        self, jobs: list[tuple[Int[np.ndarray, " _"], int, int]], size: int, batch_size: int
    ) -> Float[np.ndarray, "jobs P"]:
        """Return the log-probabilities of the targets of each row, in a batch of fixed shape.

        Args:
            jobs: token ids, index of the target, and index after the last token to mask.
            size: T.
            batch_size: number of rows.

        Returns:
            P is 1; for a causal model T - 1, of which the first are the pieces of the text.
        """
        causal = self.config.model.causal
        tokens = np.full((batch_size, size), self.vocabulary.pad_id, np.int32)
        length = np.zeros((batch_size, 1), np.int32)
        width = size - 1 if causal else 1
        positions, targets = np.zeros((2, batch_size, width), np.int32)
        for row, (ids, target, end) in enumerate(jobs):
            n = len(ids)
            tokens[row, :n], length[row] = ids, n
            if causal:  # position i predicts the piece after it; the last one is [SEP]
                positions[row], targets[row, : n - 1] = np.arange(width), ids[1:]
            else:
                tokens[row, target:end] = self.vocabulary.mask_id
                positions[row], targets[row] = target, ids[target]
        layout = rows.Layout(*map(jnp.asarray, rows.layout(length, length, size)))
        scores = self._log_probabilities(self._params, tokens, layout, positions, targets)
        return np.asarray(scores, np.float64)[: len(jobs)]


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
        source, which: as in `convert.source.open_model`, or a model that it returned.

    Raises:
        UserError: the model cannot be loaded.
    """

    def __init__(self, source: str | pathlib.Path | OpenModel, which: str = "best"):
        self.config, self.vocabulary, self._params, self.step = _open(source, which)
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
