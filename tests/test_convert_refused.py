"""Refused conversions: unsupported architectures, inconsistent checkpoints and damaged files."""

import json
import os
import shutil
import zipfile

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as torch_save

from bert_jax import cli
from bert_jax.convert import source
from bert_jax.convert.export import export
from bert_jax.convert.families import BERT
from bert_jax.convert.huggingface import huggingface_config
from bert_jax.data.vocabulary import Vocabulary
from bert_jax.errors import UserError
from bert_jax.storage import files
from tests.helpers.checkpoints import (
    TF1,
    WORDS,
    error_of,
    export_refusal,
    refusal,
    small_config,
    small_run,
)
from tests.helpers.runs import refused


def edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"model_type": "albert", "architectures": ["AlbertModel"]}, "AlbertModel"),
        ({"architectures": [["x"]]}, "architectures"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"is_decoder": True}, "is_decoder"),
        ({"hidden_act": "quick_gelu"}, "hidden_act"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_attention_heads": 5}, "num_attention_heads"),
        ({"hidden_size": -12}, "hidden_size"),
        ({"vocab_size": 27}, "word_embeddings.weight"),
        ({"layer_norm_eps": float("nan")}, "norm.epsilon"),
    ],
)
def test_unsupported_or_inconsistent_config_is_refused(hf_folder, changes, key):
    edit(hf_folder, **changes)
    assert key in refusal(hf_folder)


def test_missing_and_unexpected_tensors_are_named(hf_folder, tmp_path):
    path = hf_folder / "model.safetensors"
    tensors = load_file(path)
    lost = "bert.encoder.layer.1.output.dense.bias"
    save_file({k: v for k, v in tensors.items() if k != lost}, path)
    assert f"missing: {lost}" in refusal(hf_folder)
    save_file({**tensors, lost: np.full(12, np.nan, np.float32)}, path)
    assert f"NaN or infinite values: {lost}" in refusal(hf_folder)
    save_file({**tensors, "adapter.down": np.ones(3), "adapter.up": np.ones(3)}, path)
    assert "unexpected: adapter.down, adapter.up" in refusal(hf_folder)
    got = source.read(str(hf_folder), allow_unexpected=["adapter.*"])
    assert got.about["left_out"] == ["adapter.down", "adapter.up"]
    # All problems are reported in one error.
    (tmp_path / "short.txt").write_text("\n".join(WORDS[:-2]))
    output = refusal(hf_folder, vocab=str(tmp_path / "short.txt"))
    assert "adapter.down" in output
    assert f"{len(WORDS) - 2} tokens" in output


def test_dtype_without_numpy_equivalent_is_refused(hf_folder):
    path = hf_folder / "model.safetensors"
    tensors = {name: torch.from_numpy(value) for name, value in load_file(path).items()}
    name = "bert.pooler.dense.bias"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    torch_save(tensors, path)
    assert f"{name} (F8_E4M3)" in refusal(hf_folder)


def test_named_pipe_as_config_json_does_not_block(hf_folder):
    (hf_folder / "config.json").unlink()
    os.mkfifo(hf_folder / "config.json")
    assert "config.json" in refusal(hf_folder)


def test_export_follows_a_symlink_to_an_empty_folder(hf_folder, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    export(str(hf_folder), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "config.json").exists()


def test_links_in_place_of_working_files_and_folders_are_not_followed(tmp_path):
    kept = tmp_path / "elsewhere" / "kept"
    kept.parent.mkdir()
    kept.write_text("text")
    for name in (".new.partial", ".new.00000000.partial", "run"):
        (tmp_path / name).symlink_to(kept.parent)
    with files.new_folder(tmp_path / "new"):
        assert list(kept.parent.iterdir()) == [kept]
    with files.lock_folder(tmp_path / "run"):  # a folder that the user has put on another disk
        (kept.parent / files.LOCK).unlink()
    (kept.parent / files.LOCK).symlink_to(kept)
    with pytest.raises(UserError, match=files.LOCK), files.lock_folder(tmp_path / "run"):
        pass
    assert kept.read_text() == "text"


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
    short, long = tmp_path / "short.txt", tmp_path / "long.txt"
    short.write_text("\n".join(WORDS[:-2]))
    assert "--allow-missing tokens" in refusal(hf_folder, vocab=str(short))
    padded = source.read(str(hf_folder), vocab=str(short), allow_missing=["tokens"]).vocabulary
    assert len(padded) == len(WORDS)
    assert padded.encode("the cat") == Vocabulary(WORDS, True).encode("the cat")
    long.write_text("\n".join([*WORDS, "more"]))
    output = refusal(hf_folder, vocab=str(long), allow_missing=["tokens"])
    assert f"{len(WORDS) + 1} tokens" in output
    for name in ("vocab.txt", "tokenizer.json"):
        (hf_folder / name).unlink(missing_ok=True)
    assert "--vocab" in refusal(hf_folder)


def test_unsupported_tokenizer_is_refused(hf_folder):
    path = hf_folder / "tokenizer.json"
    values = json.loads(path.read_text())
    model = values["model"]
    vocab = {("x\ny" if k == "mat" else k): v for k, v in model["vocab"].items()}
    for change, key in (
        ({"model": {**model, "type": "BPE"}}, "BPE"),
        ({"normalizer": {"type": "NFC"}}, "NFC"),
        ({"pre_tokenizer": None}, "pre_tokenizer"),
        ({"model": {**model, "continuing_subword_prefix": "@@"}}, "@@"),
        ({"model": []}, "tokenizer.json"),
        ({"model": {**model, "vocab": vocab}}, "line break"),
        ({"added_tokens": [{"id": 3, "content": "the", "special": False}]}, "added tokens"),
    ):
        path.write_text(json.dumps({**values, **change}))
        assert key in refusal(hf_folder)
    assert len(source.read(str(hf_folder), allow_missing=["added_tokens"]).vocabulary) == len(WORDS)
    path.write_text("{")
    assert "tokenizer.json" in refusal(hf_folder)
    path.write_text(json.dumps(values))
    (hf_folder / "vocab.txt").write_text("\n".join(reversed(WORDS)))
    assert "vocab.txt" in refusal(hf_folder)


def test_unusual_sources_are_read_or_refused_in_one_line(hf_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("", ".", "/", "~nobody/x", "x" * 300, "a\0b"):
        status = cli.main(["import", name, "--out", str(tmp_path / "o")])
        output = capsys.readouterr().err.strip()
        assert (status, len(output.splitlines())) == (cli.EXIT_USER_ERROR, 1), (name, output)
    assert cli.main(["import", str(hf_folder), "--out", "/"]) == cli.EXIT_USER_ERROR
    assert "--revision" in refusal(hf_folder, revision="main")
    # Hugging Face's files take precedence over Google's, which are incomplete here.
    shutil.copy(TF1 / "bert_model.ckpt.index", hf_folder)
    assert source.read(str(hf_folder)).about["format"] == "Hugging Face"
    (hf_folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "Git LFS" in refusal(hf_folder)
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as archive:
        for file in (*TF1.glob("bert*"), TF1 / "vocab.txt"):
            archive.write(file, file.name)
        archive.writestr("__MACOSX/._bert_model.ckpt.index", b"")
    assert source.read(str(tmp_path / "z.zip")).config.model.layers == 2
    data = bytearray((tmp_path / "z.zip").read_bytes())
    data[data.index(b"[UNK]")] ^= 1
    (tmp_path / "z.zip").write_bytes(data)
    assert "damaged" in refusal(tmp_path / "z.zip")


def test_damaged_safetensors_error_names_file_and_tensor(hf_folder, run_folder, tmp_path):
    path = hf_folder / "model.safetensors"
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    header.pop("__metadata__")
    last = max(header, key=lambda name: header[name]["data_offsets"])
    path.write_bytes(data[:-1])
    assert f"model.safetensors is damaged: truncated in {last}" in refusal(hf_folder)
    for content in (data[:50], b""):
        path.write_bytes(content)
        assert "model.safetensors" in refusal(hf_folder)
    # Exports of bert_jax carry checksums.
    export(str(run_folder), tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    assert "checksum" in refusal(tmp_path / "out")


def test_missing_shard_is_named(hf_folder):
    index = {"weight_map": {"a": "absent.safetensors"}}
    (hf_folder / "model.safetensors").rename(hf_folder / "other.safetensors")
    (hf_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "absent.safetensors" in refusal(hf_folder)


def test_failed_conversion_leaves_and_overwrites_no_files(hf_folder, run_folder, tmp_path, capsys):
    out, again = tmp_path / "out", tmp_path / "again"
    (hf_folder / "model.safetensors").write_bytes(b"nothing")
    refused(capsys, "import", hf_folder, "--out", out)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["theirs"]
    out.mkdir()
    (out / "mine").write_text("mine")
    for verb in (("import", TF1 / "bert_model.ckpt"), ("export", "--workdir", run_folder)):
        assert str(out) in refused(capsys, *verb, "--out", out)
    assert [p.name for p in out.iterdir()] == ["mine"]
    for source_, key in (
        (run_folder, "already"), (tmp_path / "nowhere" / "at" / "all", "nowhere"),
        (out, "config.json"),
    ):  # fmt: skip
        assert key in refused(capsys, "import", source_, "--out", again)
    assert not again.exists()


CLASSIFIER = {
    "masked_lm": False,
    "next_sentence": False,
    "head.kind": "sequence",
    "head.labels": ("a", "b"),
}


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"position_kind": "rope"}, "position_kind"),
        ({"transform": False}, "transform"),
        ({"segments": 0}, "segments"),
        ({"embedding_size": 4}, "embedding_size"),
        ({"pooler_activation": "relu"}, "pooler_activation"),
        ({"electra.replaced_token": True}, "electra.replaced_token"),
        ({"family": "roberta"}, "next_sentence"),
        ({"family": "distilbert", "next_sentence": False}, "segments"),
        ({"family": "electra", "next_sentence": False, "activation": "relu"}, "activation"),
        (CLASSIFIER | {"head.lstm_layers": 1}, "head.lstm_layers"),
        (CLASSIFIER | {"head.features": "last"}, "head.features"),
        (CLASSIFIER | {"causal": True}, "causal"),
    ],
)
def test_config_without_transformers_equivalent_is_not_exported(tmp_path, changes, key):
    message = error_of(huggingface_config, small_config(**changes), Vocabulary(WORDS, True))
    assert f"config.model.{key} is" in message
    if "head.kind" in changes:  # the encoder can be exported
        run = small_run(tmp_path / "run", **changes)
        assert export_refusal(run, tmp_path / "out") == message
        export(str(run), tmp_path / "out", heads="none")
        assert source.read(str(tmp_path / "out")).params.keys() == {"embeddings", "encoder"}
