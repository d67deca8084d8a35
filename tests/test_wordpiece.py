"""WordPiece vocabularies and tokenization, against Google's and Hugging Face's tokenizers."""

import collections
import hashlib
import pickle
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_jax.data import vocabulary_files, wordpiece
from bert_jax.data.vocabulary import SPECIAL, Vocabulary
from bert_jax.errors import UserError

# Ids of words in Google's uncased vocabulary.
GOOGLE_IDS = {
    **{"[PAD]": 0, "[UNK]": 100, "[CLS]": 101, "[SEP]": 102, "[MASK]": 103},
    **{"!": 999, "world": 2088, "great": 2307, "movie": 3185, "hello": 7592},
    **{"##s": 2015, "##ing": 2075, "un": 4895, "##aff": 10354, "##able": 3085, "is": 2003},
    **{"[": 1031, "]": 1033, "mask": 7308, "sep": 19802, "cafe": 7668, "a": 1037, "##a": 2050},
}

TEXT = """The quick brown fox jumps over the lazy dog, and the dogs were jumping over foxes.
Unaffordable cafés are cafés nobody can afford; affording them is for others.
In 1905 she wrote four papers, and in 1921 she was awarded a prize for one of them."""


def google_like() -> Vocabulary:
    tokens = [f"[unused{i}]" for i in range(20_000)]
    for token, i in GOOGLE_IDS.items():
        tokens[i] = token
    return Vocabulary(tuple(tokens), True)


def many_scripts(lowercase: bool) -> Vocabulary:
    """Return a vocabulary of single characters of many scripts and a few word pieces."""
    characters = "aàbcdeéfghi\u0131jklmnopqrstuvwxyzßñœ0123456789!?.,;:-_'\"()[]{}$%&@#^`~|<>=+*/\\中国日本한δщ€😀ा"
    tokens = [*SPECIAL, *characters, *("##" + c for c in characters)]
    tokens += ["the", "##ing", "un", "##able", "mask", "ab", "##ab", "a" * 100]
    if not lowercase:
        tokens += ["A", "É", "##B", "The", "Z"]
    return Vocabulary(tuple(dict.fromkeys(tokens)), lowercase)


def google_tokenize(vocabulary: Vocabulary, text: str) -> list[int]:
    """Tokenize like Google's tokenization.py (BasicTokenizer, then WordpieceTokenizer)."""

    def is_cjk(c):
        ranges = [(0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F)]
        ranges += [(0x2B740, 0x2B81F), (0x2B820, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F)]
        return any(low <= ord(c) <= high for low, high in ranges)

    def is_punctuation(c):
        ascii_symbol = 33 <= ord(c) <= 126 and not c.isalnum()
        return ascii_symbol or unicodedata.category(c).startswith("P")

    clean = ""
    for c in text:
        if c in "\t\n\r" or unicodedata.category(c) == "Zs":
            clean += " "
        elif c not in "\0\ufffd" and unicodedata.category(c)[0] != "C":
            clean += f" {c} " if is_cjk(c) else c
    ids = []
    for token in clean.split():
        if vocabulary.lowercase:
            token = unicodedata.normalize("NFD", token.lower())
            token = "".join(c for c in token if unicodedata.category(c) != "Mn")
        for word in "".join(f" {c} " if is_punctuation(c) else c for c in token).split():
            results, start = [], 0
            while start < len(word) and len(word) <= 100:
                for end in range(len(word), start, -1):
                    piece = ("##" if start else "") + word[start:end]
                    if piece in vocabulary.index:
                        break
                else:
                    break
                results.append(vocabulary.index[piece])
                start = end
            ids += results if start >= len(word) else [vocabulary.unk_id]
    return ids


AWKWARD = st.lists(
    st.one_of(
        st.sampled_from("aàbcde\u0301AÉBZ\u0130ß '!.[]-_\t\n\0\u00a0\u200b\u200d\ufffd\u3000\u0915\u093e中国日𠀀한😀ıœ€$^"),
        st.sampled_from(["the", "The", "unable", "[MASK]", "[SEP]", "##ing", "a" * 99, "a" * 101]),
        # Leave out two irrelevant differences: Google's lower() handles the final sigma, and the
        # tokenizers use different versions of Unicode.
        st.characters(categories=("L", "Nd", "Sm", "Zs", "Mn"), exclude_characters="Σ", max_codepoint=0x24FF)
        .filter(lambda c: unicodedata.ucd_3_2_0.category(c) == unicodedata.category(c)),
        st.characters(categories=("P", "S"), max_codepoint=0x17F),
        st.sampled_from("\u2013\u2014\u2018\u2019\u201c\u201d\u2022\u2026\u2030。、「」👩🏽🇫🇷️⃣\u202e\x7f"),
    ),
    max_size=20,
).map("".join)  # fmt: skip


def hugging_face(vocabulary: Vocabulary):
    from transformers import BertTokenizerFast

    return BertTokenizerFast(vocab=vocabulary.index, do_lower_case=vocabulary.lowercase)


@pytest.fixture(scope="module")
def references():
    return {case: (many_scripts(case), hugging_face(many_scripts(case))) for case in (True, False)}


@settings(max_examples=600, deadline=None)
@given(text=AWKWARD, other=AWKWARD, lowercase=st.booleans())
def test_encode_matches_google_and_hugging_face(references, text, other, lowercase):
    vocabulary, reference = references[lowercase]
    assert vocabulary.encode(text)[1:-1] == google_tokenize(vocabulary, text)
    for special in SPECIAL:  # Hugging Face's parses these in any text
        text, other = text.replace(special, ""), other.replace(special, "")
    pair = (text, other) if other else (text,)
    assert vocabulary.encode(*pair) == reference(*pair)["input_ids"]


@pytest.mark.parametrize("case", ["uncased", "cased"])
def test_google_vocabularies_match_hugging_face(shared_data, case):
    vocabulary = vocabulary_files.load(shared_data(f"vocab/bert-base-{case}-vocab.txt"))
    official = {"uncased": "07eced375cec144d", "cased": "eeaa9875b23b04b4"}[case]
    assert vocabulary.lowercase == (case == "uncased")
    assert vocabulary.sha256.startswith(official)
    reference = hugging_face(vocabulary)
    for text in [
        "Hello world", "Great movie!", "Ünïcödé ÀÉÎ naïve façade", "東京は日本の首都。", "don't—stop… “now”",
        "x\0y\u200bz\ufffd\tw", "😀👩‍👩‍👧 emoji", "Ελλάδα ΣΟΦΟΣ", "a" * 101, "İstanbul", "हिन्दी", "1,234.5€", "",
    ]:  # fmt: skip
        assert vocabulary.encode(text) == reference(text)["input_ids"]


def test_special_tokens_in_text_are_plain_text():
    vocabulary = google_like()
    assert vocabulary.encode("hello [MASK]") == [101, 7592, 1031, 7308, 1033, 102]
    assert vocabulary.encode("[SEP]") == [101, 1031, 19802, 1033, 102]
    assert vocabulary.encode("hello [MASK] ![MASK]", mask=True) == [101, 7592, 103, 999, 103, 102]
    ids = vocabulary.tokenizer().encode("[CLS] [PAD] hello [unused7] [SEP][MASK]").ids
    assert not {0, 101, 102, 103, 8} & set(ids)
    assert vocabulary.encode("\udcff cafe") == vocabulary.encode("? cafe")  # a surrogate


def test_decode_and_continuation():
    vocabulary = google_like()
    ids = np.array([101, 4895, 10354, 3085, 2003, 103, 999, 102, 0])
    assert vocabulary.decode(ids) == "[CLS] unaffable is [MASK]! [SEP] [PAD]"
    expected = {i for token, i in GOOGLE_IDS.items() if token.startswith("##")}
    assert set(np.flatnonzero(vocabulary.continuation())) == expected
    assert vocabulary.continuation().shape == (20_000,)


@pytest.mark.parametrize("lowercase", [True, False])
def test_save_and_load(tmp_path, lowercase):
    vocabulary = Vocabulary((*SPECIAL, "a", "É"), lowercase)
    vocabulary.save(tmp_path / "new")
    assert vocabulary_files.load(tmp_path / "new") == vocabulary
    assert vocabulary_files.load(tmp_path / "new/vocab.txt") == vocabulary
    assert vocabulary_files.load(tmp_path / "new", lowercase=not lowercase).lowercase != lowercase
    content = (tmp_path / "new/vocab.txt").read_bytes()
    assert content == "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nÉ\n".encode()
    assert hashlib.sha256(content).hexdigest() == vocabulary.sha256
    vocabulary.encode("a")
    assert pickle.loads(pickle.dumps(vocabulary)) == vocabulary


def test_case_is_detected(tmp_path):
    path = tmp_path / "v.txt"
    path.write_text("\n".join([*SPECIAL, "[unusedA]", "hello"]))
    assert vocabulary_files.load(path).lowercase
    path.write_text("\r\n".join([*SPECIAL, "Hello", "hello"]))
    assert not vocabulary_files.load(path).lowercase
    assert vocabulary_files.load(path).tokens[-1] == "hello"


SPECIAL_LINES = "\n".join(SPECIAL).encode()


@pytest.mark.parametrize(
    ("name", "content", "key"),
    [
        ("vocab.txt", SPECIAL_LINES.replace(b"[SEP]", b"sep"), r"vocab.txt: no \[SEP\]"),
        ("vocab.txt", SPECIAL_LINES + b"\na\nb\na\n", "vocab.txt:8: .*'a' .*line 6"),
        ("vocab.txt", SPECIAL_LINES + b"\n\nb\n", "vocab.txt:6"),
        ("vocab.txt", SPECIAL_LINES + b"\n\xe9\n", "byte 31"),
        ("other.txt", SPECIAL_LINES, "no vocabulary at .*vocab.txt"),
        ("vocab.json", b'{"lowercase": "yes"}', "vocab.json"),
    ],
)
def test_invalid_vocabularies_are_rejected(tmp_path, name, content, key):
    if name == "vocab.json":
        (tmp_path / "vocab.txt").write_bytes(SPECIAL_LINES)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=key):
        vocabulary_files.load(tmp_path)


def test_reserved_tokens_match_google_files():
    head = wordpiece.reserved(30_522)
    assert [head.index(t) for t in SPECIAL] == [0, 100, 101, 102, 103]
    places = {1: "[unused0]", 99: "[unused98]", 104: "[unused99]", 998: "[unused993]"}
    assert {i: head[i] for i in places} == places
    assert len(head) == 999  # Google's first word piece is 999
    assert wordpiece.reserved(8192).index("[MASK]") == 103
    assert tuple(wordpiece.reserved(500)) == SPECIAL


def train(tmp_path, text=TEXT, **options) -> Vocabulary:
    source = tmp_path / "text.txt"
    source.write_text(text)
    return wordpiece.train([f"google:{source}"], tmp_path / "out", **{"size": 200, **options})


def test_training(tmp_path):
    vocabulary = train(tmp_path, TEXT * 5, size=130)
    assert len(vocabulary) == 130
    assert vocabulary_files.load(tmp_path / "out") == vocabulary
    assert vocabulary.tokens[:5] == SPECIAL
    assert len(set(vocabulary.tokens)) == 130
    assert "the" in vocabulary.index
    assert "##ing" in vocabulary.index or "##in" in vocabulary.index
    assert vocabulary.unk_id not in vocabulary.encode(TEXT)
    assert vocabulary.encode("cafés") == vocabulary.encode("CAFES")
    for token in vocabulary.tokens[5:]:  # every piece is reachable
        if not token.startswith("##"):
            assert vocabulary.encode(token)[1:-1] == [vocabulary.index[token]]


def test_training_cased(tmp_path):
    vocabulary = train(tmp_path, lowercase=False, size=150, min_frequency=1)
    assert not vocabulary_files.load(tmp_path / "out").lowercase
    assert vocabulary.encode("the") != vocabulary.encode("THE")
    assert any("é" in token for token in vocabulary.tokens)


def test_training_keeps_many_characters():
    words = collections.Counter({chr(0x4E00 + i): 2 for i in range(1200)})
    assert len(wordpiece._train_pieces(words, 3600, 2)) == 1200
    assert len(wordpiece._train_pieces(words, 300, 2)) == 100  # room for merges
    words.update({chr(0x4E00 + i): 500_000 for i in range(10)})
    assert len(wordpiece._train_pieces(words, 9000, 2)) == 1000


def test_training_applies_weights_and_sample_size(tmp_path):
    (tmp_path / "a.txt").write_text("zebra zebra\n")
    (tmp_path / "b.txt").write_text("panda panda\n\nkoala koala koala koala\n" * 3)
    sources = [f"google:{tmp_path}/a.txt@10", f"google:{tmp_path}/b.txt"]
    options = dict(size=120, min_frequency=7, sample_bytes=5)
    vocabulary = wordpiece.train(sources, tmp_path / "out", **options)
    assert "zebra" in vocabulary.index  # weighted count 20
    assert "panda" not in vocabulary.index  # only the first document of b.txt is read
    assert "koala" not in vocabulary.index


def test_training_rejects_small_size_and_empty_text(tmp_path):
    with pytest.raises(UserError, match="45 for word pieces"):
        train(tmp_path, size=50)
    with pytest.raises(UserError, match="contains no text"):
        train(tmp_path, text="\n")


def test_existing_files_require_force(tmp_path):
    source, out = tmp_path / "text.txt", tmp_path / "run"
    source.write_text("The cat saw the dog.\nThe dog saw the cow.\n" * 20)
    out.mkdir()
    first = wordpiece.train([str(source)], out, size=200)  # an empty folder
    before = (out / "vocab.txt").stat()
    with pytest.raises(UserError, match=r"run .*vocab\.txt.*--force"):
        wordpiece.train([str(source)], out, size=180)
    assert (out / "vocab.txt").stat() == before
    assert wordpiece.train([str(source)], out, size=200, force=True) == first
    assert vocabulary_files.load(out) == first


@pytest.mark.parametrize("force", [False, True])
def test_unwritable_folder_is_refused_before_words_are_counted(tmp_path, monkeypatch, force):
    monkeypatch.setattr(wordpiece, "count_words", None)
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "vocab", "/proc/vocab"):
        with pytest.raises(UserError, match=str(out)):
            wordpiece.train([__file__], out, force=force)
