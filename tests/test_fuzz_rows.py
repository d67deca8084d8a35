"""Damaged shards and manifests are never read as rows, and are reported once."""

import collections
import json
import os
import pathlib
import random
import shutil

import numpy as np
import pytest

from bert_jax.config.schema import Config, PhaseConfig
from bert_jax.data import loader
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


def damage(path, opened, number, part="payload"):
    """Flip a bit of a record, or only of its checksum."""
    every = records(opened)
    if part == "checksum":
        every[number] = every[number][:-1] + bytes([every[number][-1] ^ 1])
        reseal(path, every)
    else:
        flip(path, path.read_bytes().index(every[number]) + 5)


def assert_same_except(clean, actual, empty):
    """Assert that batches are equal except for the rows `empty`, which must be padding."""
    for name, values in clean.items():
        expected = values.copy()
        expected[empty] = -1 if name == "label" else 0
        np.testing.assert_array_equal(actual[name], expected)
    assert not actual["length"][empty].any()


@pytest.mark.parametrize(("part", "split"), [("payload", "train"), ("checksum", "heldout")])
def test_damaged_record_is_rejected_or_skipped_and_named(folder, part, split):
    opened = loader.RowDataset(folder, split)
    clean, path = all_rows(opened), shard_of(folder, split)
    damage(path, opened, 3, part)
    with pytest.raises(UserError, match=f"record 3 of the shard {path}"):
        all_rows(loader.RowDataset(folder, split))
    with pytest.raises(UserError, match=f"{path} fails its checksum"):
        loader.RowDataset(folder, split).verify()
    messages = []
    skipping = loader.RowDataset(folder, split, messages.append)
    for _ in range(2):
        assert_same_except(clean, all_rows(skipping), 3)
    (line,) = messages
    assert line.startswith(f"record 3 of the shard {path} is damaged")
    skipping.verify()
    assert f"{path} fails its checksum" in messages[1]


@pytest.mark.parametrize("policy", ["skip", "stop"])
def test_damaged_rows_policy(folder, policy, capsys):
    """A bit flips during the run, in a row of the first batch."""
    config = Config(phases=(PhaseConfig(rows=str(folder)),), batch_size=8, damaged_rows=policy)
    _, _, _, (phase,) = pretraining.make_phases(config)
    (clean,) = phase.batches(0, 1, 0, 1)
    opened = loader.RowDataset(folder, "train")
    number = int(shuffled([5], len(opened), config.seed)[0])
    damage(shard_of(folder), opened, number)
    _ = capsys.readouterr()
    if policy == "stop":
        with pytest.raises(UserError, match=f"record {number} of the shard"):
            list(phase.batches(0, 1, 0, 1))
        with pytest.raises(UserError, match="fails its checksum"):
            pretraining.make_phases(config)
    else:
        _, _, _, (phase,) = pretraining.make_phases(config)
        for _ in range(2):
            (result,) = phase.batches(0, 1, 0, 1)
            assert_same_except(clean, result, 5)
        altered, skipped = capsys.readouterr().err.splitlines()
        assert "fails its checksum" in altered
        assert f"record {number} of the shard" in skipped


@pytest.mark.parametrize("skip", [None, print])
def test_unreadable_shard_is_never_skipped(folder, skip):
    opened = loader.RowDataset(folder, "train", skip)
    path = shard_of(folder)
    data = path.read_bytes()
    path.write_bytes(data[:2000])
    with pytest.raises(UserError, match=f"{path} has 2000 bytes.* truncated"):
        loader.RowDataset(folder, "train", skip)
    with pytest.raises(UserError, match=f"{path} has 0 readable rows"):
        all_rows(opened)
    path.unlink()
    with pytest.raises(UserError, match=f"the shard {path} is missing"):
        loader.RowDataset(folder, "train", skip)


def test_changed_vocabulary_is_rejected(folder):
    config = Config(phases=(PhaseConfig(rows=str(folder)),), batch_size=8)
    path = folder / "vocab.txt"
    path.write_text(path.read_text().replace("##", "#", 1))
    with pytest.raises(UserError, match="not the vocabulary"):
        pretraining.make_phases(config)


def test_any_flipped_bit_changes_nothing_or_is_detected(folder):
    opened = loader.RowDataset(folder, "train")
    clean, path = all_rows(opened), shard_of(folder)
    data = path.read_bytes()
    # A small shard is mostly zero padding up to the next block, so every other flip avoids it.
    used = [i for i, byte in enumerate(data) if byte]
    rng, outcomes = random.Random(7), collections.Counter()
    for number in range(FLIPS):
        path.write_bytes(data)
        at = rng.choice(used) if number % 2 else rng.randrange(len(data))
        flip(path, at, rng.randrange(8))
        with pytest.raises(UserError, match=path.name):
            opened.verify()
        messages = []
        try:
            result = all_rows(loader.RowDataset(folder, "train", messages.append))
        except UserError:  # the shard's index
            outcomes["error"] += 1
            continue
        empty = [int(line.split()[1]) for line in messages]
        assert_same_except(clean, result, empty)
        outcomes["skipped" if messages else "no difference"] += 1
    assert {"skipped", "no difference"} <= {*outcomes}, outcomes


def test_manifest_with_too_many_rows_is_rejected(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    for holder in (manifest["train"], manifest["train"]["shards"][0]):
        holder["rows"] = 10**12
    (folder / "manifest.json").write_text(json.dumps(manifest))
    opened = loader.RowDataset(folder, "train", pytest.fail)
    with pytest.raises(UserError, match="manifest says 1000000000000"):
        opened.read([0])
