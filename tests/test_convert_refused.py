"""Refused conversions: unsupported architectures, inconsistent checkpoints and damaged files."""

import contextlib
import json
import os
import pickle
import shutil
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as torch_save

from bert_jax import cli
from bert_jax.config.schema import ModelConfig
from bert_jax.convert import source
from bert_jax.convert.export import export
from bert_jax.convert.families import BERT
from bert_jax.data.wordpiece import Vocabulary
from bert_jax.errors import UserError
from tests.helpers.checkpoints import (
    TF1,
    WORDS,
    random_params,
    refusal,
    save_pretrained,
    torch_model,
    write_run,
)


def edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("albert", "AlbertModel"),
        ("mpnet", "MPNetForMaskedLM"),
        ("deberta-v2", "DebertaV2Model"),
        ("xlm-roberta-xl", "XLMRobertaXLModel"),
        ("bert-generation", "BertGenerationEncoder"),
    ],
)
def test_unsupported_architecture_is_named_in_the_error(hf_folder, kind, name):
    edit(hf_folder, model_type=kind, architectures=[name])
    output = refusal(hf_folder)
    assert kind in output
    assert name in output


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({"is_decoder": True}, "is_decoder is True"),
        ({"hidden_act": "quick_gelu"}, "hidden_act is 'quick_gelu'; supported: gelu"),
        ({"num_hidden_layers": 3}, "num_hidden_layers is 3, but the weights have 2"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, but the weights have 2"),
        ({"num_attention_heads": 5}, "12 is not a multiple of num_attention_heads 5"),
        ({"hidden_size": "12"}, "hidden_size is '12'; expected int"),
        ({"hidden_size": -12}, "hidden_size is -12"),
        ({"intermediate_size": 21}, "intermediate.dense.weight is [20, 12], not [21, 12]"),
        ({"vocab_size": 27}, "word_embeddings.weight is [26, 12], not [27, 12]"),
        ({"layer_norm_eps": float("nan")}, "layer_norm_epsilon is nan"),
        ({"hidden_dropout_prob": 2.0}, "dropout is 2.0"),
    ],
)
def test_unsupported_or_inconsistent_config_is_refused(hf_folder, changes, expected):
    edit(hf_folder, **changes)
    assert expected in refusal(hf_folder)


def test_missing_and_unexpected_tensors_are_named(hf_folder):
    path = hf_folder / "model.safetensors"
    tensors = load_file(path)
    lost = "bert.encoder.layer.1.output.dense.bias"
    save_file({k: v for k, v in tensors.items() if k != lost}, path)
    assert f"missing: {lost}" in refusal(hf_folder)
    save_file({**tensors, "adapter.down": np.ones(3), "adapter.up": np.ones(3)}, path)
    output = refusal(hf_folder)
    assert "unexpected: adapter.down, adapter.up; ignore them with --allow-unexpected" in output
    got = source.read(str(hf_folder), allow_unexpected=["adapter.*"])
    assert got.about["left_out"] == ["adapter.down", "adapter.up"]
    save_file({**tensors, lost: np.full(12, np.nan, np.float32)}, path)
    assert f"NaN or infinite values: {lost}" in refusal(hf_folder)


def test_all_problems_are_reported_in_one_error(hf_folder, tmp_path):
    path, short = hf_folder / "model.safetensors", tmp_path / "short.txt"
    save_file({**load_file(path), "adapter.down": np.ones(3)}, path)
    short.write_text("\n".join(WORDS[:-2]))
    output = refusal(hf_folder, vocab=str(short))
    assert "unexpected: adapter.down" in output
    assert f"; also, the vocabulary has {len(WORDS) - 2} tokens" in output


def test_dtype_without_numpy_equivalent_is_refused(hf_folder):
    path = hf_folder / "model.safetensors"
    tensors = {name: torch.from_numpy(value) for name, value in load_file(path).items()}
    name = "bert.pooler.dense.bias"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    torch_save(tensors, path)
    assert f"types that are not supported: {name} (F8_E4M3)" in refusal(hf_folder)


def test_named_pipe_as_config_json_does_not_block(hf_folder):
    (hf_folder / "config.json").unlink()
    os.mkfifo(hf_folder / "config.json")
    assert "it has no config.json" in refusal(hf_folder)


def test_export_follows_a_symlink_to_an_empty_folder(hf_folder, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    export(str(hf_folder), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "config.json").exists()


@pytest.mark.parametrize("part", ["pooler", "masked_lm", "next_sentence"])
def test_allow_missing_permits_an_absent_part(hf_folder, part):
    path = hf_folder / "model.safetensors"
    starts = BERT.parts[part]
    kept = {k: v for k, v in load_file(path).items() if not k.startswith(starts)}
    if part == "pooler":
        kept = {k: v for k, v in kept.items() if "seq_relationship" not in k}
    save_file(kept, path)
    assert f"--allow-missing {part}" in refusal(hf_folder)
    got = source.read(str(hf_folder), allow_missing=[part, "next_sentence"])
    there = {"pooler": got.config.model.has_pooler, "masked_lm": got.config.model.masked_lm}
    there["next_sentence"] = got.config.model.next_sentence
    assert not there[part]
    assert part not in got.params


def test_vocabulary_size_must_match_the_embeddings(hf_folder, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("\n".join(WORDS[:-2]))
    output = refusal(hf_folder, vocab=str(short))
    assert f"has {len(WORDS) - 2} tokens, the embeddings {len(WORDS)} rows" in output
    assert "--allow-missing tokens" in output
    padded = source.read(str(hf_folder), vocab=str(short), allow_missing=["tokens"]).vocabulary
    assert len(padded) == len(WORDS)
    assert padded.encode("the cat") == Vocabulary(WORDS, True).encode("the cat")
    long = tmp_path / "long.txt"
    long.write_text("\n".join([*WORDS, "more"]))
    assert f"has {len(WORDS) + 1} tokens" in refusal(
        hf_folder, vocab=str(long), allow_missing=["tokens"]
    )
    for name in ("vocab.txt", "tokenizer.json"):
        (hf_folder / name).unlink(missing_ok=True)
    assert "neither vocab.txt nor tokenizer.json found; give one with --vocab" in refusal(hf_folder)


def test_unsupported_tokenizer_is_refused(hf_folder):
    path = hf_folder / "tokenizer.json"
    values = json.loads(path.read_text())
    for change, expected in (
        ({"model": {**values["model"], "type": "BPE"}}, "its model is BPE"),
        ({"normalizer": {"type": "NFC"}}, "its normalizer is NFC"),
        ({"pre_tokenizer": None}, "pre_tokenizer is not BertPreTokenizer"),
        ({"model": {**values["model"], "continuing_subword_prefix": "@@"}}, "is '@@'"),
        ({"model": []}, "tokenizer.json is not BERT's"),
    ):
        path.write_text(json.dumps({**values, **change}))
        assert expected in refusal(hf_folder)
    path.write_text("{")
    assert "tokenizer.json is not BERT's" in refusal(hf_folder)


def test_unsupported_vocabulary_in_tokenizer_json_is_refused(hf_folder):
    path = hf_folder / "tokenizer.json"
    values = json.loads(path.read_text())
    entry = {"id": 3, "content": "the", "special": False}
    path.write_text(json.dumps({**values, "added_tokens": [entry]}))
    assert "added tokens, which are not supported: the" in refusal(hf_folder)
    assert len(source.read(str(hf_folder), allow_missing=["added_tokens"]).vocabulary) == len(WORDS)
    vocab = {("x\ny" if k == "mat" else k): v for k, v in values["model"]["vocab"].items()}
    path.write_text(json.dumps({**values, "model": {**values["model"], "vocab": vocab}}))
    assert "a token that contains a line break" in refusal(hf_folder)
    path.write_text(json.dumps(values))
    (hf_folder / "vocab.txt").write_text("\n".join(reversed(WORDS)))
    assert "contain different vocabularies" in refusal(hf_folder)


@pytest.mark.parametrize("value", [5, [["x"]], "BertModel", {"a": 1}])
def test_malformed_architectures_field_is_refused(hf_folder, value):
    edit(hf_folder, architectures=value)
    assert "architectures is" in refusal(hf_folder)


def test_unusual_sources_are_read_or_refused_in_one_line(hf_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("", ".", "/", "~nobody/x", "x" * 300, "a\0b"):
        status = cli.main(["import", name, "--out", str(tmp_path / "o")])
        output = capsys.readouterr().err.strip()
        assert (status, len(output.splitlines())) == (cli.EXIT_USER_ERROR, 1), (name, output)
    assert cli.main(["import", str(hf_folder), "--out", "/"]) == cli.EXIT_USER_ERROR
    assert "a folder: --revision applies to" in refusal(hf_folder, revision="main")
    # Hugging Face's files take precedence over Google's, which are incomplete here.
    shutil.copy(TF1 / "bert_model.ckpt.index", hf_folder)
    assert source.read(str(hf_folder)).about["format"] == "Hugging Face"
    (hf_folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "a Git LFS pointer" in refusal(hf_folder)
    shutil.rmtree(hf_folder / "tokenizer.json", ignore_errors=True)
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as archive:
        for file in ("bert_config.json", "bert_model.ckpt.index", "vocab.txt"):
            archive.write(TF1 / file, file)
        archive.write(
            TF1 / "bert_model.ckpt.data-00000-of-00001", "bert_model.ckpt.data-00000-of-00001"
        )
        archive.writestr("__MACOSX/._bert_model.ckpt.index", b"")
    assert source.read(str(tmp_path / "z.zip")).config.model.layers == 2
    data = bytearray((tmp_path / "z.zip").read_bytes())
    at = data.index(b"[UNK]")
    data[at] ^= 1
    (tmp_path / "z.zip").write_bytes(data)
    assert "the zip is damaged" in refusal(tmp_path / "z.zip")


def test_damaged_safetensors_error_names_file_and_tensor(hf_folder, run_folder, tmp_path):
    path = hf_folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    output = refusal(hf_folder)
    assert "model.safetensors is damaged: truncated in " in output
    last = max(
        (v["data_offsets"][1], k)
        for k, v in json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).items()
        if k != "__metadata__"
    )[1]
    assert last in output
    path.write_bytes(data[:50])
    assert "is truncated" in refusal(hf_folder)
    path.write_bytes(b"")
    assert "is damaged" in refusal(hf_folder)
    # Exports of bert_jax carry checksums.
    export(str(run_folder), tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    assert "fails its checksum" in refusal(tmp_path / "out")


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_random_damage_raises_only_user_errors(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("spoilt") / "m"
    save_pretrained(torch_model(num_hidden_layers=1, hidden_size=3), folder)
    names = ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"]
    path = folder / data.draw(st.sampled_from(names))
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(len(content), 3000) - 1))
        content[at] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.sampled_from([len(content), len(content) // 2]))]
    path.write_bytes(content)
    with contextlib.suppress(UserError):
        source.read(str(folder))


def test_pickle_that_would_run_code_is_refused(hf_folder, tmp_path):
    class Trap:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/ran",)

    (hf_folder / "model.safetensors").unlink()
    torch.save({"x": Trap()}, hf_folder / "pytorch_model.bin")
    assert "system" in refusal(hf_folder)
    (hf_folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    refusal(hf_folder)
    assert not (tmp_path / "ran").exists()


def test_shard_index_cannot_name_files_outside_its_folder(hf_folder, tmp_path):
    shutil.copy(hf_folder / "model.safetensors", tmp_path / "secret.safetensors")
    (hf_folder / "model.safetensors").unlink()
    index = hf_folder / "model.safetensors.index.json"
    for name in ("../secret.safetensors", str(tmp_path / "secret.safetensors"), "..", ""):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        assert "which is not a file in the same folder" in refusal(hf_folder)
    index.write_text(json.dumps({"weight_map": {"a": "absent.safetensors"}}))
    assert "absent.safetensors is missing" in refusal(hf_folder)


def test_failed_conversion_leaves_and_overwrites_no_files(hf_folder, run_folder, tmp_path, capsys):
    out = tmp_path / "out"

    def run(*argv):
        status = cli.main([str(a) for a in argv])
        return status, capsys.readouterr().err.strip()

    (hf_folder / "model.safetensors").write_bytes(b"nothing")
    status, output = run("import", hf_folder, "--out", out)
    assert (status, "\n" in output) == (cli.EXIT_USER_ERROR, False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["theirs"]
    out.mkdir()
    (out / "mine").write_text("mine")
    for verb in (("import", TF1 / "bert_model.ckpt"), ("export", "--workdir", run_folder)):
        status, output = run(*verb, "--out", out)
        assert status == cli.EXIT_USER_ERROR
        assert output.endswith("exists: choose another folder or remove it first")
    assert [p.name for p in out.iterdir()] == ["mine"]
    status, output = run("import", run_folder, "--out", tmp_path / "again")
    assert "already: use it as it is" in output
    status, output = run("import", tmp_path / "nowhere" / "at" / "all", "--out", tmp_path / "again")
    assert "no such file or folder" in output
    status, output = run("import", out, "--out", tmp_path / "again")
    assert "no checkpoint: it has no config.json" in output


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"final_norm": True}, "config.model.final_norm is True"),
        ({"position_kind": "rope"}, "config.model.position_kind is 'rope'"),
        ({"norm_position": "pre"}, "config.model.norm_position is 'pre'"),
        ({"decoder_bias": False}, "config.model.decoder_bias is False"),
        ({"transform": False}, "config.model.transform is False"),
        ({"segments": 0}, "config.model.segments is 0"),
    ],
)
def test_config_without_transformers_equivalent_is_not_exported(tmp_path, changes, expected):
    config = ModelConfig(
        layers=1, hidden=4, heads=2, feed_forward=4, vocab_size=9, positions=8, **changes
    )
    run = write_run(tmp_path / "run", config, random_params(config))
    with pytest.raises(UserError, match=expected):
        export(str(run), tmp_path / "out")
    assert not (tmp_path / "out").exists()
