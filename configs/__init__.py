"""Configs that `--config NAME[:ARGUMENT]` finds by name; installed as `bert_jax.configs`."""
