"""Folders of sentence-transformers: every setting that changes vectors, against torch."""

import importlib
import importlib.util
import json
import shutil
import types
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import tokenizers
import torch
import transformers

import bert_jax
from bert_jax import cli
from bert_jax.convert import source
from bert_jax.convert.export import export
from tests.helpers.checkpoints import WORDS, refusal, save_pretrained, torch_model

TEXTS = [
    "the cat sat on the mat.",
    "THE CAT, É!",
    "",
    "a",
    "unst sat! the cat sat on a mat, the cat sat on the mat, b c d e f g h i",
]
# Name -> settings of `write`, what to compute (`reference`).
VARIANTS = {
    "lowercase RoBERTa": (
        {"sentence": {"do_lower_case": True, "max_seq_length": 20}, "roberta": True},
        {"lower": True, "tokens": 20},
    ),
    "unused prompts": ({"defaults": {"prompts": {"q": "the cat: "}}}, {}),
    "empty prompt": ({"defaults": {"default_prompt_name": "query"}}, {}),
    "prompt left out": (
        {
            "defaults": {"prompts": {"q": "uns"}, "default_prompt_name": "q"},
            "pooling": {"include_prompt": False},
        },
        {"prompt": "uns", "skip": True},
    ),
    "prompt left out of cls": (
        {
            "defaults": {"prompts": {"q": "uns"}, "default_prompt_name": "q"},
            "pooling": {"include_prompt": False, "pooling_mode": "cls"},
        },
        {"prompt": "uns", "skip": True, "cls": True},
    ),
    "long prompt left out": (
        {
            "sentence": {"max_seq_length": 6},
            "defaults": {"prompts": {"q": "the cat sat on a mat"}, "default_prompt_name": "q"},
            "pooling": {"include_prompt": False},
        },
        {"prompt": "the cat sat on a mat", "skip": True, "tokens": 6},
    ),
    "truncate_dim": (
        {"defaults": {"truncate_dim": 5}, "normalize": True},
        {"kept": 5, "unit": True},
    ),
    "cls by its old name": (
        {"pooling": {"pooling_mode_cls_token": True, "include_prompt": True}},
        {"cls": True},
    ),
    "length by RoBERTa's name": (
        {"sentence": {"max_seq_length": 9}, "sentence_name": "sentence_roberta_config.json"},
        {"tokens": 9},
    ),
    "length of the tokenizer": ({"model_max_length": 8}, {"tokens": 8}),
    "subfolder": (
        {"subfolder": "0_BERT/", "sentence": {"max_seq_length": 10, "do_lower_case": True}},
        {"lower": True, "tokens": 10},
    ),
}


def write(
    folder, subfolder="", sentence=None, sentence_name="sentence_bert_config.json",
    defaults=None, pooling=None, normalize=False, more=(), model_max_length=None, roberta=False,
):  # fmt: skip
    """Write a cased encoder with random weights in the layout of sentence-transformers."""
    inner = folder / subfolder
    save_roberta(inner) if roberta else save_pretrained(torch_model("BertModel"), inner)
    tokenizer = inner / "tokenizer_config.json"
    saved = json.loads(tokenizer.read_text()) | {"do_lower_case": False}
    saved["model_max_length"] = model_max_length or 512
    tokenizer.write_text(json.dumps(saved))
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else []), *more]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else subfolder,
         "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]  # fmt: skip
    for module in modules[1:]:
        (folder / module["path"]).mkdir()
    pooling = {"word_embedding_dimension": 12} | (pooling or {})
    if not any(name.startswith("pooling_mode") for name in pooling):
        pooling["pooling_mode"] = "mean"
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    (folder / "modules.json").write_text(json.dumps(modules))
    if sentence is not None:
        (inner / sentence_name).write_text(json.dumps(sentence))
    if defaults is not None:
        (folder / "config_sentence_transformers.json").write_text(json.dumps(defaults))
    return inner


def save_roberta(folder):
    """Save a RoBERTa with random weights and a byte-level tokenizer."""
    bpe = tokenizers.ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    bpe.train_from_iterator(TEXTS * 3, 300, special_tokens=special, show_progress=False)
    state = json.loads(bpe.to_str())["model"]
    merges: Any = [tuple(pair) for pair in state["merges"]]
    transformers.RobertaTokenizer(vocab=state["vocab"], merges=merges).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.RobertaConfig(
        vocab_size=len(state["vocab"]), hidden_size=12, num_hidden_layers=2, num_attention_heads=3,
        intermediate_size=20, max_position_embeddings=26, type_vocab_size=1, initializer_range=0.3,
    )  # fmt: skip
    transformers.RobertaModel(config).save_pretrained(folder)


def reference(
    folder, prompt="", skip=False, cls=False, lower=False, tokens=24, kept=12, unit=False
):
    """Return what `SentenceTransformer(folder).encode(TEXTS)` computes, [N, D], with transformers."""
    model = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    vectors = []
    for text in TEXTS:
        texts = [
            prompt.lower() if lower else prompt,
            (prompt + text).lower() if lower else prompt + text,
        ]
        of_prompt, ids = (
            tokenizer(x, truncation=True, max_length=tokens)["input_ids"] for x in texts
        )
        with torch.no_grad():
            states = model(torch.tensor([ids])).last_hidden_state[0].numpy()
        own = states[len(of_prompt) - 1 :] if skip else states
        first = (own if len(own) else states)[0]
        vector = first if cls else own.sum(0) / max(len(own), 1)
        vectors.append((vector / np.linalg.norm(vector) if unit else vector)[:kept])
    return np.stack(vectors)


@pytest.mark.parametrize("name", VARIANTS)
def test_settings_change_vectors_as_in_sentence_transformers(tmp_path, name):
    """Also after an export, and where sentence-transformers is installed, by itself."""
    files, computed = VARIANTS[name]
    inner = write(tmp_path / "theirs", **files)
    expected = reference(inner, **computed)
    export(str(tmp_path / "theirs"), tmp_path / "again")
    for folder in (tmp_path / "theirs", tmp_path / "again"):
        vectors = bert_jax.load(folder).embed(TEXTS)
        np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-6)
    if not importlib.util.find_spec("sentence_transformers"):
        return
    library = importlib.import_module("sentence_transformers")
    for folder in (tmp_path / "theirs", tmp_path / "again"):
        vectors = library.SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
        np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("files", "key"),
    [
        ({"sentence": {"processor_kwargs": {"x": 1}}}, "--allow-unexpected processor_kwargs"),
        ({"sentence": {"do_lower_case": "yes"}}, "do_lower_case is 'yes', not true or false"),
        ({"defaults": {"default_prompt_name": "x"}}, "'x', which is not in prompts"),
        ({"defaults": {"truncate_dim": -1}}, "truncate_dim"),
        ({"pooling": {"pooling_mode": ["cls", "mean"]}}, "pools by cls, mean"),
        ({"pooling": {"pooling_mode_max_tokens": True}}, "--allow-unexpected Pooling"),
        ({"more": ["Dense"]}, "--allow-unexpected Dense"),
    ],
)
def test_unsupported_setting_is_refused_by_name(tmp_path, files, key):
    """Some may be ignored."""
    write(tmp_path / "theirs", **files)
    assert key in refusal(tmp_path / "theirs")
    _, is_advised, name = key.partition("--allow-unexpected ")
    if is_advised:
        imported = source.read(str(tmp_path / "theirs"), allow_unexpected=[name])
        assert imported.config.embed.pooling == "mean"


def test_tokenizer_that_sentence_transformers_lowercases(tmp_path):
    """Its tokenizer.json lowercases; as in transformers, tokenizer_config.json overrides that."""
    inner = write(tmp_path / "theirs")
    file, saved = inner / "tokenizer.json", inner / "tokenizer_config.json"
    tokenizer = json.loads(file.read_text())
    steps = [{"type": "Lowercase"}, tokenizer["normalizer"] | {"lowercase": False}]
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": steps}
    file.write_text(json.dumps(tokenizer))
    vectors = bert_jax.load(tmp_path / "theirs").embed(TEXTS)
    np.testing.assert_allclose(vectors, reference(inner), rtol=0, atol=1e-6)
    saved.write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    vectors = bert_jax.load(tmp_path / "theirs").embed(TEXTS)
    np.testing.assert_allclose(vectors, reference(inner, lower=True), rtol=0, atol=1e-6)


def test_command_line_applies_the_settings(tmp_path):
    defaults = {"prompts": {"q": "a cat "}, "default_prompt_name": "q", "truncate_dim": 7}
    inner = write(tmp_path / "theirs", defaults=defaults)
    (tmp_path / "texts.txt").write_text("".join(f"{text}\n" for text in TEXTS if text))
    for options, prompt in ([], "a cat "), (["--prompt", ""], ""):
        out = tmp_path / f"{len(options)}.npy"
        argv = ["embed", "--init", tmp_path / "theirs", "--out", out, *options]
        assert cli.main([*map(str, argv), str(tmp_path / "texts.txt")]) == 0
        expected = reference(inner, prompt, kept=7)[[bool(text) for text in TEXTS]]
        np.testing.assert_allclose(np.load(out), expected, rtol=0, atol=1e-6)


def test_subfolder_is_downloaded_from_the_hub(tmp_path, monkeypatch):
    folder, cache = tmp_path / "theirs", tmp_path / "cache"
    write(folder, "0_Transformer", sentence={"max_seq_length": 10}, pooling={"pooling_mode": "cls"})
    names = [str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()]

    def download(name, file, revision):
        (cache / file).parent.mkdir(parents=True, exist_ok=True)
        return shutil.copy(folder / file, cache / file)

    siblings = [types.SimpleNamespace(rfilename=name) for name in names]
    info = types.SimpleNamespace(siblings=siblings)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: info)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert source.open_vocabulary("someone/tiny").tokens == WORDS
    assert not (cache / "0_Transformer" / "model.safetensors").exists()
    vectors = bert_jax.load("someone/tiny").embed(TEXTS)
    expected = reference(folder / "0_Transformer", cls=True, tokens=10)
    np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-6)
