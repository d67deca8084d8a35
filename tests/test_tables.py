"""Tables: every format and compression gives the same records; errors give the line number."""

import csv
import gzip
import io
import json

import pyarrow
import pytest
from pyarrow import parquet

from bert_jax.data import tables
from bert_jax.errors import UserError
from tests.helpers.compression import COMPRESSIONS

ROWS = [
    {"text": 'He said "no", twice.', "other": "a, b", "label": "0"},
    {"text": "Ünïcode \u2028 and \x85 and\x0cform feed", "other": '"', "label": "1"},
    {"text": " spaces kept ", "other": "日本", "label": "2"},
]


def content(kind, rows=ROWS):
    if kind == ".jsonl":
        return "\n\n".join(json.dumps(row) for row in rows)
    if kind == ".csv":
        out = io.StringIO()
        writer = csv.DictWriter(out, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
        return out.getvalue()
    return "".join("\t".join(line) + "\n" for line in [rows[0], *(r.values() for r in rows)])


def write(path, data):
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


@pytest.mark.parametrize(
    "suffix", [".tsv", ".csv", ".jsonl", ".TSV.gz", ".csv.bz2", ".jsonl.xz", ".tsv.zst"]
)
def test_reads_every_format_and_compression(tmp_path, suffix):
    kind, _, compression = suffix[1:].lower().partition(".")
    data = ("\ufeff" * (kind != "jsonl") + content(f".{kind}")).encode()
    path = write(tmp_path / f"a.b{suffix}", COMPRESSIONS.get(compression, bytes)(data))
    read_bytes = []
    result = list(tables.read(path, ["text"], ["label"], count=read_bytes.append))
    assert [record.fields for record in result] == ROWS
    first, step = (1, 2) if kind == "jsonl" else (2, 1)
    assert [r.where for r in result] == [f"{path}:{first + step * i}" for i in range(3)]
    assert sum(read_bytes) == path.stat().st_size


def test_reads_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    columns = {name: [row[name] for row in ROWS] for name in ROWS[0]}
    columns["other"] = pyarrow.array(columns["other"]).dictionary_encode()
    columns["tags"] = [["a", "b"], [], ["c"]]
    parquet.write_table(pyarrow.table(columns), path)
    count, optional = [], ["label", "nothing"]
    records = tables.read(path, ["text", "other"], ["tags"], optional=optional, count=count.append)
    result = list(records)
    assert [{k: r.fields[k] for k in ROWS[0]} for r in result] == ROWS
    assert [r.fields["tags"] for r in result] == columns["tags"]
    assert result[2].where == f"{path}: row 3"
    assert sum(count) == path.stat().st_size
    assert list(next(tables.read(path, ["text"])).fields) == ["text"]


def test_header_and_quoting_arguments(tmp_path):
    path = write(tmp_path / "a.tsv", '1\t"x\n2\ty"\r\n\n')
    plain = [r.fields for r in tables.read(path, ["b"], header=["a", "b"])]
    assert plain == [{"a": "1", "b": '"x'}, {"a": "2", "b": 'y"'}]
    assert [r.fields for r in tables.read(path, ['"x'])] == [{"1": "2", '"x': 'y"'}]
    path = write(tmp_path / "b.tsv", 'a\tb\n1\t"x\ty ""z"""\n')
    quoted = [r.fields for r in tables.read(path, ["b"], quoting=True)]
    assert quoted == [{"a": "1", "b": 'x\ty "z"'}]
    path = write(tmp_path / "c.csv", 'a,b\n1,"x"\n')
    assert next(tables.read(path, ["b"], quoting=False)).fields["b"] == '"x"'


def test_multiline_fields_count_all_their_lines(tmp_path):
    path = write(tmp_path / "a.csv", 'text,label\n"one\ntwo\r\nthree",0\nfour,1\nfive\n')
    result = tables.read(path, ["text"])
    first, second = next(result), next(result)
    assert first == (f"{path}:2", {"text": "one\ntwo\nthree", "label": "0"})
    assert second.where == f"{path}:5"
    with pytest.raises(UserError, match=r"a.csv:6"):
        next(result)


def test_plain_text_lines(tmp_path):
    path = write(tmp_path / "a.txt", "one\ttwo\n\nthree\t\n")
    result = [r.fields["t"] for r in tables.read(path, ["t"], header=["t"], empty=True)]
    assert result == ["one\ttwo", "", "three\t"]
    with pytest.raises(UserError, match=r"a.txt:2"):
        list(tables.read(path, ["a", "b"], header=["a", "b"]))
    path = write(tmp_path / "b.txt", "one\ttwo\nthree\t\n")
    with pytest.raises(UserError, match=r"b.txt:2: 'b'"):  # only texts may be empty
        list(tables.read(path, ["a"], ["b"], header=["a", "b"], empty=True))
    pairs = [r.fields for r in tables.read(path, ["a", "b"], header=["a", "b"], empty=True)]
    assert pairs == [{"a": "one", "b": "two"}, {"a": "three", "b": ""}]


@pytest.mark.parametrize(
    ("name", "data", "key"),
    [
        ("a.tsv", "text\tlabel\na\t0\nb\n", "a.tsv:3"),
        ("a.tsv", "text\tlabel\ttext\na\t0\tb\n", "a.tsv:1: more than one column 'text'"),
        ("a.tsv", "text\tlabel\n \t0\n", "a.tsv:2: 'text'"),
        ("a.tsv", b"text\tlabel\na\t0\nb\xe4\t1\n", "a.tsv:3: not UTF-8"),
        ("a.tsv", "text\tlabel\na\0\t0\n", "a.tsv:2: .*NUL"),
        ("a.csv", 'text,label\na,0\n"b,0\nc,1\n', "a.csv:3"),
        ("a.jsonl", '{"text": "a", "label": 0}\n{"text"\n', "a.jsonl:2"),
        ("a.jsonl", '{"text": 1, "label": 0}\n', "a.jsonl:1: .*'text'"),
        ("a.tsv.gz", gzip.compress(b"text\tlabel\n" * 99, mtime=0)[:-9], "damaged"),
        ("a.parquet", b"PAR1nonsense", "not a complete Parquet file"),
        ("a.parquet", {"text": [1.5], "label": [0]}, "'text' has type double"),
        ("a.parquet", {"text": ["a", None], "label": [0, 1]}, "row 2: no text in 'text'"),
        ("a.xlsx", b"x", "unknown file format"),
        ("a.tsv", None, "does not exist"),
    ],
)
def test_malformed_table_error_names_the_row(tmp_path, name, data, key):
    if isinstance(data, dict):
        parquet.write_table(pyarrow.table(data), tmp_path / name)
    elif data is not None:
        write(tmp_path / name, data)
    with pytest.raises(UserError, match=key):
        list(tables.read(tmp_path / name, ["text"], ["label"]))


def test_long_fields_are_read_and_longer_lines_refused(tmp_path, monkeypatch):
    path = write(tmp_path / "a.csv", f'text,label\n"{"x" * 200_000}",0\n')
    (record,) = tables.read(path, ["text"], ["label"])
    assert len(record.fields["text"]) == 200_000
    monkeypatch.setattr(tables, "LINE_BYTES", 20)
    with pytest.raises(UserError, match=r"a.csv:2: .*20 bytes"):
        list(tables.read(path, ["text"]))


def test_lone_surrogates_are_replaced(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "a\\ud83d", "label": "\\udc00"}\n')
    (record,) = tables.read(path, ["text"], ["label"])
    assert record.fields == {"text": "a?", "label": "?"}
