"""Import and export of BERT: file formats, round trips, heads, tokenizers, cards, CLI and Hub."""

import contextlib
import io
import json
import logging
import shutil
import zipfile

import jax
import numpy as np
import pytest
import safetensors
import torch
import transformers
from huggingface_hub import ModelCard
from safetensors.numpy import load_file, save_file

from bert_jax import cli
from bert_jax.config.schema import Config, PhaseConfig
from bert_jax.convert import export as export_lib
from bert_jax.convert import huggingface, source, tensorflow1, weights
from bert_jax.convert.export import export
from bert_jax.data.vocabulary import Vocabulary
from bert_jax.inference.fill_mask import MaskFiller
from bert_jax.model.bert import flatten as flat
from bert_jax.objectives import warm_start
from bert_jax.runs import checkpoint
from tests.helpers.checkpoints import (
    TF1,
    WORDS,
    add_step,
    error_of,
    refusal,
    save_pretrained,
    small_config,
    small_run,
    torch_model,
)


def assert_same(params, others):
    params, others = flat(params), flat(others)
    assert params.keys() == others.keys()
    for path, value in params.items():
        np.testing.assert_array_equal(value, others[path], err_msg=path)


@pytest.mark.parametrize("kind", ["sharded", "legacy bin", "sharded bin", "bfloat16"])
def test_all_weight_file_formats_load_the_same_params(tmp_path, kind):
    model = torch_model()
    plain = source.read(str(save_pretrained(model, tmp_path / "plain")))
    folder = tmp_path / "other"
    save_pretrained(model, folder, max_shard_size="2KB" if kind == "sharded" else "1GB")
    if kind == "sharded":
        assert len(list(folder.glob("model-*.safetensors"))) > 2
    elif kind == "bfloat16":
        save_pretrained(model.to(torch.bfloat16), folder)
        plain = source.read(str(save_pretrained(model.float(), tmp_path / "rounded")))
    else:
        (folder / "model.safetensors").unlink()
        state = model.state_dict()
        if kind == "sharded bin":
            names = list(state)
            halves = {"a.bin": names[:9], "b.bin": names[9:]}
            for file, part in halves.items():
                torch.save({name: state[name] for name in part}, folder / file)
            index = {"weight_map": {n: file for file, part in halves.items() for n in part}}
            (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        else:
            file = folder / "pytorch_model.bin"
            torch.save(state, file, _use_new_zipfile_serialization=False)
    other = source.read(str(folder))
    assert other.config == plain.config
    assert_same(other.params, plain.params)


def rename(folder, change, extra=()):
    """Rewrite the weights with renamed tensors and extra ones."""
    path = folder / "model.safetensors"
    tensors = {change(name): value for name, value in load_file(path).items()}
    save_file({**tensors, **dict(extra)}, path)


def old(name):
    name = name.replace("LayerNorm.weight", "LayerNorm.gamma")
    return name.replace("LayerNorm.bias", "LayerNorm.beta")


@pytest.mark.parametrize(
    "change", [old, lambda n: f"module.{n}", lambda n: f"module.model.{old(n)}"]
)
def test_legacy_and_wrapped_tensor_names_are_read(hf_folder, change):
    expected = source.read(str(hf_folder))
    buffer = change("bert.embeddings.position_ids")
    rename(hf_folder, change, [(buffer, np.arange(24)[None])])
    got = source.read(str(hf_folder))
    assert got.about["left_out"] == [buffer]
    assert_same(got.params, expected.params)


def test_duplicate_of_tied_decoder_must_match_embeddings(hf_folder):
    expected = source.read(str(hf_folder))
    words = load_file(hf_folder / "model.safetensors")["bert.embeddings.word_embeddings.weight"]
    twice = [("cls.predictions.decoder.weight", words)]
    rename(hf_folder, lambda n: n, twice)
    assert_same(source.read(str(hf_folder)).params, expected.params)
    rename(hf_folder, lambda n: n, [("cls.predictions.decoder.weight", words + 1)])
    assert "cls.predictions.decoder.weight" in refusal(hf_folder)


def test_google_release_loads_from_folder_zip_and_checkpoint(tmp_path):
    release = tmp_path / "uncased_L-2_H-8_A-2"
    release.mkdir()
    for file in TF1.glob("bert*"):
        shutil.copy(file, release)
    shutil.copy(TF1 / "vocab.txt", release)
    with zipfile.ZipFile(tmp_path / "release.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for file in release.iterdir():
            archive.write(file, f"{release.name}/{file.name}")
    first = source.read(str(release))
    model = first.config.model
    assert (model.layers, model.hidden, model.heads) == (2, 8, 2)
    assert model.masked_lm
    assert model.next_sentence
    for other in (tmp_path / "release.zip", release / "bert_model.ckpt"):
        again = source.read(str(other))
        assert again.config == first.config
        assert_same(again.params, first.params)
    # Compare one tensor of each kind, by Google's names.
    theirs, ours = tensorflow1.read(release, "bert_model.ckpt"), flat(first.params)
    layer = "bert/encoder/layer_1"
    for path, expected in {
        "attention/query/kernel": theirs[f"{layer}/attention/self/query/kernel"].reshape(8, 2, 4),
        "attention/query/bias": theirs[f"{layer}/attention/self/query/bias"].reshape(2, 4),
        "feed_forward/intermediate/kernel": theirs[f"{layer}/intermediate/dense/kernel"],
        "attention/norm/scale": theirs[f"{layer}/attention/output/LayerNorm/gamma"],
    }.items():
        np.testing.assert_array_equal(ours[f"encoder/layer_1/{path}"], expected, err_msg=path)
    positions = theirs["bert/embeddings/position_embeddings"]
    np.testing.assert_array_equal(ours["embeddings/position/embedding"], positions)
    np.testing.assert_array_equal(ours["masked_lm/bias"], theirs["cls/predictions/output_bias"])
    following = theirs["cls/seq_relationship/output_weights"].T
    np.testing.assert_array_equal(ours["next_sentence/kernel"], following)
    np.testing.assert_array_equal(ours["pooler/kernel"], theirs["bert/pooler/dense/kernel"])


def test_vocab_txt_with_and_without_tokenizer_settings(hf_folder):
    """Use `do_lower_case` and similar settings if present, else infer them from the vocabulary."""
    (hf_folder / "tokenizer.json").unlink()
    (hf_folder / "vocab.txt").write_text("\n".join(WORDS))
    saved = hf_folder / "tokenizer_config.json"
    saved.unlink()
    assert source.read(str(hf_folder)).vocabulary == Vocabulary(WORDS, True)
    saved.write_text(json.dumps({"do_lower_case": False, "strip_accents": True}))
    assert source.read(str(hf_folder)).vocabulary == Vocabulary(WORDS, False, True)
    saved.write_text(json.dumps({"tokenize_chinese_chars": False}))
    assert source.read(str(hf_folder)).vocabulary == Vocabulary(WORDS, True, None, False)
    assert not source.read(str(hf_folder), lowercase=False).vocabulary.lowercase
    for key, value in (("strip_accents", "yes"), ("tokenizer_class", "BertJapaneseTokenizer")):
        saved.write_text(json.dumps({key: value}))
        assert value in refusal(hf_folder)
    saved.unlink()
    (hf_folder / "added_tokens.json").write_text(json.dumps({"<new>": 26, "[PAD]": 0}))
    assert "<new>" in refusal(hf_folder)


def test_tokenizer_config_overrides_tokenizer_json(hf_folder):
    saved = hf_folder / "tokenizer_config.json"
    values = json.loads(saved.read_text())
    for change in ({"do_lower_case": False}, {"strip_accents": False}):
        saved.write_text(json.dumps({**values, **change}))
        theirs = transformers.AutoTokenizer.from_pretrained(hf_folder)
        text = "The CAT sat É é"
        assert source.read(str(hf_folder)).vocabulary.encode(text) == theirs(text)["input_ids"]
    values |= {"tokenizer_class": "PreTrainedTokenizerFast", "do_lower_case": False}
    saved.write_text(json.dumps(values))  # this class reads tokenizer.json as it is
    theirs = transformers.AutoTokenizer.from_pretrained(hf_folder)
    assert source.read(str(hf_folder)).vocabulary.encode(text) == theirs(text)["input_ids"]


@pytest.mark.parametrize(
    ("names", "head", "labels"),
    [
        (("output_weights", "output_bias"), "sequence", ("LABEL_0", "LABEL_1")),
        (("cls/squad/output_weights", "cls/squad/output_bias"), "span", ("start", "end")),
    ],
)
def test_google_finetuned_heads_are_recognized(monkeypatch, names, head, labels):
    def read(folder, prefix, selected):
        result = original(folder, prefix, selected)
        kept = {k: v for k, v in result.items() if not k.startswith("cls/")}
        return {**kept, names[0]: np.ones((2, 8), np.float32), names[1]: np.ones(2, np.float32)}

    original = tensorflow1.read
    monkeypatch.setattr(tensorflow1, "read", read)
    imported = source.read(str(TF1 / "bert_model.ckpt"))
    assert (imported.config.model.head.kind, imported.config.model.head.labels) == (head, labels)
    np.testing.assert_array_equal(imported.params["classifier"]["kernel"], np.ones((8, 2)))


# --- Round trips ----------------------------------------------------------------------------------


def test_safetensors_files_are_deterministic(tmp_path):
    tensors = {name: np.arange(3, dtype=np.float32) for name in ("b", "a")}
    path, contents = tmp_path / "model.safetensors", set()
    for _ in range(12):  # in random order, two entries agree by chance once in 2,048
        weights.write(path, tensors)
        contents.add(path.read_bytes())
    assert len(contents) == 1
    with safetensors.safe_open(path, "numpy") as opened:
        assert opened.metadata()["format"] == "pt"
        np.testing.assert_array_equal(opened.get_tensor("a"), tensors["a"])


@pytest.mark.parametrize("is_tied", [True, False])
def test_export_without_padding_of_the_vocabulary_imports_again(tmp_path, is_tied):
    run = small_run(tmp_path / "run", vocab_multiple=8, tied_decoder=is_tied)
    export(str(run), tmp_path / "out")
    back = source.read(str(tmp_path / "out"))
    assert back.config.model == small_config(tied_decoder=is_tied)
    ours, theirs = flat(checkpoint.load_model(run)[2]), flat(back.params)
    for path, value in theirs.items():
        kept = tuple(slice(size) for size in value.shape)
        np.testing.assert_array_equal(value, ours[path][kept], err_msg=path)
    assert theirs.keys() == ours.keys()


@contextlib.contextmanager
def no_warnings():
    """Fail if transformers logs a warning inside the block."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("heads", "loader", "loaded", "dropped"),
    [
        ("all", "AutoModelForPreTraining", "BertForPreTraining", ()),
        ("all", "AutoModelForMaskedLM", "BertForMaskedLM", ("cls.seq", "bert.pooler.")),
        ("all", "AutoModel", "BertModel", ("cls.",)),
        ("masked_lm", "AutoModelForMaskedLM", "BertForMaskedLM", ()),
        ("none", "AutoModel", "BertModel", ()),
    ],
)
def test_transformers_loads_exported_heads(tmp_path, run_folder, heads, loader, loaded, dropped):
    """A warning would be logged if a class lacked weights; one is expected for dropped heads."""
    export(str(run_folder), tmp_path / "out", heads=heads)
    load_model = getattr(transformers, loader).from_pretrained
    with contextlib.nullcontext() if dropped else no_warnings():
        model, info = load_model(tmp_path / "out", output_loading_info=True)
    assert type(model).__name__ == loaded
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert all(name.startswith(dropped) for name in info["unexpected_keys"])
    # Of all heads, transformers' pipeline would report the unexpected weights.
    pipeline = ModelCard.load(tmp_path / "out" / "README.md").data.pipeline_tag
    assert (pipeline == "fill-mask") == (heads == "masked_lm")


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_encoder_without_pooler_loads_as_its_card_says(tmp_path, family):
    run = small_run(tmp_path / "run", next_sentence=False, family=family)
    (name,) = export(str(run), tmp_path / "out", heads="none")["architectures"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert f'{name}.from_pretrained("PATH", add_pooling_layer=False)' in card
    with no_warnings():
        model = transformers.AutoModel.from_pretrained(tmp_path / "out", add_pooling_layer=False)
    assert type(model).__name__ == name
    assert not source.read(str(tmp_path / "out")).config.model.has_pooler


@pytest.mark.parametrize("problem_type", ["multi_label_classification", "regression", None])
def test_problem_type_of_a_classifier_round_trips(tmp_path, problem_type):
    model = torch_model("BertForSequenceClassification", problem_type=problem_type)
    save_pretrained(model, tmp_path / "in")
    source.import_checkpoint(str(tmp_path / "in"), tmp_path / "ours")
    for name in ("in", "ours"):
        export(str(tmp_path / name), tmp_path / f"from_{name}")
        theirs = transformers.AutoConfig.from_pretrained(tmp_path / f"from_{name}")
        assert theirs.problem_type == problem_type
    config = Config(phases=(PhaseConfig(tokens=16),))
    assert warm_start.open_start(config, str(tmp_path / "in"))[0].model.head.problem_type == ""


def test_causal_model_exports_as_a_decoder(tmp_path):
    run = small_run(tmp_path / "run", causal=True, next_sentence=False)
    export(str(run), tmp_path / "out")
    assert "pipeline_tag: text-generation" in (tmp_path / "out" / "README.md").read_text()
    with no_warnings():
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(model).__name__ == "BertLMHeadModel"
    assert export(str(run), tmp_path / "bare", heads="none")["architectures"] == ["BertModel"]
    assert error_of(MaskFiller, source.open_model(str(run)))


def test_pooled_heads_of_causal_models_are_rejected(tmp_path):
    for name in ("BertForPreTraining", "BertForSequenceClassification"):
        theirs = save_pretrained(torch_model(name, is_decoder=True), tmp_path / name)
        assert "is_decoder" in refusal(theirs)
    theirs = save_pretrained(torch_model("BertModel", is_decoder=True), tmp_path / "pooled")
    assert "unexpected: pooler.dense.bias, pooler.dense.weight" in refusal(theirs)
    result = source.read(str(theirs), allow_unexpected=["pooler.*"])
    assert result.config.model.causal
    assert result.params.keys() == {"embeddings", "encoder"}


@pytest.mark.parametrize(
    ("cased", "accents"), [(False, None), (True, None), (True, True), (False, False)]
)
def test_tokenizer_settings_round_trip(tmp_path, run_folder, cased, accents):
    config, _, params, _ = checkpoint.load_model(run_folder)
    vocabulary = Vocabulary(WORDS, not cased, accents, split_chinese=accents is None)
    source.write(source.Imported(config, vocabulary, params, {}), tmp_path / "run")
    export(str(tmp_path / "run"), tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "É é A a 中国 cats"
    assert theirs(text)["input_ids"] == vocabulary.encode(text)
    back = source.import_checkpoint(str(tmp_path / "out"), tmp_path / "back")
    assert back.vocabulary == vocabulary
    assert checkpoint.load_model(tmp_path / "back")[1] == vocabulary


def test_export_of_all_checkpoints(run_folder, tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(run_folder, run)
    config, _, params, _ = checkpoint.load_model(run)
    later = jax.tree.map(lambda x: x + 1, params)
    add_step(run, 9, later)
    lines = [{"step": step, "split": "heldout", "masked_lm_loss": step / 10} for step in (7, 8, 9)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    argv = f"export --init {run} --out {tmp_path / 'out'} --checkpoint all".split()

    def stopped(source, out, which, *more, **options):
        if which == "9":
            raise KeyboardInterrupt
        return export(source, out, which, *more, **options)

    with monkeypatch.context() as patch:
        patch.setattr(export_lib, "export", stopped)
        assert cli.main(argv) == 130
    assert not (tmp_path / "out").exists()
    assert cli.main([*argv, "--license", "mit", "--language", "en", "--language", "de"]) == 0
    assert "step_7, step_9" in capsys.readouterr().out
    for step, expected in ((7, params), (9, later)):
        folder = tmp_path / "out" / f"step_{step}"
        tensors = load_file(folder / "model.safetensors")
        reference = huggingface.to_huggingface(jax.device_get(expected), config.model)
        assert tensors.keys() == reference.keys()
        for name, value in reference.items():
            np.testing.assert_array_equal(tensors[name], value, err_msg=name)
        card = ModelCard.load(folder / "README.md")
        assert (card.data.license, card.data.language) == ("mit", ["en", "de"])
        losses = [loss for loss in ("0.7000", "0.8000", "0.9000") if loss in card.content]
        assert losses == [f"{step / 10:.4f}"]
    imported = tmp_path / "theirs"
    shutil.copytree(tmp_path / "out" / "step_7", imported)
    argv = f"export --init {imported} --out {tmp_path / 'o'} --checkpoint all".split()
    assert cli.main(argv) == cli.EXIT_USER_ERROR
    assert "is not a run" in capsys.readouterr().err
