"""ModernBERT: parity with transformers, import and export, and unsupported settings."""

import functools

import numpy as np
import pytest
import torch
import transformers

from bert_jax.convert import huggingface, source
from bert_jax.convert.export import export as export_folder
from bert_jax.convert.families import FAMILIES
from bert_jax.data.wordpiece import Vocabulary
from bert_jax.model.bert import Bert
from tests.helpers.checkpoints import WORDS, error_of, save_pretrained
from tests.helpers.models import gradient, make_batch, one_sequence_a_row, torch_inputs

# The first and fourth of five layers are global; half a window is 4 tokens.
SMALL = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 5,
    "num_attention_heads": 4, "max_position_embeddings": 64, "local_attention": 8,
    "norm_eps": 0.01,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    },
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
    **dict.fromkeys(("cls_token_id", "sep_token_id"), 0),
}  # fmt: skip


def make_theirs(name="ForMaskedLM", **changes):
    """Return a transformers model whose parameters all differ from their initial values."""
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


def rows_of(batch):
    return {key: torch_inputs(batch)[key] for key in ("input_ids", "attention_mask")}


BIASED = {
    **dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), True),
    "decoder_bias": False, "hidden_activation": "gelu_new", "classifier_activation": "gelu_new",
}  # fmt: skip


@pytest.mark.parametrize("changes", [{}, BIASED])
def test_outputs_and_gradients_equal_transformers(changes):
    model = make_theirs(**changes)
    config, params = import_(model)
    batch = make_batch(np.random.default_rng(0), [[40], [23], [9]], 40)
    output = model(
        **rows_of(batch), labels=torch_inputs(batch)["labels"], output_hidden_states=True,
        output_attentions=True,
    )  # fmt: skip
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
    maps = run(method=Bert.attention_probabilities)
    for ours, theirs in zip(maps, output.attentions, strict=True):
        ours, theirs = (np.swapaxes(x, 1, 2)[real] for x in (ours, theirs.detach().numpy()))
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
    grads = export(grads, config)
    for name, parameter in model.named_parameters():
        theirs = parameter.grad.numpy()
        np.testing.assert_allclose(grads[name], theirs, rtol=0, atol=1e-5, err_msg=name)
        assert np.abs(theirs).max() > 1e-4, name


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Model", {}),
        ("ForSequenceClassification", {"num_labels": 3}),
        ("ForSequenceClassification", BIASED | {"classifier_pooling": "mean"}),
        ("ForTokenClassification", {"num_labels": 5}),
        ("ForQuestionAnswering", {}),
    ],
)
def test_heads_of_packed_rows_equal_separate_sequences_in_transformers(name, changes):
    model = make_theirs(name, **changes)
    config, params = import_(model)
    packed = make_batch(np.random.default_rng(2), [[20, 17, 3], [30, 9]], 40)
    single, origin = one_sequence_a_row(packed)
    method = Bert.encode if name == "Model" else Bert.classify
    ours = np.asarray(
        Bert(config).apply({"params": params}, packed.tokens, packed.layout, method=method)
    )
    with torch.no_grad():
        output = model(**rows_of(single))
    theirs = output[0].numpy()
    if name == "ForQuestionAnswering":
        theirs = np.stack([output.start_logits, output.end_logits], -1)
    for i, (row, slot) in enumerate(origin):
        inside = np.asarray(packed.layout.segment_ids[row]) == slot
        if name == "ForSequenceClassification":
            value, expected = ours[row, slot], theirs[i]
        else:
            value, expected = ours[row, inside], theirs[i, : inside.sum()]
        np.testing.assert_allclose(value, expected, rtol=0, atol=1e-5)


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
        "layer_types", "local_attention", "norm_eps", "norm_bias", "attention_bias", "num_labels",
        "tie_word_embeddings", "decoder_bias", "classifier_pooling", "architectures",
    ):  # fmt: skip
        assert getattr(again.config, key) == getattr(model.config, key), key
    vocabulary = {
        f"{part}_token_id": WORDS.index(f"[{part.upper()}]") for part in ("pad", "cls", "sep")
    }
    assert {key: getattr(again.config, key) for key in vocabulary} == vocabulary
    before, after = (source.read(str(tmp_path / x)).config.model for x in ("in", "out"))
    assert before == after


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
    ("changes", "key"),
    [
        ({"mlp_bias": True}, "mlp_bias"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_type"),
    ],
)
def test_unsupported_settings_are_refused(changes, key):
    assert key in error_of(settings_of, **changes)
