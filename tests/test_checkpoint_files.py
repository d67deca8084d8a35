"""Readers of TensorFlow and PyTorch checkpoints: bit-exact values or one-line errors."""

import collections
import contextlib
import importlib.util
import io
import itertools
import os
import pathlib
import pickle
import shutil
import struct
import time
import tracemalloc
import zipfile

import google_crc32c
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_jax.convert import pytorch, tensorflow1
from bert_jax.errors import UserError

FIXTURE = pathlib.Path(__file__).parent / "data" / "tf1"
LEGACY, ZIP = False, True


def same(a, b) -> bool:
    """Return whether two dicts of arrays are equal in order, dtypes, shapes and bits."""
    return list(a) == list(b) and all(
        (a[name].dtype, a[name].shape, a[name].tobytes())
        == (b[name].dtype, b[name].shape, b[name].tobytes())
        for name in a
    )


@contextlib.contextmanager
def refused(*words):
    """Expect a one-line `UserError` of readable length that contains each of `words`."""
    with pytest.raises(UserError) as caught:
        yield
    line = str(caught.value)
    assert "\n" not in line
    assert len(line) < 1000
    assert [word for word in words if word not in line] == []


@contextlib.contextmanager
def modest(bytes_limit=24 << 20, seconds=60):
    """Limit the memory and time of the block; a bomb that goes off takes minutes."""
    start = time.monotonic()
    tracemalloc.start()
    try:
        yield
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < bytes_limit
        assert time.monotonic() - start < seconds


damages = st.one_of(
    st.tuples(st.just("flip"), st.integers(0, 1 << 20), st.integers(0, 7)),
    st.tuples(st.just("cut"), st.integers(0, 1 << 20), st.just(0)),
    st.tuples(st.just("set"), st.integers(0, 1 << 20), st.integers(0, 255)),
)


def damaged(content: bytes, damage) -> bytes:
    kind, at, value = damage
    at %= len(content)
    if kind == "cut":
        return content[:at]
    byte = content[at] ^ 1 << value if kind == "flip" else value
    return content[:at] + bytes([byte]) + content[at + 1 :]


# TensorFlow.


@pytest.fixture(scope="module")
def script():
    """The script that wrote the fixture, imported for its tensors."""
    spec = importlib.util.spec_from_file_location("write", FIXTURE / "write.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _masked(data: bytes) -> int:
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _message(*fields) -> bytes:
    """Encode a protocol buffer of (field number, value): bytes, int or ("fixed32", int)."""
    out = b""
    for number, value in fields:
        if isinstance(value, bytes):
            out += _varint(number << 3 | 2) + _varint(len(value)) + value
        elif isinstance(value, tuple):
            out += _varint(number << 3 | 5) + struct.pack("<I", value[1])
        else:
            out += _varint(number << 3) + _varint(value)
    return out


HEADER = _message((1, 1), (3, _message((1, 1))))


def _entry(data=b"\0" * 8, shape=(2,), dtype=1, shard=0, offset=0, size=None, crc=None, more=()):
    dimensions = _message(*[(2, _message((1, n))) for n in shape])
    size = len(data) if size is None else size
    crc = _masked(data) if crc is None else crc
    fields = (1, dtype), (2, dimensions), (3, shard), (4, offset), (5, size), (6, ("fixed32", crc))
    return _message(*fields, *more)


def _table(records: list[tuple[bytes, bytes]], a_block=2, restart=2, kind=0) -> bytes:
    """Encode a table with valid checksums; its records may be invalid."""
    table = bytearray()

    def block(items) -> bytes:
        out, restarts, last = bytearray(), [], b""
        for i, (key, value) in enumerate(items):
            pairs = zip(key, last, strict=False)
            shared = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
            if i % restart == 0:
                shared = 0
                restarts.append(len(out))
            out += _varint(shared) + _varint(len(key) - shared) + _varint(len(value))
            out += key[shared:] + value
            last = key
        out += struct.pack(f"<{len(restarts) + 1}I", *restarts, len(restarts))
        handle = _varint(len(table)) + _varint(len(out))
        out += bytes([kind])
        table.extend(out + struct.pack("<I", _masked(bytes(out))))
        return handle

    index = [
        (records[min(i + a_block, len(records)) - 1][0], block(records[i : i + a_block]))
        for i in range(0, len(records), a_block)
    ]
    footer = (block([]) + block(index)).ljust(40, b"\0")
    return bytes(table + footer + struct.pack("<Q", tensorflow1._MAGIC))


def _write(folder, records, data=b"\0" * 8, **options):
    (folder / "x.index").write_bytes(_table(sorted(records.items()), **options))
    (folder / "x.data-00000-of-00001").write_bytes(data)


def test_reads_checkpoints_written_by_tensorflow(script):
    """TensorFlow wrote the fixture; its tensors follow from a formula."""
    for tensors, prefix in ((script.bert(), "bert_model.ckpt"), (script.other(), "other.ckpt")):
        read = tensorflow1.read(FIXTURE, prefix, lambda name: name != "string")
        assert same(read, {name: np.asarray(tensors[name]) for name in sorted(tensors)})
    with refused("other.ckpt.index", "'string'"):
        tensorflow1.read(FIXTURE, "other.ckpt")


def test_unselected_tensors_are_not_read(tmp_path):
    name, tensor = "bert_model.ckpt.data-00000-of-00001", "bert/pooler/dense/bias/adam_m"
    shutil.copy(FIXTURE / "bert_model.ckpt.index", tmp_path)
    content = bytearray((FIXTURE / name).read_bytes())
    content[tensorflow1.entries(FIXTURE, "bert_model.ckpt")[tensor].offset] ^= 1
    (tmp_path / name).write_bytes(content)
    read = tensorflow1.read(tmp_path, "bert_model.ckpt", lambda name: "adam" not in name)
    whole = tensorflow1.read(FIXTURE, "bert_model.ckpt")
    assert same(read, {name: v for name, v in whole.items() if "adam" not in name})
    with refused(name, repr(tensor), "checksum"):
        tensorflow1.read(tmp_path, "bert_model.ckpt")


@settings(max_examples=150, deadline=None)
@given(damages)
def test_corrupt_index_is_rejected_or_harmless(tmp_path_factory, damage):
    folder = tmp_path_factory.getbasetemp()
    content = (FIXTURE / "bert_model.ckpt.index").read_bytes()
    (folder / "d.index").write_bytes(damaged(content, damage))
    with contextlib.suppress(UserError):
        assert tensorflow1.entries(folder, "d") == tensorflow1.entries(FIXTURE, "bert_model.ckpt")
        assert damage[0] != "cut"


@settings(max_examples=40, deadline=None)
@given(damages)
def test_corrupt_data_error_names_the_tensor(tmp_path_factory, damage):
    folder = tmp_path_factory.getbasetemp()
    shutil.copy(FIXTURE / "bert_model.ckpt.index", folder / "e.index")
    content = (FIXTURE / "bert_model.ckpt.data-00000-of-00001").read_bytes()
    changed = damaged(content, damage)
    (folder / "e.data-00000-of-00001").write_bytes(changed)
    if changed == content:
        return
    at = damage[1] % len(content)
    entries = tensorflow1.entries(folder, "e")
    hit = next(n for n, e in entries.items() if e.offset <= at < e.offset + e.size)
    with refused("e.data-00000-of-00001", repr(hit)):
        tensorflow1.read(folder, "e")


# Names that share prefixes across the restart points and blocks of the table.
names = st.lists(st.text("ab/", min_size=1, max_size=12), unique=True, min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(names, st.integers(1, 9), st.integers(1, 9))
def test_reads_tables_with_any_block_and_restart_size(tmp_path_factory, names, a_block, restart):
    folder = tmp_path_factory.getbasetemp()
    data, records = b"", {b"": HEADER}
    arrays = {name: np.float32([len(name), i]) for i, name in enumerate(names)}
    for name, array in arrays.items():
        records[name.encode()] = _entry(array.tobytes(), offset=len(data))
        data += array.tobytes()
    _write(folder, records, data, a_block=a_block, restart=restart)
    assert same(tensorflow1.read(folder, "x"), dict(sorted(arrays.items())))


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (_entry(size=4), ["'t'", "4 bytes", "[2]"]),
        (_entry(shape=(1 << 40,), size=4 << 40), ["'t'", "truncated", "data-00000"]),
        (_entry(shape=(-2,)), ["'t'", "impossible"]),
        (_entry(offset=4), ["'t'", "truncated"]),
        (_entry(shard=1), ["'t'", "data file 1 of 1"]),
        (_entry(dtype=7), ["'t'", "type"]),
        (_entry(crc=1), ["'t'", "checksum"]),
        (_entry(more=[(7, b"")]), ["'t'", "partitioned"]),
        (_entry(shape=(1,) * 33 + (2,)), ["'t'", "impossible"]),
        (_message((1, b"float")), ["x.index", "wrong type"]),
        (b"\xff" * 11, ["x.index", "damaged"]),
    ],
)
def test_invalid_index_entries_are_rejected(tmp_path, entry, words):
    _write(tmp_path, {b"": HEADER, b"t": entry})
    with refused(*words), modest():
        tensorflow1.read(tmp_path, "x")


@pytest.mark.parametrize(
    ("table", "word"),
    [
        (_table([(b"t", _entry())]), "no header"),
        (_table([(b"", _message((1, 1), (2, 1)))]), "big-endian"),
        (_table([(b"", _message((1, 1), (3, _message((2, 2)))))]), "newer"),
        (_table([(b"", HEADER)], kind=1), "Snappy"),
        (_table([(b"", HEADER), (b"b", b""), (b"a", b"")], a_block=1), "out of order"),
        (_table([(b"", HEADER), (b"n" * 1001, b"")]), "longer"),
        (_table([(b"", HEADER), (b"\xff", _entry())]), "damaged"),
        (_table([(b"", HEADER), (b"a", _entry()), (b"b", _entry())]), "'b'"),  # they overlap
        (b"", "footer"),
        (bytes(1 << 24) + _table([(b"", HEADER)]), "larger than 16 MB"),
    ],
)
def test_invalid_index_tables_are_rejected(tmp_path, table, word):
    (tmp_path / "x.index").write_bytes(table)
    (tmp_path / "x.data-00000-of-00001").write_bytes(bytes(8))
    with refused(str(tmp_path / "x."), word):
        tensorflow1.read(tmp_path, "x")


# PyTorch.


def save(path, value, kind=ZIP) -> pathlib.Path:
    torch.save(value, path, _use_new_zipfile_serialization=kind)
    return path


def theirs(value) -> dict[str, np.ndarray]:
    """Return a state dict's arrays, converted by PyTorch."""

    def array(tensor):
        tensor = tensor.detach().contiguous()
        if tensor.dtype == torch.bfloat16:
            return tensor.view(torch.int16).numpy().view(pytorch.ml_dtypes.bfloat16)
        return tensor.numpy()

    return {name: array(tensor) for name, tensor in value.items()}


class _AsStorage:
    """Placeholder for a storage of `elements` elements in a hand-made pickle."""

    def __init__(self, elements, key="0"):
        self.identity = ("storage", torch.FloatStorage, key, "cpu", elements)


class _Calls:
    """Object that pickles as a call of `function`."""

    def __init__(self, function, *arguments):
        self.reduction = function, arguments

    def __reduce__(self):
        return self.reduction


def _pickled(value, protocol=2) -> bytes:
    class Pickler(pickle._Pickler):
        def persistent_id(self, value):
            return value.identity if isinstance(value, _AsStorage) else None

    out = io.BytesIO()
    Pickler(out, protocol).dump(value)
    return out.getvalue()


def _tensor(elements=6, offset=0, shape=(6,), strides=(1,), key="0") -> _Calls:
    arguments = (_AsStorage(elements, key), offset, shape, strides, False, {})
    return _Calls(torch._utils._rebuild_tensor_v2, *arguments)


def container(path, pickled: bytes, kind, data=b"\0" * 24) -> pathlib.Path:
    """Write a file of either format with the given pickle and one storage "0"."""
    if kind is ZIP:
        with zipfile.ZipFile(path, "w") as out:
            out.writestr("archive/data.pkl", pickled)
            out.writestr("archive/data/0", data)
    else:
        system = {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}
        head = [pickle.dumps(v, 2) for v in (0x1950A86A20F9469CFC6C, 1001, system)]
        tail = pickle.dumps(["0"], 2) + struct.pack("<q", len(data) // 4) + data
        path.write_bytes(b"".join(head) + pickled + tail)
    return path


@pytest.fixture(scope="module")
def states():
    """State dicts of modules, dtypes, views, parameters and special values."""
    torch.manual_seed(0)
    base = torch.randn(5, 7)
    layers = {"dense": torch.nn.Linear(4, 3), "table": torch.nn.Embedding(6, 4)}
    model = torch.nn.Sequential(collections.OrderedDict(layers))
    integers = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool]
    floats = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    views = {
        "whole": base,
        "transposed": base.T,
        "column": base[:, 3],
        "steps": base[1::2, ::3],
        "expanded": base[0].expand(4, 7),
        "scalar": base[4, 6],
        "folded": base.reshape(5, 7, 1).permute(2, 1, 0),
        "empty": base[:0],
        "empty_tail": base[5:],
    }
    return {
        "module": model.state_dict(),
        "dtypes": {str(d): (torch.randn(3, 4) * 50).to(d) for d in integers + floats},
        "views": views,
        "parameters": {"p": torch.nn.Parameter(base), "buffer": torch.arange(9).expand((1, -1))},
        "odd": {"nan": torch.tensor([float("nan"), -0.0, float("inf"), 1e-42]), "": base},
    }


@pytest.mark.parametrize(("kind", "protocol"), [(LEGACY, 2), (LEGACY, 5), (ZIP, 3), (ZIP, 4)])
def test_reads_checkpoints_written_by_pytorch(tmp_path, states, kind, protocol):
    for state in states.values():
        path = tmp_path / "pytorch_model.bin"
        torch.save(state, path, pickle_protocol=protocol, _use_new_zipfile_serialization=kind)
        assert same(pytorch.read(path), theirs(state))


@pytest.mark.parametrize("kind", [LEGACY, ZIP])
def test_shared_storage_stays_shared(tmp_path, states, kind):
    read = pytorch.read(save(tmp_path / "m.bin", states["views"], kind))
    assert np.shares_memory(read["whole"], read["transposed"])
    assert sum(array.base is None for array in read.values()) <= 2  # the empty ones


@pytest.mark.parametrize("kind", [LEGACY, ZIP])
def test_finds_the_state_dict_in_a_training_checkpoint(tmp_path, states, kind):
    state, path = states["module"], tmp_path / "m.bin"
    # The state of Adam, written out because importing Adam takes seconds.
    moments = {i: {"step": torch.tensor(3.0), "exp_avg": torch.ones(2)} for i in range(2)}
    optimizer = {"state": moments, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    for value in (
        {"state_dict": state},
        {"epoch": 3, "model": state, "loss": 0.5, "names": ["a", None, (1, 2)]},
        {"optimizer": optimizer, "model": state},
        collections.OrderedDict(step=7, **state),
    ):
        assert same(pytorch.read(save(path, value, kind)), theirs(state))
    for value, words in (
        ({"model": state, "ema": state}, ["several", "'model'", "'ema'"]),
        ({"epoch": 3}, ["no state dict"]),
        ([torch.ones(2)], ["no state dict"]),
        (torch.ones(2), ["no state dict"]),
    ):
        with refused("m.bin", *words):
            pytorch.read(save(path, value, kind))


@pytest.mark.parametrize(("kind", "protocol"), [(LEGACY, 2), (ZIP, 4)])
def test_pickle_that_runs_code_is_rejected(tmp_path, kind, protocol):
    proof = tmp_path / "it_ran"
    for evil, name in (
        (_Calls(eval, f"open({str(proof)!r}, 'w')"), "eval"),
        (_Calls(torch.nn.Parameter, _Calls(os.mkdir, str(proof))), "mkdir"),
        (_Calls(getattr, "torch", "load"), "getattr"),
        (_Calls(torch.load, str(proof)), "load"),
        (pathlib.PurePosixPath("x"), "pathlib"),
        (os.system, ".system"),  # referenced, not called
    ):
        path = container(tmp_path / "m.bin", _pickled({"a": _tensor(), "b": evil}, protocol), kind)
        with refused("m.bin", name, "not allowed"):
            pytorch.read(path)
    # At the start of the file, where the legacy format has its magic number.
    (tmp_path / "m.bin").write_bytes(pickle.dumps(_Calls(os.mkdir, str(proof))))
    with refused("m.bin"):
        pytorch.read(tmp_path / "m.bin")
    assert not proof.exists()


def test_misuse_of_allowed_pickle_names_is_rejected(tmp_path):
    """Pickles may use the allowed names only as PyTorch does: no attributes, no instances."""
    rebuild = b"ctorch._utils\n_rebuild_tensor_v2\n"
    for code in (
        rebuild + b"}X\x08\x00\x00\x00__code__K\x01sb.",  # BUILD on a function
        b"ctorch\nFloatStorage\n)R.",  # a class that PyTorch never calls
        b"ctorch\nSize\n)\x81.",  # NEWOBJ
        b"(ctorch\nSize\no.",  # OBJ
        b"(ios\nsystem\n.",  # INST
        b"\x82\x01.",  # EXT1
        rebuild + b"K\x01a.",  # APPEND to a function
        rebuild + b"K\x01K\x02s.",  # SETITEM on a function
        b"K\x01)R.",  # REDUCE on a number
        b"ccollections\nOrderedDict\nK\x01R.",  # arguments that are not a tuple
        rebuild + b"(K\x01K\x01K\x01K\x01tR.",
        b"K\x01Q.",  # an invalid persistent id
    ):
        for kind in (LEGACY, ZIP):
            path = container(tmp_path / "m.bin", code, kind)
            with refused("m.bin", "not a readable PyTorch checkpoint"):
                pytorch.read(path)
    path = container(tmp_path / "m.bin", b"ccollections\nOrderedDict\n](K\x01K\x02e\x85R.", ZIP)
    with refused("builds an OrderedDict"):
        pytorch.read(path)


@pytest.mark.parametrize("kind", [LEGACY, ZIP])
@pytest.mark.parametrize(
    "bad",
    [
        *({"elements": n} for n in (7, 5, 1 << 40, -6)),
        *({"offset": n} for n in (1, -1, 1 << 70, 0.0)),
        *({"shape": shape} for shape in ((7,), (-6,), (6, 1), ("6",))),
        {"shape": (1 << 50, 1 << 50), "strides": (0, 0)},
        {"shape": (1 << 40,), "strides": (0,)},
        {"shape": (0, 1 << 62, 1 << 62), "strides": (0, 0, 0)},
        *({"strides": (n,)} for n in (2, -1, 1 << 62)),
        {"shape": (1,) * 40, "strides": (1,) * 40},
        *({"key": key} for key in ("1", "../data.pkl")),
    ],
)
def test_tensors_outside_their_storage_are_rejected(tmp_path, kind, bad):
    fine = _pickled({"t": _tensor(), "one": _tensor(shape=(1, 6), strides=(1 << 62, 1))})
    shapes = [
        array.shape for array in pytorch.read(container(tmp_path / "m.bin", fine, kind)).values()
    ]
    assert shapes == [(6,), (1, 6)]  # the stride of a dimension of size 1 does not matter
    path = container(tmp_path / "m.bin", _pickled({"t": _tensor(**bad)}), kind)
    beyond = bad in ({"offset": 1}, {"shape": (7,)}, {"strides": (2,)})
    with refused("m.bin", "beyond its storage" if beyond else ""), modest():
        pytorch.read(path)


def test_legacy_storage_larger_than_its_file_is_rejected(tmp_path):
    elements = 1 << 28
    pickled = _pickled({"t": _tensor(elements, shape=(elements,))})
    path = container(tmp_path / "m.bin", pickled, LEGACY)
    content = path.read_bytes()
    path.write_bytes(content[:-32] + struct.pack("<q", elements) + content[-24:])
    with refused("m.bin", "truncated", "'t'"), modest():
        pytorch.read(path)


def test_reads_storage_views_from_before_pytorch_0_4(tmp_path):
    storage = _AsStorage(6)
    storage.identity += (("view", 2, 3),)
    tensor = _Calls(torch._utils._rebuild_tensor, storage, 1, (2,), (1,))
    data = np.arange(6, dtype=np.float32)
    path = container(tmp_path / "m.bin", _pickled({"t": tensor}), LEGACY, data.tobytes())
    assert pytorch.read(path)["t"].tolist() == [3, 4]


@pytest.mark.parametrize("kind", [LEGACY, ZIP])
@pytest.mark.parametrize(
    "code",
    [
        b"Nr\xff\xff\xff\xff.",  # a memo with 2**32 entries
        b"\x8b\xff\xff\xff\x7f\x01.",  # an integer of 2 GB
        b"\x8e" + struct.pack("<Q", 1 << 62) + b"x.",  # bytes of 4 EB
        b"\x95" + struct.pack("<Q", 1 << 62) + b"N.",  # a frame of 4 EB
        b"I" + b"9" * 100_000 + b"\n.",
        b"]" * 10_000 + b"a" * 9_999 + b".",  # deep nesting
        b"}K\x00" + b"q\x00h\x00\x86" * 200 + b"K\x01s.",  # a key whose hash takes 2**200 steps
        b"]q\x00" + b"h\x00a" * 1000 + b".",  # a list inside itself
        b"}K\x01h\x07s.",  # a memo entry that was never set
        b".",
        b"",
    ],
)
def test_pickle_bombs_are_rejected_within_limits(tmp_path, kind, code):
    path = container(tmp_path / "m.bin", b"\x80\x02" + code, kind)
    with refused("m.bin"), modest():
        pytorch.read(path)


@settings(max_examples=150, deadline=None)
@given(damages)
def test_corrupt_pytorch_zip_is_rejected_or_harmless(tmp_path_factory, states, damage):
    path = tmp_path_factory.getbasetemp() / "zip.bin"
    whole = save(path, states["views"] | states["module"]).read_bytes()
    path.write_bytes(damaged(whole, damage))
    with contextlib.suppress(UserError):
        assert same(pytorch.read(path), theirs(states["views"] | states["module"]))
        assert damage[0] != "cut"


@settings(max_examples=120, deadline=None)
@given(damages)
def test_corrupt_legacy_file_raises_only_user_errors(tmp_path_factory, states, damage):
    """The format has no checksums, so wrong names or numbers cannot be detected."""
    path = tmp_path_factory.getbasetemp() / "legacy.bin"
    whole = save(path, states["views"] | states["module"], LEGACY).read_bytes()
    path.write_bytes(damaged(whole, damage))
    with contextlib.suppress(UserError):
        assert pytorch.read(path)
        assert damage[0] != "cut"


def test_unreadable_pytorch_files_are_rejected(tmp_path, states):
    path = tmp_path / "m.bin"
    with refused("m.bin", "does not exist"):
        pytorch.read(path)
    with refused(str(tmp_path), "a folder"):
        pytorch.read(tmp_path)
    whole = save(path, states["module"]).read_bytes()
    for content in (b"", b"PK\3\4", b"version https://git-lfs.github.com/spec/v1\n", whole[:9]):
        path.write_bytes(content)
        with refused("m.bin", "not a readable PyTorch checkpoint"):
            pytorch.read(path)

    def rewritten(compression=zipfile.ZIP_STORED, **members):
        with zipfile.ZipFile(io.BytesIO(whole)) as old, zipfile.ZipFile(path, "w") as new:
            for name in old.namelist():
                base = name.split("/")[-1]
                new.writestr(name, members.get(base, old.read(name)), compression)
        return path

    assert same(pytorch.read(rewritten()), theirs(states["module"]))
    with refused("compressed"):
        pytorch.read(rewritten(zipfile.ZIP_DEFLATED))
    with refused("big-endian"):
        pytorch.read(rewritten(byteorder=b"big"))
