"""Vocabulary extension: choice of new tokens, their embeddings, and what stays unchanged."""

import collections
import itertools

import jax
import numpy as np
import pytest
import transformers

from bert_jax import cli
from bert_jax.convert.export import export
from bert_jax.data import wordpiece
from bert_jax.data.vocabulary import Vocabulary
from bert_jax.model.bert import flatten
from bert_jax.runs import checkpoint
from tests.helpers.checkpoints import WORDS, small_run
from tests.helpers.runs import refused


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("extend") / "run"
    return small_run(folder, vocab_multiple=8, tied_decoder=request.param)


def test_new_embeddings_are_the_mean_of_their_pieces(run, tmp_path, capsys):
    (tmp_path / "words").write_text("Cats\nthe\nunsat-cats\n##sts\ncatt\nz\n")
    argv = ["extend-vocab", "--init", run, "--add", tmp_path / "words", "--out", tmp_path / "new"]
    assert cli.main([str(argument) for argument in argv]) == 0
    pieces = {
        "cats": ["cat", "##s"],
        "unsat": ["[UNK]"],  # there is no "##a"
        "-": ["[UNK]"],  # the tokenizer treats it as a word
        "##sts": ["##s", "##t", "##s"],
        "catt": ["cat", "##t"],
        "z": ["[UNK]"],
    }
    new = list(pieces)
    _, vocabulary, params, step = checkpoint.load_model(tmp_path / "new")
    assert vocabulary.tokens == (*WORDS, *new)
    assert step == 0
    _, old_vocabulary, originals, _ = checkpoint.load_model(run)
    old_tokenizer = transformers.BertTokenizerFast(vocab={w: i for i, w in enumerate(WORDS)})
    for word in ("cats", "unsat", "-", "catt", "z"):
        assert old_tokenizer.tokenize(word) == pieces[word]
    before, after = flatten(jax.device_get(originals)), flatten(jax.device_get(params))
    assert before.keys() == after.keys()
    count, size = len(WORDS), len(vocabulary)
    for path, value in before.items():
        changed = after[path]
        if path == "masked_lm/decoder":
            value, changed = value.T, changed.T
        if path in ("embeddings/word/embedding", "masked_lm/bias", "masked_lm/decoder"):
            assert len(changed) == 8 * -(-size // 8)
            assert not changed[size:].any()
            for i, word in enumerate(new, count):
                ids = [WORDS.index(piece) for piece in pieces[word]]
                np.testing.assert_allclose(changed[i], value[ids].mean(0), rtol=1e-6)
            value, changed = value[:count], changed[:count]
        np.testing.assert_array_equal(changed, value, err_msg=path)

    assert vocabulary.encode("É café") == old_vocabulary.encode("É café")
    assert vocabulary.encode("the cats")[2] == count
    export(str(tmp_path / "new"), tmp_path / "theirs")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    for text in ("The cats sat on a mat!", "É café", "catsts Catt unsat-z"):
        assert theirs(text)["input_ids"] == vocabulary.encode(text)

    argv[-1] = tmp_path / "again"
    assert "--add" in refused(capsys, *argv, "text.txt")
    for words, key in (("the\ncat\n", "already"), ("the\n" + 101 * "x", "words:2")):
        (tmp_path / "words").write_text(words)
        assert key in refused(capsys, *argv)


def reference_merges(vocabulary, words, count):
    """Merge the most frequent pair `count` times, recounting all pairs each time."""
    splits = {word: vocabulary.split(word) for word in words}
    new = []
    for _ in range(count):
        pairs = collections.Counter()
        for word, pieces in splits.items():
            for pair in itertools.pairwise(pieces):
                pairs[pair] += words[word]
        pair = min(pairs, key=lambda pair: (-pairs[pair], pair))
        new.append(pair[0] + pair[1].removeprefix("##"))
        for word, pieces in splits.items():
            splits[word] = wordpiece._joined(pieces, pair, new[-1])
    used = collections.Counter(
        piece for word, pieces in splits.items() for piece in pieces for _ in range(words[word])
    )
    return [piece for piece in new if used[piece] >= 2]


def test_corpus_pieces_equal_a_naive_pair_merge(tmp_path, capsys):
    letters = "abcdefghijklmnop"
    vocabulary = Vocabulary(
        (*WORDS[:5], *letters, *(f"##{letter}" for letter in letters), "."), lowercase=True
    )
    rng = np.random.default_rng(0)
    words = collections.Counter()
    for i in range(60):
        word = "".join(rng.choice(list(letters), rng.integers(2, 8), p=np.arange(1, 17) / 136))
        words[word] += 100 // (i + 1) + 1
    merged = [wordpiece.merge(vocabulary, words, count, 2) for count in (1, 10, 40)]
    for chosen in merged:
        references = (reference_merges(vocabulary, words, n) for n in range(len(chosen), 200))
        assert chosen == next(new for new in references if len(new) >= len(chosen))
    assert list(map(len, merged)) == [1, 10, 40]
    text = "\n".join(f"{word.upper()}." for word in words.elements())
    (tmp_path / "text.txt").write_text(text)
    assert wordpiece.new_pieces(vocabulary, [f"{tmp_path}/text.txt"], 10) == merged[1]
    for piece in wordpiece.merge(vocabulary, words, 10_000, 2):
        inner = piece.removeprefix("##")
        assert any(
            inner in word[1:] if inner != piece else word.startswith(piece) for word in words
        )


@pytest.mark.parametrize(("length", "is_used"), [(100, True), (101, False)])
def test_words_that_the_tokenizer_reads_as_unknown_give_no_pieces(length, is_used):
    vocabulary = Vocabulary((*WORDS[:5], "a", "##a"), lowercase=True)
    words = collections.Counter({"a" * length: 9})
    assert bool(wordpiece.merge(vocabulary, words, 1, 2)) == is_used
    assert bool(wordpiece._train_pieces(words, 99, 2)) == is_used  # of a new vocabulary
