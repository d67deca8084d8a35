"""Continued pretraining from released weights: initialization, vocabularies, rejected settings."""

import dataclasses
import json
import shlex
import shutil

import jax
import numpy as np
import pytest
import torch

import bert_jax
from bert_jax import api, cli
from bert_jax.config.model import HeadConfig, ModelConfig
from bert_jax.config.schema import Config, PhaseConfig
from bert_jax.convert import source
from bert_jax.data import prepare, vocabulary_files, wordpiece
from bert_jax.data.rows import read_manifest
from bert_jax.errors import UserError
from bert_jax.model.bert import flatten
from bert_jax.objectives.warm_start import extend_positions, open_start
from bert_jax.runs import checkpoint, workdir
from tests.helpers.checkpoints import TF1, random_params, save_pretrained, torch_model, write_run
from tests.helpers.runs import arguments, assert_same_run, refused

POSITIONS = "embeddings/position/embedding"


def config(folder="", **model):
    return Config(model=ModelConfig(**model), phases=(PhaseConfig(rows=str(folder), tokens=16),))


def values(params):
    return flatten(jax.device_get(params))


@pytest.fixture(scope="module")
def pretrained(rows, tmp_path_factory):
    """A run whose model has the vocabulary of the rows, 32 positions and random weights."""
    words = vocabulary_files.load(rows(32, 3)).tokens
    model = ModelConfig(
        layers=1, hidden=32, heads=2, feed_forward=128, vocab_size=len(words), positions=32
    )
    folder = tmp_path_factory.mktemp("released") / "model"
    return write_run(folder, model, random_params(model), words)


@pytest.mark.parametrize(
    ("name", "new", "left_out"),
    [
        ("BertForPreTraining", [], []),
        ("BertForMaskedLM", ["next_sentence", "pooler"], []),
        ("BertModel", ["masked_lm", "next_sentence"], []),
        ("BertForSequenceClassification", ["masked_lm", "next_sentence"], ["classifier"]),
    ],
)
def test_encoder_and_heads_are_copied_from_the_source(tmp_path, name, new, left_out):
    folder = str(save_pretrained(torch_model(name, hidden_act="relu"), tmp_path / "theirs"))
    theirs = source.read(folder)
    changed, start = open_start(config(dropout=0.3, dtype="bfloat16", vocab_multiple=8), folder)
    expected = dataclasses.replace(
        theirs.config.model, masked_lm=True, next_sentence=True, pooler=False, head=HeadConfig(),
        dropout=0.3, dtype="bfloat16", vocab_multiple=8,
    )  # fmt: skip
    assert changed.model == expected
    assert expected.activation == "relu"
    assert (start.about["new"], start.about["left_out"]) == (new, left_out)
    params, originals = values(start.params), values(theirs.params)
    assert {path.partition("/")[0] for path in params} == set(start.about["loaded"])
    assert params.keys() == {p for p in originals if p.partition("/")[0] not in left_out}
    for path, value in params.items():
        original, count = originals[path], expected.vocab_size
        if path in ("embeddings/word/embedding", "masked_lm/bias"):
            assert len(value) == 32 > count
            assert not value[count:].any()
            value = value[:count]
        np.testing.assert_array_equal(value, original, err_msg=path)


def test_settings_that_conflict_with_the_source_are_rejected(hf_folder):
    init = str(hf_folder)
    small = str(save_pretrained(torch_model(max_position_embeddings=8), hf_folder.parent / "small"))
    for settings, source_, keys, expected in (
        (config(hidden=24), init, None, "config.model.hidden is 24, .*'s is 12"),
        (config(), init, ["model.hidden"], "config.model.hidden is 768, .*'s is 12"),
        (config(positions=20), init, None, "is 20, .*'s is 24"),
        (config(), small, None, r"phases\[0\].tokens is 16: it must be at most 8"),
    ):
        with pytest.raises(UserError, match=expected):
            open_start(settings, source_, keys=keys)
    # A size that comes from the config's name does not conflict with the source. An explicit
    # setting does, even at its default, 768.
    changed, start = open_start(config(hidden=24), init, keys=["steps"])
    assert changed.model.hidden == 12
    (note,) = start.about["notes"]
    assert "L2-H12-A3" in note


@pytest.mark.parametrize("how", ["copied", "interpolated"])
@pytest.mark.parametrize("count", [24, 60])
def test_extend_positions_copies_or_interpolates(how, count):
    table = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)
    if how == "copied":
        expected = np.concatenate([table, table, table])[:count]
    else:
        columns = torch.tensor(table.T[None]).double()
        expected = torch.nn.functional.interpolate(
            columns, count, mode="linear", align_corners=True
        )[0].T.numpy()
    extended = extend_positions(table, count, how)
    np.testing.assert_allclose(extended, expected, atol=0 if how == "copied" else 1e-6)


def test_open_start_extends_position_embeddings(hf_folder):
    table = values(source.read(str(hf_folder)).params)[POSITIONS]
    longer = dataclasses.replace(config(positions=60), new_positions="interpolated")
    changed, start = open_start(longer, str(hf_folder), keys=["model.positions"])
    assert changed.model.positions == 60
    np.testing.assert_array_equal(
        values(start.params)[POSITIONS], extend_positions(table, 60, "interpolated")
    )
    one = np.ones((1, 3), np.float32)
    np.testing.assert_array_equal(extend_positions(one, 4, "interpolated"), np.ones((4, 3)))


# --- Vocabularies ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["run", "folder", "tokenizer", "google", "vocab.txt"])
def test_vocabulary_is_read_from_any_source(pretrained, corpus, tmp_path, kind):
    place, theirs = pretrained, vocabulary_files.load(pretrained)
    if kind in ("folder", "tokenizer"):
        place = save_pretrained(torch_model(), tmp_path / "theirs")
        settings = json.loads((place / "tokenizer_config.json").read_text())
        settings |= {"do_lower_case": False, "strip_accents": True}
        (place / "tokenizer_config.json").write_text(json.dumps(settings))
        if kind == "tokenizer":
            (place / "vocab.txt").unlink(missing_ok=True)
        theirs = source.open_model(str(place)).vocabulary
        assert (theirs.lowercase, theirs.strip_accents) == (False, True)
    elif kind == "google":
        place = TF1
        theirs = vocabulary_files.load(TF1)
    elif kind == "vocab.txt":
        place = pretrained / "vocab.txt"
    assert source.open_vocabulary(str(place)) == theirs
    assert source.open_vocabulary(str(place), lowercase=True).lowercase
    if kind == "tokenizer":
        argv = ["prepare", "--vocab", place, "--out", tmp_path / "rows", "--workers=1", corpus]
        assert cli.main([str(argument) for argument in argv]) == 0
        assert vocabulary_files.load(tmp_path / "rows") == theirs


def test_vocabulary_errors_give_the_command(pretrained, corpus, tmp_path, capsys):
    result = refused(capsys, "prepare", "--vocab", tmp_path / "v", "--out", tmp_path / "o", "text")
    assert "bert-jax vocab" in result
    wordpiece.train([str(corpus)], str(tmp_path / "v"), size=140)
    other = tmp_path / "rows of others"
    prepare.prepare(
        [str(corpus)], str(tmp_path / "v"), str(other), tokens=16, sequences=2, pairs="none",
        passes=2, heldout_fraction=0.1, workers=1,
    )  # fmt: skip
    argv = ["pretrain", "--config=continued:16", "--init", pretrained, "--workdir", tmp_path / "w"]
    result = refused(capsys, *argv, "--config.model.next_sentence=false", "--rows", other)
    assert f"phase 0: {other}" in result
    words = shlex.split(result[result.index("bert-jax prepare") :])
    assert cli.main([*words[1:], "--workers=1"]) == 0
    made = f"{other}-model"
    _, start = open_start(config(made, next_sentence=False), str(pretrained))
    assert start.params
    manifest = read_manifest(made)
    assert manifest.vocab_sha256 == vocabulary_files.load(pretrained).sha256
    changing = {"source_bytes"}
    assert {k: v for k, v in manifest.settings.items() if k not in changing} == {
        k: v for k, v in read_manifest(other).settings.items() if k not in changing
    }

    cased = dataclasses.replace(vocabulary_files.load(pretrained), lowercase=False)
    prepare.prepare([str(corpus)], cased, str(tmp_path / "cased"), tokens=16, workers=1)
    with pytest.raises(UserError, match="settings of the vocabulary"):
        open_start(config(tmp_path / "cased"), str(pretrained))


# --- Runs -----------------------------------------------------------------------------------------


def test_pretrain_with_init_copies_weights_and_keeps_checkpoints(
    pretrained, rows, tmp_path, capsys
):
    folder = tmp_path / "run"
    changes = ("checkpoint.every_steps=7", "checkpoint.keep_every_steps=3")
    argv = ["pretrain", *arguments("steps=4", *changes), "--rows", str(rows(32, 3))]
    init = ["--init", str(pretrained)]
    assert cli.main([*argv, *init, "--workdir", str(folder)]) == 0
    output = capsys.readouterr().err
    assert f"encoder, masked_lm, next_sentence, pooler from {pretrained} (step 7)" in output
    assert "positions: 32 extended to 64" in output
    (data,) = workdir.read_data(folder)
    assert (data["init"]["source"], data["init"]["step"]) == (str(pretrained), 7)

    steps = sorted(int(p.name) for p in (folder / "checkpoints").iterdir() if p.name.isdecimal())
    assert steps == [0, 3, 4]
    first, originals = (
        values(checkpoint.load_model(run, which)[2])
        for run, which in ((folder, "0"), (pretrained, "7"))
    )
    positions = first.pop(POSITIONS)
    np.testing.assert_array_equal(positions[:32], originals.pop(POSITIONS))
    np.testing.assert_array_equal(positions[32:], positions[:32])
    for path, value in originals.items():
        np.testing.assert_array_equal(first[path], value, err_msg=path)
    last = values(checkpoint.load_model(folder, "3")[2])
    assert not np.array_equal(last[POSITIONS], positions)

    argv += ["--workdir", str(folder)]
    other = write_run(tmp_path / "other", *source_of(pretrained, seed=1))
    assert "--init" in refused(capsys, *argv)
    assert "--init" in refused(capsys, *argv, "--init", other)
    assert "--checkpoint 7" in refused(capsys, *argv, "--checkpoint", "7")
    assert "checkpoint '5'" in refused(capsys, *argv, *init, "--checkpoint", "5")
    # The run resumes from its own checkpoint, not from the source.
    whole = shutil.copytree(folder, tmp_path / "whole")
    shutil.rmtree(folder / "checkpoints" / "4")
    assert cli.main([*argv, *init]) == 0
    assert "resuming at step 3" in capsys.readouterr().err
    assert_same_run(folder, whole)


def source_of(pretrained, seed):
    saved, vocabulary, _, _ = checkpoint.load_model(pretrained)
    return saved.model, random_params(saved.model, seed), vocabulary.tokens


def test_python_api_pretrains_on_texts(pretrained, tmp_path, monkeypatch):
    runs = []
    monkeypatch.setattr(api.train, "train", lambda *run, start, **_: runs.append((run, start)))
    loaded = api.load(pretrained)
    monkeypatch.setattr(api, "load", lambda folder: loaded)
    texts = [f"The king sees river {n}.\nHe follows it.\nThe city is old." for n in range(40)]
    changes = {"steps": 1, "model.next_sentence": False}
    bert_jax.pretrain("continued:32", tmp_path / "run", texts, init=pretrained, changes=changes)
    (((settings, vocabulary, (data,), _, folder), start),) = runs
    assert (settings.model.hidden, settings.model.next_sentence) == (32, False)
    assert vocabulary == vocabulary_files.load(pretrained)
    assert data["init"]["left_out"] == ["next_sentence", "pooler"]
    assert folder == str(tmp_path / "run")
    originals = values(checkpoint.load_model(pretrained)[2])
    for path, value in values(start).items():
        np.testing.assert_array_equal(value, originals[path], err_msg=path)
