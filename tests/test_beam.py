"""`prepare` on Apache Beam: the same bytes, manifest and errors as with the local runner."""

import gzip
import json
import pathlib
import random
import sys
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bert_jax.data import beam, prepare_plan, prepare_worker, workers
from bert_jax.data import prepare as module
from bert_jax.data.prepare import prepare
from bert_jax.data.vocabulary import Vocabulary
from bert_jax.errors import UserError

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
REPEATED = "Some lines are longer than forty letters and come again"

OPTIONS = [
    {"tokens": 64, "heldout_fraction": 0.2},
    {"tokens": 64, "sequences": 4, "passes": 2, "seed": 5},
    {"tokens": 32, "pairs": "none", "heldout_fraction": 0.0},
    {"tokens": 48, "pairs": "none", "sequences": 3, "short_fraction": 0.5, "lowercase": False},
]


@pytest.fixture
def small_pieces(monkeypatch):
    """Split a small text into many chunks, batches and shards."""
    monkeypatch.setattr(prepare_worker, "CHUNK_CHARACTERS", 1500)
    monkeypatch.setattr(prepare_worker, "BATCH_BYTES", 3000)
    monkeypatch.setattr(prepare_plan, "_MIN_SHARD_TOKENS", 500)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Sources and vocabulary: files of several formats and sizes, some of them malformed."""
    folder = tmp_path_factory.mktemp("text")
    rng = random.Random(0)

    def document(number):
        lengths = [rng.randint(3, 14) for _ in range(rng.randint(2, 12))]
        lines = [" ".join(f"d{number}w{rng.randrange(8)}" for _ in range(n)) for n in lengths]
        return "\n".join([f"{REPEATED} d{number % 9}w1"] * (number % 3 == 0) + lines)

    (folder / "plain").mkdir()
    for i in range(8):  # file 4 is empty, file 5 has invalid UTF-8
        content = "\n\n".join(document(5 * i + j) for j in range(1 + 4 * (i % 3)) if i != 4)
        (folder / f"plain/{i}.txt").write_bytes(content.encode() + b"\xff\n" * (i == 5))
    for i in range(3):
        lines = [json.dumps({"text": document(40 + 4 * i + j)}) for j in range(4)]
        lines = "\n".join([*lines, '{"text": " "}', "{no JSON"]) + "\n"
        (folder / f"{i}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    words = [f"d{d}w{w}" for d in range(52) for w in range(8)]
    Vocabulary((*SPECIAL, *words, *REPEATED.lower().split()), True).save(folder / "v")
    sources = [f"{folder}/plain", f"{folder}/*.gz@1.5", f"google:{folder}/plain/2.txt@0.5"]
    return sources, str(folder / "v")


def content(folder):
    return {path.name: path.read_bytes() for path in pathlib.Path(folder).iterdir()}


class Shuffled(beam.Pipelines):
    """Runner that executes tasks in random order and some of them twice, as Beam may."""

    def __init__(self, job, rng):
        self._job, self._rng = job, rng

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def run(self, method, tasks):
        tasks = list(tasks)
        again = self._rng.sample(tasks, self._rng.randint(0, len(tasks)))
        for _, arguments in self._rng.sample(tasks + again, len(tasks) + len(again)):
            workers.call(self._job, method, arguments)
        yield from ((tag, None) for tag, _ in tasks)


def shuffled(sources, vocab, out, rng, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_pool", lambda job, *_: Shuffled(job, rng))
        return prepare(sources, vocab, out, runner="beam", **options)


@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.randoms(use_true_random=False),
    st.sampled_from(OPTIONS),
    st.permutations(range(3)),
    st.sampled_from([1, 2000, 6000, 100_000]),
    st.sampled_from([800, 2500, 100_000]),
)
def test_output_is_independent_of_task_order_and_batching(
    tmp_path_factory, text, small_pieces, rng, options, order, batch_bytes, chunk_characters
):
    sources, vocab = [text[0][i] for i in order], text[1]
    folder = tmp_path_factory.mktemp("rows")
    local = prepare(sources, vocab, folder / "local", workers=1, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare_worker, "BATCH_BYTES", batch_bytes)
        patch.setattr(prepare_worker, "CHUNK_CHARACTERS", chunk_characters)
        there = shuffled(sources, vocab, folder / "there", rng, **options)
    assert there == local
    assert content(folder / "there") == content(folder / "local")


@pytest.mark.slow
def test_beam_output_matches_local_runner(tmp_path, text, small_pieces):
    options = ["direct_num_workers=3", "direct_running_mode=multi_threading"]
    prepare(*text, tmp_path / "local", workers=1, **OPTIONS[1])
    prepare(*text, tmp_path / "beam", runner="beam", beam=options, **OPTIONS[1])
    assert content(tmp_path / "beam") == content(tmp_path / "local")


@pytest.mark.parametrize(
    ("name", "bad"),
    [("b.jsonl", '{"text": "fine"}\n{"txt": "not"}\n'), ("b.txt", " \n\n")],
)
def test_invalid_input_gives_the_local_runners_error(
    tmp_path, text, small_pieces, name, bad, capfd
):
    (tmp_path / name).write_text(bad)
    sources = [*text[0], str(tmp_path / name)]
    with pytest.raises(UserError) as local:
        prepare(sources, text[1], tmp_path / "local", workers=1)
    capfd.readouterr()
    with pytest.raises(UserError) as there:
        prepare(sources, text[1], tmp_path / "beam", runner="beam")
    assert str(there.value) == str(local.value)
    assert "Traceback" not in capfd.readouterr().err
    assert not (tmp_path / "beam" / "manifest.json").exists()


def fail(method, arguments):
    raise UserError("the disk is full")


def test_error_that_cannot_be_written_is_reported_by_beam(tmp_path):
    pipelines = beam.Pipelines(fail, tmp_path / "missing" / "error", [])
    with pytest.raises(UserError, match="the disk is full"):
        list(pipelines.run("method", [(1, ())]))


@pytest.mark.parametrize("runner", ["beam", "local"])
def test_partial_output_is_kept_for_the_same_runner(
    tmp_path, text, small_pieces, monkeypatch, runner
):
    out, rng = tmp_path / "rows", random.Random(0)
    again = partial(shuffled, rng=rng) if runner == "beam" else partial(prepare, workers=1)
    with monkeypatch.context() as patch:
        patch.setattr(prepare_plan, "make_plan", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            shuffled(*text, out, rng)
    done = {path: path.stat().st_mtime_ns for path in out.glob(".partial/*.batch")}
    assert done
    with monkeypatch.context() as patch:
        patch.setattr(module, "_finish", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            again(*text, out)
    kept = [path.exists() and path.stat().st_mtime_ns == time for path, time in done.items()]
    assert all(kept) == (runner == "beam")
    prepare(*text, tmp_path / "whole", workers=1)
    prepare(*text, out, workers=1)
    assert content(out) == content(tmp_path / "whole")


def test_missing_beam_error_names_the_package(tmp_path, text, monkeypatch):
    monkeypatch.setitem(sys.modules, "apache_beam", None)
    with pytest.raises(UserError, match=r"bert-jax\[beam\]"):
        prepare(*text, tmp_path / "rows", runner="beam")
    assert not (tmp_path / "rows").exists()


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"runner": "spark"}, "local, beam"),
        ({"runner": "beam", "workers": 2}, "--beam direct_num_workers"),
        ({"beam": ["runner=FlinkRunner"]}, "--runner beam"),
        ({"runner": "beam", "beam": ["direct_num_worker=2"]}, "direct_num_workers"),
        ({"runner": "beam", "beam": ["direct_num_workers=two"]}, "'two'"),
        ({"runner": "beam", "beam": ["runner=Sparkle"]}, "Sparkle"),
    ],
)
def test_invalid_options_are_rejected(tmp_path, text, options, key):
    with pytest.raises(UserError, match=key):
        prepare(*text, tmp_path / "rows", **options)
    assert not (tmp_path / "rows" / "manifest.json").exists()
