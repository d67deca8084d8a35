"""Plans: which examples are in a batch, in which order and rows."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_jax.data import examples as examples_lib
from bert_jax.data import rows
from bert_jax.data.examples import NO_EXAMPLE, PackedBatches, pair, row_counts
from tests.helpers.examples import RandomExamples, plans, random_examples
from tests.helpers.runs import VOCABULARY


@pytest.mark.parametrize("head", ["sequence", "choice", "token", "span"])
def test_batch_contains_exactly_its_examples(head):
    dataset = RandomExamples(head)
    examples = dataset.splits["train"]
    packed, single = plans(dataset)
    # The choices of a question share a row even without packing.
    assert packed.shape.rows < single.shape.rows or head == "choice"
    seen = []
    for step in range(packed.steps):
        members = packed.members(step, 0)
        assert len(members) == 7
        seen += members
        for plan in (packed, single):
            batch = plan.batch(step, 0)
            assert {k: v.shape for k, v in batch.items()} == {
                k: v.shape for k, v in plan.empty().items()
            }
            results = []
            for row in range(plan.shape.rows):
                start = 0
                for slot in np.flatnonzero(batch["length"][row]):
                    end = start + batch["length"][row, slot]
                    tokens = tuple(batch["tokens"][row, start:end])
                    results.append((batch["example"][row, slot], tokens))
                    start = end
                assert not batch["tokens"][row, start:].any()
                assert (np.diff(np.flatnonzero(batch["length"][row])) == 1).all()
            group = examples.group
            expected = [
                (i, tuple(examples.tokens[i * group + j])) for i in members for j in range(group)
            ]
            assert sorted(results) == sorted(expected)
    # In the first epoch and a half, every example occurs once before any is repeated.
    assert sorted(seen[:23]) == list(range(23))


def test_every_seed_and_epoch_has_a_different_order():
    plan = PackedBatches(random_examples("sequence"), 23, 0)
    orders = {tuple(plan.members(epoch, seed)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    assert {tuple(sorted(order)) for order in orders} == {tuple(range(23))}


def test_evaluation_packs_every_example_exactly_once():
    examples = random_examples("sequence", count=50)
    plan = PackedBatches(examples, 8, 7, shuffle=False, rows_multiple=2)
    batches = list(plan.batches(0, 0, plan.steps))
    assert len(batches) == plan.steps <= 7
    assert {batch["tokens"].shape for batch in batches} == {plan.shape[:2]}
    result = np.concatenate([batch["example"][batch["example"] != NO_EXAMPLE] for batch in batches])
    assert sorted(result) == list(range(50))
    packed = rows.pack_lengths(examples.lengths().tolist(), plan.shape.tokens, rows.SLOTS_UNBOUNDED)
    assert sum(batch["tokens"].any(1).sum() for batch in batches) == len(packed)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=40), st.integers(1, 3))
def test_row_counts_minimize_padding(needs, most):
    counts, total = row_counts(np.array(needs), most)

    def least(number):  # brute force over all row counts up to the largest
        some = itertools.combinations(range(1, max(needs) + 1), number)
        return min(
            sum(min((r for r in each if r >= need), default=10**6) for need in needs)
            for each in some
        )

    possible = min(most, len(set(needs)))
    assert sorted(set(counts)) == list(counts)
    assert counts[-1] == max(needs)
    assert total == least(len(counts))
    if len(counts) > 1:
        assert total <= 0.98 * least(len(counts) - 1)
    if len(counts) < possible:
        assert least(len(counts) + 1) > 0.98 * total


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 9), st.integers(2, 20), st.integers(1, 3), st.integers(4, 40))
def test_long_runs_use_the_smallest_sufficient_row_count(seed, batch_size, multiple, longest):
    examples = random_examples("sequence", count=40, seed=seed, longest=longest)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(examples_lib, "LONG_RUN_STEPS", 12)
        patch.setattr(examples_lib, "FIRST_STEPS", 4)
        short, long, again = (
            PackedBatches(examples, batch_size, steps, (0, 1), rows_multiple=multiple)
            for steps in (11, 12, 12)
        )
        assert len(short.shapes) == 1
        assert long.shapes == again.shapes
        assert 1 <= len(long.shapes) <= 3
        assert {shape[1:] for shape in long.shapes} == {long.shape[1:]}
        counts = [shape.rows for shape in long.shapes]
        assert counts == sorted(set(counts))
        assert all(count % multiple == 0 for count in counts)
        lengths = examples.lengths()
        for run in (0, 1):
            for step in range(12):
                members = long.members(step, run)
                need = len(rows.pack_lengths(lengths[members].tolist(), long.shape.tokens, 10**6))
                fitting = [count for count in counts if count >= need]
                batch = long.batch(step, run)
                assert len(batch["tokens"]) == (counts[-1] if step < 4 else min(fitting))
                assert sorted(batch["example"][batch["length"] > 0]) == sorted(members)
                assert batch["tokens"][:need].any(1).all()
        parts = [next(long.batches(0, 11, 12, i, multiple)) for i in range(multiple)]
        for name, value in long.batch(11, 0).items():
            np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), value)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 30), st.integers(0, 30), st.integers(5, 30))
def test_pairs_are_truncated_as_in_google_bert(n_a, n_b, most):
    a, b = list(range(100, 100 + n_a)), list(range(200, 200 + n_b))
    tokens, a_length, cut = pair(VOCABULARY, a, b, most)
    while len(a) + len(b) > most - 3:  # run_classifier.py, _truncate_seq_pair
        (a if len(a) > len(b) else b).pop()
    assert tokens.tolist() == [2, *a, 3, *b, 3]
    assert (a_length, cut) == (len(a) + 2, n_a + n_b - len(a) - len(b))
    alone, length, cut = pair(VOCABULARY, a, None, 6)
    assert alone.tolist() == [2, *a[:4], 3]
    assert (length, cut) == (len(alone), max(len(a) - 4, 0))
