"""Fused kernels of the training step for GPUs."""

from bert_jax.config.schema import TrainConfig
from bert_jax.errors import UserError


def line_part(config: TrainConfig, platform: str) -> str:
    """Return the end of a line: which kernels a run on GPUs uses, and why; "" on other platforms."""
    if platform != "gpu":
        return ""
    if config.model.kernels == "auto":
        return "; kernels: xla (those of pallas were never timed)"
    return f"; kernels: {config.model.kernels} (as configured)"


def check(config: TrainConfig, platform: str) -> None:
    """Check that `config.model.kernels` can train the model on a platform: "cpu", "gpu" or "tpu"."""
    model = config.model
    if model.kernels != "pallas":
        return
    if platform != "gpu":
        raise UserError(
            f"config.model.kernels='pallas' runs on a gpu only, this is a {platform}: set it to 'xla'"
        )
    if model.dropout and model.dropout_generator != "hash":
        raise UserError(
            "config.model.kernels='pallas' draws the bits of dropout by 'hash', but "
            f"config.model.dropout_generator is {model.dropout_generator!r}: set one of the two"
        )
