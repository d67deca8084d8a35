"""Text embeddings: parity with transformers, packing, long texts, layers, file formats, errors."""

import dataclasses
import functools
import gzip
import io
import itertools
import json
import types

import jax
import numpy as np
import pyarrow
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from bert_jax.config.model import ModelConfig
from bert_jax.config.schema import Config, EmbedConfig
from bert_jax.convert.huggingface import to_huggingface
from bert_jax.data.vocabulary import SPECIAL, Vocabulary
from bert_jax.inference import embed
from bert_jax.inference.embed import Counts, Embedder, embed_file, windows
from tests.helpers.checkpoints import error_of, random_params
from tests.helpers.models import torch_bert

WORDS = [f"w{i}" for i in range(80)]
VOCABULARY = Vocabulary((*SPECIAL, *WORDS, "##x", "##y"), True)
MODEL = ModelConfig(
    layers=4, hidden=32, heads=4, feed_forward=64, vocab_size=len(VOCABULARY), positions=160,
    dropout=0.0, attention_dropout=0.0, masked_lm=False, next_sentence=False, pooler=True,
)  # fmt: skip
PARAMS = random_params(MODEL)


@pytest.fixture(autouse=True)
def one_device(request, monkeypatch):
    """Use one device, which is faster, except in tests with a `devices` parameter."""
    if "devices" not in request.fixturenames:
        monkeypatch.setattr(jax, "local_devices", lambda: jax.devices()[:1])


@functools.cache
def compiled(long, overlap_tokens, weights, **changes):
    return Embedder(
        Config(model=MODEL, embed=EmbedConfig(**changes)),
        VOCABULARY,
        PARAMS,
        long=long,
        overlap_tokens=overlap_tokens,
        weights=weights,
        batch_tokens=256,
    )


def embedder(long="truncate", overlap_tokens=64, weights=(), **changes):
    """Return a cached embedder with its counts reset to zero."""
    made = compiled(long, overlap_tokens, weights, **changes)
    made.counts = Counts()
    return made


def words(count, seed=0):
    """Return a text of `count` tokens, excluding [CLS] and [SEP]."""
    return " ".join(np.random.default_rng(seed).choice(WORDS, count))


def mixed(count, most=120):
    rng = np.random.default_rng(1)
    return [words(n, i) for i, n in enumerate(rng.integers(0, most, count))]


@functools.cache
def torch_model():
    tensors = to_huggingface(PARAMS, MODEL)
    tensors = {name.removeprefix("bert."): x for name, x in tensors.items()}
    return torch_bert("BertModel", MODEL, tensors).eval()


@functools.cache
def reference(text):
    """Return transformers' hidden states of a text on its own, [L + 1, n, D]."""
    with torch.no_grad():
        ids = torch.tensor([VOCABULARY.encode(text)])
        states = torch_model()(ids, output_hidden_states=True).hidden_states
    return np.stack([state[0].numpy() for state in states])


def close(got, expected, tolerance=1e-5):
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance)


def test_hidden_states_of_every_layer_equal_transformers():
    texts = mixed(24)
    make = embedder(pooling="none", layers="0,1,2,3,4")
    assert make.dimension == 5 * MODEL.hidden
    for text, (tokens, vectors) in zip(texts, make.with_tokens(texts), strict=True):
        assert tokens.tolist() == VOCABULARY.encode(text)
        close(vectors, np.concatenate(list(reference(text)), -1))


@pytest.mark.parametrize("devices", [8])
def test_rows_are_sharded_across_devices(devices, monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: jax.devices()[:devices])
    texts = mixed(12, 60)
    make = Embedder(Config(model=MODEL), VOCABULARY, PARAMS, batch_tokens=64)
    close(np.stack(list(make(texts))), np.stack([reference(x)[-1].mean(0) for x in texts]))
    assert make.counts.row_tokens % (64 * devices) == 0
    result = make._start(embed._Batch(64, [[]]))
    assert {shard.data.shape[0] for shard in result.addressable_shards} == {1}
    assert len(result.sharding.device_set) == devices


@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.integers(0, 150), max_size=20),
    st.sampled_from(["mean", "cls", "none"]),
    st.integers(1, 9),
)
def test_packed_texts_equal_transformers_one_at_a_time(lengths, pooling, chunk):
    texts = [words(n, n) for n in lengths]
    make = embedder(pooling=pooling)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make, "_chunk_texts", chunk)
        together = list(make(texts))
    for text, vectors in zip(texts, together, strict=True):
        states = reference(text)[-1]
        pooled = {"mean": states.mean(0), "cls": states[0], "none": states}
        close(vectors, pooled[pooling])
    counts, num_tokens = make.counts, sum(len(VOCABULARY.encode(text)) for text in texts)
    assert (counts.texts, counts.tokens) == (len(texts), num_tokens)
    assert counts.row_tokens % 64 == 0
    assert not counts.truncated
    assert not counts.windowed


def test_token_ids_match_the_vocabulary():
    texts = ["", " \t", "[MASK] [SEP] w1", "w1x w2yx", "é W3\u0301", "中w1文", "w" * 200, "a\0b 😀"]
    got = embedder(pooling="none", layers="0").with_tokens(texts)
    assert [ids.tolist() for ids, _ in got] == [VOCABULARY.encode(text) for text in texts]


def test_layers_are_concatenated_or_weighted():
    texts = mixed(6, 30)
    states = [reference(text) for text in texts]

    def check(expected, **settings):
        close(np.stack(list(embedder(**settings)(texts))), np.stack(expected))

    check([np.concatenate(x[1:].mean(1)) for x in states], layers="last4")
    check([np.concatenate(x[1:].mean(1)) for x in states], layers="all")
    check([x[3].mean(0) for x in states], layers="second-to-last")
    check([x[0].mean(0) for x in states], layers="embeddings")
    weights = (0.5, -2.0)
    check([(0.5 * x[4] - 2 * x[1]).mean(0) for x in states], layers="-1,1", weights=weights)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 60), st.integers(1, 12), st.data())
def test_windows_cover_the_text_with_maximal_context(length, room, data):
    overlap = data.draw(st.integers(0, room - 1))
    result = windows(length, room, overlap)
    assert [w.first for w in result] == [0, *[w.last for w in result[:-1]]]
    assert result[-1].last == length
    for one, two in itertools.pairwise(result):
        assert one.start + room - two.start >= overlap
    for window in result:
        for token in range(window.first, window.last):

            def far(w, token=token):
                return min(token - w.start, w.start + room - 1 - token)

            assert far(window) >= 0 or length <= room
            assert far(window) == max(map(far, result)) or length <= room


def test_long_texts_are_truncated_or_windowed():
    texts = [words(10), words(25), words(8, 1)]
    cut = embedder(tokens=12)
    whole = embedder(tokens=12, long="window", overlap_tokens=4)
    # Windows of 10 over 25 tokens start at 0, 6, 12 and 15. Tuples are (start, first, last): tokens
    # [first, last) are used from the window at `start`.
    by_hand = [(0, 0, 8), (6, 8, 14), (12, 14, 19), (15, 19, 25)]
    assert windows(25, 10, 4) == by_hand
    ids = VOCABULARY.encode(texts[1])[1:-1]
    parts = [
        reference(" ".join(VOCABULARY.tokens[i] for i in ids[start : start + 10]))[-1]
        for start, _, _ in by_hand
    ]
    counted = [
        np.concatenate([x[:1], x[1 + first - start : 1 + last - start], x[-1:]])
        for x, (start, first, last) in zip(parts, by_hand, strict=True)
    ]

    got, windowed = list(cut(texts)), list(whole(texts))
    close(got[1], parts[0].mean(0))
    close(windowed[1], np.concatenate(counted).mean(0))
    close(windowed[0], got[0])
    close(windowed[2], got[2])
    assert (cut.counts.truncated, cut.counts.windowed) == (1, 0)
    assert (whole.counts.truncated, whole.counts.windowed) == (0, 1)
    assert whole.counts.tokens == 12 + 4 * 12 + 10

    make = embedder(tokens=12, long="window", overlap_tokens=4, pooling="cls")
    close(list(make(texts))[1], np.mean([x[0] for x in parts], 0))

    # A prompt of 7 tokens is left out, and the [CLS] of both windows that have tokens of it.
    prompt = {"prompt": " ".join(texts[1].split()[:7]), "include_prompt": False}
    make = embedder(tokens=12, long="window", overlap_tokens=4, **prompt)
    own = [counted[0][8:], counted[1][1:], *counted[2:]]
    close(next(make([" " + " ".join(texts[1].split()[7:])])), np.concatenate(own).mean(0))

    make = embedder(tokens=12, long="window", overlap_tokens=4, pooling="none")
    tokens, vectors = list(make.with_tokens(texts))[1]
    assert tokens.tolist() == VOCABULARY.encode(texts[1])
    content = [x[1:-1] for x in counted]
    close(vectors, np.concatenate([parts[0][:1], *content, parts[-1][-1:]]))


def test_texts_are_streamed_into_full_rows(monkeypatch):
    make = embedder()
    monkeypatch.setattr(make, "_chunk_texts", 50)
    taken = 0

    def endless():
        nonlocal taken
        for i in itertools.count():
            taken += 1
            yield words(i % 40, i % 7)

    for i, _ in zip(range(1, 401), make(endless()), strict=False):
        assert taken <= i + 4 * 50
    monkeypatch.undo()
    monkeypatch.setattr(jax, "local_devices", lambda: jax.devices()[:1])
    full = embedder()
    list(full(mixed(500)))
    assert full.counts.tokens > 0.95 * full.counts.row_tokens
    assert full._forward._cache_size() <= 3  # one compilation each for rows of 64, 128 and 256


# --- Files ----------------------------------------------------------------------------------------

TEXTS = ["w1 w2", "", "w3 é w4x", "w5"]


def vectors_of(texts, **changes):
    return list(embedder(**changes)(texts))


def write_parquet(path, **columns):
    parquet.write_table(pyarrow.table(columns), path)
    return path


@pytest.mark.parametrize("name", ["-", "a.txt", "a.txt.gz", "a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_reads_every_kind_of_file(tmp_path, monkeypatch, name):
    """`test_tables.py` has the other compressions."""
    source, out = tmp_path / name, tmp_path / "out.npy"
    content = ("\ufeff" + "\r\n".join(TEXTS)).encode()  # no newline at the end of the file
    if name == "-":
        stdin = types.SimpleNamespace(buffer=io.BytesIO("\n".join(TEXTS).encode()))
        monkeypatch.setattr("sys.stdin", stdin)
    elif name == "a.parquet":
        write_parquet(source, body=pyarrow.array(TEXTS))
    else:
        if ".jsonl" in name:
            lines = (json.dumps({"id": 1, "body": text}) + "\n" for text in TEXTS)
            content = "".join([*lines, "\n"]).encode()
        source.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert embed_file(embedder(), "-" if name == "-" else source, out, column="body").texts == 4
    got = np.load(out)
    assert (got.dtype, got.shape) == (np.float32, (4, MODEL.hidden))
    close(got, np.stack(vectors_of(TEXTS)))
    assert {path.name for path in tmp_path.iterdir()} == {name, out.name} - {"-"}


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("\ufeff" + "".join(f"{text}\n" for text in TEXTS))  # with a byte order mark
    return path


@pytest.mark.parametrize("pooling", ["mean", "none"])
def test_writes_jsonl(source, pooling):
    out = source.with_suffix(".jsonl")
    embed_file(embedder(pooling=pooling), source, out)
    result = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["index"] for row in result] == [0, 1, 2, 3]
    assert [row["text"] for row in result] == TEXTS
    for row, vectors in zip(result, vectors_of(TEXTS, pooling=pooling), strict=True):
        assert np.array_equal(np.array(row["vector"], np.float32), vectors)  # bitwise
        if pooling == "none":
            ids = VOCABULARY.encode(row["text"])
            assert row["tokens"] == [VOCABULARY.tokens[i] for i in ids]
        else:
            assert "tokens" not in row


def test_npy_token_vectors_have_a_lengths_file(source, tmp_path):
    embed_file(embedder(pooling="none"), source, tmp_path / "v.npy")
    expected = vectors_of(TEXTS, pooling="none")
    assert np.load(tmp_path / "v.lengths.npy").tolist() == [len(x) for x in expected]
    close(np.load(tmp_path / "v.npy"), np.concatenate(expected))


@pytest.mark.parametrize("suffix", [".npy", ".jsonl"])
def test_empty_source_writes_empty_output(tmp_path, suffix):
    (tmp_path / "empty.txt").write_text("")
    out = tmp_path / f"out{suffix}"
    assert embed_file(embedder(), tmp_path / "empty.txt", out).texts == 0
    if suffix == ".npy":
        assert np.load(out).shape == (0, MODEL.hidden)
    else:
        assert not out.read_text()


@pytest.mark.parametrize(
    ("name", "content", "key"),
    [
        ("a.txt", b"good\nb\xe4d\n", "a.txt:2"),
        ("a.jsonl", b'{"text": "good"}\n\n{"text": 3}\n', "a.jsonl:3: no text in 'text'"),
        ("a.jsonl", b"[" * 99_999 + b"\n", "a.jsonl:1: not JSON"),
        ("a.parquet", {"txt": ["a"]}, "it has: txt"),
        ("a.csv", b"x", "unknown file format"),
    ],
)
def test_bad_source_is_a_one_line_error(tmp_path, name, content, key):
    """`test_tables.py` has the other errors of these files."""
    if isinstance(content, dict):
        write_parquet(tmp_path / name, **content)
    else:
        (tmp_path / name).write_bytes(content)
    assert key in error_of(embed_file, embedder(), tmp_path / name, tmp_path / "out.npy")
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_outputs_are_never_overwritten(source, tmp_path):
    (tmp_path / "out.npy").write_text("mine")
    (tmp_path / "v.lengths.npy").write_text("mine")
    for out, pooling, key in (
        ("out.npy", "mean", "already exists"),
        ("v.npy", "none", "already exists"),
        ("out.csv", "mean", ".npy"),
        ("nowhere/out.npy", "mean", "cannot write"),
    ):
        assert key in error_of(embed_file, embedder(pooling=pooling), source, tmp_path / out)
    assert not (tmp_path / "v.npy").exists()


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"layers": "5"}, "layer 5"),
        ({"layers": "first"}, "layers"),
        ({"tokens": 161}, "3 to 160"),
        ({"pooling": "max"}, "pooling"),
        ({"weights": (1.0, 2.0)}, "2 weights"),
        ({"long": "drop"}, "drop"),
        ({"long": "window", "tokens": 12, "overlap_tokens": 10}, "0 to 9"),
    ],
)
def test_invalid_settings_are_rejected(settings, key):
    defaults = {"long": "truncate", "overlap_tokens": 64, "weights": ()}
    assert key in error_of(compiled.__wrapped__, **{**defaults, **settings})


def test_cls_pooling_of_a_causal_model_is_rejected():
    def make(pooling):
        config = Config(
            model=dataclasses.replace(MODEL, causal=True), embed=EmbedConfig(pooling=pooling)
        )
        return Embedder(config, VOCABULARY, PARAMS)

    make("mean")
    assert "causal" in error_of(make, "cls")
