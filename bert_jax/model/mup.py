"""Maximal update parametrization (muP): settings that carry over from a narrow model to a wide one.

Yang et al. 2022 (arXiv 2203.03466), table 8, for Adam. With `config.mup.base_hidden`, the hidden size for
which `initializer_stddev` and the learning rate are meant, wider models have the initial values and
learning rates with which activations change by as much in every step. The size of attention heads
must not depend on the width, so that scores keep their scale.
"""

import re

from bert_jax.config.model import ModelConfig

# Powers of base_hidden / hidden for the initial values and the learning rate. The input of a tied
# decoder, whose weights are the embeddings, is scaled instead: the output of the head's LayerNorm.
_HIDDEN = (
    r"^(encoder/.*|pooler|(masked_lm|head)/transform|span_boundary/(first|second))/kernel$", 0.5, 1,
)  # fmt: skip
_OUTPUT = (
    r"^((next_sentence|classifier|teacher_projection)/kernel|masked_lm/decoder|"
    r"span_boundary/second_norm/(scale|bias))$", 1, 1,
)  # fmt: skip
_TIED = (r"^masked_lm/norm/(scale|bias)$", 1, 1)


def scales(config: ModelConfig, path: str) -> tuple[float, float]:
    """Return the factors of a parameter's initial values and of its learning rate."""
    if not config.mup.base_hidden:
        return 1.0, 1.0
    ratio = config.mup.base_hidden / config.hidden
    for pattern, stddev, rate in (_HIDDEN, _OUTPUT, *[_TIED] * config.tied_decoder):
        if re.search(pattern, path):
            return ratio**stddev, ratio**rate
    return 1.0, 1.0
