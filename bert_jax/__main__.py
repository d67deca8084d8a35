"""`python -m bert_jax VERB`: the command `bert-jax` by the Python that runs it."""

from bert_jax.cli import console

if __name__ == "__main__":
    console()
