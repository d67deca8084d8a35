"""Named sizes and architectures of models: `base`, `L6-H768-A3`, `modern-base`."""

import re
from typing import Any

from bert_jax.config.fields import with_fields
from bert_jax.config.model import ModelConfig
from bert_jax.errors import UserError

# Devlin et al.; small ones from Turc et al. (arXiv 1908.08962), except "micro", that of the quickstart.
SIZES = {
    "micro": (3, 192, 3),
    "tiny": (2, 128, 2),
    "mini": (4, 256, 4),
    "small": (4, 512, 8),
    "medium": (8, 512, 8),
    "base": (12, 768, 12),
    "large": (24, 1024, 16),
}
_PRE_NORM: dict[str, Any] = {
    "norm.position": "pre",
    "norm.final": True,
    "position_kind": "rope",
    "gated_feed_forward": True,
    "bias": False,
    "segments": 0,
    "next_sentence": False,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
# ModernBERT (Warner et al., arXiv 2412.13663): GeGLU, and local attention in two of three layers.
_MODERN: dict[str, Any] = _PRE_NORM | {
    "family": "modernbert",
    "norm.kind": "layer_norm_no_bias",
    "norm.epsilon": 1e-5,
    "rope_theta": 160_000.0,
    "local.rope_theta": 10_000.0,
    "local.window": 128,
    "positions": 8192,
    "vocab_multiple": 64,
    "head.layer": "transform",
}
# ELECTRA (Clark et al., arXiv 2003.10555, table 6).
_ELECTRA: dict[str, Any] = {
    "family": "electra",
    "masked_lm": False,
    "next_sentence": False,
    "electra.replaced_token": True,
}
# Models that differ from BERT in more than size.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "teaching": {
        "layers": 3,
        "hidden": 192,
        "heads": 4,
        "feed_forward": 768,
        "positions": 64,
        "segments": 0,
        "activation": "relu",
        "norm.final": True,
        "transform": False,
        "tied_decoder": False,
        "next_sentence": False,
    },
    "modern-base": {**_MODERN, "layers": 22, "feed_forward": 1152},
    "modern-large": {**_MODERN, "layers": 28, "hidden": 1024, "heads": 16, "feed_forward": 2624},
    # After NeoBERT (Le Breton et al., arXiv 2502.19587): SwiGLU and RMSNorm.
    "neo-base": {
        **_PRE_NORM,
        "layers": 28,
        "feed_forward": 2048,
        "activation": "silu",
        "norm.kind": "rms_norm",
        "norm.epsilon": 1e-6,
        "norm.embeddings": False,
        "positions": 4096,
        "transform": False,
        "tied_decoder": False,
    },
    "electra-small": {
        **_ELECTRA,
        "hidden": 256,
        "heads": 4,
        "feed_forward": 1024,
        "embedding_size": 128,
        "electra.generator_hidden": 64,
    },
    "electra-base": {**_ELECTRA, "electra.generator_hidden": 256},
    "electra-large": {
        **_ELECTRA,
        "layers": 24,
        "hidden": 1024,
        "heads": 16,
        "feed_forward": 4096,
        "electra.generator_hidden": 256,
    },
}


def model_size(name: str) -> ModelConfig:
    """Return the config of a name of `SIZES` or `ARCHITECTURES`, or of a shape like `L6-H768-A3`."""
    if name in ARCHITECTURES:
        return with_fields(ModelConfig(), ARCHITECTURES[name])
    shape = re.fullmatch(r"L(\d+)[-_]H(\d+)[-_]A(\d+)", name)
    if shape:
        layers, hidden, heads = map(int, shape.groups())
    elif name in SIZES:
        layers, hidden, heads = SIZES[name]
    else:
        known = ", ".join([*ARCHITECTURES, *SIZES])
        raise UserError(f"unknown model size {name!r}: choose {known}, or a shape like L6-H768-A3")
    return ModelConfig(layers=layers, hidden=hidden, heads=heads, feed_forward=4 * hidden)
