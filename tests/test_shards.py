"""Reading rows from shards."""

import itertools
import json
import os
import resource
import shutil

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from bert_jax.data import loader
from bert_jax.errors import UserError
from bert_jax.storage import files


def write(path, records, options="group_size:1,uncompressed"):
    writer = ArrayRecordWriter(str(path), options)
    for record in records:
        writer.write(record)
    writer.close()


def test_number_of_open_shards_is_limited(rows, tmp_path, monkeypatch):
    """Running out of file descriptors does not count as a damaged record."""
    folder = shutil.copytree(rows(), tmp_path / "rows")
    opened = loader.RowDataset(folder, "train")
    expected, (path,) = opened.read(range(len(opened))), folder.glob("train-*")
    records = opened._records(range(len(opened)))
    path.unlink()
    names = [f"train-{i:05}.arrayrecord" for i in range(len(records))]  # one shard per row
    for name, record in zip(names, records, strict=True):
        write(folder / name, [record])
    save_manifest(folder, [{"name": name, "rows": 1} for name in names])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(fd) for fd in os.listdir("/proc/self/fd")}
    free = itertools.islice((fd for fd in itertools.count() if fd not in used), 64)
    monkeypatch.setattr(loader, "_OPEN_SHARDS", 32)
    many = loader.RowDataset(folder, "train", pytest.fail)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(free) + 1, hard))
    try:
        result = many.read(range(len(many)))
        resource.setrlimit(resource.RLIMIT_NOFILE, (10, hard))
        many._reader.cache_clear()
        with pytest.raises(UserError, match="Too many open files"):
            many.read([0])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(records) > 64
    for name, values in result.items():
        np.testing.assert_array_equal(values, expected[name])


def save_manifest(folder, shards):
    manifest = json.loads((folder / "manifest.json").read_text())
    for shard in shards:
        path = folder / shard["name"]
        shard |= {"bytes": path.stat().st_size, "sha256": files.sha256(path)}
    manifest["train"]["shards"] = shards
    (folder / "manifest.json").write_text(json.dumps(manifest))


REST = (slice(1, None), 0)  # no sequences after the first


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"length": (0, 65_535)}, "more than 32 tokens"),
        ({"length": (slice(None), 0)}, "no sequences, or gaps"),
        ({"length": (slice(2), (0, 5))}, "no sequences, or gaps"),
        ({"a_length": (0, 33)}, "segment a is longer"),
        ({"label": (0, 2)}, "a label is out of range"),
        (dict.fromkeys(("length", "a_length", "label"), REST), "a label without a sequence"),
        ({"tokens": (3, 65_000)}, "a token is out of range"),
    ],
)
def test_inconsistent_record_is_rejected(rows, tmp_path, changes, problem):
    """The checksums of the record, the shard and the manifest are correct."""
    folder = shutil.copytree(rows(), tmp_path / "rows")
    opened = loader.RowDataset(folder, "train")
    form, (path,) = opened.manifest.format, folder.glob("train-*")
    records = opened._records(range(len(opened)))
    record = np.frombuffer(records[3], form.dtype).copy()
    for field, (place, value) in changes.items():
        record[field][0, place] = value
    records[3] = form.encode(form.seal(record))[0]
    write(path, records)
    save_manifest(folder, [{"name": path.name, "rows": len(records)}])

    again = loader.RowDataset(folder, "train")
    again.verify()
    again.read([0, 1, 2])
    with pytest.raises(UserError, match=f"record 3 of the shard .*{problem}"):
        again.read([2, 3])
    skipped = []
    read = loader.RowDataset(folder, "train", skipped.append).read([2, 3])
    assert problem in skipped[0]
    assert read["length"].any(1).tolist() == [True, False]
