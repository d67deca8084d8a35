"""Small models, packed batches and losses for model tests."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from bert_jax.config.fields import with_fields
from bert_jax.config.model import ModelConfig
from bert_jax.config.sizes import model_size
from bert_jax.data import rows
from bert_jax.model.bert import Bert, shapes
from bert_jax.model.bert import flatten as flat
from bert_jax.objectives import losses


class Batch(NamedTuple):
    """Rows and their labels, with P predictions per row, some of weight 0."""

    tokens: jax.Array
    layout: rows.Layout
    positions: jax.Array
    labels: jax.Array
    weights: jax.Array
    next_labels: jax.Array
    next_weights: jax.Array


def make_config(size="L2-H32-A4", **changes) -> ModelConfig:
    defaults = {"vocab_size": 101, "positions": 64, "dropout": 0.0, "attention_dropout": 0.0}
    return with_fields(model_size(size), {**defaults, **changes})


def make_batch(rng, lengths, tokens, vocab=101, predictions=6) -> Batch:
    """Return random rows of sentence pairs; `lengths` lists the pair lengths of each row."""
    slots = max(len(row) for row in lengths)
    length = np.array([row + [0] * (slots - len(row)) for row in lengths], np.int32)
    layout = rows.layout(length, np.where(length > 1, length // 2, length), tokens)
    # Token id 0 is used only for padding: PyTorch's embedding gives it no gradient.
    ids = rng.integers(1, vocab, layout.segment_ids.shape) * (layout.segment_ids < slots)
    positions = np.zeros((len(lengths), predictions))
    weights = np.zeros((len(lengths), predictions))
    for i, used in enumerate(length.sum(1)):
        count = min(predictions - i % 2, used)  # the number of predictions varies by row
        positions[i, :count] = np.sort(rng.choice(used, count, replace=False))
        weights[i, :count] = 1
    return Batch(
        jnp.asarray(ids, jnp.int32),
        rows.Layout(*(jnp.asarray(x, jnp.int32) for x in layout)),
        jnp.asarray(positions, jnp.int32),
        jnp.asarray(rng.integers(0, vocab, positions.shape), jnp.int32),
        jnp.asarray(weights, jnp.float32),
        jnp.asarray(rng.integers(0, 2, length.shape), jnp.int32),
        jnp.asarray(length > 0, jnp.float32),
    )


def torch_bert(name, config, tensors, **changes):
    """Return a transformers model with the sizes of `config`, `tensors` by name, and no dropout."""
    values = dict(
        vocab_size=config.vocab_size, hidden_size=config.hidden, num_hidden_layers=config.layers,
        num_attention_heads=config.heads, intermediate_size=config.feed_forward,
        max_position_embeddings=config.positions, layer_norm_eps=config.norm.epsilon,
        tie_word_embeddings=config.tied_decoder, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, attn_implementation="eager",
    )  # fmt: skip
    model = getattr(transformers, name)(transformers.BertConfig(**{**values, **changes}))
    load_tensors(model, tensors)
    return model


def load_tensors(model, tensors):
    """Set a transformers model's parameters, except those of tied decoders and unused poolers."""
    tensors = {name: torch.tensor(np.array(x)) for name, x in tensors.items()}
    result = model.load_state_dict(tensors, strict=False)
    assert not result.unexpected_keys
    assert all("decoder" in x or "lm_head" in x or "pooler" in x for x in result.missing_keys)
    model.tie_weights()


def torch_inputs(batch):
    """Return the inputs and labels of transformers' BERT, for rows of one sequence each."""
    labels = np.full(batch.tokens.shape, -100)
    for i, j in zip(*np.nonzero(batch.weights), strict=True):
        labels[i, batch.positions[i, j]] = batch.labels[i, j]
    return {
        "input_ids": torch.tensor(np.array(batch.tokens, np.int64)),
        "attention_mask": torch.tensor(np.array(batch.layout.segment_ids < 1, np.int64)),
        "token_type_ids": torch.tensor(np.array(batch.layout.token_type_ids, np.int64)),
        "labels": torch.tensor(labels),
        "next_sentence_label": torch.tensor(np.array(batch.next_labels[:, 0], np.int64)),
    }


def random_params(config, rng):
    """Return parameters away from their initial values, so that no gradient is trivially zero."""

    def draw(path, leaf):
        name = path[-1].key
        # Large enough that attention is far from uniform, small enough not to amplify rounding.
        attending = path[-2].key in ("query", "key") and name == "kernel"
        wide = 1.5 / config.hidden**0.5 if attending else 0.1
        value = (name == "scale") + wide * rng.standard_normal(leaf.shape, np.float32)
        if name == "embedding" and path[-2].key == "word":
            value[config.vocab_size :] = 0
        if path[-2].key == "masked_lm":  # the decoder or its bias; the vocabulary axis is last
            value[..., config.vocab_size :] = 0
        return jnp.asarray(value)

    return jax.tree_util.tree_map_with_path(draw, shapes(config))


def loss_of(config):
    """Return a function (params, batch, key) -> (sum of both mean losses, both heads' logits)."""

    def loss(params, batch, key=None):
        outputs = Bert(config).apply(
            {"params": params}, batch.tokens, batch.layout, batch.positions, key
        )
        words, following = outputs.masked_lm, outputs.next_sentence
        total, weight = losses.cross_entropy(words, batch.labels, batch.weights)
        value = total / weight
        if following is not None:
            pair = losses.cross_entropy(following, batch.next_labels, batch.next_weights)
            value += pair[0] / pair[1]
        return value, (words, following)

    return loss


def gradient(config):
    return jax.jit(jax.value_and_grad(loss_of(config), has_aux=True))


def assert_trees_close(actual, expected, tolerance):
    actual, expected = flat(actual), flat(expected)
    assert actual.keys() == expected.keys()
    for path in expected:
        np.testing.assert_allclose(
            actual[path], expected[path], rtol=0, atol=tolerance, err_msg=path
        )


def one_sequence_a_row(packed: Batch) -> tuple[Batch, list[tuple[int, int]]]:
    """Put each packed sequence in its own row; also return the (row, slot) it comes from."""
    tokens = packed.tokens.shape[1]
    parts, origin = [], []
    for row in range(len(packed.tokens)):
        for slot in np.flatnonzero(packed.next_weights[row]):
            origin.append((row, slot))
            inside = np.flatnonzero(packed.layout.segment_ids[row] == slot)
            start, n = inside[0], len(inside)
            is_inside = (packed.positions[row] >= start) & (packed.positions[row] < start + n)
            a_length = n - int(packed.layout.token_type_ids[row, inside].sum())
            layout = rows.layout(np.array([[n]]), np.array([[a_length]]), tokens)
            parts.append(
                Batch(
                    jnp.zeros((1, tokens), jnp.int32)
                    .at[0, :n]
                    .set(packed.tokens[row, start : start + n]),
                    rows.Layout(*(jnp.asarray(x, jnp.int32) for x in layout)),
                    jnp.where(is_inside, packed.positions[row] - start, 0)[None],
                    packed.labels[row][None],
                    (is_inside * packed.weights[row])[None],
                    packed.next_labels[row, slot][None, None],
                    jnp.ones((1, 1)),
                )
            )
    single = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
    return single, origin
