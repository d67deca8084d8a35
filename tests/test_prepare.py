"""`bert-jax prepare`: BERT's training instances, and identical bytes after any interruption."""

import bisect
import collections
import errno
import itertools
import json
import os
import pathlib
import random
import shutil
import string
import subprocess
import sys
import time
from unittest import mock

import hypothesis
import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_jax.data import loader, prepare_plan, prepare_worker
from bert_jax.data import prepare as module
from bert_jax.data import vocabulary_files as vocabularies
from bert_jax.data.instances import Instances, _trim, truncated_lengths
from bert_jax.data.prepare import prepare
from bert_jax.data.rows import read_manifest
from bert_jax.data.vocabulary import Vocabulary
from bert_jax.errors import UserError
from bert_jax.storage import files

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
CLS, SEP = 2, 3


# Instances of in-memory documents, whose token ids encode the position in the corpus.


class Vocab:
    cls_id, sep_id = CLS, SEP


class InMemory:
    """Documents of given sentence lengths; each token id is 10 + its position in the corpus."""

    def __init__(self, documents):
        self.bounds, place = [], 0
        for lengths in documents:
            self.bounds.append([place, *(place + np.cumsum(lengths)).tolist()])
            place = self.bounds[-1][-1]

    def __len__(self):
        return len(self.bounds)

    def entry(self, number):
        return number, 0, number, len(self.bounds[number]) - 1, 0

    def sentences(self, entry, first, end):
        return self.bounds[entry[2]][first : end + 1]

    def tokens(self, entry, start, end):
        return np.arange(start, end, dtype=np.uint32) + 10


def segments(instance):
    """Check the structure of an instance and return its segments a and b."""
    tokens, a_length, _ = instance
    assert tokens[0] == CLS
    assert tokens[-1] == tokens[a_length - 1] == SEP
    a, b = tokens[1 : a_length - 1].astype(int) - 10, tokens[a_length:-1].astype(int) - 10
    assert (a >= 0).all()
    assert (b >= 0).all()
    return a, b


def is_run(tokens):
    return len(tokens) > 0 and (np.diff(tokens) == 1).all()


CORPORA = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=12), min_size=2, max_size=6)
SMALL = st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=10), min_size=2, max_size=6)


@given(CORPORA, st.integers(8, 64), st.sampled_from([0.0, 0.1, 1.0]), st.integers(0, 2**32))
def test_pairs_come_from_one_or_two_documents(documents, tokens, short, seed):
    memory = InMemory(documents)
    instances = Instances(memory, Vocab, tokens, "nsp", short)
    rng = random.Random(seed)
    for number, bounds in enumerate(memory.bounds):
        reached = bounds[0]
        for example in instances.of(number, rng):
            a, b = segments(example)
            assert len(example.tokens) <= tokens
            assert is_run(a)
            assert is_run(b)
            assert bounds[0] <= a[0]
            assert a[-1] < bounds[-1]
            assert a[0] >= reached  # segments never overlap
            reached = a[-1] + 1
            if example.label == 0:  # "is next", as in Google's and Hugging Face's models
                assert a[-1] < b[0]
                assert b[-1] < bounds[-1]
                if len(example.tokens) < tokens:  # not truncated
                    assert b[0] == a[-1] + 1
                    assert b[0] in bounds
                reached = b[-1] + 1
            else:
                assert example.label == 1
                assert b[-1] < bounds[0] or b[0] >= bounds[-1]
                home = next(o for o in memory.bounds if o[0] <= b[0] < o[-1])
                assert b[-1] < home[-1]


@given(SMALL, st.integers(0, 2**32))
def test_no_token_is_lost_without_truncation(documents, seed):
    memory = InMemory(documents)  # documents have at most 200 tokens, rows 512
    instances = Instances(memory, Vocab, 512, "nsp", 0.0)
    rng = random.Random(seed)
    for number, bounds in enumerate(memory.bounds):
        seen = []
        for example in instances.of(number, rng):
            a, b = segments(example)
            seen += [*a, *(b if example.label == 0 else [])]
        assert seen == list(range(bounds[0], bounds[-1]))


def reference_whole_sentences(documents, room, crossing):
    """Pack sentences one at a time, as a reference; a document is a list of lists of tokens."""
    results, current = [], []
    for document in documents:
        pieces = [s[i : i + room] for s in document for i in range(0, len(s), room)]
        for index, piece in enumerate(pieces):
            starts = index == 0 and bool(current)
            if current and ((starts and not crossing) or len(current) + starts + len(piece) > room):
                results.append(current)
                current, starts = [], False
            current = [*current, *[SEP] * starts, *piece]
    return results + [current] * bool(current)


@settings(deadline=None)
@given(CORPORA, st.integers(8, 64), st.booleans())
def test_whole_sentences_are_packed_in_order(documents, tokens, crossing):
    memory = InMemory(documents)
    kind = "full-sentences" if crossing else "doc-sentences"
    instances = Instances(memory, Vocab, tokens, kind, 0.0)
    examples = list(instances.of_all(0, len(memory), random.Random(0)))
    texts = [[[*range(a + 10, b + 10)] for a, b in itertools.pairwise(x)] for x in memory.bounds]
    expected = reference_whole_sentences(texts, tokens - 2, crossing)
    assert [e.tokens.tolist() for e in examples] == [[CLS, *inner, SEP] for inner in expected]
    assert all(len(e.tokens) == e.a_length <= tokens and e.label == -1 for e in examples)


def test_whole_sentence_rows_contain_every_token_once(tmp_path, text, small_pieces):
    """Only "full-sentences" rows cross documents."""
    index = {word: i for i, word in enumerate(vocabularies.load(text[1]).tokens)}
    words = sorted(index[word] for word in pathlib.Path(text[0][0]).read_text().split())
    counts = {}
    for kind in ("full-sentences", "doc-sentences"):
        out, options = tmp_path / kind, {"tokens": 64, "heldout_fraction": 0.1, "pairs": kind}
        counts[kind] = prepare(*text, out, workers=1, **options).train.sequences
        results = [tokens for s in ("train", "heldout") for tokens, _, _ in sequences_of(out, s)]
        assert sorted(t for tokens in results for t in tokens if t > 4) == words
        crossing = [tokens for tokens in results if SEP in tokens[1:-1]]
        assert bool(crossing) == (kind == "full-sentences")
    assert counts["doc-sentences"] > 1.1 * counts["full-sentences"]


@given(CORPORA, st.integers(8, 64), st.integers(0, 2**32))
def test_single_segments_fill_the_row(documents, tokens, seed):
    memory = InMemory(documents)
    instances = Instances(memory, Vocab, tokens, "none", 0.0)
    for number, bounds in enumerate(memory.bounds):
        examples = list(instances.of(number, random.Random(seed)))
        reached = bounds[0]
        for example in examples:
            a, b = segments(example)
            assert not len(b)
            assert example.label == -1
            assert is_run(a)
            assert a[0] >= reached
            reached = a[-1] + 1
        assert all(len(example.tokens) == tokens for example in examples[:-1])
        assert reached <= bounds[-1]


@given(st.integers(1, 200), st.integers(1, 200), st.integers(5, 100))
def test_truncation_shortens_the_longer_segment(a, b, room):
    left = [a, b]
    while sum(left) > room:
        left[0 if left[0] > left[1] else 1] -= 1
    assert truncated_lengths(a, b, room) == tuple(left)


def test_truncation_removes_from_both_ends():
    rng = random.Random(1)
    fronts = [_trim(np.arange(30), 10, rng)[0] for _ in range(4000)]
    assert np.mean(fronts) == pytest.approx(10, abs=0.2)
    assert np.var(fronts) == pytest.approx(5, abs=0.5)


def reference_instances(documents, number, tokens, short_fraction, rng):
    """Google's algorithm, implemented one sentence and one token at a time."""
    document, room = documents[number], tokens - 3
    target = rng.randint(2, room) if rng.random() < short_fraction else room
    chunk, length, i, results = [], 0, 0, []
    while i < len(document):
        chunk.append(document[i])
        length += len(document[i])
        if i == len(document) - 1 or length >= target:
            a_end = rng.randint(1, len(chunk) - 1) if len(chunk) >= 2 else 1
            a, b = list(itertools.chain(*chunk[:a_end])), []
            label = 0
            if len(chunk) == 1 or rng.random() < 0.5:
                label, expected = 1, target - len(a)
                while (other := rng.randint(0, len(documents) - 1)) == number:
                    pass
                start = rng.randint(0, len(documents[other]) - 1)
                for sentence in documents[other][start:]:
                    b.extend(sentence)
                    if len(b) >= expected:
                        break
                i -= len(chunk) - a_end
            else:
                b = list(itertools.chain(*chunk[a_end:]))
            while len(a) + len(b) > room:
                longer = a if len(a) > len(b) else b
                if rng.random() < 0.5:
                    del longer[0]
                else:
                    longer.pop()
            results.append((a, b, label))
            chunk, length = [], 0
        i += 1
    return results


def test_distributions_match_the_plain_algorithm():
    rng = np.random.default_rng(5)
    lengths = [
        rng.geometric(1 / 12, size=rng.integers(1, 40)).clip(1, 80).tolist() for _ in range(60)
    ]
    memory = InMemory(lengths)
    plain_documents = [
        [list(range(s, e)) for s, e in itertools.pairwise(bounds)] for bounds in memory.bounds
    ]
    begins = [bounds[0] for bounds in memory.bounds]

    def begin_of(token):
        return begins[bisect.bisect_right(begins, token) - 1]

    instances = Instances(memory, Vocab, 64, "nsp", 0.1)
    features = {"ours": [], "plain": []}
    random_ours, random_plain = random.Random(11), random.Random(12)
    for number in list(range(60)) * 12:
        ours = [(*segments(e), e.label) for e in instances.of(number, random_ours)]
        plain = reference_instances(plain_documents, number, 64, 0.1, random_plain)
        for name, result in (("ours", ours), ("plain", plain)):
            features[name].append(
                [
                    len(result),
                    np.mean([label for _, _, label in result]),
                    np.mean([len(a) for a, _, _ in result]),
                    np.mean([len(b) for _, b, _ in result]),
                    np.mean([len(a) + len(b) == 61 for a, b, _ in result]),
                    np.mean([a[0] for a, _, _ in result]),  # depends on truncation at the front
                    np.mean([b[0] for _, b, _ in result]),  # depends on the random document
                    np.mean([b[0] - begin_of(b[0]) for _, b, _ in result]),  # and its sentence
                ]
            )
    ours, plain = (np.array(features[name], float) for name in ("ours", "plain"))
    error = np.sqrt(ours.var(0) / len(ours) + plain.var(0) / len(plain))
    assert (np.abs(ours.mean(0) - plain.mean(0)) < 4 * error).all()
    # Compare the whole distribution of the mean length of a: the Wasserstein-1 distance.
    gap = np.abs(np.sort(ours[:, 2]) - np.sort(plain[:, 2])).mean()
    assert gap < 1.0


# Word cache.


@pytest.mark.parametrize("lowercase", [True, False])
def test_word_cache_matches_the_tokenizer(lowercase):
    """Special tokens in the text are plain text too."""
    tokens = [*SPECIAL, *string.ascii_letters, *string.punctuation, *string.digits, "é"]
    tokens += ["##" + c for c in string.ascii_lowercase + string.digits + "é"]
    tokens += ["hello", "Hello", "##llo", "isn", "unk", "UNK", "don"]
    vocabulary = Vocabulary(tuple(tokens), lowercase)
    pieces = prepare_worker._WordCache(vocabulary, np.dtype("<u2"))
    alphabet = [*"heloHELO Isn't.,;[]'\"-#  éÉ\u0301中文ß\x00\t\u00a0Σς🙂1", *SPECIAL]

    @settings(max_examples=150)
    @hypothesis.example("(hello...")
    @given(st.lists(st.sampled_from(alphabet), max_size=50).map("".join) | st.text(max_size=30))
    def same(text):
        ids = np.frombuffer(b"".join(pieces[word] for word in text.split(" ")), "<u2")
        assert ids.tolist() == vocabulary.encode(text)[1:-1]

    same()


# Row folders.


@pytest.fixture
def small_pieces(monkeypatch):
    """Shrink chunks and shards so that a small corpus has many of each."""
    monkeypatch.setattr(prepare_worker, "CHUNK_CHARACTERS", 2000)
    monkeypatch.setattr(prepare_plan, "_MIN_SHARD_TOKENS", 500)


def write_corpus(folder, documents=40, sentences=12, seed=0):
    """Write a corpus in Google's format, whose words name their document, and its vocabulary."""
    rng = random.Random(seed)
    texts = [
        [[f"d{d}w{rng.randrange(8)}" for _ in range(rng.randint(3, 14))] for _ in range(sentences)]
        for d in range(documents)
    ]
    text = "\n\n".join("\n".join(" ".join(s) for s in document) for document in texts)
    (folder / "text.txt").write_text(text + "\n")
    words = [f"d{d}w{w}" for d in range(documents) for w in range(8)]
    Vocabulary((*SPECIAL, *words), True).save(folder / "vocab")
    return str(folder / "text.txt"), str(folder / "vocab")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Sources and vocabulary, the first arguments of `prepare`."""
    text, vocab = write_corpus(tmp_path_factory.mktemp("text"))
    return [text], vocab


def rows_of(folder, split):
    opened = loader.RowDataset(folder, split)
    return opened.read(range(len(opened)))


def sequences_of(folder, split):
    for tokens, *slots in zip(*rows_of(folder, split).values(), strict=True):
        start = 0
        for a_length, length, label in zip(*(slot.tolist() for slot in slots), strict=True):
            if length:
                yield tuple(tokens[start : start + length].tolist()), a_length, label
            start += length
        assert not tokens[start:].any()


def content(folder):
    return {p.name: p.read_bytes() for p in pathlib.Path(folder).iterdir()}


def document_of(token):
    return (token - len(SPECIAL)) // 8


def test_rows_folder_matches_its_manifest(tmp_path, text, small_pieces, capsys):
    out = tmp_path / "rows"
    manifest = prepare(*text, out, tokens=64, heldout_fraction=0.2, workers=1, seed=4)
    assert manifest == read_manifest(out)
    names = {s.name for s in manifest.train.shards + manifest.heldout.shards}
    assert set(content(out)) == {*names, "manifest.json", "vocab.txt", "vocab.json"}
    assert len(manifest.train.shards) > 3
    assert manifest.vocab_sha256 == files.sha256(out / "vocab.txt")
    assert manifest.train.documents + manifest.heldout.documents == 40
    documents = {}
    for split in ("train", "heldout"):
        stated, result = getattr(manifest, split), list(sequences_of(out, split))
        for shard in stated.shards:
            assert files.sha256(out / shard.name) == shard.sha256
            assert (out / shard.name).stat().st_size == shard.bytes
        assert stated.sequences == len(result)
        assert stated.real_tokens == sum(len(tokens) for tokens, _, _ in result)
        assert stated.fill_fraction == stated.real_tokens / (stated.rows * 64)
        documents[split] = {document_of(t) for ts, _, _ in result for t in ts if t > 4}
        assert len(documents[split]) == stated.documents
        for tokens, a_length, label in result:
            a, b = tokens[1 : a_length - 1], tokens[a_length:-1]
            ((a,), (b,)) = ({document_of(t) for t in segment} for segment in (a, b))
            assert (a != b) == label
        if split == "train":
            histogram = collections.Counter(len(tokens) for tokens, _, _ in result)
            assert manifest.length_histogram == tuple(histogram[n] for n in range(65))
    assert not documents["train"] & documents["heldout"]
    assert "train" in capsys.readouterr().out


def test_packing_changes_rows_but_not_sequences(tmp_path, small_pieces):
    text, vocab = write_corpus(tmp_path, 60)
    common = {"tokens": 128, "short_fraction": 0.5, "workers": 1}
    one = prepare([text], vocab, tmp_path / "one", **common)
    four = prepare([text], vocab, tmp_path / "four", sequences=4, **common)
    for split in ("train", "heldout"):
        a, b = (sorted(sequences_of(tmp_path / f, split)) for f in ("one", "four"))
        assert a == b
    assert four.train.rows < 0.8 * one.train.rows
    lengths = rows_of(tmp_path / "four", "train")["length"]
    assert (lengths > 0).sum(1).max() == 4
    # Packing places long sequences first; the rows of a shard must not be in that order.
    first = lengths[: four.train.shards[0].rows].max(1).astype(int)
    assert (np.diff(first) > 0).any()


def test_passes_differ_and_share_the_heldout_split(tmp_path, text):
    one = prepare(*text, tmp_path / "one", workers=1)
    two = prepare(*text, tmp_path / "two", passes=2, workers=1)
    assert two.heldout.sequences == one.heldout.sequences
    assert two.train.documents == one.train.documents
    first, second = (shard.sha256 for shard in two.train.shards)
    assert first == one.train.shards[0].sha256 != second


def test_weighted_documents_are_not_their_own_random_text(tmp_path):
    text, vocab = write_corpus(tmp_path, 4)
    out = tmp_path / "rows"
    manifest = prepare([f"{text}@3"], vocab, out, tokens=32, heldout_fraction=0.0, workers=1)
    assert manifest.train.documents == 12
    assert manifest.heldout.rows == 0
    assert not manifest.heldout.shards
    for tokens, a_length, label in sequences_of(out, "train"):
        assert (document_of(tokens[1]) != document_of(tokens[a_length])) == label


def test_large_vocabularies_use_four_byte_token_ids(tmp_path):
    words = [f"w{i}" for i in range(70_000)]
    Vocabulary((*SPECIAL, *words), True).save(tmp_path / "vocab")
    (tmp_path / "text.txt").write_text("w69999 w1\nw2\n\nw69998 w3\nw4\n")
    prepare([f"google:{tmp_path}/text.txt"], tmp_path / "vocab", tmp_path / "rows", workers=1)
    seen = {t for tokens, _, _ in sequences_of(tmp_path / "rows", "train") for t in tokens}
    assert {69_999 + 5, 69_998 + 5} <= seen


def test_output_does_not_depend_on_number_of_workers(tmp_path, text, small_pieces):
    results = []
    for workers, seed in ((1, 0), (3, 0), (1, 1)):
        out = tmp_path / f"rows{workers}{seed}"
        prepare(*text, out, workers=workers, seed=seed, heldout_fraction=0.1)
        results.append(content(out))
    assert results[0] == results[1] != results[2]


SCRIPT = """
import sys
from bert_jax.data import prepare_worker
from bert_jax.data.prepare import prepare
prepare_worker.CHUNK_CHARACTERS = 2000
if __name__ == "__main__":
    prepare([sys.argv[1]], sys.argv[2], sys.argv[3], workers=2)
"""


@pytest.mark.slow
def test_workers_of_a_killed_process_end(tmp_path):
    text, vocab = write_corpus(tmp_path, 80)
    out, script = tmp_path / "rows", tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen([sys.executable, str(script), text, vocab, str(out)])
    while not list(out.glob(".partial/*.tokens")) and process.poll() is None:
        time.sleep(0.002)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    assert not (out / "manifest.json").exists()
    assert not psutil.wait_procs(workers, timeout=10)[1]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("function", ["fsync", "replace", "unlink", "rename"])
def test_interruption_at_any_file_operation_is_recoverable(
    tmp_path, small_pieces, monkeypatch, function
):
    """Interrupt each sync, move and deletion of a file in turn, including the final moves."""
    text, vocab = write_corpus(tmp_path, 6)
    common = {"heldout_fraction": 0.4, "workers": 1}
    prepare([text], vocab, tmp_path / "whole", **common)
    whole, out = content(tmp_path / "whole"), tmp_path / "rows"
    prepare([text], vocab, out, seed=1, **common)  # other rows, to be replaced
    real, calls, at = getattr(os, function), 0, 0

    def stop(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == at:
            raise Killed
        return real(*args, **kwargs)

    for at in itertools.count(1):  # noqa: B007
        calls = 0
        with monkeypatch.context() as patch:
            patch.setattr(os, function, stop)
            try:
                prepare([text], vocab, out, force=True, **common)
            except Killed:
                if (out / "manifest.json").exists():  # then it must describe the shards
                    manifest = read_manifest(out)
                    for shard in manifest.train.shards + manifest.heldout.shards:
                        assert files.sha256(out / shard.name) == shard.sha256
                continue
            break
    assert content(out) == whole


@pytest.mark.parametrize("failing", ["fsync", "write"])
def test_full_disk_gives_an_error_and_keeps_work(
    tmp_path, text, small_pieces, monkeypatch, failing
):
    from array_record.python import array_record_module

    full = OSError(errno.ENOSPC, "No space left on device")
    fsync = mock.Mock(side_effect=itertools.chain([None] * 20, itertools.repeat(full)))
    writer, message = mock.Mock(), "write() failed: No space left on device; writing x; at byte 0"
    writer.return_value.write.side_effect = RuntimeError(message)
    out = tmp_path / "rows"
    with monkeypatch.context() as patch:
        if failing == "fsync":
            patch.setattr(os, "fsync", fsync)
        else:
            patch.setattr(array_record_module, "ArrayRecordWriter", writer)
        with pytest.raises(UserError, match="the disk is full"):
            prepare(*text, out, workers=1)
    done = {path: path.stat().st_mtime_ns for path in out.glob(".partial/*.tokens")}
    assert len(done) > 3
    with monkeypatch.context() as patch:
        patch.setattr(module, "_finish", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare(*text, out, workers=1)
    assert done == {path: path.stat().st_mtime_ns for path in done}
    prepare(*text, out, workers=1)
    prepare(*text, tmp_path / "whole", workers=1)
    assert content(out) == content(tmp_path / "whole")


@pytest.mark.parametrize(
    ("interrupted", "settings", "text_seed"), [("_finish", {"seed": 1}, 0), ("_write_all", {}, 1)]
)
def test_partial_work_of_other_settings_or_text_is_discarded(
    tmp_path, small_pieces, monkeypatch, interrupted, settings, text_seed
):
    text, vocab = write_corpus(tmp_path, seed=text_seed)
    out = tmp_path / "rows"
    with monkeypatch.context() as patch:
        patch.setattr(module, interrupted, lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare([text], vocab, out, workers=1, **settings)
    assert list(out.glob(".partial/*.tokens"))
    write_corpus(tmp_path)
    prepare([text], vocab, out, workers=1)
    prepare([text], vocab, tmp_path / "whole", workers=1)
    assert content(out) == content(tmp_path / "whole")


def test_existing_rows_are_reused_unless_settings_differ(tmp_path, capsys, monkeypatch):
    text, vocab = write_corpus(tmp_path)
    out = tmp_path / "rows"
    first = prepare([text], vocab, out, workers=1)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_tokenize_all", lambda *_: 1 / 0)
        assert prepare([text], vocab, out, workers=2, language="EN") == first
    assert "is newer" not in capsys.readouterr().out
    os.utime(tmp_path / "text.txt", (time.time() + 9,) * 2)
    assert prepare([text], vocab, out, workers=1) == first
    assert "text.txt is newer" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"seed 0, not 7.*--force"):
        prepare([text], vocab, out, workers=1, seed=7)
    with pytest.raises(UserError, match=r"tokens 128, not 64; passes 1, not 2"):
        prepare([text], vocab, out, workers=1, tokens=64, passes=2)
    assert read_manifest(out) == first
    forced = prepare([text], vocab, out, workers=1, passes=2, force=True)
    shards = {shard.name for shard in forced.train.shards + forced.heldout.shards}
    assert set(content(out)) == {"manifest.json", "vocab.txt", "vocab.json"} | shards
    (tmp_path / "text.txt").write_text("other text\n\nof another length\n")
    with pytest.raises(UserError, match="source_bytes"):
        prepare([text], vocab, out, workers=1, passes=2)


def test_unsafe_inputs_and_outputs_are_refused(tmp_path, text):
    """Pipes yield their beginning only once, from which the format is detected."""
    partial, run = tmp_path / "rows" / ".partial", tmp_path / "run"
    with files.lock_folder(partial):
        with pytest.raises(UserError, match="in use"):
            prepare(*text, tmp_path / "rows", workers=1)
        assert [path.name for path in partial.iterdir()] == [files.LOCK]
    shutil.rmtree(partial)
    run.mkdir()
    (run / "fingerprint").touch()
    partial.symlink_to(run)
    with pytest.raises(UserError, match=f"{partial} is a symbolic link"):
        prepare(*text, tmp_path / "rows", workers=1, force=True)
    assert [path.name for path in run.iterdir()] == ["fingerprint"]
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe is not a file"):
        prepare([str(tmp_path / "pipe")], text[1], run)
    (run / "config.json").write_text("{}")  # a model, whose vocabulary would be replaced
    with pytest.raises(UserError, match=f"{run} holds a model.*--force"):
        prepare(*text, run, workers=1)
    prepare(*text, run, workers=1, force=True)


def test_too_few_documents_are_refused(tmp_path):
    text, vocab = write_corpus(tmp_path, 1)
    for source in (text, f"{text}@2"):  # copies are not distinct documents
        with pytest.raises(UserError, match=r"one document only.*--pairs none"):
            prepare([source], vocab, tmp_path / "rows", workers=1)
    assert prepare([text], vocab, tmp_path / "rows", pairs="none", workers=1).train.sequences
    text, vocab = write_corpus(tmp_path, 4)
    with pytest.raises(UserError, match="heldout_fraction"):
        prepare([text], vocab, tmp_path / "none", workers=1, heldout_fraction=0.999999)


@pytest.mark.parametrize(
    ("text", "pairs", "documents"),
    [
        ("d1w1 d1w2\n\nd2w1 d2w2\n", "nsp", 0),
        # Of these documents only the first can be divided, and pairs need two in each split.
        ("d1w1 d1w2 d1w3\n" * 120 + "\nd2w1 d2w2\n\nd3w1 d3w2\n", "nsp", 0),
        ("d1w1 d1w2 d1w3\n" * 120 + "\nd2w1 d2w2\n\nd3w1 d3w2\n", "none", 1),
    ],
)
def test_too_few_documents_to_hold_out_give_a_warning(tmp_path, text, pairs, documents):
    _, vocab = write_corpus(tmp_path, 4)
    (tmp_path / "few.txt").write_text(text)
    few = f"google:{tmp_path}/few.txt"
    manifest = prepare([few], vocab, tmp_path / "rows", tokens=32, pairs=pairs, workers=1)
    assert manifest.heldout.documents == documents
    warned = any("too few or too short to hold out" in line for line in manifest.warnings)
    assert warned == (documents == 0)


@pytest.mark.parametrize(
    ("documents", "fraction", "copies"), [(2, 0.05, 1), (3, 0.3, 3), (4, 0.02, 3), (40, 0.01, 1)]
)
def test_few_documents_hold_out_their_last_sentences(
    tmp_path, monkeypatch, documents, fraction, copies
):
    """Held-out text has about the requested size, spans 2 or more documents and is not in train."""
    monkeypatch.setattr(prepare_plan, "_LOWEST_DOCUMENTS", 3)  # of different documents
    rng = random.Random(documents)
    words = [[f"d{i}s{n}" for n in range(60)] for i in range(documents)]
    lines = [[" ".join([word] * rng.randint(3, 9)) for word in own] for own in words]
    path, vocab, out = (tmp_path / name for name in ("t.txt", "vocab.txt", "rows"))
    path.write_text("\n\n".join(map("\n".join, lines)))
    vocab.write_text("\n".join([*SPECIAL, *itertools.chain(*words)]))
    options = dict(pairs="none", tokens=16, heldout_fraction=fraction, short_fraction=0.0)
    manifest = prepare([f"google:{path}@{copies}"], vocab, out, workers=1, **options)
    train, heldout = (  # (document, sentence)
        {divmod(t - 5, 60) for ts, _, _ in sequences_of(out, split) for t in ts if t > 4}
        for split in ("train", "heldout")
    )
    for number in range(documents):
        last = max(n for i, n in train if i == number)
        assert all(n > last for i, n in heldout if i == number)
    assert len({i for i, _ in heldout}) >= 2
    real = manifest.heldout.real_tokens, manifest.train.real_tokens
    total = sum(len(line.split()) for own in lines for line in own)
    assert abs(real[0] / sum(real) - fraction) < 20 / total + 0.1 * fraction
    assert not manifest.warnings


def test_weighted_sources_are_held_out_in_proportion(tmp_path):
    """Which documents a fractional weight selects is independent of which are held out."""
    Vocabulary((*SPECIAL, "a", "b", "1", "##0", "##1"), True).save(tmp_path / "vocab")
    for name in "ab":
        lines = "".join(f"{name} {i:b}\n\n" for i in range(1, 2001))
        (tmp_path / f"{name}.txt").write_text(lines)
    sources, out = [f"google:{tmp_path}/{x}.txt" for x in ("a", "b")], tmp_path / "rows"
    sources[0] += "@0.1"
    prepare(sources, tmp_path / "vocab", out, pairs="none", heldout_fraction=0.1, workers=1)
    tokens = [sequence[1] for sequence, _, _ in sequences_of(out, "heldout")]
    a, b = (tokens.count(len(SPECIAL) + i) for i in range(2))
    assert a + b == pytest.approx(220, rel=0.2)
    assert a < 0.2 * b


def test_vocabulary_of_another_kind_replaces_the_files_of_the_first(tmp_path):
    text, vocab = write_corpus(tmp_path, 4)
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *"abdw0123456789ĠĊ", "<mask>"]
    ids = {token: i for i, token in enumerate(tokens)}
    contents = {"vocab.json": json.dumps(ids).encode(), "merges.txt": b"#version: 0.2\n"}
    out, byte_level = tmp_path / "rows", vocabularies.from_files(contents)
    for vocabulary in (vocab, byte_level, vocab):
        manifest = prepare([text], vocabulary, out, pairs="none", force=True, workers=1)
        assert vocabularies.load(out).sha256 == manifest.vocab_sha256
    assert not (out / vocabularies.TOKENIZER).exists()


INVISIBLE = "\u200b\n\n\u200b\n"


@pytest.mark.parametrize("empty", ["\n \n", INVISIBLE, None])
def test_sources_without_text_are_refused(tmp_path, text, empty):
    (tmp_path / "empty.txt").write_text(empty or "")
    (tmp_path / "there").mkdir()
    sources = [] if empty is None else [f"google:{tmp_path}/empty.txt"]
    for name in ("rows", "there"):
        with pytest.raises(UserError, match=r"no text|no source"):
            prepare(sources, text[1], tmp_path / name, workers=1)
        assert not (tmp_path / name / "manifest.json").exists()
    if empty != INVISIBLE:  # which turns out to be empty in a worker
        assert not (tmp_path / "rows").exists()
        assert not any((tmp_path / "there").iterdir())


@pytest.mark.parametrize(
    "setting",
    [
        *({"tokens": value} for value in (7, 1 << 16)),
        *({"sequences": value} for value in (0, 129)),
        *({"heldout_fraction": value} for value in (1.0, -0.1)),
        *({"short_fraction": value} for value in (1.1, -0.1)),
        *({"language": value} for value in ("german", "de_DE", "")),
        {"pairs": "some"},
        {"passes": 0},
        {"passes": 2, "pairs": "doc-sentences"},
        {"short_fraction": 0.1, "pairs": "full-sentences"},
        {"workers": 0},
    ],
)
def test_invalid_settings_are_rejected(tmp_path, text, setting):
    with pytest.raises(UserError, match=next(iter(setting))):
        prepare(*text, tmp_path / "rows", **setting)
    assert not (tmp_path / "rows").exists()
