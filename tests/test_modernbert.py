"""ModernBERT: parity with transformers, import and export, and unsupported settings."""

import functools

import numpy as np
import pytest

from bert_jax.convert import huggingface, source
from bert_jax.convert.export import export as export_folder
from bert_jax.convert.families import FAMILIES
from bert_jax.data.wordpiece import Vocabulary
from bert_jax.errors import UserError
from bert_jax.model.bert import Bert
from tests.helpers.checkpoints import WORDS, save_pretrained
from tests.helpers.models import gradient, make_batch

# The first and fourth of five layers are global; half a window is 4 tokens.
SMALL = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "local_attention": 8,
    "norm_eps": 0.01,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    },
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
    **dict.fromkeys(("cls_token_id", "sep_token_id"), 0),
}


def make_theirs(name="ForMaskedLM", **changes):
    """Return a transformers model whose parameters all differ from their initial values."""
    import torch
    import transformers

    config = transformers.ModernBertConfig(**SMALL | changes)
    config.architectures = [f"ModernBert{name}"]
    config._attn_implementation = "eager"
    model = getattr(transformers, f"ModernBert{name}")(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for path, p in model.named_parameters():
            # Large queries and keys, so that attention is far from uniform.
            wide = 0.3 if "Wqkv" in path else 0.1
            p.copy_(
                ("norm" in path and p.ndim == 1) + wide * torch.randn(p.shape, generator=generator)
            )
    return model


def import_(model):
    """Return config and parameters of a transformers model, converted as by `bert-jax import`."""
    family = FAMILIES["modernbert"]
    tensors = {name: x.numpy() for name, x in model.state_dict().items()}
    names = huggingface.canonical(tensors, family)
    tensors = {new: tensors[old] for new, old in names.items()}
    settings, tensors = family.to_ours(model.config.to_dict(), tensors)
    config = huggingface.model_config(settings, tensors)
    huggingface.remove_tied_duplicates(tensors, config)
    assert not huggingface.unexpected(tensors, config)
    return config, huggingface.from_huggingface(tensors, config)


def export(params, config):
    _, tensors = FAMILIES["modernbert"].to_theirs(
        huggingface.huggingface_config(config, VOCABULARY),
        huggingface.to_huggingface(params, config),
    )
    return tensors


VOCABULARY = Vocabulary(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"), lowercase=True)


def torch_rows(batch):
    import torch

    return {
        "input_ids": torch.tensor(np.array(batch.tokens, np.int64)),
        "attention_mask": torch.tensor(np.array(batch.layout.segment_ids < 1, np.int64)),
    }


@pytest.mark.parametrize("changes", [{}, {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_bias": True, "decoder_bias": False, "hidden_activation": "gelu_new", "classifier_activation": "gelu_new"}])  # fmt: skip
def test_outputs_and_gradients_equal_transformers(changes):
    import torch

    model = make_theirs(**changes)
    config, params = import_(model)
    batch = make_batch(np.random.default_rng(0), [[40], [23], [9]], 40)
    labels = np.full(batch.tokens.shape, -100)
    for i, j in zip(*np.nonzero(batch.weights), strict=True):
        labels[i, batch.positions[i, j]] = batch.labels[i, j]
    output = model(**torch_rows(batch), labels=torch.tensor(labels), output_hidden_states=True)
    output.loss.backward()
    (loss, (words, _)), grads = gradient(config)(params, batch)
    assert abs(float(loss) - output.loss.item()) <= 1e-5
    theirs = np.take_along_axis(
        output.logits.detach().numpy(), np.array(batch.positions)[:, :, None], 1
    )
    np.testing.assert_allclose(words, theirs, rtol=0, atol=1e-5)
    run = functools.partial(Bert(config).apply, {"params": params}, batch.tokens, batch.layout)
    real = np.array(batch.layout.segment_ids < 1)
    for ours, theirs in zip(run(method=Bert.hidden_states), output.hidden_states, strict=True):
        np.testing.assert_allclose(ours[real], theirs.detach().numpy()[real], rtol=0, atol=1e-5)
    grads = export(grads, config)
    for name, parameter in model.named_parameters():
        theirs = parameter.grad.numpy()
        np.testing.assert_allclose(grads[name], theirs, rtol=0, atol=1e-5, err_msg=name)
        assert np.abs(theirs).max() > 1e-4, name


def test_packed_sequences_equal_separate_ones_in_transformers():
    import torch

    model = make_theirs("Model")
    config, params = import_(model)
    batch = make_batch(np.random.default_rng(1), [[20, 17, 3], [30, 9]], 40)
    hidden = Bert(config).apply({"params": params}, batch.tokens, batch.layout, method=Bert.encode)
    for row, start, end in ((0, 0, 20), (0, 20, 37), (0, 37, 40), (1, 0, 30), (1, 30, 39)):
        tokens = torch.tensor(np.array(batch.tokens[row : row + 1, start:end], np.int64))
        with torch.no_grad():
            theirs = model(tokens).last_hidden_state[0].numpy()
        np.testing.assert_allclose(hidden[row, start:end], theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("ForSequenceClassification", {"num_labels": 3}),
        ("ForSequenceClassification", {"num_labels": 3, "classifier_pooling": "mean"}),
        ("ForTokenClassification", {"num_labels": 5}),
        ("ForQuestionAnswering", {}),
    ],
)
def test_heads_equal_transformers(name, changes):
    import torch

    model = make_theirs(name, **changes)
    config, params = import_(model)
    batch = make_batch(np.random.default_rng(2), [[40], [23], [9]], 40)
    result = Bert(config).apply(
        {"params": params}, batch.tokens, batch.layout, method=Bert.classify
    )
    with torch.no_grad():
        output = model(**torch_rows(batch))
    if name == "ForSequenceClassification":
        np.testing.assert_allclose(result[:, 0], output.logits.numpy(), rtol=0, atol=1e-5)
        return
    theirs = (
        torch.stack([output.start_logits, output.end_logits], -1)
        if name == "ForQuestionAnswering"
        else output.logits
    )
    real = np.array(batch.layout.segment_ids < 1)
    np.testing.assert_allclose(result[real], theirs.numpy()[real], rtol=0, atol=1e-5)


# --- Checkpoint folders ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("ForMaskedLM", {"norm_bias": True}),
        ("ForMaskedLM", {"decoder_bias": False}),
        ("ForMaskedLM", {"tie_word_embeddings": False, "num_hidden_layers": 4}),
        (
            "Model",
            {"layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"]},
        ),
        ("ForSequenceClassification", {"classifier_pooling": "mean"}),
        ("ForMultipleChoice", {}),
    ],
)
def test_import_and_export_round_trip_bitwise(tmp_path, name, changes):
    """The export has the first version's keys, which transformers reads as the same config."""
    import transformers

    model = make_theirs(name, vocab_size=len(WORDS), **changes)
    save_pretrained(model, tmp_path / "in")
    source.import_checkpoint(str(tmp_path / "in"), tmp_path / "ours")
    export_folder(str(tmp_path / "ours"), tmp_path / "out")
    kind = getattr(transformers, f"ModernBert{name}")
    again, info = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    after = again.state_dict()
    for tensor, value in model.state_dict().items():
        np.testing.assert_array_equal(value, after[tensor], err_msg=tensor)
    assert again.config.rope_parameters == model.config.rope_parameters
    for key in (
        *(
            "layer_types",
            "local_attention",
            "norm_eps",
            "norm_bias",
            "attention_bias",
            "num_labels",
        ),
        *("tie_word_embeddings", "decoder_bias", "classifier_pooling", "architectures"),
    ):
        assert getattr(again.config, key) == getattr(model.config, key), key
    vocabulary = {
        f"{part}_token_id": WORDS.index(f"[{part.upper()}]") for part in ("pad", "cls", "sep")
    }
    assert {key: getattr(again.config, key) for key in vocabulary} == vocabulary
    assert (
        source.read(str(tmp_path / "out")).config.model
        == source.read(str(tmp_path / "in")).config.model
    )


def settings_of(**changes):
    """Convert settings in the format of the first transformers version with ModernBERT."""
    first = {
        "model_type": "modernbert", "num_hidden_layers": 22, "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0, "local_rope_theta": 10000.0, "local_attention": 128,
        "attention_bias": False, "mlp_bias": False, "classifier_bias": False, "norm_bias": False,
    }  # fmt: skip
    return FAMILIES["modernbert"].to_ours(first | changes, {})[0]


def test_config_formats_of_both_versions_are_read():
    assert settings_of()["global_attn_every_n_layers"] == 3
    assert settings_of(local_rope_theta=None)["local_rope_theta"] == 0
    kinds = ["full_attention", *["sliding_attention"] * 3] * 2
    assert settings_of(layer_types=kinds)["global_attn_every_n_layers"] == 4
    rope = {"full_attention": {"rope_theta": 7.0}, "sliding_attention": {"rope_theta": 5.0}}
    read = settings_of(rope_parameters=rope)
    assert (read["global_rope_theta"], read["local_rope_theta"]) == (7, 5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp_bias": True}, "attention_bias is False, mlp_bias is True, classifier_bias is False"),
        (
            {"layer_types": ["sliding_attention"]},
            "layer_types must have full_attention in every n-th",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
            "rope_type is 'yarn', which is not supported",
        ),
    ],
)
def test_unsupported_settings_are_refused(changes, message):
    with pytest.raises(UserError) as error:
        settings_of(**changes)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
