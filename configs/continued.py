"""Continued pretraining from released weights, on rows of any lengths.

    --config continued                      rows of T=128
    --config continued:512                  rows of another length
    --config continued:128=0.9,512=0.1      phases with their shares of the steps

The model is that of `--init`. AdamW with a peak of 5e-5, below that of pretraining, as the README of
google-research/bert advises for additional steps from an existing checkpoint.
"""

from bert_jax.configs.pretrain import phases_of

from bert_jax.config.schema import Config, OptimConfig


def get_config(argument: str = "128") -> Config:
    """Return the config for lengths of rows: T, or T=SHARE,T=SHARE,…."""
    return Config(
        optim=OptimConfig(optimizer="adamw", learning_rate=5e-5),
        phases=phases_of(argument.split(",")),
        steps=10_000,
        warmup_fraction=0.06,
    )
