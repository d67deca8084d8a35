"""Pretrain, fine-tune and analyse BERT in JAX."""

# pyproject.toml reads it from here, so that a checkout that is not installed has a version too.
__version__ = "0.1.0"
