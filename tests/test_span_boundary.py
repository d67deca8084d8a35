"""SpanBERT's span-boundary objective: loss against a NumPy reference, size, FLOPs, and export."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
import transformers

from bert_jax.config.schema import MaskingConfig
from bert_jax.config.sizes import model_size
from bert_jax.convert.export import export
from bert_jax.data import rows
from bert_jax.model.bert import Bert, shapes
from bert_jax.model.flops import flops_per_row, parameter_count
from bert_jax.objectives.masked_lm import MaskedLM
from tests.helpers.checkpoints import random_params, write_run

VOCAB, T = 40, 32
CONFIG = dataclasses.replace(
    model_size("L1-H16-A2"), vocab_size=VOCAB, vocab_multiple=32, positions=T, span_boundary=True,
    dropout=0.0, attention_dropout=0.0,
)  # fmt: skip


def layer(x, params, name):
    """Apply a dense layer, GELU and LayerNorm (section 3.2, equations for h1 and h2)."""
    x = x @ params[name]["kernel"] + params[name]["bias"]
    x = 0.5 * x * (1 + scipy.special.erf(x / np.sqrt(2)))
    x = (x - x.mean()) / np.sqrt(x.var() + 1e-12)
    return x * params[f"{name}_norm"]["scale"] + params[f"{name}_norm"]["bias"]


def make(tokens, length, a_length, config=CONFIG, **masking):
    """Return the objective and the inputs of a batch of rows."""
    row_format = rows.RowFormat(T, length.shape[1], VOCAB)
    objective = MaskedLM(config, MaskingConfig(**masking), row_format, 3, np.zeros(VOCAB, bool))
    batch = {"tokens": tokens, "length": length, "a_length": a_length, "label": length * 0 - 1}
    return objective, jax.jit(objective.make_inputs)(batch, jax.random.key(1))


def test_loss_matches_the_paper():
    """Rows are packed: the boundary tokens of a span are in its own sequence."""
    rng = np.random.default_rng(0)
    length = np.array([[12, 9, 11], [32, 0, 0], [20, 5, 0], [30, 0, 0]], np.int32)
    a_length = np.array([[5, 9, 6], [32, 0, 0], [11, 5, 0], [4, 0, 0]], np.int32)
    tokens = rng.integers(5, VOCAB, (4, T)).astype(np.int32)
    masking = {"rate": 0.4, "span": 6, "span_p": 0.1}
    objective, inputs = make(tokens, length, a_length, **masking)
    params = jax.tree.map(jnp.asarray, random_params(CONFIG))
    encode = jax.jit(functools.partial(Bert(CONFIG).apply, outputs=()))
    hidden = np.array(encode({"params": params}, inputs.masked.tokens, inputs.layout).hidden)
    segment_ids = np.array(inputs.layout.segment_ids)
    arrays = jax.tree.map(np.array, params)
    head, table = arrays["span_boundary"], arrays["embeddings"]["word"]["embedding"]
    losses, longest = [], 0
    for row in range(4):
        weights = np.array(inputs.masked.weights[row]) > 0
        chosen = {int(p): int(y) for p, y in zip(
            inputs.masked.positions[row][weights], inputs.masked.labels[row][weights], strict=True
        )}  # fmt: skip
        for position, label in chosen.items():
            left, right = position, position
            while left in chosen:
                left -= 1
            while right in chosen:
                right += 1
            assert segment_ids[row, left] == segment_ids[row, right] == segment_ids[row, position]
            longest = max(longest, right - left - 1)
            offset = position - left - 1
            x = [hidden[row, left], hidden[row, right], head["position"]["embedding"][offset]]
            x = layer(layer(np.concatenate(x), head, "first"), head, "second")
            logits = (table @ x + head["bias"])[:VOCAB]
            losses.append(scipy.special.logsumexp(logits) - logits[label])
    assert longest > 3
    terms = jax.jit(objective.loss_terms)(params, inputs, None)
    assert float(terms["span_boundary_loss"][1]) == len(losses)
    np.testing.assert_allclose(terms["span_boundary_loss"][0], sum(losses), rtol=1e-4)
    normalizers = objective.normalizers(inputs)
    assert float(normalizers["span_boundary_loss"]) == len(losses)
    # Without the head, the other losses are the same.
    without = dataclasses.replace(CONFIG, span_boundary=False)
    plain, _ = make(tokens, length, a_length, without, **masking)
    for name, (value, _) in jax.jit(plain.loss_terms)(params, inputs, None).items():
        np.testing.assert_allclose(terms[name][0], value, rtol=1e-6)


def test_tokens_far_inside_a_span_are_not_predicted():
    tokens, length = np.array([[1, *[7] * (T - 2), 2]], np.int32), np.full((1, 1), T, np.int32)
    objective, inputs = make(tokens, length, length, rate=0.99, max_predictions_per_sequence=30)
    assert float(objective.normalizers(inputs)["masked_lm_loss"]) == 30
    assert float(objective.normalizers(inputs)["span_boundary_loss"]) == 20


def test_parameter_count_and_flops_of_the_head():
    without = dataclasses.replace(CONFIG, span_boundary=False)
    d, added = 16, 3 * 16 * 16 + 16 * 16 + 6 * 16 + 20 * 16 + VOCAB
    counts = [parameter_count(shapes(config), config) for config in (CONFIG, without)]
    assert counts[0] - counts[1] == added
    difference = flops_per_row(CONFIG, T, 1, 5) - flops_per_row(without, T, 1, 5)
    assert difference == 3 * 5 * 2 * (3 * d * d + d * d + d * VOCAB)


def test_export_omits_the_head(tmp_path):
    export(str(write_run(tmp_path / "run", CONFIG, random_params(CONFIG))), tmp_path / "hf")
    _, info = transformers.BertForPreTraining.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
