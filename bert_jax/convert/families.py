"""The architectures of transformers that can be imported and exported: names, classes, settings.

To add one, add a `Family` to `FAMILIES` and its name to the values of `config.model.family`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bert_jax.config.model import HEADS, ModelConfig
from bert_jax.config.sizes import ARCHITECTURES
from bert_jax.convert import modernbert
from bert_jax.convert.modernbert import Settings, Tensors

# Function of config.json and tensors by canonical name that returns both in another form.
Rewrite = Callable[[Settings, Tensors], tuple[Settings, Tensors]]


def _unchanged(settings: Settings, tensors: Tensors) -> tuple[Settings, Tensors]:
    return settings, tensors


@dataclasses.dataclass(frozen=True)
class Family:
    """An architecture of transformers. Canonical names are those of its classes with heads.

    Attributes:
        title: its name in messages.
        class_prefix: what the names of its classes begin with.
        encoder: attribute of the encoder in classes with heads.
        names: parameter path, or path of a module with kernel and bias or scale, → canonical name;
            {i} is the layer. `huggingface.to_huggingface` transposes dense kernels and maps
            LayerNorm's scale to weight.
        parts: optional part of a model → what the canonical names of its tensors begin with.
        classes: rest of the name of a class without a fine-tuned head → its parts. The order
            decides between classes with the same parts.
        settings: config key → key in config.json.
        activation: key of the activation in config.json.
        activations: supported values of that key; () for all that the model has.
        defaults: values of keys that config.json lacks, where they differ from `ModelConfig`'s.
        fixed: config key → the only value that the architecture has, without a key in config.json.
        heads: kinds of fine-tuned heads that it has classes for, keys of `config.HEADS`.
        head_names: kind of head → names of modules that differ from `names` and `config.HEADS`.
        token_ids: key in config.json → attribute of `Vocabulary`, besides pad_token_id.
        causal_class: rest of the name of the class of left-to-right models; "" for none.
        from_hf: applied to imported files before `names`, to split or slice tensors.
        to_hf: its inverse, applied to exported ones after `names`.
    """

    title: str
    class_prefix: str
    encoder: str
    names: Mapping[str, str]
    parts: Mapping[str, tuple[str, ...]]
    classes: Mapping[str, tuple[str, ...]]
    settings: Mapping[str, str]
    activation: str = "hidden_act"
    activations: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    heads: tuple[str, ...] = tuple(name for name in HEADS if name)
    head_names: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    token_ids: Mapping[str, str] = dataclasses.field(default_factory=dict)
    causal_class: str = ""
    from_hf: Rewrite = _unchanged
    to_hf: Rewrite = _unchanged

    @property
    def has_pooler(self) -> bool:
        """Whether heads on a sequence read a pooler."""
        return self.fixed.get("head.layer", "pooler") == "pooler"

    @property
    def words(self) -> str:
        """Canonical name of the table of word embeddings."""
        return self.names["embeddings/word/embedding"]

    @property
    def decoder_bias(self) -> str:
        """Canonical name of the bias of a decoder that is not tied to the embeddings."""
        return self.names["masked_lm/decoder"].removesuffix("weight") + "bias"

    def names_of(self, config: ModelConfig) -> dict[str, str]:
        """Return `names` of a model with its layers and head."""
        names = {}
        for ours, theirs in self.names.items():
            for i in range(config.layers if "{i}" in ours else 1):
                names[ours.format(i=i)] = theirs.format(i=i)
        if not config.tied_decoder:
            names["masked_lm/bias"] = self.decoder_bias
        return {**names, **self.names_of_head(config.head.kind)}

    def names_of_head(self, head: str) -> dict[str, str]:
        """Return the names of the modules of a fine-tuned head."""
        if head not in self.heads:
            return {}
        return {"classifier": HEADS[head].huggingface_name, **self.head_names.get(head, {})}

    def parts_with(self, head: str) -> dict[str, tuple[str, ...]]:
        """Return `parts` of a model with a head, which is a part too."""
        names = self.names_of_head(head)
        parts = {**self.parts, **({"head": (f"{names['classifier']}.",)} if names else {})}
        return {**parts, **({"pooler": (f"{names['pooler']}.",)} if "pooler" in names else {})}

    def all_classes(self) -> dict[str, tuple[tuple[str, ...], str]]:
        """Return the parts and the kind of fine-tuned head of every class."""
        classes = {f"{self.class_prefix}{rest}": (p, "") for rest, p in self.classes.items()}
        for name in self.heads:
            is_pooled = HEADS[name].pooled and self.has_pooler
            parts = ("pooler", "head") if is_pooled else ("head",)
            classes[HEADS[name].huggingface_class.replace("Bert", self.class_prefix, 1)] = (
                parts,
                name,
            )
        return classes


_BERT_ENCODER = {
    "embeddings/word/embedding": "bert.embeddings.word_embeddings.weight",
    "embeddings/position/embedding": "bert.embeddings.position_embeddings.weight",
    "embeddings/segment/embedding": "bert.embeddings.token_type_embeddings.weight",
    "embeddings/norm": "bert.embeddings.LayerNorm",
    "encoder/layer_{i}/attention/query": "bert.encoder.layer.{i}.attention.self.query",
    "encoder/layer_{i}/attention/key": "bert.encoder.layer.{i}.attention.self.key",
    "encoder/layer_{i}/attention/value": "bert.encoder.layer.{i}.attention.self.value",
    "encoder/layer_{i}/attention/output": "bert.encoder.layer.{i}.attention.output.dense",
    "encoder/layer_{i}/attention/norm": "bert.encoder.layer.{i}.attention.output.LayerNorm",
    "encoder/layer_{i}/feed_forward/intermediate": "bert.encoder.layer.{i}.intermediate.dense",
    "encoder/layer_{i}/feed_forward/output": "bert.encoder.layer.{i}.output.dense",
    "encoder/layer_{i}/feed_forward/norm": "bert.encoder.layer.{i}.output.LayerNorm",
}
_BERT_SETTINGS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "feed_forward": "intermediate_size",
    "vocab_size": "vocab_size",
    "positions": "max_position_embeddings",
    "segments": "type_vocab_size",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "norm.epsilon": "layer_norm_eps",
    "initializer_stddev": "initializer_range",
    "tied_decoder": "tie_word_embeddings",
    "causal": "is_decoder",
}

# modeling_bert.py
BERT = Family(
    title="BERT",
    class_prefix="Bert",
    encoder="bert",
    names={
        **_BERT_ENCODER,
        "pooler": "bert.pooler.dense",
        "masked_lm/transform": "cls.predictions.transform.dense",
        "masked_lm/norm": "cls.predictions.transform.LayerNorm",
        "masked_lm/decoder": "cls.predictions.decoder.weight",
        "masked_lm/bias": "cls.predictions.bias",
        "next_sentence": "cls.seq_relationship",
    },
    parts={
        "pooler": ("bert.pooler.",),
        "masked_lm": ("cls.predictions.",),
        "next_sentence": ("cls.seq_relationship.",),
    },
    classes={
        "Model": ("pooler",),
        "ForPreTraining": ("pooler", "masked_lm", "next_sentence"),
        "ForMaskedLM": ("masked_lm",),
        "LMHeadModel": ("masked_lm",),
        "ForNextSentencePrediction": ("pooler", "next_sentence"),
    },
    settings=_BERT_SETTINGS,
    defaults={"vocab_size": 30_522},
    fixed={"pooler_activation": "tanh"},
    causal_class="LMHeadModel",
)

# modeling_modernbert.py, with fused tensors split by `modernbert.from_hf`
MODERNBERT = Family(
    title="ModernBERT",
    class_prefix="ModernBert",
    encoder="model",
    names={
        "embeddings/word/embedding": "model.embeddings.tok_embeddings.weight",
        "embeddings/norm": "model.embeddings.norm",
        "encoder/layer_{i}/attention/query": "model.layers.{i}.attn.query",
        "encoder/layer_{i}/attention/key": "model.layers.{i}.attn.key",
        "encoder/layer_{i}/attention/value": "model.layers.{i}.attn.value",
        "encoder/layer_{i}/attention/output": "model.layers.{i}.attn.Wo",
        "encoder/layer_{i}/attention/norm": "model.layers.{i}.attn_norm",
        "encoder/layer_{i}/feed_forward/intermediate": "model.layers.{i}.mlp.intermediate",
        "encoder/layer_{i}/feed_forward/gate": "model.layers.{i}.mlp.gate",
        "encoder/layer_{i}/feed_forward/output": "model.layers.{i}.mlp.Wo",
        "encoder/layer_{i}/feed_forward/norm": "model.layers.{i}.mlp_norm",
        "encoder/norm": "model.final_norm",
        "masked_lm/transform": "head.dense",
        "masked_lm/norm": "head.norm",
        "masked_lm/decoder": "decoder.weight",
        "masked_lm/bias": "decoder.bias",
        "head/transform": "head.dense",
        "head/norm": "head.norm",
    },
    parts={"masked_lm": ("decoder.",)},
    classes={"Model": (), "ForMaskedLM": ("masked_lm",)},
    settings={
        "layers": "num_hidden_layers",
        "hidden": "hidden_size",
        "heads": "num_attention_heads",
        "feed_forward": "intermediate_size",
        "vocab_size": "vocab_size",
        "positions": "max_position_embeddings",
        "dropout": "mlp_dropout",
        "attention_dropout": "attention_dropout",
        "norm.epsilon": "norm_eps",
        "norm.kind": "norm",
        "bias": "attention_bias",
        "local.window": "local_attention",
        "local.global_every": "global_attn_every_n_layers",
        "rope_theta": "global_rope_theta",
        "local.rope_theta": "local_rope_theta",
        "initializer_stddev": "initializer_range",
        "tied_decoder": "tie_word_embeddings",
        "decoder_bias": "decoder_bias",
        "head.pooling": "classifier_pooling",
    },
    activation="hidden_activation",
    defaults={
        **ARCHITECTURES["modern-base"],
        "vocab_size": 50_368,
    },
    fixed={
        "norm.position": "pre",
        "norm.embeddings": True,
        "norm.final": True,
        "position_kind": "rope",
        "gated_feed_forward": True,
        "norm.qk": False,
        "segments": 0,
        "transform": True,
        "head.layer": "transform",
    },
    head_names={"span": {"classifier": "classifier"}},
    token_ids={
        "cls_token_id": "cls_id",
        "bos_token_id": "cls_id",
        "sep_token_id": "sep_id",
        "eos_token_id": "sep_id",
    },
    from_hf=modernbert.from_hf,
    to_hf=modernbert.to_hf,
)


def _drop_padding_positions(settings: Settings, tensors: Tensors) -> tuple[Settings, Tensors]:
    """Drop the first rows of the position table: positions of RoBERTa begin after its padding id."""
    key, name = "max_position_embeddings", ROBERTA.names["embeddings/position/embedding"]
    unused = _padding_positions(settings)
    if isinstance(settings.get(key), int):
        settings = {**settings, key: settings[key] - unused}
    if name in tensors:
        tensors = {**tensors, name: tensors[name][unused:]}
    return settings, tensors


def _add_padding_positions(settings: Settings, tensors: Tensors) -> tuple[Settings, Tensors]:
    key, name = "max_position_embeddings", ROBERTA.names["embeddings/position/embedding"]
    unused = _padding_positions(settings)
    padded = np.pad(tensors[name], [(unused, 0), (0, 0)])
    return {**settings, key: settings[key] + unused}, {**tensors, name: padded}


def _padding_positions(settings: Settings) -> int:
    padding = settings.get("pad_token_id", 1)
    return padding + 1 if isinstance(padding, int) else 0


# modeling_roberta.py; positions as in create_position_ids_from_input_ids
ROBERTA = Family(
    title="RoBERTa",
    class_prefix="Roberta",
    encoder="roberta",
    names={
        **{ours: theirs.replace("bert.", "roberta.", 1) for ours, theirs in _BERT_ENCODER.items()},
        "pooler": "roberta.pooler.dense",
        "masked_lm/transform": "lm_head.dense",
        "masked_lm/norm": "lm_head.layer_norm",
        "masked_lm/decoder": "lm_head.decoder.weight",
        "masked_lm/bias": "lm_head.bias",
    },
    parts={"pooler": ("roberta.pooler.",), "masked_lm": ("lm_head.",)},
    classes={"Model": ("pooler",), "ForMaskedLM": ("masked_lm",), "ForCausalLM": ("masked_lm",)},
    settings=_BERT_SETTINGS,
    activations=("gelu",),
    defaults={"vocab_size": 50_265, "positions": 510},
    fixed={"pooler_activation": "tanh"},
    head_names={"sequence": {"pooler": "classifier.dense", "classifier": "classifier.out_proj"}},
    causal_class="ForCausalLM",
    from_hf=_drop_padding_positions,
    to_hf=_add_padding_positions,
)

# modeling_distilbert.py
DISTILBERT = Family(
    title="DistilBERT",
    class_prefix="DistilBert",
    encoder="distilbert",
    names={
        "embeddings/word/embedding": "distilbert.embeddings.word_embeddings.weight",
        "embeddings/position/embedding": "distilbert.embeddings.position_embeddings.weight",
        "embeddings/norm": "distilbert.embeddings.LayerNorm",
        "encoder/layer_{i}/attention/query": "distilbert.transformer.layer.{i}.attention.q_lin",
        "encoder/layer_{i}/attention/key": "distilbert.transformer.layer.{i}.attention.k_lin",
        "encoder/layer_{i}/attention/value": "distilbert.transformer.layer.{i}.attention.v_lin",
        "encoder/layer_{i}/attention/output": "distilbert.transformer.layer.{i}.attention.out_lin",
        "encoder/layer_{i}/attention/norm": "distilbert.transformer.layer.{i}.sa_layer_norm",
        "encoder/layer_{i}/feed_forward/intermediate": "distilbert.transformer.layer.{i}.ffn.lin1",
        "encoder/layer_{i}/feed_forward/output": "distilbert.transformer.layer.{i}.ffn.lin2",
        "encoder/layer_{i}/feed_forward/norm": "distilbert.transformer.layer.{i}.output_layer_norm",
        "masked_lm/transform": "vocab_transform",
        "masked_lm/norm": "vocab_layer_norm",
        "masked_lm/decoder": "vocab_projector.weight",
        "masked_lm/bias": "vocab_projector.bias",
    },
    parts={"masked_lm": ("vocab_transform.", "vocab_layer_norm.", "vocab_projector.")},
    classes={"Model": (), "ForMaskedLM": ("masked_lm",)},
    settings={
        "layers": "n_layers",
        "hidden": "dim",
        "heads": "n_heads",
        "feed_forward": "hidden_dim",
        "vocab_size": "vocab_size",
        "positions": "max_position_embeddings",
        "dropout": "dropout",
        "attention_dropout": "attention_dropout",
        "initializer_stddev": "initializer_range",
        "tied_decoder": "tie_word_embeddings",
    },
    activation="activation",
    defaults={"vocab_size": 30_522, "layers": 6},
    fixed={"segments": 0, "norm.epsilon": 1e-12, "pooler_activation": "relu"},
    head_names={head: {"pooler": "pre_classifier"} for head in ("sequence", "choice")},
)

# modeling_electra.py
ELECTRA = Family(
    title="ELECTRA",
    class_prefix="Electra",
    encoder="electra",
    names={
        **{ours: theirs.replace("bert.", "electra.", 1) for ours, theirs in _BERT_ENCODER.items()},
        "embeddings/project": "electra.embeddings_project",
        "masked_lm/transform": "generator_predictions.dense",
        "masked_lm/norm": "generator_predictions.LayerNorm",
        "masked_lm/decoder": "generator_lm_head.weight",
        "masked_lm/bias": "generator_lm_head.bias",
        "replaced_token/transform": "discriminator_predictions.dense",
        "replaced_token/output": "discriminator_predictions.dense_prediction",
    },
    parts={
        "masked_lm": ("generator_predictions.", "generator_lm_head."),
        "replaced_token": ("discriminator_predictions.",),
    },
    classes={"Model": (), "ForPreTraining": ("replaced_token",), "ForMaskedLM": ("masked_lm",)},
    settings={
        **{ours: theirs for ours, theirs in _BERT_SETTINGS.items() if ours != "causal"},
        "embedding_size": "embedding_size",
    },
    activations=("gelu",),
    defaults={
        "vocab_size": 30_522, "embedding_size": 128, "hidden": 256, "heads": 4,
        "feed_forward": 1024,
    },
    fixed={"pooler_activation": "gelu"},
    head_names={
        "sequence": {"pooler": "classifier.dense", "classifier": "classifier.out_proj"},
        "choice": {"pooler": "sequence_summary.summary"},
    },
)  # fmt: skip

# By model_type in config.json, which is the value of config.model.family.
FAMILIES = {
    "bert": BERT,
    "roberta": ROBERTA,
    **{
        name: dataclasses.replace(
            ROBERTA,
            title=title,
            class_prefix=prefix,
            defaults={"vocab_size": 30_522, "positions": 510},
        )
        for name, title, prefix in (
            ("xlm-roberta", "XLM-R", "XLMRoberta"),
            ("camembert", "CamemBERT", "Camembert"),
        )
    },
    "distilbert": DISTILBERT,
    "electra": ELECTRA,
    "modernbert": MODERNBERT,
}
