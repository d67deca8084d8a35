"""Masking: number, selection and replacement of tokens, on any number of devices; next tokens."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_jax.config.schema import Config, MaskingConfig, PhaseConfig
from bert_jax.config.sizes import model_size
from bert_jax.data.rows import layout as row_layout
from bert_jax.objectives import pretraining
from bert_jax.objectives.masking import (
    Masker,
    NextTokenTargets,
    max_predictions_per_sequence,
    span_lengths,
    spans,
)

CLS, SEP, MASK, VOCAB, T, S = 1, 2, 3, 50, 64, 10


def make_masker(tokens=T, sequences=S, vocab=VOCAB, pieces=0, **config) -> Masker:
    """Return a masker; the last `pieces` ids of the vocabulary continue a word."""
    return Masker(
        config=MaskingConfig(**config),
        tokens=tokens,
        sequences=sequences,
        vocab_size=vocab,
        mask_id=MASK,
        continuation=np.arange(vocab) >= vocab - pieces,
    )


def random_rows(rng, count=16):
    """Return rows of up to S sequences, some of them short; ids below 4 are special tokens."""
    tokens = np.zeros((count, T), np.int32)
    length, a_length = np.zeros((2, count, S), np.int32)
    for row in range(count):
        end, longest = 0, rng.choice([4, 12, T])
        for slot in range(rng.integers(1, S + 1)):
            n = int(rng.integers(3, max(longest, 3) + 1))
            if end + n > T:
                break
            a = n if n < 5 or rng.random() < 0.3 else int(rng.integers(3, n - 1))
            ids = rng.integers(4, VOCAB, n)
            ids[0], ids[a - 1], ids[n - 1] = CLS, SEP, SEP
            tokens[row, end : end + n] = ids
            length[row, slot], a_length[row, slot] = n, a
            end += n
    return tokens, length, a_length


def run(masker):
    def mask(tokens, length, a_length, key):
        layout = row_layout(length, a_length, masker.tokens)
        return masker(tokens, length, a_length, layout, key)

    return jax.jit(mask)


@pytest.fixture(scope="module")
def mask():
    return run(make_masker())


def one_sequence(count, tokens):
    """Return `count` rows of one sequence each; ids below 4 are special tokens."""
    ids = np.random.default_rng(0).integers(4, VOCAB, (count, tokens)).astype(np.int32)
    ids[:, 0], ids[:, -1] = CLS, SEP
    length = np.full((count, 1), tokens, np.int32)
    return jnp.asarray(ids), jnp.asarray(length), jnp.asarray(length)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31))
def test_selected_tokens(mask, seed):
    tokens, length, a_length = random_rows(np.random.default_rng(seed))
    got = jax.tree.map(
        np.array, mask(*map(jnp.asarray, (tokens, length, a_length)), jax.random.key(seed))
    )
    layout = row_layout(length, a_length, T)
    for row in range(len(tokens)):
        count = int(got.weights[row].sum())
        assert got.weights[row].tolist() == [1.0] * count + [0.0] * (len(got.weights[row]) - count)
        positions = got.positions[row, :count]
        assert (np.diff(positions) > 0).all()
        np.testing.assert_array_equal(got.labels[row, :count], tokens[row, positions])
        # [CLS], [SEP] and padding are never selected.
        assert (tokens[row, positions] > SEP).all()
        for slot, n in enumerate(length[row]):
            inside = (layout.segment_ids[row, positions] == slot).sum()
            assert inside == (min(max(1, round(0.15 * int(n))), 10, n - 2) if n else 0)
        unchosen = np.delete(np.arange(T), positions)
        np.testing.assert_array_equal(got.tokens[row, unchosen], tokens[row, unchosen])


@pytest.mark.parametrize("span", [0, 5])
def test_separators_within_a_sequence_are_not_masked(span):
    tokens, length, a_length = (np.array(x) for x in one_sequence(50, T))
    tokens[:, [20, 40]] = SEP
    got = run(make_masker(sequences=1, rate=0.8, span=span))(
        tokens, length, a_length, jax.random.key(0)
    )
    assert (np.array(got.labels) != SEP).all()
    assert (np.array(got.tokens)[:, [20, 40]] == SEP).all()


@pytest.mark.parametrize(
    ("tokens", "rate", "cap", "predictions"),
    [
        *((128, 0.15, 20, 19), (512, 0.15, 76, 76), (64, 0.15, 10, 10), (100, 0.15, 15, 15)),
        *((128, 0.4, 52, 51), (512, 0.4, 205, 205)),
    ],
)
def test_number_of_predictions_for_one_sequence(tokens, rate, cap, predictions):
    assert max_predictions_per_sequence(MaskingConfig(rate=rate), tokens) == cap
    assert make_masker(tokens=tokens, sequences=1, rate=rate).predictions == predictions
    capped = make_masker(tokens=tokens, sequences=1, max_predictions_per_sequence=3)
    got = run(capped)(*one_sequence(5, tokens), jax.random.key(0))
    np.testing.assert_array_equal(got.weights, np.ones((5, 3)))


@pytest.mark.parametrize(("tokens", "sequences", "rate"), [(14, 3, 0.15), (17, 4, 0.3)])
def test_predictions_is_the_maximum_over_all_rows(tokens, sequences, rate):
    masker = make_masker(tokens=tokens, sequences=sequences, rate=rate)
    cap = max_predictions_per_sequence(masker.config, tokens)

    def expected(n):
        return min(max(1, round(rate * n)), cap, n - 2) if n > 2 else 0

    most = max(
        sum(map(expected, lengths))
        for lengths in itertools.combinations_with_replacement(range(tokens + 1), sequences)
        if sum(lengths) <= tokens
    )
    assert masker.predictions == most


@pytest.mark.parametrize("split", [(0.8, 0.1, 0.1), (0.0, 0.2, 0.8)])
def test_replacement_of_selected_tokens(split):
    masker = make_masker(
        sequences=1, rate=0.5,
        mask_fraction=split[0], same_fraction=split[1], random_fraction=split[2],
    )  # fmt: skip
    got = run(masker)(*one_sequence(600, T), jax.random.key(1))
    after = np.take_along_axis(np.array(got.tokens), np.array(got.positions), 1).ravel()
    labels = np.array(got.labels).ravel()
    total = len(labels)
    assert total == 600 * 32
    # A random token is [MASK] with probability 1 / V, and the original with probability 1 / V.
    reference = np.array([split[0] + split[2] / VOCAB, split[1] + split[2] / VOCAB])
    result = np.array([(after == MASK).mean(), (after == labels).mean()])
    sd = np.sqrt(reference * (1 - reference) / total)
    assert (np.abs(result - reference) <= 5 * sd).all(), (result, reference)
    # Uniform over the whole vocabulary: chi-square over ids from 4, V - 5 degrees of freedom.
    other = np.bincount(after[(after != MASK) & (after != labels)], minlength=VOCAB)
    expected, degrees = total * split[2] / VOCAB, VOCAB - 5
    assert (np.abs(other[:3] - expected) < 5 * expected**0.5).all()
    replaced = other[4:]
    chi = ((replaced - replaced.mean()) ** 2 / replaced.mean()).sum()
    assert abs(chi - degrees) < 5 * (2 * degrees) ** 0.5
    assert after.max() == VOCAB - 1
    assert abs(replaced.mean() - expected * degrees / (VOCAB - 4)) < 5 * expected**0.5


def words_of(tokens, n, a, start, pieces):
    """Return the words of a sequence as lists of positions; a segment boundary ends a word."""
    words = []
    special = {0, a - 1, n - 1}
    for i in range(n):
        if i in special:
            continue
        continues = tokens[start + i] >= VOCAB - pieces and i - 1 not in special
        if continues:
            words[-1].append(start + i)
        else:
            words.append([start + i])
    return words


def assert_masked(got, batch, choose):
    """Compare the masked positions with `choose(row, words, num_predictions, start of text B)`."""
    tokens, length, a_length = batch
    for row in range(len(tokens)):
        chosen, start = [], 0
        for n, a in zip(length[row].tolist(), a_length[row].tolist(), strict=True):
            num_predictions = min(max(1, round(0.3 * n)), n - 2) if n else 0
            words = words_of(tokens[row], n, a, start, 25)
            chosen += sorted(choose(row, words, num_predictions, start + a))
            start += n
        positions = np.array(got.positions[row])[np.array(got.weights[row]) > 0]
        assert positions.tolist() == chosen


@pytest.fixture(scope="module")
def maskers():
    """Maskers of 30% by (whether words are masked whole, longest span)."""
    common = {"pieces": 25, "rate": 0.3}
    return {
        (whole, span): run(make_masker(whole_word=whole, span=span, **common))
        for whole, span in ((True, 0), (False, 4), (True, 4))
    }


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31))
def test_whole_words_match_a_greedy_walk(maskers, seed):
    batch, key = random_rows(np.random.default_rng(seed)), jax.random.key(seed)
    got = maskers[True, 0](*batch, key)
    draw = np.array(jax.random.uniform(jax.random.split(key, 3)[0], batch[0].shape))

    def choose(row, words, left, start_b):
        chosen = []
        for word in sorted(words, key=lambda word: draw[row, word[0]]):
            if len(word) <= left:
                chosen += word
                left -= len(word)
        return chosen

    assert_masked(got, batch, choose)


def masked_spans(words, num_predictions, draw, lengths):
    """Return the tokens of a sequence that are masked by a walk over random span starts.

    Args:
        words: runs of words between special tokens; each word is a list of positions.
        num_predictions: number of tokens to mask.
        draw, lengths: by position, the sort key and the length of the span that starts there.
    """
    chosen = []
    starts = [(run, i) for run in words for i in range(len(run))]
    for run, i in sorted(
        starts, key=lambda start: (draw[start[0][start[1]][0]], start[0][start[1]][0])
    ):
        if run[i][0] in chosen:
            continue
        for word in run[i : i + lengths[run[i][0]]]:
            chosen += [place for place in word if place not in chosen]
    return chosen[:num_predictions]


@pytest.mark.parametrize("whole_word", [False, True])
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_spans_match_a_walk_over_random_starts(maskers, whole_word, seed):
    batch, key = random_rows(np.random.default_rng(seed)), jax.random.key(seed)
    got, shape = maskers[whole_word, 4](*batch, key), batch[0].shape
    order_key, length_key = jax.random.split(jax.random.split(key, 3)[0])
    draw = np.array(jax.random.uniform(order_key, shape))
    lengths = np.array(span_lengths(length_key, shape, MaskingConfig(span=4)))

    def choose(row, words, num_predictions, start_b):
        runs = [[], []]
        for word in words:
            runs[word[0] >= start_b] += [word] if whole_word else [[place] for place in word]
        return masked_spans(runs, num_predictions, draw[row], lengths[row])

    assert_masked(got, batch, choose)


def test_span_lengths_match_spanbert():
    """Geometric, at most 10, 3.8 on average (section 3.1)."""
    config = MaskingConfig(span=10)
    lengths = np.array(span_lengths(jax.random.key(0), (200, 500), config))
    expected = 0.2 * 0.8 ** np.arange(10)
    expected *= lengths.size / expected.sum()
    chi = ((np.bincount(lengths.ravel(), minlength=11)[1:] - expected) ** 2 / expected).sum()
    assert chi < 40  # 9 degrees of freedom
    assert lengths.max() == 10
    assert abs(lengths.mean() - 3.797) < 0.03


def test_tokens_of_a_span_are_replaced_alike():
    masker = make_masker(sequences=1, rate=0.3, span=10)
    got = run(masker)(*one_sequence(400, T), jax.random.key(4))
    at = spans(got)
    after = np.take_along_axis(np.array(got.tokens), np.array(got.positions), 1)
    labels, first = np.array(got.labels), np.array(got.positions - at.offset)
    kinds = {"mask": 0, "same": 0, "random": 0}
    for row in range(400):
        for start in np.unique(first[row]):
            inside = first[row] == start
            masked, same = after[row, inside] == MASK, after[row, inside] == labels[row, inside]
            if inside.sum() > 2:  # a random token may be [MASK] or the original
                kinds["mask" if masked.all() else "same" if same.all() else "random"] += 1
                assert masked.all() or same.all() or masked.mean() < 0.7
    share = {kind: count / sum(kinds.values()) for kind, count in kinds.items()}
    assert all(abs(share[kind] - p) < 0.05 for kind, p in zip(kinds, (0.8, 0.1, 0.1), strict=True))


@pytest.mark.parametrize("rates", [(0.3, 0.15), (0.15, 0.3)])
def test_larger_rate_sets_shapes_and_final_rate_sets_evaluation(rates):
    masker = make_masker(sequences=1, rate=rates[0], final_rate=rates[1])
    fixed = [make_masker(sequences=1, rate=rate) for rate in rates]
    assert masker.predictions == max(m.predictions for m in fixed) == 19
    batch = one_sequence(5, T)
    got = run(masker)(*batch, jax.random.key(0))
    expected = run(fixed[1])(*batch, jax.random.key(0))
    np.testing.assert_array_equal(got.tokens, expected.tokens)
    layout = row_layout(batch[1], batch[1], T)
    some = jax.jit(masker.__call__)(*batch, layout, jax.random.key(0), jnp.arange(5)[:, None])
    np.testing.assert_array_equal(some.weights.sum(1), np.arange(5))


def test_training_batches_hold_their_prediction_counts(rows):
    """Counts depend only on the step, across both phases; held-out batches have none."""
    folder = str(rows())
    phases = tuple(PhaseConfig(rows=folder, fraction=0.5) for _ in range(2))
    config = Config(
        model=dataclasses.replace(model_size("L1-H16-A2"), positions=32),
        masking=MaskingConfig(rate=0.4, final_rate=0.2), phases=phases, steps=8, batch_size=4,
    )  # fmt: skip
    _, _, _, phases = pretraining.make_phases(config)
    step = 0
    for phase in phases:
        all_steps = list(phase.batches(0, 4, 0, 1))
        for name, value in next(phase.batches(3, 4, 0, 1)).items():
            np.testing.assert_array_equal(value, all_steps[3][name])
        for batch in all_steps:
            rate = 0.4 - 0.2 * step / 8
            counts = [
                [max(1, round(rate * int(n))) if n else 0 for n in row] for row in batch["length"]
            ]
            counts = np.minimum(counts, np.maximum(batch["length"].astype(int) - 2, 0))
            np.testing.assert_array_equal(batch["num_predictions"], np.minimum(counts, 13))
            assert batch.keys() == phase.batch_shape.keys()
            step += 1
        assert "num_predictions" not in next(phase.heldout(0, 1))
        inputs = jax.jit(phase.objective.make_inputs)(batch, jax.random.key(0))
        assert float(inputs.masked.weights.sum()) == batch["num_predictions"].sum()


def test_every_token_with_a_successor_predicts_it():
    tokens, length, a_length = random_rows(np.random.default_rng(6))
    ask = NextTokenTargets(T, S)
    got = run(ask)(*map(jnp.asarray, (tokens, length, a_length)), jax.random.key(0))
    np.testing.assert_array_equal(got.tokens, tokens)
    assert got.labels.shape == (len(tokens), ask.predictions)
    for row in range(len(tokens)):
        expected, start = [], 0
        for n in length[row].tolist():
            expected += [(i, tokens[row, i + 1]) for i in range(start, start + n - 1)]
            start += n
        asked = np.array(got.weights[row]) > 0
        places = np.array(got.positions[row])[asked]
        labels = np.array(got.labels[row])[asked]
        assert list(zip(places.tolist(), labels.tolist(), strict=True)) == expected
        assert SEP in labels
        assert CLS not in labels
