"""ONNX graphs of runs in ONNX Runtime; test_families.py compares those of all classes with transformers."""

import sys

import numpy as np
import onnx
import onnxruntime
import pytest

import bert_jax
from bert_jax import cli, convert
from bert_jax.convert.export import export
from tests.helpers.checkpoints import WORDS, error_of, small_run


def session(path):
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("causal", [False, True])
def test_random_texts_of_any_shape_give_the_outputs_of_jax(tmp_path, capsys, causal):
    run = small_run(
        tmp_path / "run", layers=3, next_sentence=not causal, causal=causal, vocab_multiple=8
    )
    options = ["--init", str(run), "--heads", "masked_lm", "--out", str(tmp_path / "out")]
    assert cli.main(["export", *options, "--format", "onnx-int8"]) == 0
    assert "outputs differ by up to" in capsys.readouterr().out
    onnx.checker.check_model(tmp_path / "out" / "model.onnx", full_check=True)
    exact, rounded = (session(tmp_path / "out" / f"model{x}.onnx") for x in ("", "_quantized"))
    model, rng = bert_jax.load(run), np.random.default_rng(0)
    apply = model.apply
    for size, length in ((1, 2), (4, 17), (3, 22)):
        texts = [" ".join(rng.choice(WORDS[5:], rng.integers(length))) for _ in range(size)]
        encoded = [model.vocabulary.encode(text)[:24] for text in texts]
        width = max(map(len, encoded))
        mask = np.array([[i < len(ids) for i in range(width)] for ids in encoded])
        ids = np.zeros(mask.shape, np.int64)
        ids[mask] = np.concatenate(encoded)
        inputs = {"input_ids": ids, "attention_mask": mask * 1, "token_type_ids": ids * 0}
        (got,), (lossy,) = (x.run(["logits"], inputs) for x in (exact, rounded))
        assert got.shape == (*ids.shape, len(WORDS))
        for row, text in enumerate(texts):
            n = len(encoded[row])
            expected = np.asarray(apply(model.params, model.encode([text])).masked_lm)[
                0, :n, : len(WORDS)
            ]
            np.testing.assert_allclose(got[row, :n], expected, rtol=0, atol=1e-5)
        assert 0 < np.abs(got - lossy)[mask].max() < 0.1 * np.abs(got).max()
    constants = onnx.load(tmp_path / "out" / "model_quantized.onnx").graph.initializer
    assert any(x.data_type == onnx.TensorProto.INT8 for x in constants)


def test_missing_packages_are_named(tmp_path, monkeypatch):
    run = small_run(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.delitem(sys.modules, "bert_jax.convert.onnx_graph", raising=False)
    monkeypatch.delattr(convert, "onnx_graph", raising=False)
    assert "[onnx]" in error_of(export, str(run), tmp_path / "out", kind="onnx")
    assert not (tmp_path / "out").exists()
