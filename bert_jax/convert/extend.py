"""Add entries to the vocabulary of a model."""

import dataclasses
import os
from collections.abc import Callable, Sequence

import jax
import numpy as np

from bert_jax import storage
from bert_jax.config.schema import Config
from bert_jax.convert import source as source_lib
from bert_jax.convert.source import Imported
from bert_jax.data.vocabulary import Vocabulary
from bert_jax.errors import UserError
from bert_jax.model.bert import flatten, unflatten
from bert_jax.model.layers import change_vocabulary
from bert_jax.storage import files


@storage.with_uploaded_output("out", new=True)
def extend_vocabulary(
    source: str,
    out: str | os.PathLike,
    choose: Callable[[Vocabulary], Sequence[str]],
    which: str = "best",
) -> Imported:
    """Write a model with more word pieces to a new folder, as `import_checkpoint` does.

    Embeddings, biases of the masked-LM head and columns of an untied decoder begin as the mean of
    those of the pieces that the new one was split into before. Others are unchanged, and so are the
    ids of text without new pieces.

    Args:
        source, which: as for `open_model`.
        out: path of the new folder.
        choose: function from the vocabulary to the pieces to add.
    """
    files.check_new(out)
    config, vocabulary, params, step = source_lib.open_model(source, which)
    if not vocabulary.is_wordpiece:
        raise UserError(f"{source}: its tokenizer is not WordPiece; no other can be extended")
    tokens = list(choose(vocabulary))
    if not tokens:
        raise UserError(f"{source}: its vocabulary has all of these words already")
    pieces = [[vocabulary.index[piece] for piece in vocabulary.split(token)] for token in tokens]
    extended = dataclasses.replace(vocabulary, tokens=(*vocabulary.tokens, *tokens))
    model = dataclasses.replace(config.model, vocab_size=len(extended))

    def add_means(entries: np.ndarray) -> np.ndarray:
        return np.concatenate([entries, np.stack([entries[ids].mean(0) for ids in pieces])])

    changed = {
        path: change_vocabulary(path, value, config.model, model, add_means)
        for path, value in flatten(jax.device_get(params)).items()
    }
    if isinstance(config, Config):  # the rest describes the training of the source
        config = Config(embed=config.embed)
    config = dataclasses.replace(config, model=model)
    about = {
        "source": source,
        "format": f"bert_jax (step {step:,}, {len(tokens):,} word pieces added)",
        "official": None,
    }
    imported = Imported(config, extended, unflatten(changed), about)
    source_lib.write(imported, out)
    return imported
