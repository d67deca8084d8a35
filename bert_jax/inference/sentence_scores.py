"""Log-probabilities of sentences and of their word pieces."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from bert_jax.convert.source import OpenModel
from bert_jax.data import rows
from bert_jax.errors import UserError
from bert_jax.model.bert import Bert
from bert_jax.objectives.losses import label_logits

# Pseudo-log-likelihoods: what is masked with a word piece, nothing or the rest of its word.
PLL = ("original", "word-l2r")

# Tokens per batch of `SentenceScorer`.
_BATCH_TOKENS = 1 << 13


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
    """

    def __init__(self, opened: OpenModel):
        self.config, self.vocabulary, self._params, _ = opened
        if not self.config.model.masked_lm:
            raise UserError("the model has no masked-LM head: it cannot score sentences")
        self._continuation = self.vocabulary.continuation()
        model = Bert(self.config.model)

        @jax.jit
        def log_probabilities(params, tokens, layout, positions, targets):
            outputs: Any = model.apply(
                {"params": params}, tokens, layout, positions, outputs=("masked_lm",)
            )
            logits = outputs.masked_lm
            return label_logits(logits, targets) - jax.nn.logsumexp(logits, -1)

        self._log_probabilities = log_probabilities

    def __call__(self, texts: Sequence[str], pll: str = PLL[0]) -> Float[np.ndarray, " N"]:
        """Return the scores of N texts in nats; 0 for a text without word pieces."""
        return np.array([scores.sum() for _, scores in self._scores(texts, pll)])

    def tokens(self, texts: Sequence[str], pll: str = PLL[0]) -> list[list[TokenScore]]:
        """Return the log-probability of each word piece of each text, whose sum is its score."""
        tokens = self.vocabulary.tokens
        return [
            [TokenScore(tokens[i], float(x)) for i, x in zip(ids, scores, strict=True)]
            for ids, scores in self._scores(texts, pll)
        ]

    def _scores(
        self, texts: Sequence[str], pll: str
    ) -> list[tuple[Int[np.ndarray, " n"], Float[np.ndarray, " n"]]]:
        """Return the ids and the log-probabilities of each text's pieces."""
        if pll not in PLL:
            raise UserError(f"pll: unknown value {pll!r}; choose one of {', '.join(PLL)}")
        if pll != PLL[0] and self.config.model.causal:
            raise UserError(
                "the model reads from left to right (config.model.causal): its scores are "
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
                masked = []
                for i, target in batch:
                    end = self._word_end(encoded[i], target) if pll == "word-l2r" else target + 1
                    masked.append((encoded[i], target, end))
                rows_of_scores = self._batch(masked, size, batch_size)
                for (i, target), row in zip(batch, rows_of_scores, strict=True):
                    part = scores[i] if causal else scores[i][target - 1 : target]
                    part[:] = row[: len(part)]
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
