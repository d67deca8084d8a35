"""Import and export of every architecture against transformers, and byte-level tokenizers."""

import itertools
import json
import random
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from bert_jax import train
from bert_jax.config.flags import load
from bert_jax.config.model import HeadConfig
from bert_jax.config.schema import Config, FinetuneConfig, TaskConfig
from bert_jax.convert import export as export_lib
from bert_jax.convert import source
from bert_jax.convert.export import export
from bert_jax.convert.families import FAMILIES
from bert_jax.convert.huggingface import huggingface_config, to_huggingface
from bert_jax.data import prepare, rows, vocabulary_files
from bert_jax.data.loader import RowDataset, batches
from bert_jax.inference.fill_mask import MaskFiller
from bert_jax.model.bert import Bert
from bert_jax.model.encoder import attention_probabilities
from bert_jax.objectives import losses, pretraining
from bert_jax.tasks.squad import Squad
from tests.helpers.checkpoints import (
    WORDS,
    error_of,
    export_refusal,
    random_params,
    refusal,
    small_config,
)

TEXT = (
    "The cats sat on a mat, and didn't move (much). Naïve café: 12 cats—zwölf Katzen! 中国 日本\n"
    "A dog ran; the dog's mat was red. Cats and dogs run on the mat."
)
LABELS = {"id2label": {0: "no", 1: "maybe", 2: "yes"}}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """Folder with a byte-level BPE and a SentencePiece tokenizer, saved by transformers."""
    from tokenizers import ByteLevelBPETokenizer, SentencePieceUnigramTokenizer

    folder = tmp_path_factory.mktemp("tokenizers")
    bpe = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    bpe.train_from_iterator([TEXT] * 3, 330, special_tokens=special, show_progress=False)
    state = json.loads(bpe.to_str())["model"]
    merges = [tuple(pair) for pair in state["merges"]]
    swapped = {**state["vocab"], "<pad>": 3, "<unk>": 1}
    for name, ids in (("roberta", state["vocab"]), ("roberta-pad-3", swapped)):
        theirs = transformers.RobertaTokenizer(vocab=ids, merges=merges)
        theirs.save_pretrained(folder / name)
    unigram = SentencePieceUnigramTokenizer()
    unigram.train_from_iterator(
        [TEXT] * 3, vocab_size=120, special_tokens=[*special[:4]], unk_token="<unk>",
        show_progress=False,
    )  # fmt: skip
    pieces = [tuple(piece) for piece in json.loads(unigram.to_str())["model"]["vocab"]]
    theirs = transformers.XLMRobertaTokenizer(vocab=[*pieces, ("<mask>", 0.0)])
    theirs.save_pretrained(folder / "xlm-roberta")
    return folder


def texts(count, seed=0):
    """Yield random texts of words, punctuation, spaces, accents and special tokens."""
    rng = random.Random(seed)
    words = [*TEXT.split(), "<s>", "</s>", "<mask>", "é", "", "▁", "Ġ", "\t", "ß", "🙂", "don't"]
    for _ in range(count):
        chosen = rng.choices(words, k=rng.randint(0, 9))
        yield rng.choice(["", " ", "  "]) + rng.choice([" ", " ", "", "  "]).join(chosen)


@pytest.mark.parametrize("kind", ["roberta", "xlm-roberta"])
def test_token_ids_equal_transformers(tokenizers, kind, tmp_path):
    theirs = transformers.AutoTokenizer.from_pretrained(tokenizers / kind)
    ours = vocabulary_files.load(tokenizers / kind)
    assert not ours.is_wordpiece
    assert len(ours) == len(theirs)
    special = (theirs.pad_token, theirs.unk_token, theirs.cls_token, theirs.sep_token)
    assert ours.special == (*special, theirs.mask_token)
    sample = list(texts(150))
    for a, b in itertools.pairwise(sample):
        b = b or "."  # transformers treats an empty second text as absent
        assert ours.encode(a) == theirs(a, split_special_tokens=True)["input_ids"], a
        assert ours.encode(a, b) == theirs(a, b, split_special_tokens=True)["input_ids"], (a, b)
        assert ours.encode(a, b, mask=True) == theirs(a, b)["input_ids"], (a, b)
    assert ours.encode("a [MASK] ran", mask=True) == theirs("a <mask> ran")["input_ids"]
    # Character offsets, apart from spaces, equal those of transformers' fast tokenizers.
    for (ids, spans), text in zip(ours.encode_all(sample), sample, strict=True):
        assert ours.encode(text)[1:-1] == ids.tolist()
        expected = theirs(text, split_special_tokens=True, return_offsets_mapping=True)
        for (start, end), (low, high) in zip(spans, expected["offset_mapping"][1:-1], strict=True):
            assert text[start:end].strip() == text[low:high].strip()
    words = ["cats", "(much).", "didn't", "Katzen!"]
    pieces = [encoded.ids.tolist() for encoded in ours.encode_words(words)]
    split = transformers.AutoTokenizer.from_pretrained(tokenizers / kind, add_prefix_space=True)
    assert [i for piece in pieces for i in piece] == split(words, is_split_into_words=True)[
        "input_ids"
    ][1:-1]
    # Saving and loading preserves the vocabulary.
    ours.save(tmp_path / "saved")
    assert vocabulary_files.load(tmp_path / "saved") == ours
    assert ours.sha256 == vocabulary_files.load(tmp_path / "saved").sha256


@pytest.mark.parametrize("seed", range(4))
def test_spans_of_byte_level_tokens_have_their_text(seed):
    """The library's are wrong if a space is added to every word (huggingface/tokenizers, trim_offsets)."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers
    from tokenizers import pre_tokenizers as pre

    rng = random.Random(seed)
    alphabet = pre.ByteLevel.alphabet()
    printable = {c: ord(c) for c in alphabet if ord(c) < 256}
    others = sorted(set(alphabet) - set(printable))  # the other bytes, from "Ā" on
    byte_of = printable | dict(zip(others, sorted({*range(256)} - {*printable.values()})))  # noqa: B905
    splits = [
        *(pre.Whitespace, pre.WhitespaceSplit, pre.Punctuation, pre.Digits),
        lambda: pre.Split(" ", "merged_with_next"),
    ]
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    for _ in range(12):
        flags = [rng.random() < 0.7 for _ in range(5)]
        steps = [split() for split in rng.choices(splits, k=rng.randint(0, 3))]
        byte_level = pre.ByteLevel(add_prefix_space=flags[0], use_regex=flags[1])
        steps.insert(rng.randint(0, len(steps)), byte_level)
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer, tokenizer.decoder = pre.Sequence(steps), decoders.ByteLevel()
        lower = rng.random() < 0.3
        if lower:
            tokenizer.normalizer = normalizers.Lowercase()
        tokenizer.train_from_iterator(
            [TEXT] * 3,
            trainers.BpeTrainer(
                vocab_size=320,
                initial_alphabet=alphabet,
                special_tokens=special,
                show_progress=False,
            ),
        )
        tokenizer.post_processor = processors.RobertaProcessing(
            ("</s>", 2), ("<s>", 0), trim_offsets=flags[2], add_prefix_space=flags[3]
        )
        contents = {"tokenizer.json": tokenizer.to_str(pretty=flags[4]).encode()}
        tokenizer.encode_special_tokens = True
        ours, sample = vocabulary_files.from_files(contents), list(texts(20, rng.random()))
        for (ids, spans), text in zip(ours.encode_all(sample), sample, strict=True):
            assert ids.tolist() == tokenizer.encode(text, add_special_tokens=False).ids
            for i, (start, end) in zip(ids, spans, strict=True):
                shown = text[start:end].lower() if lower else text[start:end]
                token = bytes(byte_of[character] for character in ours.tokens[i])
                try:
                    assert shown == token.decode().strip(), (text, steps)
                except UnicodeDecodeError:  # part of a character, which the span covers
                    assert token.strip() in shown.encode(), (text, steps)
                    assert len(shown) <= len(token.strip()), (text, steps)


def test_roberta_tokenizer_loads_from_vocab_and_merges(tokenizers, tmp_path):
    state = json.loads((tokenizers / "roberta" / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(state["vocab"]))
    lines = [" ".join(pair) for pair in state["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *lines, ""]))
    one, other = vocabulary_files.load(tmp_path), vocabulary_files.load(tokenizers / "roberta")
    assert one.tokens == other.tokens
    for text in texts(50):
        assert one.encode(text, "a") == other.encode(text, "a")
    assert one.encode("a <mask>", mask=True) == other.encode("a<mask>", mask=True)  # lstrip


@pytest.mark.parametrize("prefix", ["Roberta", "XLMRoberta", "Electra"])
def test_tokenizer_json_without_a_model_type_is_read(tokenizers, tmp_path, prefix):
    """Files of 2020 do not name the type of the model, and nothing else names the tokenizer."""
    their_model(tmp_path, prefix, "Model", tokenizers)
    expected = source.read(str(tmp_path)).vocabulary
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    del content["model"]["type"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 512}')
    for other in (source.read(str(tmp_path)).vocabulary, vocabulary_files.load(tmp_path)):
        assert (type(other), other.tokens) == (type(expected), expected.tokens)
        assert other.encode("The cats", "a dog") == expected.encode("The cats", "a dog")


@pytest.mark.parametrize("kind", ["roberta", "xlm-roberta"])
def test_continuation_marks_word_starts(tokenizers, kind):
    ours = vocabulary_files.load(tokenizers / kind)
    ids = ours.encode("The cats didn't move (much).")[1:-1]
    continues, words = ours.continuation(), [""]
    for i in ids:
        words += [] if continues[i] or not words[0] else [""]
        words[-1] += ours.text_of(i).lstrip("▁")
    assert words[:3] == ["The", "cats", "didn"]
    assert words[3].startswith("'")
    assert "move" in words
    assert not continues[[ours.cls_id, ours.sep_id, ours.mask_id]].any()


# --- Parity with transformers ---------------------------------------------------------------------

SIZES = dict(hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20)
MODERN = dict(
    SIZES, num_attention_heads=2, num_hidden_layers=4, local_attention=8, norm_eps=0.01,
    cls_token_id=2, bos_token_id=2, sep_token_id=3, eos_token_id=3,
    rope_parameters={
        "full_attention": {"rope_type": "default", "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    },
)  # fmt: skip
BIASED = {
    **dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), True),
    "hidden_activation": "gelu_new", "classifier_activation": "gelu_new",
}  # fmt: skip
MODELS = {
    "Roberta": ("roberta", dict(**SIZES, type_vocab_size=1, layer_norm_eps=1e-5)),
    "XLMRoberta": ("xlm-roberta", dict(**SIZES, type_vocab_size=1)),
    "Camembert": ("roberta-pad-3", dict(**SIZES, type_vocab_size=1)),
    "Bert": ("wordpiece", SIZES),
    "DistilBert": ("wordpiece", dict(dim=12, n_layers=2, n_heads=3, hidden_dim=20)),
    "Electra": ("wordpiece", dict(**SIZES, embedding_size=8)),
    "ModernBert": ("wordpiece", MODERN),
}
HEADS = ("SequenceClassification", "MultipleChoice", "TokenClassification", "QuestionAnswering")
CLASSES = ("Model", "ForMaskedLM", *(f"For{head}" for head in HEADS))
CASES = [
    *itertools.product(("Bert", "Roberta", "DistilBert", "Electra", "ModernBert"), CLASSES),
    ("Bert", "ForPreTraining"), ("Bert", "ForNextSentencePrediction"), ("Bert", "LMHeadModel"),
    ("XLMRoberta", "ForMaskedLM"), ("Camembert", "ForMaskedLM"), ("Electra", "ForPreTraining"),
]  # fmt: skip
CHANGES = {
    ("Bert", "LMHeadModel"): {"is_decoder": True},
    ("ModernBert", "Model"): {"layer_types": ["full_attention", "sliding_attention"] * 2},
    ("ModernBert", "ForMaskedLM"): BIASED | {"tie_word_embeddings": False, "decoder_bias": False},
    ("ModernBert", "ForSequenceClassification"): BIASED | {"classifier_pooling": "mean"},
}


def their_model(folder, prefix, rest, tokenizers, kind=None):
    """Save a random transformers model with its tokenizer, and return both."""
    own_kind, settings = MODELS[prefix]
    kind = kind or own_kind
    if kind == "wordpiece":
        ids = {word: i for i, word in enumerate(WORDS)}
        name = "DistilBertTokenizer" if prefix == "DistilBert" else "BertTokenizer"
        tokenizer = getattr(transformers, name)(vocab=ids)
        if prefix == "ModernBert":
            tokenizer.model_input_names = ["input_ids", "attention_mask"]
        tokenizer.save_pretrained(folder)
    else:
        shutil.copytree(tokenizers / kind, folder, dirs_exist_ok=True)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    changes = {
        **(LABELS if rest.endswith("Classification") else {}),
        **CHANGES.get((prefix, rest), {}),
    }
    config = getattr(transformers, f"{prefix}Config")(
        **settings, **changes,
        vocab_size=len(tokenizer), max_position_embeddings=34, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = getattr(transformers, prefix + rest)(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 0.3, generator=generator)
            if own_kind != "wordpiece" and "position_embeddings" in name:
                parameter[: tokenizer.pad_token_id + 1] = 0  # never used
    model.save_pretrained(folder)
    return model, tokenizer


def run(config, params, tokens, layout):
    return jax.jit(Bert(config.model).apply)({"params": params}, tokens, layout)


def batch(vocab, tokenizer):
    """Return two text pairs as one packed row (tokens, layout), and as transformers' inputs.

    The last result is the mask of real tokens in transformers' rows.
    """
    pairs = [("the cats sat, on a mat", "a dog ran."), ("A mat", "the cat!")]
    theirs = tokenizer([a for a, _ in pairs], [b for _, b in pairs], padding=True)
    theirs = transformers.BatchEncoding(theirs, tensor_type="pt")
    encoded = [vocab.encode(a, b) for a, b in pairs]
    real = theirs["attention_mask"].numpy() == 1
    assert [ids[r].tolist() for ids, r in zip(theirs["input_ids"], real, strict=True)] == encoded
    first = [[1 + len(vocab.encode(a)) - 2 + len(vocab.separator_ids) for a, _ in pairs]]
    tokens, length = np.concatenate(encoded)[None], np.array([[len(ids) for ids in encoded]])
    layout = rows.layout(length, np.array(first), tokens.shape[1])
    return jnp.asarray(tokens), rows.Layout(*map(jnp.asarray, layout)), theirs, real


# A table names the tensors of the heads of a family; every commit tests two of the four heads.
NIGHTLY = [*itertools.product(("Roberta", "DistilBert", "Electra", "ModernBert"), CLASSES[3:5])]


@pytest.mark.parametrize(
    ("prefix", "rest"),
    [pytest.param(*case, marks=[pytest.mark.nightly] * (case in NIGHTLY)) for case in CASES],
)
def test_outputs_equal_transformers_and_tensors_round_trip(tmp_path, tokenizers, prefix, rest):
    """Our sequences are packed into one row."""
    model, tokenizer = their_model(tmp_path / "in", prefix, rest, tokenizers)
    config, vocab, params, about = source.read(str(tmp_path / "in"))
    assert about["left_out"] == []
    tokens, layout, theirs, real = batch(vocab, tokenizer)
    if rest == "ForMultipleChoice":
        theirs = {key: value[:, None] for key, value in theirs.items()}
    with torch.no_grad():
        expected = model(**theirs, output_hidden_states=True)
    outputs = run(config, params, tokens, layout)
    for ours, state in zip(outputs.states[1:], expected.hidden_states[1:], strict=True):
        np.testing.assert_allclose(ours[0], state[real], rtol=0, atol=1e-5)
    if rest == "Model":
        got = {"last_hidden_state": outputs.hidden}
        if config.model.has_pooler:
            got = {"pooler_output": outputs.pooled}
    elif config.model.electra.replaced_token:
        got = {"logits": outputs.replaced_token}
    elif config.model.head.kind:
        logits = outputs.head
        got = {"logits": logits}
        if rest == "ForQuestionAnswering":
            got = {"start_logits": logits[..., 0], "end_logits": logits[..., 1]}
        if rest.endswith("Classification"):
            assert config.model.head.labels == ("no", "maybe", "yes")
    else:
        words, following = outputs.masked_lm, outputs.next_sentence
        got = {"logits": following if words is None else words}
        if rest == "ForPreTraining":
            got = {"prediction_logits": words, "seq_relationship_logits": following}
    for key, value in got.items():
        value, other = np.asarray(value[0]), expected[key].numpy()
        other = other[real] if other.shape[:2] == real.shape else other
        np.testing.assert_allclose(value, other, rtol=0, atol=1e-5, err_msg=key)

    export(str(tmp_path / "in"), tmp_path / "out")
    before, after = (load_file(tmp_path / x / "model.safetensors") for x in ("in", "out"))
    assert before.keys() == after.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(value, after[name], err_msg=name)
    again, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    ours, reference = again.config.to_dict(), model.config.to_dict()
    differing = {key for key, value in reference.items() if ours.get(key) != value}
    assert differing <= {"_name_or_path", "label2id"}
    assert not any(info[f"{kind}_keys"] for kind in ("missing", "unexpected", "mismatched"))
    with torch.no_grad():
        repeated = again.eval()(**theirs)
    for one, other in zip(repeated.to_tuple(), expected.to_tuple(), strict=False):
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    export(str(tmp_path / "in"), tmp_path / "graph", kind="onnx")
    graph = onnxruntime.InferenceSession(tmp_path / "graph" / "model.onnx")
    results = graph.run(None, {x.name: theirs[x.name].numpy() for x in graph.get_inputs()})
    for output, value in zip(graph.get_outputs(), results, strict=True):
        pair = (value, expected[output.name].numpy())
        assert pair[0].shape == pair[1].shape
        value, other = (x[real] if x.shape[:2] == real.shape else x for x in pair)
        np.testing.assert_allclose(value, other, rtol=0, atol=1e-5, err_msg=output.name)
    if rest == "ForSequenceClassification":
        export(str(tmp_path / "in"), tmp_path / "bare", heads="none")
        bare = transformers.AutoModel.from_pretrained(tmp_path / "bare").eval()
        theirs.pop("labels", None)
        with torch.no_grad():
            states = bare(**theirs).last_hidden_state
        torch.testing.assert_close(states, expected.hidden_states[-1], rtol=0, atol=1e-6)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs("The cat!", "a dog") == tokenizer("The cat!", "a dog")
    if not vocab.is_wordpiece:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "in" / name).read_bytes()


def test_second_text_has_type_0_if_the_tokenizer_gives_none(tmp_path, tokenizers):
    """BERT with XLM-R's tokenizer, such as multilingual E5, is used without token types."""
    model, tokenizer = their_model(
        tmp_path / "in", "Bert", "ForSequenceClassification", tokenizers, kind="xlm-roberta"
    )
    config, vocab, params, _ = source.read(str(tmp_path / "in"))
    tokens, layout, theirs, _ = batch(vocab, tokenizer)
    assert "token_type_ids" not in theirs
    assert layout.token_type_ids.any()
    export(str(tmp_path / "in"), tmp_path / "out")
    logits = run(config, params, tokens, layout).head
    for one in (model, type(model).from_pretrained(tmp_path / "out").eval()):
        with torch.no_grad():
            expected = one(**theirs).logits
        np.testing.assert_allclose(logits[0], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("rest", "missing", "head"),
    [("Model", ["pooler", "head"], ""), ("ForQuestionAnswering", ["pooler"], "span")],
)
def test_allow_missing_as_advised_imports_without_the_named_head(
    tmp_path, tokenizers, rest, missing, head
):
    their_model(tmp_path, "DistilBert", rest, tokenizers)
    saved = (tmp_path / "config.json").read_text()
    saved = saved.replace(f"DistilBert{rest}", "DistilBertForSequenceClassification")
    (tmp_path / "config.json").write_text(saved)
    assert " ".join(f"--allow-missing {part}" for part in missing) in refusal(tmp_path)
    imported = source.read(str(tmp_path), allow_missing=missing)
    assert imported.config.model.head.kind == head
    assert imported.params.keys() == {"embeddings", "encoder", *(["classifier"] if head else [])}


@pytest.mark.parametrize("prefix", ["Roberta", "DistilBert", "Electra", "ModernBert"])
def test_masked_lm_loss_and_gradients_equal_transformers(tmp_path, tokenizers, prefix):
    model, tokenizer = their_model(tmp_path, prefix, "ForMaskedLM", tokenizers)
    config, vocab, params, _ = source.read(str(tmp_path))
    tokens, layout, theirs, real = batch(vocab, tokenizer)
    model.set_attn_implementation("eager")
    is_target = real & (np.arange(real.shape[1]) % 3 == 1)
    targets = torch.where(torch.tensor(is_target), theirs["input_ids"], -100)
    reference = model(**theirs, labels=targets, output_attentions=True)
    reference.loss.backward()
    states = run(config, params, tokens, layout).states
    maps = attention_probabilities(config.model, params, states, layout)
    for ours, layer in zip(maps, reference.attentions, strict=True):
        start = 0
        for weights, inside in zip(layer.detach().numpy(), real, strict=True):
            end = start + inside.sum()
            expected = weights[:, inside][:, :, inside]
            np.testing.assert_allclose(ours[0, :, start:end, start:end], expected, atol=1e-5)
            start = end
    weights = jnp.float32(is_target[real])[None]

    def loss(params):
        logits = Bert(config.model).apply({"params": params}, tokens, layout).masked_lm
        total, weight = losses.cross_entropy(logits, tokens, weights)
        return total / weight

    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    np.testing.assert_allclose(value, reference.loss.item(), rtol=0, atol=1e-5)
    expected = {n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}
    settings = huggingface_config(config.model, vocab)
    _, mine = FAMILIES[config.model.family].to_hf(settings, to_huggingface(grads, config.model))
    for name, value in mine.items():
        other = expected.get(name, expected.get(name.replace("decoder.bias", "bias")))
        if "word_embeddings" in name or "tok_embeddings" in name:  # PyTorch skips the padding_idx
            value, other = np.delete(value, vocab.pad_id, 0), np.delete(other, vocab.pad_id, 0)
        np.testing.assert_allclose(value, other, rtol=0, atol=1e-5, err_msg=name)


def test_prepared_row_holds_the_ids_of_a_document(tokenizers, tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizers / "roberta")
    sentences = ["The cats sat on a mat.", "A dog ran; it didn't move.", "The mat was red."]
    (tmp_path / "text.txt").write_text("\n".join(sentences))

    def prepared(name, vocab):
        prepare.prepare(
            [str(tmp_path / "text.txt")], vocab, str(tmp_path / name), tokens=64, sequences=2,
            pairs="none", heldout_fraction=0.0, short_fraction=0.0, workers=1,
        )  # fmt: skip
        return str(tmp_path / name)

    opened = RowDataset(prepared("rows", str(tokenizers / "roberta")), "train")
    (made,) = batches(opened, opened.manifest.train.rows, 0, 0, 1, 0, 1)
    assert len(made["tokens"]) == 1
    (length,) = made["length"][made["length"] > 0].tolist()
    assert made["tokens"][0, :length].tolist() == tokenizer(" ".join(sentences))["input_ids"]
    # A model may have more embeddings than its tokenizer has tokens; its rows have its vocabulary.
    padded = vocabulary_files.load(tokenizers / "roberta").resized(400)
    flags = ["--config=configs/pretrain.py:L1-H8-A2,64", "--config.model.next_sentence=false"]
    config = load(flags)
    config.phases[0].rows = prepared("padded", padded)
    assert pretraining.make_phases(config)[1] == padded


@pytest.mark.parametrize(
    ("prefix", "text"), [("Bert", "the [MASK] sat on the mat"), ("Roberta", "a dog <mask> on")]
)
def test_fill_mask_equals_transformers(tokenizers, tmp_path, prefix, text):
    their_model(tmp_path, prefix, "ForMaskedLM", tokenizers)
    expected = transformers.pipeline("fill-mask", str(tmp_path), top_k=4)(text)
    (candidates,) = MaskFiller(source.open_model(str(tmp_path)))(text, 4)
    probabilities = [candidate.probability for candidate in candidates]
    np.testing.assert_allclose([x["score"] for x in expected], probabilities, atol=1e-5)
    assert [x["token_str"].strip() for x in expected] == [x.token for x in candidates]


@pytest.mark.parametrize("kind", ["roberta", "xlm-roberta"])
@pytest.mark.parametrize(
    ("context", "answer"),
    [("It (12-14) is.", "12"), ('A "cat" sat.', "cat"), ("日本中国日本", "中国"), ("A cat.", "A")],
)
def test_squad_answers_without_spaces_around_them(tokenizers, kind, context, answer, tmp_path):
    """The ids of a word differ from those of the same word after a space."""
    answers = [{"text": answer, "answer_start": context.index(answer)}]
    paragraph = {"context": context, "qas": [{"id": "q", "question": "What?", "answers": answers}]}
    data = {"version": "1.1", "data": [{"title": "t", "paragraphs": [paragraph]}]}
    (tmp_path / "train.json").write_text(json.dumps(data))
    task = TaskConfig(
        kind="squad", train=str(tmp_path / "train.json"), tokens=64, question_tokens=16
    )
    dataset = Squad(task, vocabulary_files.load(tokenizers / kind))
    ((first, last),) = dataset.splits["train"].targets["label"].tolist()
    logits = np.zeros((len(dataset.splits["train"].tokens[0]), 2), np.float32)
    logits[first, 0] = logits[last, 1] = 9
    assert dataset.predict("train", [logits])["q"].answer == answer


def test_two_segments_are_refused_if_the_tokenizer_has_no_token_types(
    tokenizers, tmp_path, monkeypatch
):
    vocab = vocabulary_files.load(tokenizers / "xlm-roberta")
    model = small_config(
        vocab_size=len(vocab), next_sentence=False, head=HeadConfig("sequence", ("a", "b"))
    )
    opened = source.OpenModel(Config(model=model), vocab, random_params(model), 0)
    monkeypatch.setattr(export_lib, "open_model", lambda *_: opened)
    assert "segments" in export_refusal("run", tmp_path / "out")
    export("run", tmp_path / "encoder", heads="none")
    start, folder = ("none", tmp_path / "w"), str(tokenizers / "xlm-roberta")
    assert "segments" in error_of(train.finetune, FinetuneConfig(), *start, vocab=folder)


def modernbert_settings(**changes):
    """Convert settings in the format of the first transformers version with ModernBERT."""
    first = {
        "model_type": "modernbert", "num_hidden_layers": 22, "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0, "local_rope_theta": 10000.0, "local_attention": 128,
        "attention_bias": False, "mlp_bias": False, "classifier_bias": False, "norm_bias": False,
    }  # fmt: skip
    return FAMILIES["modernbert"].from_hf(first | changes, {})[0]


def test_modernbert_configs_of_both_versions_are_read():
    assert modernbert_settings()["global_attn_every_n_layers"] == 3
    read = modernbert_settings(local_rope_theta=None)
    assert read["local_rope_theta"] == 0
    read |= {"position_embedding_type": "absolute", "hidden_activation": "gelu", "mlp_dropout": 0.0}
    assert FAMILIES["modernbert"].to_hf(read, {})[0]["local_rope_theta"] == 160000
    kinds = ["full_attention", *["sliding_attention"] * 3] * 2
    assert modernbert_settings(layer_types=kinds)["global_attn_every_n_layers"] == 4
    rope = {"full_attention": {"rope_theta": 7.0}, "sliding_attention": {"rope_theta": 5.0}}
    read = modernbert_settings(rope_parameters=rope)
    assert (read["global_rope_theta"], read["local_rope_theta"]) == (7, 5)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"mlp_bias": True}, "mlp_bias"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_type"),
    ],
)
def test_unsupported_modernbert_settings_are_refused(changes, key):
    assert key in error_of(modernbert_settings, **changes)
