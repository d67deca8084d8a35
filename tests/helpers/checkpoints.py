"""Small checkpoints with random weights, of transformers models and of untrained runs."""

import pathlib

import jax
import numpy as np
import pytest
import torch
import transformers

from bert_jax.config.fields import with_fields
from bert_jax.config.model import ModelConfig
from bert_jax.config.schema import Config
from bert_jax.convert import source
from bert_jax.convert.export import export
from bert_jax.data.vocabulary import SPECIAL, Vocabulary
from bert_jax.errors import UserError
from bert_jax.model.bert import shapes
from bert_jax.runs import checkpoint, workdir

TF1 = pathlib.Path(__file__).parent.parent / "data" / "tf1"
WORDS = (*SPECIAL, *"the a cat sat on mat un ##s ##t . , ! é".split(), *"bcdefghi")
LABELS = {"id2label": {0: "no", 1: "maybe", 2: "yes"}}
BEST = {"best_by": "masked_lm_loss", "highest": False}


def torch_model(name="BertForPreTraining", seed=0, **changes):
    """Return a transformers model with random weights, none of which is 0 or 1."""
    values = dict(
        vocab_size=len(WORDS), hidden_size=12, num_hidden_layers=2, num_attention_heads=3,
        intermediate_size=20, max_position_embeddings=24,
    )  # fmt: skip
    labels = LABELS if name.endswith("Classification") else {}
    config = transformers.BertConfig(**{**values, **labels, **changes})
    model = getattr(transformers, name)(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return model


def save_pretrained(model, folder, words=WORDS, **options):
    """Save a transformers model and its tokenizer, and return the folder."""
    model.save_pretrained(folder, **options)
    tokenizer = transformers.BertTokenizerFast(vocab={word: i for i, word in enumerate(words)})
    tokenizer.save_pretrained(folder)
    return folder


def small_config(**changes):
    """Return the config of a one-layer model with the vocabulary `WORDS`."""
    values = dict(
        layers=1, hidden=12, heads=3, feed_forward=20, vocab_size=len(WORDS), positions=24
    )  # fmt: skip
    return with_fields(ModelConfig(), {**values, **changes})


def random_params(config, seed=0):
    """Return random model parameters, with zeros in the vocabulary padding."""
    rng = np.random.default_rng(seed)
    params = jax.tree.map(
        lambda x: rng.normal(0, 0.3, x.shape).astype(np.float32),
        shapes(config),
    )
    extra = params["embeddings"]["word"]["embedding"][config.vocab_size :]
    extra[:] = 0  # vocabulary padding
    if config.masked_lm:
        if config.decoder_bias:
            params["masked_lm"]["bias"][config.vocab_size :] = 0
        if not config.tied_decoder:
            params["masked_lm"]["decoder"][:, config.vocab_size :] = 0
    return params


def write_run(folder, config, params, words=None):
    """Write a run folder with a checkpoint of `params`, and return the folder."""
    words = words or [*SPECIAL, *(f"w{i}" for i in range(config.vocab_size - len(SPECIAL)))]
    folder.mkdir(parents=True, exist_ok=True)
    workdir.write_or_check_config(
        folder, Config(model=config), [], BEST, False, Vocabulary(tuple(words), True)
    )
    add_step(folder, 7, params)
    return folder


def small_run(folder, **changes):
    """Write a run of `small_config` with random weights, and return the folder."""
    config = small_config(**changes)
    return write_run(folder, config, random_params(config), WORDS)


def add_step(folder, step, params):
    """Save a checkpoint of a run."""
    checkpoints = checkpoint.Checkpoints(
        folder / "checkpoints", Config().checkpoint, identity=workdir.read_identity(folder)
    )
    checkpoints.save(step, params)
    checkpoints.close()


def refusal(folder, **options):
    """Read a checkpoint that must be rejected, and return the one-line error message."""
    return error_of(source.read, str(folder), **options)


def export_refusal(folder, out):
    """Export a run that must be rejected, and return the one-line error message."""
    message = error_of(export, str(folder), out)
    assert not out.exists()
    return message


def error_of(function, *args, **options):
    """Return the message of the `UserError` that the call raises; it has one line."""
    with pytest.raises(UserError) as caught:
        function(*args, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message
