"""Damaged shards and manifests are never read as rows, and are reported once."""

import collections
import json
import os
import pathlib
import random
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_jax.config.schema import Config, PhaseConfig
from bert_jax.data import loader
from bert_jax.data.rows import read_manifest
from bert_jax.data.shuffle import shuffled
from bert_jax.errors import UserError
from bert_jax.objectives import pretraining

FLIPS = int(os.environ.get("BERT_JAX_SOAK", 1)) * 100


@pytest.fixture
def folder(rows, tmp_path):
    """A copy of the rows, to be damaged."""
    return pathlib.Path(shutil.copytree(rows(), tmp_path / "rows"))


def shard_of(folder, split="train"):
    (path,) = sorted(folder.glob(f"{split}-*.arrayrecord"))
    return path


def all_rows(opened):
    parts = [range(i, min(i + 8, len(opened))) for i in range(0, len(opened), 8)]
    read = [opened.read(part) for part in parts]
    return {name: np.concatenate([part[name] for part in read]) for name in read[0]}


def records(opened):
    """Return the bytes of every record as stored in the shard."""
    return opened._records(range(len(opened)))


def flip(path, at, bit=0):
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def reseal(path, changed):
    """Rewrite the shard with changed records that pass ArrayRecord's own checks."""
    from array_record.python.array_record_module import ArrayRecordWriter

    size = path.stat().st_size
    writer = ArrayRecordWriter(str(path), "group_size:1,uncompressed")
    for record in changed:
        writer.write(record)
    writer.close()
    assert path.stat().st_size == size


def damage(path, opened, number, part):
    """Flip a bit of a record's payload, of the frame before it, or only of its checksum."""
    every = records(opened)
    if part == "checksum":
        every[number] = every[number][:-1] + bytes([every[number][-1] ^ 1])
        reseal(path, every)
    else:
        flip(path, path.read_bytes().index(every[number]) + {"payload": 5, "frame": -15}[part])


def assert_same_except(clean, actual, empty):
    """Assert that batches are equal except for the rows `empty`, which must be padding."""
    for name, values in clean.items():
        expected = values.copy()
        expected[empty] = -1 if name == "label" else 0
        np.testing.assert_array_equal(actual[name], expected)
    assert not actual["length"][empty].any()


@pytest.mark.parametrize("split", ["train", "heldout"])
@pytest.mark.parametrize("part", ["payload", "checksum"])
def test_damaged_record_is_rejected_or_skipped_and_named(folder, part, split):
    opened = loader.Rows(folder, split)
    clean, path = all_rows(opened), shard_of(folder, split)
    damage(path, opened, 3, part)
    with pytest.raises(UserError, match=f"record 3 of the shard {path} is damaged .*prepare"):
        all_rows(loader.Rows(folder, split))
    with pytest.raises(UserError, match=f"{path} fails its checksum"):
        loader.Rows(folder, split).verify()
    messages = []
    skipping = loader.Rows(folder, split, messages.append)
    assert_same_except(clean, all_rows(skipping), 3)
    assert_same_except(clean, all_rows(skipping), 3)
    (line,) = messages
    assert line.startswith(f"record 3 of the shard {path} is damaged")
    skipping.verify()
    assert f"{path} fails its checksum" in messages[1]


def test_damaged_record_frame_loses_no_row(folder):
    opened = loader.Rows(folder, "train")
    clean, path = all_rows(opened), shard_of(folder)
    damage(path, opened, 3, "frame")
    result = all_rows(loader.Rows(folder, "train"))
    assert {name: x.tolist() for name, x in result.items()} == {
        name: x.tolist() for name, x in clean.items()
    }
    with pytest.raises(UserError, match=f"{path} fails its checksum"):
        opened.verify()


def test_skipping_a_row_does_not_move_other_rows(folder):
    """Over two epochs, with threads that read ahead."""
    opened = loader.Rows(folder, "train")
    steps = 2 * len(opened) // 8
    clean = list(loader.batches(opened, 8, 1, 0, steps))
    damage(shard_of(folder), opened, 3, "payload")
    messages = []
    result = list(loader.batches(loader.Rows(folder, "train", messages.append), 8, 1, 0, steps))
    order = shuffled(np.arange(steps * 8), len(opened), 1)
    hit = [place for place, row in enumerate(order) if row == 3]
    assert hit
    for step in range(steps):
        assert_same_except(
            clean[step], result[step], [place - 8 * step for place in hit if place // 8 == step]
        )
    assert len(messages) == 1


def test_each_process_skips_only_its_own_damaged_rows(folder):
    opened = loader.Rows(folder, "heldout")
    clean = [list(loader.heldout_batches(opened, 8, 0, process, 2)) for process in (0, 1)]
    damage(shard_of(folder, "heldout"), opened, 3, "payload")
    actual = collections.defaultdict(list)
    for process in (0, 1):
        skipping = loader.Rows(folder, "heldout", actual[process].append)
        result = list(loader.heldout_batches(skipping, 8, 0, process, 2))
        assert [batch["length"].shape for batch in result] == [
            batch["length"].shape for batch in clean[process]
        ]
        differ = sum(
            (a["length"] != b["length"]).any(1).sum()
            for a, b in zip(clean[process], result, strict=True)
        )
        assert differ == len(actual[process])
    assert sum(map(len, actual.values())) == 1


@pytest.mark.parametrize("policy", ["skip", "stop"])
def test_damaged_rows_policy(folder, policy, capsys):
    """A bit flips during the run, in a row of the first batch."""
    config = Config(phases=(PhaseConfig(rows=str(folder)),), batch_size=8, damaged_rows=policy)
    _, _, _, (phase,) = pretraining.make_phases(config)
    (clean,) = phase.batches(0, 1, 0, 1)
    opened = loader.Rows(folder, "train")
    number = int(shuffled([5], len(opened), config.seed)[0])
    damage(shard_of(folder), opened, number, "payload")
    _ = capsys.readouterr()
    if policy == "stop":
        with pytest.raises(UserError, match=f"record {number} of the shard"):
            list(phase.batches(0, 1, 0, 1))
        with pytest.raises(UserError, match="fails its checksum"):
            pretraining.make_phases(config)
        return
    _, _, _, (phase,) = pretraining.make_phases(config)
    for _ in range(2):
        (result,) = phase.batches(0, 1, 0, 1)
        assert_same_except(clean, result, 5)
    output = capsys.readouterr().err.splitlines()
    assert [line.startswith("warning: ") for line in output] == [True, True]
    assert "fails its checksum" in output[0]
    assert f"record {number} of the shard" in output[1]


@pytest.mark.parametrize("skip", [None, print])
def test_unreadable_shard_is_never_skipped(folder, skip):
    opened = loader.Rows(folder, "train", skip)
    path = shard_of(folder)
    data = path.read_bytes()
    path.write_bytes(data[:2000])
    for read in (lambda: loader.Rows(folder, "train", skip), lambda: all_rows(opened)):
        with pytest.raises(UserError, match=f"{path} has 2000 bytes.* truncated"):
            read()
    path.unlink()
    with pytest.raises(UserError, match=f"cannot read the shard {path}: it does not exist"):
        loader.Rows(folder, "train", skip)


def test_changed_vocabulary_is_rejected(folder):
    config = Config(phases=(PhaseConfig(rows=str(folder)),), batch_size=8)
    path = folder / "vocab.txt"
    path.write_text(path.read_text().replace("##", "#", 1))
    with pytest.raises(UserError, match="is not the vocabulary that its rows were prepared with"):
        pretraining.make_phases(config)


def test_any_flipped_bit_changes_nothing_or_is_detected(folder):
    opened = loader.Rows(folder, "train")
    clean, path = all_rows(opened), shard_of(folder)
    data = path.read_bytes()
    # A small shard is mostly zero padding up to the next block, so every other flip avoids it.
    used = [i for i, byte in enumerate(data) if byte]
    rng, outcomes = random.Random(7), collections.Counter()
    for number in range(FLIPS):
        path.write_bytes(data)
        at = rng.choice(used) if number % 2 else rng.randrange(len(data))
        flip(path, at, rng.randrange(8))
        messages = []
        result = all_rows(loader.Rows(folder, "train", messages.append))
        empty = [int(line.split()[1]) for line in messages]
        assert_same_except(clean, result, empty)
        outcomes["skipped" if messages else "no difference"] += 1
    assert {"skipped", "no difference"} == {*outcomes}, outcomes


# --- Manifests ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def manifest(rows):
    return read_manifest(rows()).to_dict()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m.update(tokens=10**12), "1000000000000 tokens"),
        (lambda m: m.update(sequences=0), "0 sequences"),
        (lambda m: m.update(vocab_size=1 << 40), "vocabulary"),
        (lambda m: m.update(tokens="32"), "whole number"),
        (lambda m: m["train"]["shards"][0].update(name="../../etc/passwd"), "etc/passwd"),
        (lambda m: m["train"]["shards"][0].update(name="/x.arrayrecord"), "/x"),
        (lambda m: m["train"]["shards"][0].update(rows=-1), "-1 rows"),
        (lambda m: m["train"].update(rows=10**12), "total of its shards"),
        (lambda m: m["train"]["shards"].append(None), "shards"),
    ],
)
def test_invalid_manifest_is_rejected(manifest, tmp_path, change, says):
    changed = json.loads(json.dumps(manifest))
    change(changed)
    (tmp_path / "manifest.json").write_text(json.dumps(changed))
    with pytest.raises(UserError, match="not a manifest of rows") as error:
        read_manifest(tmp_path)
    assert says in str(error.value)


def test_manifest_with_too_many_rows_is_rejected(folder, manifest):
    changed = json.loads(json.dumps(manifest))
    for holder in (changed["train"], changed["train"]["shards"][0]):
        holder["rows"] = 10**12
    (folder / "manifest.json").write_text(json.dumps(changed))
    with pytest.raises(UserError, match="too few for the 1000000000000 rows"):
        loader.Rows(folder, "train")


@given(bit=st.integers(0, 1 << 20))
def test_shard_checksum_detects_any_flipped_bit(rows, tmp_path_factory, bit):
    folder = tmp_path_factory.getbasetemp() / "flipped"
    if not folder.exists():
        shutil.copytree(rows(), folder)
    path = shard_of(folder)
    flip(path, bit // 8 % path.stat().st_size, bit % 8)
    try:
        with pytest.raises(UserError, match=path.name):
            loader.Rows(folder, "train").verify()
    finally:
        flip(path, bit // 8 % path.stat().st_size, bit % 8)
