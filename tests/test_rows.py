"""Row records, packing, the layout of packed rows, and the manifest."""

import json
from functools import partial

import jax.numpy as jnp
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
def test_pack_encode_decode_round_trip(case):
    form, examples = case
    array = form.pack(examples)
    records = form.encode(array)
    size = form.tokens * (2 if form.vocab_size <= 65_536 else 4) + form.sequences * 6 + 4
    assert {len(record) for record in records} == {size}
    decoded = form.decode(records)
    for name in ("tokens", "a_length", "length", "label"):
        np.testing.assert_array_equal(decoded[name], array[name])
    results = []
    for tokens, *slots in zip(*decoded.values(), strict=True):
        end = 0
        for a_length, n, label in zip(*(slot.tolist() for slot in slots), strict=True):
            if n:
                results.append((tokens[end : end + n].tolist(), a_length, label))
            else:
                assert label == rows.NO_LABEL
            end += n
        assert not tokens[end:].any()
    expected = [(e.tokens.tolist(), e.a_length, e.label) for e in examples]
    assert sorted(results) == sorted(expected)


def one_record():
    form = RowFormat(6, 2, 100)
    return form, form.encode(form.pack([Example(np.arange(1, 5), 2, 1)]))[0]


def test_any_flipped_bit_is_detected():
    form, record = one_record()
    for bit in range(8 * len(record)):
        altered = bytearray(record)
        altered[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match="record 1 fails its checksum"):
            form.decode([record, bytes(altered)])


@pytest.mark.parametrize("change", [lambda r: r[:-1], lambda r: r + b"\0", lambda r: b""])
def test_record_of_wrong_size_is_rejected(change):
    form, record = one_record()
    with pytest.raises(ValueError, match=rf"record 0 has \d+ bytes, not {len(record)}"):
        form.decode([change(record)])


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


def reference_layout(length, a_length, tokens):
    """Compute `rows.layout` one token at a time, as a reference."""
    slots = len(length[0])
    sequence, position, segment, cls = [], [], [], []
    for lengths, a_lengths in zip(length, a_length, strict=True):
        row = [
            (slot, i, int(i >= a))
            for slot, (n, a) in enumerate(zip(lengths, a_lengths, strict=True))
            for i in range(n)
        ]
        row += [(slots, 0, 0)] * (tokens - len(row))
        sequence.append([x[0] for x in row])
        position.append([x[1] for x in row])
        segment.append([x[2] for x in row])
        cls.append([sum(lengths[:slot]) for slot in range(slots)])
    return sequence, position, segment, cls


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_layout_matches_a_reference_loop(data):
    tokens, slots, length, a_length = 12, 3, [], []
    for _ in range(2):
        left, ns = tokens, []
        for _ in range(data.draw(st.integers(0, slots))):
            n = data.draw(st.integers(0, left))
            if n == 0:
                break
            ns.append(n)
            left -= n
        length.append(ns + [0] * (slots - len(ns)))
        a_length.append([data.draw(st.integers(1, n)) if n else 0 for n in length[-1]])
    expected = reference_layout(length, a_length, tokens)
    for array in (partial(np.array, dtype=np.int16), partial(jnp.asarray, dtype=jnp.int32)):
        got = layout(array(length), array(a_length), tokens)
        assert {x.dtype for x in got} == {np.dtype("int32")}
        for name in ("segment_ids", "position_ids", "token_type_ids"):
            np.testing.assert_array_equal(getattr(got, name), expected[got._fields.index(name)])
        cls = np.array(got.cls)
        used = np.array(length) > 0
        np.testing.assert_array_equal(cls[used], np.array(expected[3])[used])
        assert cls.min() >= 0
        assert cls.max() < tokens


# --- The manifest ---------------------------------------------------------------------------------


def make_manifest():
    shard = rows.Shard("train-00000.arrayrecord", 3, 100, "0" * 64)
    split = rows.Split(2, 5, 3, 60, 0.9, (shard,))
    return rows.Manifest(
        version=rows.FORMAT_VERSION, tokens=24, sequences=3, vocab_size=100, vocab_sha256="1" * 64,
        pairs="nsp", seed=0, settings={"tokens": 24}, sources=({"name": "a", "bytes": 7},),
        length_histogram=(0, 1, 2), warnings=("w",), train=split, heldout=split,
    )  # fmt: skip


def test_manifest_round_trip(tmp_path):
    manifest = make_manifest()
    (tmp_path / "manifest.json").write_text(json.dumps(manifest.to_dict()))
    assert rows.read_manifest(tmp_path) == manifest
    assert manifest.format == RowFormat(24, 3, 100)


def altered(shard=(), train=(), **changes):
    """Return a manifest, of which the first shard, the training split or other values differ."""
    values = make_manifest().to_dict()
    values["train"]["shards"][0].update(shard)
    values["train"].update(train)
    return json.dumps({**values, **changes})


@pytest.mark.parametrize(
    ("content", "key"),
    [
        (None, "not a folder of rows"),
        ("{", "cannot read"),
        ("[1]", "version None"),
        ("", "cannot read"),
        (altered(version=99), "version 99"),
        (json.dumps({"version": rows.FORMAT_VERSION}), "not a manifest"),
        (altered(heldout={}), "not a manifest .*heldout"),
        (altered(heldout=None), "not a manifest .*heldout"),
        (altered(extra=1), "not a manifest .*extra"),
        (altered(tokens=10**12), "1000000000000 tokens"),
        (altered(sequences=0), "0 sequences"),
        (altered(vocab_size=1 << 40), "a vocabulary of 1099511627776"),
        (altered(tokens="32"), "not a manifest .*tokens"),
        (altered({"name": "../../etc/passwd"}), "etc/passwd"),
        (altered({"name": "/x.arrayrecord"}), "/x.arrayrecord"),
        (altered({"rows": -1}), "-1 rows"),
        (altered(train={"rows": 10**12}), "number of rows"),
        (altered(train={"shards": [None]}), "not a manifest .*shards"),
    ],
)
def test_bad_manifest_is_refused(tmp_path, content, key):
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(UserError, match=key) as error:
        rows.read_manifest(tmp_path)
    assert str(tmp_path) in str(error.value)
    assert "prepare" in str(error.value)
