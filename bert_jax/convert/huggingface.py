"""Hugging Face's BERT: its tensors, config.json and tokenizer files, to ours and back.

One table of names is read in both directions, so what goes out comes back bit for bit. The names
here are those of `transformers`' `BertForPreTraining` and its sisters (modeling_bert.py).
"""

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from flax import traverse_util

from bert_jax.config import POOLED_HEADS, ModelConfig
from bert_jax.data.wordpiece import CONTINUATION, SPECIAL, Vocabulary
from bert_jax.errors import UserError
from bert_jax.model.bert import Params, shapes
from bert_jax.model.layers import padded_vocab_size

# Our path → their name. {i} is the layer. Dense kernels are transposed, and LayerNorm's scale is
# their weight, in `to_huggingface`.
_EMBEDDINGS = {
    "embeddings/word/embedding": "bert.embeddings.word_embeddings.weight",
    "embeddings/position/embedding": "bert.embeddings.position_embeddings.weight",
    "embeddings/segment/embedding": "bert.embeddings.token_type_embeddings.weight",
    "embeddings/norm": "bert.embeddings.LayerNorm",
}
_LAYER = {
    "encoder/layer_{i}/attention/query": "bert.encoder.layer.{i}.attention.self.query",
    "encoder/layer_{i}/attention/key": "bert.encoder.layer.{i}.attention.self.key",
    "encoder/layer_{i}/attention/value": "bert.encoder.layer.{i}.attention.self.value",
    "encoder/layer_{i}/attention/output": "bert.encoder.layer.{i}.attention.output.dense",
    "encoder/layer_{i}/attention/norm": "bert.encoder.layer.{i}.attention.output.LayerNorm",
    "encoder/layer_{i}/feed_forward/intermediate": "bert.encoder.layer.{i}.intermediate.dense",
    "encoder/layer_{i}/feed_forward/output": "bert.encoder.layer.{i}.output.dense",
    "encoder/layer_{i}/feed_forward/norm": "bert.encoder.layer.{i}.output.LayerNorm",
}
_POOLER = {"pooler": "bert.pooler.dense"}
_MASKED_LM = {
    "masked_lm/transform": "cls.predictions.transform.dense",
    "masked_lm/norm": "cls.predictions.transform.LayerNorm",
    "masked_lm/decoder": "cls.predictions.decoder.weight",
    "masked_lm/bias": "cls.predictions.bias",
}
_NEXT_SENTENCE = {"next_sentence": "cls.seq_relationship"}
_WORDS = "bert.embeddings.word_embeddings.weight"
_DECODER, _DECODER_BIAS = "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"
_BIAS = "cls.predictions.bias"

# What a checkpoint may have besides the encoder, by what its tensors' names begin with.
PARTS = {
    "pooler": ("bert.pooler.",),
    "masked_lm": ("cls.predictions.",),
    "next_sentence": ("cls.seq_relationship.",),
    "head": ("classifier.", "qa_outputs."),
}
# Their class → its parts and the kind of its fine-tuned head.
_CLASSES = {
    "BertModel": (("pooler",), ""),
    "BertForPreTraining": (("pooler", "masked_lm", "next_sentence"), ""),
    "BertForMaskedLM": (("masked_lm",), ""),
    "BertLMHeadModel": (("masked_lm",), ""),
    "BertForNextSentencePrediction": (("pooler", "next_sentence"), ""),
    "BertForSequenceClassification": (("pooler", "head"), "sequence"),
    "BertForMultipleChoice": (("pooler", "head"), "choice"),
    "BertForTokenClassification": (("head",), "token"),
    "BertForQuestionAnswering": (("head",), "span"),
}
# Ours → theirs in config.json.
_SETTINGS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "feed_forward": "intermediate_size",
    "vocab_size": "vocab_size",
    "positions": "max_position_embeddings",
    "segments": "type_vocab_size",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "layer_norm_epsilon": "layer_norm_eps",
    "initializer_stddev": "initializer_range",
    "tied_decoder": "tie_word_embeddings",
    "causal": "is_decoder",
}
# The first of theirs that ours has the meaning of is written back.
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}


# --- Tensors --------------------------------------------------------------------------------------


def _names(config: ModelConfig) -> dict[str, str]:
    layers = {
        ours.format(i=i): theirs.format(i=i)
        for i in range(config.layers)
        for ours, theirs in _LAYER.items()
    }
    head = {"classifier": "qa_outputs" if config.head == "span" else "classifier"}
    names = {**_EMBEDDINGS, **layers, **_POOLER, **_MASKED_LM, **_NEXT_SENTENCE, **head}
    if not config.tied_decoder:
        names["masked_lm/bias"] = _DECODER_BIAS
    return names


def _their_name(path: str, names: Mapping[str, str]) -> str:
    if path in names:
        return names[path]
    module, _, leaf = path.rpartition("/")
    return f"{names[module]}.{'bias' if leaf == 'bias' else 'weight'}"


def _their_shape(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Heads are not an axis of its own there, and kernels [in, out] are weights [out, in]."""
    if path.endswith("attention/output/kernel"):
        shape = (shape[0] * shape[1], shape[2])
    elif re.search(r"attention/(query|key|value)/", path):
        shape = (*shape[:-2], shape[-2] * shape[-1])
    return shape[::-1] if _is_transposed(path) else shape


def _is_transposed(path: str) -> bool:
    return path.endswith("/kernel") or path == "masked_lm/decoder"


def _vocabulary_padding(path: str, config: ModelConfig) -> int:
    """By how much our tensor is longer than theirs, on the first axis of theirs."""
    is_table = path in ("embeddings/word/embedding", "masked_lm/decoder", "masked_lm/bias")
    return padded_vocab_size(config) - config.vocab_size if is_table else 0


def to_huggingface(params: Params, config: ModelConfig) -> dict[str, np.ndarray]:
    """Our parameters under Hugging Face's names and shapes, without the vocabulary's padding."""
    names, tensors = _names(config), {}
    for path, value in traverse_util.flatten_dict(params, sep="/").items():
        value, shape = np.asarray(value), _their_shape(path, value.shape)
        value = value.reshape(shape[::-1]).T if _is_transposed(path) else value.reshape(shape)
        value = value[: len(value) - _vocabulary_padding(path, config)]
        tensors[_their_name(path, names)] = np.ascontiguousarray(value)
    if config.masked_lm and not config.tied_decoder:
        # Their untied decoder has a bias of its own and leaves this one, still a parameter, unread.
        tensors[_BIAS] = tensors[_DECODER_BIAS]
    return tensors


def from_huggingface(
    tensors: Mapping[str, np.ndarray],
    config: ModelConfig,
    shown: Mapping[str, str] | None = None,
) -> Params:
    """The inverse, in float32.

    Args:
        tensors: by the names of `to_huggingface`; those that the config does not name are not read.
        config: whose parameters to make.
        shown: what to call a tensor in an error, where that is not its name.

    Raises:
        UserError: tensors that are missing, have another shape or hold what is no number; the line
            names them.
    """
    names, params, shown = _names(config), {}, shown or {}
    missing, misshapen, broken = [], [], []
    for path, leaf in traverse_util.flatten_dict(shapes(config), sep="/").items():
        name, padding = _their_name(path, names), _vocabulary_padding(path, config)
        if name not in tensors:
            missing.append(name)
            continue
        value = np.asarray(tensors[name])
        name = shown.get(name, name)
        first, *rest = _their_shape(path, leaf.shape)
        if value.shape != (first - padding, *rest):
            misshapen.append(f"{name} is {list(value.shape)}, not {[first - padding, *rest]}")
            continue
        with np.errstate(over="ignore"):  # told below
            value = value.astype(np.float32)
        if not np.isfinite(value).all():
            broken.append(name)
        value = np.pad(value, [(0, padding), *[(0, 0) for _ in rest]])
        value = value.T if _is_transposed(path) else value
        params[path] = np.ascontiguousarray(value).reshape(leaf.shape)
    problems = {
        "missing": missing,
        "of another shape than the config says": misshapen,
        "not numbers everywhere": broken,
    }
    found = [f"{what}: {some(names)}" for what, names in problems.items() if names]
    if found:
        raise UserError(f"the weights are not those of this model; {'; '.join(found)}")
    return traverse_util.unflatten_dict(params, sep="/")


def settle_decoder(tensors: dict[str, np.ndarray], tied: bool) -> list[str]:
    """Sees to the tensors that a masked-LM head may have twice, in place.

    Args:
        tensors: by canonical names.
        tied: whether the decoder is the embedding table.

    Returns:
        Names of tensors that say nothing new or that nobody reads; they are taken out.

    Raises:
        UserError: a decoder that is to be the embedding table and is not.
    """
    own, other = (_BIAS, _DECODER_BIAS) if tied else (_DECODER_BIAS, _BIAS)
    if other in tensors:
        tensors.setdefault(own, tensors[other])
    twins = {_DECODER: _WORDS, other: own} if tied else {}
    for name, twin in twins.items():
        if name in tensors and not np.array_equal(tensors[name], tensors[twin]):
            raise UserError(
                f"config.json ties the decoder to the embeddings, but {name} is not {twin}; "
                'add "tie_word_embeddings": false to keep both'
            )
    return [
        name
        for name in ({_DECODER, other} if tied else {other})
        if tensors.pop(name, None) is not None
    ]


def unexpected(tensors: Collection[str], config: ModelConfig) -> list[str]:
    """Canonical names that the model has no place for."""
    names = _names(config)
    paths = traverse_util.flatten_dict(shapes(config), sep="/")
    return sorted(set(tensors) - {_their_name(path, names) for path in paths})


def some(names: Collection[str], most: int = 8) -> str:
    """Names for a line: all, or the first ones and how many more."""
    shown = ", ".join(list(names)[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def canonical(tensors: Mapping[str, Any]) -> dict[str, str]:
    """The name each tensor goes by in `to_huggingface`, for names of whatever age and wrapping.

    Understands `module.` and other prefixes, an encoder saved without `bert.`, LayerNorm's `gamma`
    and `beta`; leaves out buffers that hold no weights.

    Returns:
        Our name of a tensor → its name in `tensors`.

    Raises:
        UserError: there is not exactly one BERT among the tensors.
    """
    ending = "embeddings.word_embeddings.weight"
    encoders = [n.removesuffix(ending) for n in tensors if re.search(rf"(^|\.){ending}$", n)]
    if len(encoders) != 1:
        found = some([f"{prefix}{ending}" for prefix in encoders]) or f"no {ending}"
        raise UserError(f"not the weights of one BERT: found {found}")
    encoder = encoders[0]
    outside = encoder.removesuffix("bert.")
    names = {}
    for name in tensors:
        if name.endswith((".position_ids", ".token_type_ids")) or name == "position_ids":
            continue
        if re.match(r"(embeddings|encoder|pooler)\.", name.removeprefix(encoder)):
            new = "bert." + name.removeprefix(encoder)
        else:
            new = name.removeprefix(outside)
        new = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", new)
        new = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", new)
        if new in names:
            raise UserError(f"both {names[new]} and {name} are {new}")
        names[new] = name
    return names


# --- config.json ----------------------------------------------------------------------------------


def model_config(
    settings: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    allow_missing: Collection[str] = (),
) -> ModelConfig:
    """The model that a config.json and the tensors beside it make.

    Args:
        settings: the parsed config.json (or Google's bert_config.json).
        tensors: by canonical names; which parts there are is read from them.
        allow_missing: parts that may be missing although the config's class has them.

    Raises:
        UserError: not BERT (said by name), a setting that our BERT does not have, a part missing.
    """
    kind = settings.get("model_type", "bert")
    classes = settings.get("architectures") or []
    if not isinstance(classes, list) or not all(isinstance(c, str) for c in classes):
        raise UserError(f"config.json: architectures is {classes!r}, not a list of names")
    if kind != "bert":
        raise UserError(
            f"a {kind!r} model ({', '.join(classes) or 'no class named'}): "
            "only BERT and models of its architecture (model_type 'bert') can be imported"
        )
    refused = {
        "position_embedding_type": ("absolute", None),
        "add_cross_attention": (False, None),
        "pruned_heads": ({}, None),
    }
    for name, allowed in refused.items():
        if settings.get(name) not in allowed:
            raise UserError(f"config.json: {name} is {settings[name]!r}, which this BERT is not")
    activation = settings.get("hidden_act", "gelu")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise UserError(
            f"config.json: hidden_act is {activation!r}; known: {', '.join(_ACTIVATIONS)}"
        )
    default = ModelConfig(vocab_size=30_522)
    values: dict[str, Any] = {"activation": _ACTIVATIONS[activation]}
    for ours, theirs in _SETTINGS.items():
        value = settings.get(theirs, getattr(default, ours))
        wanted = type(getattr(default, ours))
        if wanted is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if type(value) is not wanted or (wanted is int and not 0 < value < 1 << 31):
            raise UserError(f"config.json: {theirs} is {value!r}, which is no {wanted.__name__}")
        values[ours] = value
    layers = {
        m.group(1) for m in (re.match(r"bert\.encoder\.layer\.(\d+)\.", n) for n in tensors) if m
    }
    if len(layers) != values["layers"]:
        raise UserError(
            f"config.json: num_hidden_layers is {values['layers']}, the weights have {len(layers)}"
        )
    if values["hidden"] % values["heads"]:
        raise UserError(
            f"config.json: hidden_size {values['hidden']} is not a multiple of "
            f"num_attention_heads {values['heads']}"
        )
    parts, head = _parts(settings, tensors, allow_missing)
    if values["causal"]:
        if "next_sentence" in parts or head in POOLED_HEADS:
            raise UserError(
                "config.json: is_decoder is True and a head stands on [CLS], which then sees nothing; "
                "causal models here have theirs on the last token"
            )
        # It would stand on another token here. If there is one, it is told as unexpected.
        parts = [part for part in parts if part != "pooler"]
    values["masked_lm"] = "masked_lm" in parts
    values["next_sentence"] = "next_sentence" in parts
    if "head" in parts:
        values |= {"head": head, "labels": _labels(settings, tensors, head)}
    config = ModelConfig(**values)
    config.pooler = "pooler" in parts and not config.has_pooler
    return config


def _parts(settings, tensors, allow_missing) -> tuple[list[str], str]:
    known = [c for c in settings.get("architectures") or [] if c in _CLASSES]
    declared, head = _CLASSES[known[0]] if known else ((), "")
    if any(name.startswith("qa_outputs.") for name in tensors):
        head = "span"
    there = [part for part, starts in PARTS.items() if any(n.startswith(starts) for n in tensors)]
    if "head" in there and not head:
        there.remove("head")  # nobody says what it is: its tensors will be told as unexpected
    missing = [part for part in declared if part not in there]
    if settings.get("add_pooling_layer") is False:  # as transformers calls it
        missing = [part for part in missing if part != "pooler"]
    unforgiven = [part for part in missing if part not in allow_missing]
    if unforgiven:
        names = [f"{start}*" for part in unforgiven for start in PARTS[part][:1]]
        options = " ".join(f"--allow-missing {part}" for part in unforgiven)
        raise UserError(
            f"{known[0]} without {', '.join(names)}: the {' and the '.join(unforgiven)} missing; "
            f"add {options} to go on without"
        )
    if "pooler" not in there and ("next_sentence" in there or head in ("sequence", "choice")):
        raise UserError("missing: bert.pooler.dense.weight, which its heads stand on")
    return there, head


def _labels(settings, tensors, head: str) -> tuple[str, ...]:
    if head == "span":
        return ("start", "end")
    if head == "choice":
        return ("score",)
    count = len(tensors["classifier.weight"]) if "classifier.weight" in tensors else 1
    names = settings.get("id2label")
    names = names if isinstance(names, dict) else {}
    return tuple(str(names.get(str(i), f"LABEL_{i}")) for i in range(count))


def huggingface_config(config: ModelConfig, vocabulary: Vocabulary) -> dict[str, Any]:
    """config.json of a model.

    Raises:
        UserError: transformers' BERT cannot be this model; the line says why.
    """
    if config.causal and config.has_pooler:
        raise UserError(
            "config.model.causal is True and what is pooled is the last token: transformers' BERT pools "
            "the first"
        )
    impossible = {
        "lstm_layers": config.lstm_layers,
        "features": config.features,
        "final_norm": config.final_norm,
        "transform": config.masked_lm and not config.transform,
        "segments": not config.segments,
    }
    for key in (key for key, is_so in impossible.items() if is_so):
        raise UserError(
            f"config.model.{key} is {getattr(config, key)!r}: transformers' BERT has no such model"
        )
    settings: dict[str, Any] = {
        "architectures": [architecture(config)],
        "model_type": "bert",
        "hidden_act": next(k for k, v in _ACTIVATIONS.items() if v == config.activation),
        **{theirs: getattr(config, ours) for ours, theirs in _SETTINGS.items()},
        "pad_token_id": vocabulary.pad_id,
        "position_embedding_type": "absolute",
        "dtype": "float32",
    }
    if architecture(config) == "BertModel" and not config.has_pooler:
        settings["add_pooling_layer"] = False
    if config.head in ("sequence", "token"):
        settings["id2label"] = {str(i): label for i, label in enumerate(config.labels)}
        settings["label2id"] = {label: i for i, label in enumerate(config.labels)}
    return settings


def architecture(config: ModelConfig) -> str:
    """The class of transformers that has most of the model's parts, and no others if one is so."""
    if config.causal and config.masked_lm:
        return "BertLMHeadModel"
    parts = {"pooler": config.has_pooler, "head": bool(config.head)}
    parts |= {"masked_lm": config.masked_lm, "next_sentence": config.next_sentence}
    ours = {part for part, there in parts.items() if there}

    def fits(item):
        parts, head = item[1]
        return head == config.head, -len({*parts} - ours), len(ours & {*parts})

    return max(_CLASSES.items(), key=fits)[0]


# --- Tokenizer ------------------------------------------------------------------------------------


def read_tokenizer(text: str) -> tuple[Vocabulary, list[str]]:
    """The vocabulary and settings of a tokenizer.json, and the tokens it adds to BERT's.

    Raises:
        ValueError: it is not BERT's tokenizer; says what is different.
    """
    file = json.loads(text)
    model, normalizer = file["model"], file.get("normalizer") or {}
    if model.get("type", "WordPiece") != "WordPiece":
        raise ValueError(f"its model is {model['type']}, not WordPiece")
    if normalizer.get("type") != "BertNormalizer":
        raise ValueError(f"its normalizer is {normalizer.get('type')}, not BertNormalizer")
    if (file.get("pre_tokenizer") or {}).get("type") != "BertPreTokenizer":
        raise ValueError("its pre_tokenizer is not BertPreTokenizer")
    for name, wanted in {
        "continuing_subword_prefix": CONTINUATION,
        "max_input_chars_per_word": 100,
        "unk_token": "[UNK]",
    }.items():
        if model.get(name, wanted) != wanted:
            raise ValueError(f"its {name} is {model[name]!r}, not {wanted!r}")
    if not normalizer.get("clean_text", True):
        raise ValueError("its clean_text is off")
    ids = dict(model["vocab"])
    added = [token["content"] for token in file.get("added_tokens") or []]
    for token in file.get("added_tokens") or []:
        ids.setdefault(token["content"], token["id"])
    tokens = sorted(ids, key=ids.__getitem__)
    if [ids[token] for token in tokens] != list(range(len(tokens))):
        raise ValueError("its ids are not 0, 1, 2, …")
    vocabulary = Vocabulary(
        tuple(tokens),
        bool(normalizer.get("lowercase", True)),
        normalizer.get("strip_accents"),
        bool(normalizer.get("handle_chinese_chars", True)),
    )
    return vocabulary, [token for token in added if token not in SPECIAL]


def tokenizer_files(vocabulary: Vocabulary, tokens: int) -> dict[str, str]:
    """tokenizer.json, tokenizer_config.json and special_tokens_map.json, for at most `tokens`."""
    from tokenizers import processors

    tokenizer = vocabulary.tokenizer()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary.cls_id), ("[SEP]", vocabulary.sep_id)],
    )
    special = {f"{token[1:-1].lower()}_token": token for token in SPECIAL}
    settings = {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": vocabulary.lowercase,
        "strip_accents": vocabulary.strip_accents,
        "tokenize_chinese_chars": vocabulary.split_chinese,
        "model_max_length": tokens,
        **special,
    }
    return {
        "tokenizer.json": tokenizer.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(settings, indent=2),
        "special_tokens_map.json": json.dumps(special, indent=2),
    }
