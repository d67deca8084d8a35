"""Loss levels of n-gram models, against a reference implementation in plain Python."""

import collections
import itertools
import math

import numpy as np
import pytest

from bert_jax.config.schema import Config, PhaseConfig
from bert_jax.data.rows import read_manifest
from bert_jax.tools.report import curves, levels, plots

CLS, SEP, PAD = 0, 1, 2
VOCAB = 7
TRAIN = [[CLS, 3, 4, 3, SEP, CLS, 3, 4, SEP, PAD], [CLS, 5, 5, 5, 4, 3, SEP, PAD, PAD, PAD]]
HELDOUT = [[CLS, 3, 4, 6, 5, SEP, PAD, PAD, PAD, PAD]]


def reference(train, heldout):
    """Return unigram and bigram losses and the number of training tokens.

    The losses follow the definition of absolute discounting, one token at a time.
    """
    discount, pairs, tokens = 0.75, [], []
    for row in train:
        for left, right in itertools.pairwise(row):
            if right not in (CLS, SEP, PAD):
                pairs.append((left, right))
                tokens.append(right)
    counts, pair_counts = collections.Counter(tokens), collections.Counter(pairs)

    def unigram(w):
        seen = max(counts[w] - discount, 0) / len(tokens)
        return seen + discount * len(counts) / len(tokens) / VOCAB

    def bigram(h, w):
        total = sum(n for (left, _), n in pair_counts.items() if left == h)
        if not total:
            return unigram(w)
        followers = len([1 for left, _ in pair_counts if left == h])
        seen = max(pair_counts[h, w] - discount, 0) / total
        return seen + discount * followers / total * unigram(w)

    targets = [
        (h, w) for row in heldout for h, w in itertools.pairwise(row) if w not in (CLS, SEP, PAD)
    ]
    return (
        -sum(math.log(unigram(w)) for _, w in targets) / len(targets),
        -sum(math.log(bigram(h, w)) for h, w in targets) / len(targets),
        len(tokens),
    )


def test_losses_match_reference():
    """The held-out text has an unseen pair (4, 6) and an unseen left neighbor (6)."""
    result = levels.count_models(
        np.array(TRAIN), np.array(HELDOUT), np.array([CLS, SEP, PAD]), VOCAB
    )
    assert result == pytest.approx(reference(TRAIN, HELDOUT))


def test_read_returns_levels_only_for_matching_rows(rows):
    """On real sentences the bigram loss is lower. A different digest gives None."""
    folder = rows()
    result = levels.read(str(folder), read_manifest(folder).digest)
    assert result.bigram < result.unigram < math.log(1000)
    assert levels.read(str(folder), "0" * 64) is None
    assert levels.read(str(folder / "none"), "0" * 64) is None


@pytest.mark.parametrize(("metric", "share"), [("masked_lm_loss", 0.75), ("next_token_loss", 1.0)])
def test_reports_scale_levels_by_hidden_targets(rows, metric, share):
    """Kept targets are visible to a masked LM, and cost a unigram model nothing."""
    folder = rows()
    digest = read_manifest(folder).digest
    config = Config(phases=(PhaseConfig(rows=str(folder)),))
    config.masking.same_fraction = 0.25
    data, best = [{"digest": digest}], {"best_by": metric}
    run = curves.Recorded("run", config, [], [], data, best, [])
    losses = levels.read(str(folder), digest)
    expected = {"unigram": share * losses.unigram, "bigram": share * losses.bigram}
    assert plots.ngram_losses([run], metric) == pytest.approx(expected)
    assert plots.ngram_losses([run], "loss") == {}
