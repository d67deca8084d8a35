"""Byte-level BPE and unigram vocabularies that are trained here; the same bytes of all kinds."""

import json
import os
import subprocess

import numpy as np
import pytest
import transformers

import bert_jax
from bert_jax import cli
from bert_jax.convert.export import export
from bert_jax.convert.tokenizer import tokenizer_files
from bert_jax.data import subwords, vocabulary_files
from tests.helpers.checkpoints import error_of
from tests.helpers.runs import arguments, python


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_pretraining_from_scratch_with_whole_words_and_export(kind, corpus, tmp_path, capsys):
    command = ["vocab", "--kind", kind, "--size", "330", "--out", str(tmp_path / "vocab")]
    assert cli.main([*command, *["--cased"] * (kind == "bpe"), str(corpus)]) == 0
    ours = vocabulary_files.load(tmp_path / "vocab")
    assert ours.special == ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    assert ours.has_token_types
    rows = tmp_path / "rows"
    sizes = ["--tokens", "32", "--sequences", "2", "--workers", "1"]
    command = ["prepare", "--vocab", str(tmp_path / "vocab"), "--out", str(rows)]
    assert cli.main([*command, *sizes, str(corpus)]) == 0
    config = arguments("steps=2", "masking.whole_word=true")
    run = tmp_path / "run"
    assert cli.main(["pretrain", *config, "--rows", str(rows), "--workdir", str(run)]) == 0
    export(str(run), tmp_path / "out")
    assert bert_jax.load(tmp_path / "out").vocabulary == ours
    without = json.loads(tokenizer_files(ours, 32, segments=False)["tokenizer_config.json"])
    assert without["model_input_names"] == ["input_ids", "attention_mask"]
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    pair = ("The River résumé (much),  of a", "中国 didn't")
    encoded = theirs(*pair)
    assert encoded["input_ids"] == ours.encode(*pair)
    assert set(encoded["token_type_ids"]) == {0, 1}
    assert theirs.mask_token_id == ours.mask_id
    if kind == "bpe":  # loses nothing
        assert theirs.decode(ours.encode(pair[0])[1:-1]) == pair[0]
    model = transformers.AutoModelForPreTraining.from_pretrained(tmp_path / "out")
    assert model(**theirs(*pair, return_tensors="pt")).prediction_logits.shape[-1] == len(ours)


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_training_is_deterministic(kind, corpus, tmp_path):
    """Hash seeds and thread counts differ between processes; many rare words are tied."""
    words = np.random.default_rng(0).integers(97, 123, (3000, 6)).astype(np.uint8)
    lines = [bytes(word).decode() for word in words]
    text = tmp_path / "text.txt"
    text.write_text("\n".join([*lines, *lines, corpus.read_text()]))
    digests = set()
    for threads in "1", "3":
        out = tmp_path / threads
        environment = {**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        command = python("vocab", "--kind", kind, "--size", "900", "--out", out, f"google:{text}")
        subprocess.run(command, env=environment, check=True)
        digests.add(vocabulary_files.load(out).sha256)
    assert len(digests) == 1


def test_small_sizes_and_folders_in_use_are_refused(corpus, tmp_path):
    assert "at least 300" in error_of(
        subwords.train, "bpe", [str(corpus)], tmp_path / "v", size=260
    )
    (tmp_path / "file").touch()
    assert "not empty" in error_of(subwords.train, "bpe", [str(corpus)], tmp_path)
