"""Training of vocabularies other than WordPiece: byte-level BPE and unigram language models.

Special tokens are BERT's, and the second text of a pair has token type 1, so that every objective can
use them.
"""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from bert_jax import storage
from bert_jax.data import corpus, vocabulary_files, wordpiece
from bert_jax.data.vocabulary import CONFIG, SPECIAL, TOKENIZER, Vocabulary
from bert_jax.errors import UserError
from bert_jax.runtime.progress import Progress

# A string of more characters without a space is no word of any script.
_LONGEST = 10_000


@storage.with_uploaded_output("out")
def train(
    kind: str,
    sources: Sequence[str],
    out: str | pathlib.Path,
    *,
    size: int = 50_000,
    lowercase: bool = False,
    min_frequency: int = 2,
    language: str = "en",
    force: bool = False,
) -> Vocabulary:
    """Train a vocabulary on text, and save it to a folder.

    Args:
        kind: "bpe": byte-level BPE (Radford et al. 2019, section 2.2), which has no unknown words, as in
            RoBERTa and ModernBERT; the same text and settings give the same bytes. "unigram": a unigram
            language model (Kudo, arXiv 1804.10959), as in ALBERT and XLM-R; its trainer adds numbers in
            a random order, so that pieces may differ between runs.
        sources: text sources, as specified for `corpus.parse_source`.
        out: output folder for tokenizer.json and tokenizer_config.json.
        size: V; the vocabulary is smaller, with a warning, if the text yields fewer pieces.
        lowercase: whether to lowercase text and strip accents.
        min_frequency: minimum number of occurrences of a merge of "bpe".
        language: language code for `split_sentences`.
        force: write to a folder that contains a vocabulary, or other files.
    """
    wordpiece.check_out(pathlib.Path(out), force)
    wordpiece.check_numbers(size, min_frequency)
    if size < 300:
        raise UserError(f"size: {size:,} is too small for this kind; choose at least 300")
    parsed = [corpus.parse_source(source) for source in sources]
    tokenizer, trainer = _untrained(kind, size, lowercase, min_frequency)
    with Progress("counting words", corpus.total_bytes(parsed), "B") as progress:
        chunks = wordpiece.count_chunks(parsed, progress, language=language)
        progress.note("training")
        tokenizer.train_from_iterator(wordpiece.repeat(chunks, _LONGEST), trainer)
        count = tokenizer.get_vocab_size()
        if count < size:
            progress.say(f"warning: the text yields only {count:,} pieces, not {size:,}")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{token[1:-1].lower()}_token": token for token in SPECIAL},
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
    }
    contents = {TOKENIZER: tokenizer.to_str(pretty=True), CONFIG: json.dumps(config, indent=2)}
    encoded = {name: content.encode() for name, content in contents.items()}
    vocabulary = vocabulary_files.from_files(encoded)
    vocabulary.save(out)
    return vocabulary


def _untrained(kind: str, size: int, lowercase: bool, min_frequency: int) -> tuple[Any, Any]:
    """Return a tokenizer without pieces, and its trainer."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

    # A mask takes the space before it, as in RoBERTa, ALBERT and ModernBERT.
    special = [
        tokenizers.AddedToken(token, lstrip=token == "[MASK]", special=True) for token in SPECIAL
    ]
    steps = [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
    steps = steps if lowercase else []
    settings = {"vocab_size": size, "special_tokens": special, "show_progress": False}
    if kind == "bpe":
        tokenizer = tokenizers.Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(
            **settings, min_frequency=min_frequency, initial_alphabet=alphabet
        )
    else:
        tokenizer = tokenizers.Tokenizer(models.Unigram())
        steps = [
            *(steps or [normalizers.NFKC()]),
            normalizers.Replace(tokenizers.Regex(" {2,}"), " "),
        ]
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(**settings, unk_token=SPECIAL[1])
    if steps:
        tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[(token, SPECIAL.index(token)) for token in ("[CLS]", "[SEP]")],
    )
    return tokenizer, trainer
