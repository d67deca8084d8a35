"""Sizes of a model: number of parameters, and FLOPs of a training step."""

import jax

from bert_jax.config.model import ModelConfig
from bert_jax.model.bert import Params
from bert_jax.model.layers import padded_vocab_size


def parameter_count(params: Params, config: ModelConfig) -> int:
    """Return the number of scalars in `params`, without the padding of the vocabulary."""
    total = sum(x.size for x in jax.tree.leaves(params))
    has_decoder = config.masked_lm or bool(config.electra.generator_hidden)
    num_tables = 1 if config.tied_decoder or not has_decoder else 2
    biases = (has_decoder and config.decoder_bias) + config.span_boundary  # of the decoders
    per_entry = config.embedding_width * num_tables + biases
    return total - (padded_vocab_size(config) - config.vocab_size) * per_entry


def flops_per_row(config: ModelConfig, tokens: int, sequences: int, predictions: int) -> float:
    """Return the FLOPs of a training step per row: three times the forward matrix products.

    A multiply-add counts as 2. Attention counts all T² pairs, as dense implementations compute
    them, for causal models and local attention too. Frozen layers that `config.head.features` uses are
    counted once, layers above them not at all. The frozen kernels of a model with adapters have no
    gradients and are counted twice. LSTMs and ELECTRA's generator are included, adapters and
    fine-tuned heads are not.
    """
    d, f, e = config.hidden, config.feed_forward, config.embedding_width
    kernels = tokens * (8 * d * d + (6 if config.gated_feed_forward else 4) * d * f)
    layer = kernels + tokens * 4 * tokens * d
    head = predictions * 2 * e * (config.vocab_size + d * config.transform) * config.masked_lm
    if config.span_boundary:
        head += predictions * 2 * d * (config.vocab_size + 4 * d)
    head += tokens * 2 * d * (d + 1) * config.electra.replaced_token
    head += tokens * 2 * e * d * (e != d)  # projection of the embeddings
    pooler = sequences * 2 * d * (d + 2) if config.next_sentence else 0
    encoder, width = 3.0 * config.layers * layer, d
    if config.lora.rank:
        encoder -= config.layers * kernels
    if config.head.features:
        encoder = max(config.feature_layers) * layer
        width = 4 * d if config.head.features == "last4" else d
    lstm = 0
    for _ in range(config.head.lstm_layers):
        lstm += tokens * 16 * d * (width + d)  # two directions of four gates
        width = 2 * d
    total = encoder + 3.0 * (head + pooler + lstm)
    if config.electra.generator_hidden:
        total += flops_per_row(config.generator(), tokens, sequences, predictions)
    return total
