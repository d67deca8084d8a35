"""Next-token prediction with a left-to-right model ("LTR", Devlin et al., section 5.1)."""

import numpy as np

from bert_jax.config.schema import MaskingConfig
from bert_jax.data.rows import RowFormat
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.objectives.masking import NextTokenTargets


class CausalLM(MaskedLM):
    """Next-token prediction in place of masked LM."""

    metric_prefix, display_name = "next_token", "next token"

    def make_masker(
        self,
        masking: MaskingConfig,
        row_format: RowFormat,
        mask_id: int,
        continuation: np.ndarray,
    ) -> NextTokenTargets:
        """Return the targets of rows, whose tokens stay as they are."""
        return NextTokenTargets(row_format.tokens, row_format.sequences)
