"""The Python API: agreement with the command line, and use in JAX transformations."""

import concurrent.futures
import dataclasses
import doctest
import json
import os
import pathlib
import signal

import jax
import numpy as np
import pytest

import bert_jax
from bert_jax import api
from bert_jax.config.model import HeadConfig, ModelConfig
from bert_jax.config.schema import Config, FinetuneConfig, TaskConfig
from bert_jax.data.vocabulary import SPECIAL, Vocabulary
from bert_jax.errors import UserError
from bert_jax.inference import predict
from bert_jax.model import encoder
from bert_jax.model.bert import init_params
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.runs import workdir
from bert_jax.storage import files

DOCUMENTS = [
    f"The {n} rivers run past the mill.\nIt turns the wheel.\nBread is baked by {n} men."
    for n in range(60)
]
SIZE = "L2-H16-A2,32"
CHANGES = {"steps": 2, "batch_size": 8, "evaluate_every_steps": 2}
ROWS = [{"text": f"bread {n}", "label": "ab"[n % 2]} for n in range(60)]
TABLE = {"task.tokens": 32, "epochs": 1}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("api") / "run"
    return bert_jax.pretrain(SIZE, folder, iter(DOCUMENTS), vocab_size=150, changes=CHANGES)


def with_head(run, head, labels, task):
    """Return the model of a run with a new encoder and head."""
    model = ModelConfig(
        layers=1, hidden=8, heads=2, feed_forward=8, positions=32, vocab_size=len(run.vocabulary),
        masked_lm=False, next_sentence=False, head=HeadConfig(head, labels),
    )  # fmt: skip
    params = init_params(model, jax.random.key(0))
    return dataclasses.replace(run, config=FinetuneConfig(model=model, task=task), params=params)


@pytest.fixture(scope="module")
def finetuned(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuned") / "run"
    splits = {"train": ROWS[:40], "dev": ROWS[40:]}
    metrics = bert_jax.finetune("table", run.source, folder, splits, changes=TABLE)
    dtypes = [bert_jax.load(source).config.model.dtype for source in (run.source, folder)]
    assert dtypes == ["float32"] * 2  # what "auto" means on a CPU
    return metrics, folder


def test_training_and_loading_leave_the_process_as_it_is(tmp_path):
    """Also in another thread than the main one, where handlers of signals cannot be set."""

    def settings():
        handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
        return os.environ["XLA_FLAGS"], dict(jax.config.values), handlers

    before = settings()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        train = pool.submit(bert_jax.pretrain, SIZE, tmp_path, DOCUMENTS, changes=CHANGES)
        assert train.result().step == 2
    assert settings() == before


def test_doctests(run):
    failures, tests = doctest.testmod(api, extraglobs={"example_run": lambda: run.source})
    assert (failures, tests > 3) == (0, True)


def test_apply_matches_other_methods_under_jit_and_grad(run):
    inputs = run.encode(["The [MASK] runs.", ("It turns.", "Bread is baked by ten men.")])
    output = jax.jit(run.apply)(run.params, inputs)
    logits = output.masked_lm[0, 2]  # [CLS] the [MASK]
    (candidates,) = run.fill_mask("The [MASK] runs.", top=3)
    expected = jax.lax.top_k(jax.nn.softmax(logits), 3)[0]
    np.testing.assert_allclose([c.probability for c in candidates], expected, rtol=1e-5)
    inputs = run.encode(["The river runs."])
    count = int((inputs.layout.segment_ids == 0).sum())
    mean = run.apply(run.params, inputs).hidden[0, :count].mean(0)
    np.testing.assert_allclose(run.embed(["The river runs."])[0], mean, atol=1e-5)
    maps = run.attention("It turns.", "Bread is baked.")
    np.testing.assert_allclose(maps.probabilities.sum(-1), 1, rtol=1e-5)
    grads = jax.grad(lambda p: run.apply(p, inputs).hidden.sum())(run.params)
    assert jax.tree.structure(grads) == jax.tree.structure(run.params)
    dropped = run.apply(run.params, inputs, jax.random.key(0)).hidden[0, :count].mean(0)
    assert not np.allclose(dropped, mean, atol=1e-3)


def test_changed_parameters_are_saved_and_exported(run, tmp_path):
    changed = dataclasses.replace(run, params=jax.tree.map(lambda x: x + 1, run.params))
    changed.save(tmp_path / "saved")
    changed.to_huggingface(tmp_path / "exported")
    for folder in ("saved", "exported"):
        loaded = bert_jax.load(tmp_path / folder)
        jax.tree.map(np.testing.assert_array_equal, loaded.params, changed.params)
        assert loaded.vocabulary.tokens == run.vocabulary.tokens
    assert "512 tokens (trained on rows of 32)" in (tmp_path / "exported/README.md").read_text()


@pytest.mark.parametrize(("threshold", "answered"), [(-1e9, False), (1e9, True)])
def test_saved_models_keep_the_threshold_of_squad2(run, tmp_path, threshold, answered):
    metrics = {"step": 7, "dev": {"best_f1_thresh": threshold}}
    (tmp_path / "metrics.json").write_text(json.dumps(metrics))
    task = TaskConfig(kind="squad", tokens=32, question_tokens=8, stride_tokens=8)
    reader = with_head(run, "span", ("start", "end"), task)
    dataclasses.replace(reader, source=str(tmp_path), step=7).save(tmp_path / "saved")
    loaded = bert_jax.load(tmp_path / "saved")
    assert bool(loaded.predict([("the mill", "The river runs.")])[0].label) is answered


def test_predict_matches_the_predict_command(finetuned, tmp_path):
    metrics, folder = finetuned
    assert metrics == json.loads((folder / "metrics.json").read_text())
    texts = ["bread 3", "the river runs"]
    (tmp_path / "new.txt").write_text("\n".join(texts) + "\n")
    predict.predict_file(folder, str(tmp_path / "new.txt"), tmp_path / "out")
    lines = (tmp_path / "out" / "predictions.tsv").read_text().splitlines()[1:]
    model = bert_jax.load(folder)
    predictions = model.predict(texts)
    for line, prediction in zip(lines, predictions, strict=True):
        _, label, *probabilities, _ = line.split("\t")
        assert prediction.label == label
        np.testing.assert_allclose(
            list(prediction.probabilities.values()), np.float64(probabilities), atol=1e-6
        )
    logits = model.apply(model.params, model.encode(texts)).head
    np.testing.assert_allclose(
        jax.nn.softmax(logits), [list(p.probabilities.values()) for p in predictions], atol=1e-5
    )


def test_repeated_calls_do_not_trace_again(run, finetuned, monkeypatch):
    tuned, inputs = bert_jax.load(finetuned[1]), run.encode(["bread"])
    traces, attention_context, repeated = [], encoder.attention_context, {}
    monkeypatch.setattr(
        encoder, "attention_context", lambda *args: traces.append(1) or attention_context(*args)
    )
    calls = {
        "embed": lambda: run.embed(["bread"], layers="1", weights=[0.5]),
        "predict": lambda: tuned.predict(["bread"]),
        "apply": lambda: run.apply(run.params, inputs),
    }
    for name, call in calls.items():
        call()
        count = len(traces)
        call()
        repeated[name] = len(traces) - count
    assert repeated == dict.fromkeys(calls, 0)
    assert traces
    # Other settings have their own program.
    assert not np.allclose(*(run.embed(["bread"], weights=[x]) for x in (0.5, 0.25)))


def test_tagging_predicts_every_word_of_every_text(run):
    task = TaskConfig(kind="tagging", tokens=16, document_context=True)
    tagger = with_head(run, "token", ("O", "B-x"), task)
    predictions = tagger.predict(["the river", "", "-DOCSTART- is a word", "\ud800 runs"])
    assert [len(prediction.label) for prediction in predictions] == [2, 0, 4, 2]


def test_multilabel_names_may_contain_the_separator(run):
    task = TaskConfig(objective="classes", tokens=16)
    model = with_head(run, "sequence", ("a|b", "c|d", "e|f"), task)
    model.params["classifier"]["bias"] = np.array([9.0, -9.0, 9.0], np.float32)
    (prediction,) = model.predict(["the river"])
    assert prediction.label == ("a|b", "e|f")


def test_texts_of_another_form_than_the_task_are_refused(run):
    task = TaskConfig(kind="squad", tokens=32, question_tokens=8)
    reader = with_head(run, "span", ("start", "end"), task)
    with pytest.raises(UserError, match="text 1 is no pair"):
        reader.predict([("the mill", "The river runs."), "the mill"])
    tagger = with_head(run, "token", ("O", "B-x"), TaskConfig(kind="tagging", tokens=16))
    with pytest.raises(UserError, match="text 0 is a pair"):
        tagger.predict([("the mill", "The river runs.")])


def test_predict_without_a_head_is_rejected(run):
    with pytest.raises(UserError, match="no head"):
        run.predict(["a text"])


def test_embed_takes_no_texts_and_lone_surrogates(run):
    assert run.embed([]).shape == (0, 16)
    assert run.embed([], pooling="none") == []
    np.testing.assert_array_equal(*run.embed(["\ud800 runs", "? runs"]))


def test_records_are_written_completely_or_not_at_all(tmp_path):
    path = tmp_path / "data" / "text.jsonl"

    def interrupted():
        yield {"text": "a"}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        api._write_lines(path, interrupted())
    assert not list(path.parent.iterdir())
    with pytest.raises(UserError, match="no rows"):  # the folder exists, the texts do not
        bert_jax.pretrain(SIZE, tmp_path, changes=CHANGES)
    values = ["\ud800", np.int64(1), np.float32(0.5), np.bool_(True), np.array(["a", "b"])]
    api._write_lines(path, [{"text": value} for value in values])
    written = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    assert written == ["\ud800", 1, 0.5, True, ["a", "b"]]


@pytest.mark.parametrize("kind", ["pretraining", "fine-tuning"])
def test_data_of_a_run_are_not_replaced(run, finetuned, kind):
    """Not even by data of the same size, from which rows are said to be the same."""

    def resume(data):
        if kind == "pretraining":
            bert_jax.pretrain(SIZE, run.source, data, vocab_size=150, changes=CHANGES)
        else:
            splits = {"train": ROWS[:40], "dev": data}
            bert_jax.finetune("table", run.source, finetuned[1], splits, changes=TABLE)

    if kind == "pretraining":
        data, path = DOCUMENTS, pathlib.Path(run.source, "data", "text.jsonl")
    else:
        data, path = ROWS[40:], finetuned[1] / "data" / "dev.jsonl"
    before, time = path.read_bytes(), path.stat().st_mtime_ns
    for other in (data[::-1], data[:-1]):
        with pytest.raises(UserError, match=f"{path} holds other data"):
            resume(other)
    with files.lock_folder(path.parents[1]), pytest.raises(UserError, match="in use"):
        resume(data)
    resume(data)
    assert (path.read_bytes(), path.stat().st_mtime_ns) == (before, time)


def test_data_can_be_corrected_before_a_run_begins(tmp_path):
    path = tmp_path / "data" / "dev.jsonl"
    for rows in (ROWS, ROWS[40:]):
        api._write_lines(path, rows)
    assert [json.loads(line) for line in path.read_text().splitlines()] == ROWS[40:]


def test_workdirs_on_object_storage(run, tmp_path, monkeypatch):
    """Their URLs are not used as local paths, and Python objects cannot be written to them."""
    monkeypatch.chdir(tmp_path)
    url, received = "gs://bucket/run", []
    for owner, name in ((api.train, "train"), (api, "export")):
        monkeypatch.setattr(owner, name, lambda *args, **_: received.extend(args))
    monkeypatch.setattr(api.train, "finetune", lambda *args, **_: received.extend(args) or {})
    monkeypatch.setattr(api, "load", lambda _: run)
    monkeypatch.setattr(workdir, "_local", lambda _, name: tmp_path / name)
    bert_jax.pretrain(SIZE, url, rows=[f"{run.source}/data/rows32"], changes=CHANGES)
    bert_jax.finetune("table", run.source, url, changes=TABLE)
    run.to_huggingface(url)
    assert received.count(url) == 3
    with pytest.raises(UserError, match="texts need a local workdir"):
        bert_jax.pretrain(SIZE, url, DOCUMENTS, changes=CHANGES)
    with pytest.raises(UserError, match="examples need a local workdir"):
        bert_jax.finetune("table", run.source, url, {"train": []}, changes=TABLE)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: bert_jax.pretrain(SIZE, "run", DOCUMENTS, rows=["a"]), "rows without texts"),
        (lambda: bert_jax.finetune("table", "init", "run", seeds=0), "at least 1"),
        (lambda: bert_jax.finetune("table", "init", "run", {"validation": []}), "'validation'"),
        (lambda: bert_jax.pretrain(SIZE, "run", "text"), "texts is the string 'text'"),
        # Arguments, not options of the command line.
        (lambda: bert_jax.pretrain("base", "run", rows=["a"]), "^rows=: 1 folder for 2 phases"),
        (lambda: bert_jax.pretrain(SIZE, "run"), r"rows=DIR .*changes={'phases\[0\].rows': DIR}"),
        (lambda: bert_jax.pretrain("bsae", "run"), "^config='bsae'"),
        (lambda: bert_jax.finetune("table", "none", "run"), "^init=none .* vocab=DIR"),
        (lambda: api._config(Config(), None, FinetuneConfig), "pass a FinetuneConfig"),
    ],
)
def test_invalid_arguments_are_refused(tmp_path, monkeypatch, call, says):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=says):
        call()
    assert not list(tmp_path.iterdir())


def test_results_are_short_to_read_and_names_are_listed(run):
    assert {"load", "pretrain", "finetune", "Model"} <= {*dir(bert_jax)}
    inputs = run.encode(["The river", "It [MASK]"])
    for result in (inputs, run.apply(run.params, inputs), run.attention("The river")):
        assert "[2, " in repr(result)
        assert len(repr(result)) < 300
    assert len(repr(run.vocabulary)) < 300
    predicted = bert_jax.Prediction("b", {name: n / 6 for n, name in enumerate("abcd" * 2)})
    assert repr(predicted).index("'d'") < repr(predicted).index("'b':")


def test_fill_mask_of_a_list_has_a_result_per_text(run):
    texts = ["The [MASK] runs.", "[MASK] turns the [MASK]."]
    assert run.fill_mask(texts) == [run.fill_mask(text) for text in texts]


@pytest.mark.parametrize("method", ["encode", "embed", "score", "score_tokens", "predict"])
def test_string_instead_of_texts_is_refused(method):
    """Its characters would be the texts."""
    model = api.Model("run", "best", Config(), Vocabulary((*SPECIAL, "a"), True), {}, 0)
    with pytest.raises(UserError, match=rf"{method}\(\): texts is the string"):
        getattr(model, method)("a text")


class Scaled(MaskedLM):
    """User-defined objective: half the masked-LM loss."""

    def loss_terms(self, params, inputs, key):
        terms = super().loss_terms(params, inputs, key)
        name = "masked_lm_loss"
        return {**terms, name: (terms[name][0] / 2, terms[name][1])}


def test_custom_objective_trains_and_is_required_on_resume(run, tmp_path):
    rows = [workdir.read_data(run.source)[0]]
    assert "objective" not in rows[0]
    folders = [f"{run.source}/data/rows32"]
    scaled = bert_jax.pretrain(
        SIZE, tmp_path / "run", rows=folders, objective=Scaled, changes=CHANGES
    )

    plain, half = (
        workdir.read_lines(folder / "metrics.jsonl")[0]["masked_lm_loss"]
        for folder in (pathlib.Path(run.source), tmp_path / "run")
    )
    np.testing.assert_allclose(half, plain / 2, rtol=0.01)
    assert scaled.step == 2
    with pytest.raises(UserError, match="objective"):
        bert_jax.pretrain(SIZE, tmp_path / "run", rows=folders, changes=CHANGES)
