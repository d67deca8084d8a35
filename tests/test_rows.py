"""Row records, packing, the layout of packed rows, and the manifest."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_jax.data import rows
from bert_jax.data.rows import Example, RowFormat, layout, pack_lengths
from bert_jax.errors import UserError


@st.composite
def formats_and_examples(draw):
    tokens, sequences = draw(st.integers(2, 40)), draw(st.integers(1, 5))
    vocab = draw(st.sampled_from([100, 65_536, 65_537, 200_000]))
    examples = []
    for _ in range(draw(st.integers(1, 12))):
        n = draw(st.integers(1, tokens))
        ids = draw(st.lists(st.integers(0, vocab - 1), min_size=n, max_size=n))
        ids[-1] = vocab - 1
        examples.append(Example(np.array(ids), draw(st.integers(1, n)), draw(st.integers(-1, 9))))
    return RowFormat(tokens, sequences, vocab), examples


@settings(max_examples=60, deadline=None)
@given(formats_and_examples())
def test_packed_rows_and_their_layout_give_the_sequences_back(case):
    form, examples = case
    array = form.pack(examples)
    records = form.encode(array)
    size = form.tokens * (2 if form.vocab_size <= 65_536 else 4) + form.sequences * 6 + 4
    assert {len(record) for record in records} == {size}
    decoded = form.decode(records)
    for name in ("tokens", "a_length", "length", "label"):
        np.testing.assert_array_equal(decoded[name], array[name])
    lengths = (decoded[name].astype(np.int32) for name in ("length", "a_length"))
    *layouts, cls = layout(*lengths, form.tokens)
    assert cls.min() >= 0
    assert cls.max() < form.tokens
    results = []
    for row, (tokens, *slots) in enumerate(zip(*decoded.values(), strict=True)):
        places = []  # (sequence, position, segment) of each token
        for slot, (a_length, n, label) in enumerate(
            zip(*map(np.ndarray.tolist, slots), strict=True)
        ):
            if n:
                assert cls[row, slot] == len(places)
                results.append((tokens[len(places) :][:n].tolist(), a_length, label))
            else:
                assert label == rows.NO_LABEL
            places += [(slot, i, int(i >= a_length)) for i in range(n)]
        assert not tokens[len(places) :].any()
        places += [(form.sequences, 0, 0)] * (form.tokens - len(places))
        assert [*zip(*(x[row].tolist() for x in layouts), strict=True)] == places
    expected = [(e.tokens.tolist(), e.a_length, e.label) for e in examples]
    assert sorted(results) == sorted(expected)


def test_any_flipped_bit_or_missing_byte_is_detected():
    form = RowFormat(6, 2, 100)
    (record,) = form.encode(form.pack([Example(np.arange(1, 5), 2, 1)]))
    for bit in range(8 * len(record)):
        altered = bytearray(record)
        altered[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match="record 1 fails its checksum"):
            form.decode([record, bytes(altered)])
    for altered in (record[:-1], record + b"\0", b""):
        with pytest.raises(ValueError, match=f"record 0 has {len(altered)} bytes"):
            form.decode([altered])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 30), max_size=60), st.integers(30, 50), st.integers(1, 6))
def test_packing_is_a_partition_within_bounds(lengths, tokens, sequences):
    bins = pack_lengths(lengths, tokens, sequences)
    assert sorted(i for row in bins for i in row) == list(range(len(lengths)))
    assert all(0 < len(row) <= sequences for row in bins)
    assert all(sum(lengths[i] for i in row) <= tokens for row in bins)
    assert pack_lengths(lengths, tokens, sequences) == bins
    # With no binding limit on sequences, best fit leaves no two rows that would fit into one.
    if sequences >= len(lengths):
        totals = sorted(sum(lengths[i] for i in row) for row in bins)
        assert len(totals) < 2 or totals[0] + totals[1] > tokens


def test_packing_matches_hand_computed_examples():
    # 6 opens a row, 5 another; 4 fills the first, 3 goes to the second and 2 fills that one.
    assert pack_lengths([2, 3, 4, 5, 6], 10, 9) == [[4, 2], [3, 1, 0]]
    # 2 goes to the row with 2 tokens left, not to the one with 3.
    assert pack_lengths([7, 8, 2], 10, 9) == [[1, 2], [0]]
    assert pack_lengths([7, 6, 3], 10, 9) == [[0, 2], [1]]
    assert pack_lengths([2, 2, 2], 10, 2) == [[0, 1], [2]]
    assert pack_lengths([10], 10, 1) == [[0]]
    with pytest.raises(ValueError, match="11 tokens"):
        pack_lengths([1, 11], 10, 2)


# --- The manifest ---------------------------------------------------------------------------------


def altered(of_shard=(), of_train=(), **changes):
    """Return a manifest, of which the first shard, the training split or other values differ."""
    shard = rows.Shard("train-00000.arrayrecord", 3, 100, "0" * 64)
    split = rows.Split(2, 5, 3, 60, 0.9, (shard,))
    manifest = rows.Manifest(
        version=rows.FORMAT_VERSION, tokens=24, sequences=3, vocab_size=100, vocab_sha256="1" * 64,
        pairs="nsp", seed=0, settings={"tokens": 24}, sources=({"name": "a", "bytes": 7},),
        length_histogram=(0, 1, 2), warnings=("w",), train=split, heldout=split,
    )  # fmt: skip
    values = manifest.to_dict()
    values["train"]["shards"][0].update(of_shard)
    values["train"].update(of_train)
    return json.dumps({**values, **changes})


@pytest.mark.parametrize(
    ("content", "key"),
    [
        (None, "not a folder of rows"),
        ("{", "cannot read"),
        ("[1]", "version None"),
        (altered(version=99), "version 99"),
        (altered(heldout={}), "not a manifest .*heldout"),
        (altered(tokens=10**12), "1000000000000 tokens"),
        (altered(vocab_size=1 << 40), "a vocabulary of 1099511627776"),
        (altered({"name": "../../etc/passwd"}), "etc/passwd"),
        (altered({"rows": -1}), "-1 rows"),
        (altered(of_train={"rows": 10**12}), "number of rows"),
    ],
)
def test_bad_manifest_is_refused(tmp_path, content, key):
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(UserError, match=key) as error:
        rows.read_manifest(tmp_path)
    assert str(tmp_path) in str(error.value)
    assert "prepare" in str(error.value)
