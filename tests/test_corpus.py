"""Text sources in every format and compression, valid and damaged."""

import gzip
import itertools
import json
import pathlib
import sys
import textwrap
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_jax.data import corpus, formats, readers, wordpiece
from bert_jax.data.readers import UNKNOWN_WORD
from bert_jax.data.sentences import SENTENCE_CHARACTERS, split_sentences
from bert_jax.data.vocabulary import SPECIAL, Vocabulary
from bert_jax.errors import UserError
from tests.helpers.compression import COMPRESSIONS

PROSE = (
    "It was a bright cold day in spring. The clocks of Dr. Smith, who lived in the U.S. for years, "
    "were striking thirteen. Nobody knew why they did that, and nobody asked any more."
)
WRAPPED = textwrap.fill(PROSE, 60)
SENTENCES = [
    "It was a bright cold day in spring.",
    "The clocks of Dr. Smith, who lived in the U.S. for years, were striking thirteen.",
    "Nobody knew why they did that, and nobody asked any more.",
]
GOOGLE = (
    "One is here.\nTwo is here. Still two.\n\n\nThree is here.\nFour is here.\n"
    "It is five.\nSix is.\nSeven is.\nEight.\n"
)
GOOGLE_SENTENCES = [
    ["One is here.", "Two is here. Still two."],
    ["Three is here.", "Four is here.", "It is five.", "Six is.", "Seven is.", "Eight."],
]
PARAGRAPHS = (
    "One is. Two is.\nThree is. Four is.\n \t\nFive is. Six is.\nSeven is. Eight is.\n\n" * 3
)
PARAGRAPH_SENTENCES = [
    ["One is.", "Two is.", "Three is.", "Four is."],
    ["Five is.", "Six is.", "Seven is.", "Eight is."],
] * 3
WIKITEXT = (
    " = Robert Boulter = \n \n He was well @-@ known . He had 1 @,@ 000 <unk> at 2 @.@ 5 . \n"
    " \n = = Career = = \n \n In 2000 he rose . \n \n = = = 2000 = = = \n \n He sat . \n"
    " \n = Du Fu = \n \n A poet was he . He sang . \n"
)
UNKNOWN = f"He had 1,000 {UNKNOWN_WORD} at 2.5 ."
WIKITEXT_SENTENCES = [
    ["He was well-known .", UNKNOWN, "In 2000 he rose .", "He sat ."],
    ["A poet was he .", "He sang ."],
]

WIKI = """{{Infobox person|name=Ada|birth={{birth date|1815|12|10}}}}
[[File:Ada.jpg|thumb|right|A [[portrait]] of '''Ada''']]
'''Ada Lovelace''' ({{IPA|x}}; born [[Byron]] in 1815) was an [[English people|English]] mathematician.<ref name="a">{{cite|t}}</ref><ref name="b" /> She was {{convert|160|cm|in}} tall&nbsp;and wrote to ''[[Charles Babbage]]''.<!-- hidden [[ -->

== Work ==
She worked on the [https://example.org Analytical Engine] and {{lang|fr|mémoires}}.
* a list item with [[links]]
{| class="wikitable"
|-
! head || [[cell]]
|}
<gallery>
File:x.jpg|text
</gallery>
<math>x^2</math>
[[Category:Mathematicians]]
[[fr:Ada Lovelace]]
"""
WIKI_SENTENCES = [
    "Ada Lovelace (born Byron in 1815) was an English mathematician.",
    "She was 160 cm tall and wrote to Charles Babbage.",
    "She worked on the Analytical Engine and mémoires.",
]


def dump(*pages: str) -> str:
    inside = "\n".join(pages)
    return (
        '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/" xml:lang="en">\n'
        f"<siteinfo><sitename>Wikipedia</sitename></siteinfo>\n{inside}\n</mediawiki>\n"
    )


def page(text: str, namespace: int = 0, extra: str = "") -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;")
    return (
        f"<page><title>T</title><ns>{namespace}</ns><id>1</id>{extra}"
        f'<revision><id>2</id><text xml:space="preserve">{text}</text></revision></page>'
    )


def read(spec) -> tuple[list[corpus.RawDocument], corpus.Report]:
    report = corpus.Report()
    return list(corpus.read(corpus.parse_source(str(spec)), report)), report


def write(path: pathlib.Path, content: str | bytes) -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def assert_read_fails(spec, key: str) -> None:
    with pytest.raises(UserError, match=key):
        read(spec)


def split(text: str, kind: str) -> list[str]:
    return split_sentences(corpus.RawDocument(text, kind, "f", 1))


# Kind of source -> (content, sentences of each document).
EXAMPLES = {
    "google": (GOOGLE, GOOGLE_SENTENCES),
    "books": (f"CHAPTER ONE\n\n{WRAPPED}\r\n\n{PROSE}\n", [["CHAPTER ONE", *SENTENCES, *SENTENCES]]),
    "wikiextractor": (
        f'<doc id="1" url="u" title="Cats &amp; dogs">\nCats &amp; dogs\n\n{PROSE}\nHistory.\n\n</doc>\n'
        '<doc id="2" url="u" title="B">\nB\n\nBe it so &lt;here&gt;.\n</doc>\n',
        [[*SENTENCES, "History."], ["Be it so <here>."]],
    ),
    "wikiextractor-json": (
        json.dumps({"id": "1", "url": "u", "title": "Cats", "text": f"Cats\n\n{PROSE}"}) + "\n",
        [SENTENCES],
    ),
    "jsonl": (
        json.dumps({"text": PROSE}) + "\n\n" + json.dumps({"n": 1, "text": "Bé.\nCé\ud800."}) + "\n",
        [SENTENCES, ["Bé.", "Cé?."]],
    ),
    "paragraphs": (PARAGRAPHS, PARAGRAPH_SENTENCES),
    "wikitext": (WIKITEXT, WIKITEXT_SENTENCES),
    "mediawiki": (
        dump(page("Talk.", 1), page(WIKI), page("#REDIRECT [[X]]", 0, '<redirect title="X"/>')),
        [WIKI_SENTENCES],
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "compression"),
    [
        *((kind, None) for kind in EXAMPLES),
        *zip(EXAMPLES, itertools.cycle(COMPRESSIONS), strict=False),
    ],
)
def test_reads_every_kind(tmp_path, kind, compression):
    content, expected = EXAMPLES[kind]
    data = content.encode()
    if compression:  # two concatenated streams in a file without the usual suffix
        half = len(data) // 2
        compress = COMPRESSIONS[compression]
        data = compress(data[:half]) + compress(data[half:])
    path = write(tmp_path / "file", data)
    for spec in (path, f"{kind}:{path}"):
        documents, report = read(spec)
        assert [split_sentences(d) for d in documents] == expected
        assert {d.kind for d in documents} == {kind}
        assert report.bytes_read == len(data) == report.sources[0]["bytes"]
        assert report.sources[0]["documents"] == len(expected)
        assert report.warnings == ()


def test_reads_parquet(tmp_path):
    import pyarrow
    from pyarrow import parquet

    texts, path = [PROSE, None, "", *(f"Number {i}." for i in range(600))], tmp_path / "a.parquet"
    table = pyarrow.table({"n": range(len(texts)), "text": texts})
    parquet.write_table(table, path, row_group_size=100)
    documents, report = read(path)
    assert len(documents) == 601
    assert split_sentences(documents[0]) == SENTENCES
    assert documents[1][1:4] == ("parquet", str(path), 4)
    assert report.bytes_read == path.stat().st_size
    assert "a.parquet:2: a text is empty (2 in" in report.warnings[0]

    assert_read_fails(write(tmp_path / "cut.parquet", path.read_bytes()[:-9]), "not a complete")
    parquet.write_table(table.rename_columns(["n", "body"]), path)
    assert_read_fails(path, "a.parquet: .*'text'")


def test_reads_hugging_face_datasets_and_runs_none_of_their_code(tmp_path, monkeypatch):
    import pyarrow
    from pyarrow import parquet

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    columns = {
        "text": [PROSE, None, "", *(f"Number {i}." for i in range(300))],
        "id": [*range(303)],
    }
    folder = tmp_path / "wiki"
    for config, texts in (("old", columns["text"][::-1]), ("new", columns["text"])):
        (folder / config).mkdir(parents=True)
        table = pyarrow.table({**columns, "text": texts})
        parquet.write_table(table, folder / config / "train.parquet", row_group_size=100)
    write(folder / "new" / "test.parquet", (folder / "old" / "train.parquet").read_bytes())
    write(
        folder / "README.md",
        "---\nconfigs:\n- {config_name: old, data_dir: old}\n- {config_name: new, data_dir: new}\n---\n",
    )
    write(tmp_path / "lines" / "train.jsonl", '{"text": "One is."}\n{"text": "Two is."}\n')
    documents, report = read(f"hf:{folder},new")
    assert [d.text for d in documents] == [text for text in columns["text"] if text]
    assert documents[1][1:4] == ("hf", f"{folder},new", 4)
    assert "a text is empty (2 in" in report.warnings[0]
    assert [d.text for d in read(f"hf:{folder},new:test")[0]] == [d.text for d in documents][::-1]
    assert [d.text for d in read(f"hf:{tmp_path}/lines@2")[0]] == ["One is.", "Two is."]
    assert corpus.total_bytes([corpus.parse_source("hf:a/b")]) is None
    assert_read_fails(f"hf:{folder},new:dev", "'hf:.*:dev'")
    assert_read_fails(f"hf:{tmp_path}/none", "none'")
    write(tmp_path / "other" / "train.jsonl", '{"body": "One is."}\n')
    assert_read_fails(f"hf:{tmp_path}/other", "it has: body")
    # Older versions of the library ran a program of the folder's name.
    write(tmp_path / "code" / "code.py", f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    assert_read_fails(f"hf:{tmp_path}/code", "code'")
    assert not (tmp_path / "ran").exists()


def test_reads_tfds_without_tensorflow(tmp_path, monkeypatch):
    import tensorflow_datasets as tfds

    class Tiny(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = tfds.features.FeaturesDict({"text": tfds.features.Text()})
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager):
            return {"train": ((i, {"text": f"Numéro {i}. Hello."}) for i in range(300))}

        def _generate_examples(self):
            raise NotImplementedError

    builder = Tiny(data_dir=tmp_path, file_format="array_record")
    builder.download_and_prepare()
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    documents, report = read("tfds:tiny")
    assert {d.text for d in documents} == {f"Numéro {i}. Hello." for i in range(300)}
    assert [d.line for d in documents] == list(range(1, 301))
    assert len(split_sentences(documents[0])) == 2
    assert report.sources[0]["documents"] == 300
    assert corpus.total_bytes([corpus.parse_source("tfds:tiny")]) is None
    assert_read_fails("tfds:nothing_of_that_name/en", "nothing_of_that_name.*TFDS_DATA_DIR")
    assert "tensorflow" not in sys.modules


def test_folders_and_globs_expand_in_sorted_order(tmp_path):
    for name in "b/2.txt", "a/1.txt", "c.txt.gz", ".hidden", "a/.git/x", "a/3.txt":
        text = f"Text of {name} is here.\n".encode()
        write(tmp_path / name, gzip.compress(text) if name.endswith("gz") else text)
    names = [pathlib.Path(d.file).name for d in read(tmp_path)[0]]
    assert names == ["1.txt", "3.txt", "2.txt", "c.txt.gz"]
    assert len(read(f"{tmp_path}/**/*.txt")[0]) == 3
    assert len(read(f"{tmp_path}/*")[0]) == 4
    source = corpus.parse_source(f"books:{tmp_path}/a@2.5")
    assert (source.kind, source.weight, len(source.files)) == ("books", 2.5, 2)
    assert corpus.total_bytes([source, source]) == 2 * sum(f.stat().st_size for f in source.files)
    write(tmp_path / "we@3/x.txt", "Hi.")
    assert corpus.parse_source(f"{tmp_path}/we@3").weight == 1
    assert corpus.parse_source(f"{tmp_path}/we@3/x.txt@3").weight == 3
    (tmp_path / "none").mkdir()
    assert_read_fails(tmp_path / "none", "the folder .* contains no files")


@pytest.mark.parametrize(
    ("spec", "key"),
    [
        ("/nowhere/*.txt", r"'/nowhere/\*.txt'"),
        ("bokks:novels/", "'bokks'.*mediawiki.*; did you mean books"),
        (f"{__file__}@0", "weight '0'"),
    ],
)
def test_invalid_source_specs_are_refused(spec, key):
    assert_read_fails(spec, key)


def test_source_weight_sets_the_copies_of_documents(tmp_path):
    path = write(tmp_path / "t.txt", "".join(f"Document {i}\nis here.\n\n" for i in range(2000)))
    assert {d.copies for d in read(f"{path}@3")[0]} == {3}
    half = read(f"{path}@0.5")[0]
    assert 900 < len(half) < 1100
    assert {d.copies for d in half} == {1}
    assert half == read(f"{path}@0.5")[0]
    more = read(f"{path}@1.5")[0]
    assert len(more) == 2000
    assert [d.text for d in more if d.copies == 2] == [d.text for d in half]


def test_documents_record_their_line_numbers(tmp_path):
    xml = dump("\n", page("A."), page("B."))
    for text, lines in (
        ("\n\n" + GOOGLE, [3, 7]),
        (xml, [5, 6]),
        (PARAGRAPHS, [1, 4, 7, 10, 13, 16]),
    ):
        documents, _ = read(write(tmp_path / "t", text))
        assert [d.line for d in documents] == lines


def test_unknown_words_of_wikitext_stay_unknown(tmp_path):
    vocabulary = Vocabulary((*SPECIAL, "a", "b"), True)
    assert vocabulary.encode(f"a {UNKNOWN_WORD} b")[2] == vocabulary.unk_id
    source = str(write(tmp_path / "wiki.train.tokens", WIKITEXT))
    trained = wordpiece.train([source], tmp_path / "vocab", size=150, min_frequency=1)
    assert UNKNOWN_WORD not in "".join(trained.tokens)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_damaged_compressed_data_is_refused(tmp_path, compression):
    numbers = "".join(f"The number {i**3} is the cube of {i}.\n" for i in range(20_000))
    whole = COMPRESSIONS[compression](numbers.encode())
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0xFF
    for data in (whole[: -len(whole) // 3], bytes(flipped)):
        assert_read_fails(write(tmp_path / "file", data), "file: .* damaged or truncated")


@pytest.mark.parametrize(
    ("content", "key"),
    [
        (b"Text\nthen \0 and more" * 10, "file:2: .*NUL at byte 10"),
        ("Text".encode("utf-16"), "UTF-16"),
        ("Übergröße für ältere Väter\n".encode("latin1") * 9, "file:1: not UTF-8 .*byte 0"),
        (b"\n\n  \n", "contains no text"),
        (b'{"body": "x"}\n', 'file:1: .*"text".*body'),
        (b'{\n  "text": "A."\n}\n', "file:1: JSON over several lines"),
        (b'[{"text": "A."}]\n', 'file:1: .*"text".*list'),
        (b"EU B-ORG\nrejects O\n\n" * 20, "CoNLL"),
        (b'<?xml version="1.0"?>\n<html/>', "XML but not a MediaWiki dump"),
        (dump(page("A."))[:-30].encode(), "file:3: not well-formed XML"),
        (b'<!DOCTYPE m [<!ENTITY a "aa">]>\n<mediawiki/>', "file:1: a document type"),
        (b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 9, "not a text file"),
    ],
)
def test_non_text_and_malformed_files_are_refused(tmp_path, content, key):
    assert_read_fails(write(tmp_path / "file", content), key)


def test_invalid_bytes_are_replaced_with_a_warning(tmp_path):
    good = b"A sentence of good text is here.\n" * 3
    bad = b"A caf\xe9 is not.\n" + good + b"\xff\n" + good * 2000 + b"A \0 is here.\n"
    path = write(tmp_path / "t.txt", good + bad)
    documents, report = read(f"google:{path}")
    assert len(documents[0].text.split("\n")) == 6009
    assert "A caf\ufffd is not." in documents[0].text
    warnings = "\n".join(report.warnings)
    assert "t.txt:4 (byte 104 of the text): a line is not UTF-8 (2 in" in warnings
    assert "t.txt:6009: a line contains NUL characters (1 in" in warnings


def test_byte_order_mark_and_carriage_returns_are_removed(tmp_path):
    text = "\ufeffOne is.\r\nTwo is.\r\n\r\nThree is.\r\nFour is."
    documents, _ = read(write(tmp_path / "t.txt", text.encode()))
    assert [d.text for d in documents] == ["One is.\nTwo is.", "Three is.\nFour is."]


def test_suspicious_content_is_reported_as_warnings(tmp_path):
    content = "".join(f"Sentence {i}.\n\n" for i in range(10))
    path = write(tmp_path / "t.txt", content)
    write(tmp_path / "empty.txt", "")
    _, report = read(tmp_path)
    output = "\n".join(report.warnings)
    assert f"{path}:1: a blank line follows a single line" in output
    assert "(10 in" in output
    assert f"{tmp_path}/empty.txt:1: a file is empty (1 in {tmp_path})" in output

    bad = '{"text": "Fine it is."}\n{"text": "Cut\n{"text": " "}\n'
    _, report = read(write(tmp_path / "t.jsonl", bad))
    assert "t.jsonl:2: a line is not JSON (1 in" in report.warnings[0]
    assert "t.jsonl:3: a text is empty (1 in" in report.warnings[1]

    _, report = read(write(tmp_path / "w", '<doc id="1" url="" title="A">\nA\n\nText.\n'))
    assert "w:1: the last article has no </doc>" in report.warnings[0]


@pytest.mark.parametrize("kind", ["google", "books", "wikiextractor", "jsonl", "mediawiki"])
def test_overlong_documents_are_split(tmp_path, monkeypatch, kind):
    for module in (corpus, readers):
        monkeypatch.setattr(module, "DOCUMENT_CHARACTERS", 1000)
    lines = [f"Line {i} é with some words." for i in range(200)] + ["e" + "é" * 5000]
    text = "\n".join(lines)
    wrapped = {
        "wikiextractor": f'<doc id="1" url="" title="A">\n{text}\n</doc>\n',
        "mediawiki": dump(page(text)),
        "jsonl": json.dumps({"text": text}, ensure_ascii=False) + '\n{"text": "A short one."}\n',
    }
    path = write(tmp_path / "t", wrapped.get(kind, text))
    documents, report = read(f"{kind}:{path}")
    assert max(len(d.text) for d in documents) <= 1000 + 100
    whole = "".join(d.text for d in documents).replace("\n", "")
    assert whole == text.replace("\n", "") + "A short one." * (kind == "jsonl")
    assert "a document is longer than" in report.warnings[0]
    if kind == "jsonl":  # the line is parsed as a whole
        assert [d.line for d in documents] == [1] * (len(documents) - 1) + [2]
        monkeypatch.setattr(readers, "_JSON_BYTES", 2000)
        documents, report = read(path)
        assert [d.text for d in documents] == ["A short one."]
        assert "t:1: a line is not JSON" in report.warnings[0]


def test_memory_does_not_grow_with_file_size(tmp_path):
    line = "A sentence of about eighty characters which says nothing of any interest at all. "
    document, peaks = f"{line * 50}\n{line * 50}\n\n".encode(), []
    for documents in 200, 2000:
        path = write(tmp_path / "t.gz", gzip.compress(document * documents, 1))
        source, report = corpus.parse_source(f"google:{path}"), corpus.Report()
        tracemalloc.start()
        for _ in corpus.read(source, report):
            pass
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0]


def test_long_sentences_are_split_between_words():
    text = "word " * 5000 + "x" * 25_000
    result = split(text, "google")
    assert max(map(len, result)) <= SENTENCE_CHARACTERS
    assert "".join(result).replace(" ", "") == text.replace(" ", "")
    assert all(set(s.split()) == {"word"} for s in result[:2])


PUNCTUATION = " \n.!?aBé'\"\u3000\u2028[]{}|=<>*&;:#"


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(st.sampled_from(PUNCTUATION) | st.characters(codec="utf-8")),
    kind=st.sampled_from([k for k in formats.KINDS if k != "mediawiki"]),
)
def test_sentence_splitting_loses_no_text(text, kind):
    result = split(text, kind)
    for sentence in result:
        assert sentence == " ".join(sentence.split())
        assert sentence
    if "&" not in text:
        assert "".join("".join(result).split()) == "".join(text.split())


MARKUP = "[[ ]] {{ }} {| |} | ''' == <ref> </ref> <!-- : a File:".split()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([*MARKUP, "\n", "* ", "a b"])))
def test_malformed_wiki_markup_is_stripped(parts):
    for sentence in split("".join(parts), "mediawiki"):
        assert "[[" not in sentence
        assert "{{" not in sentence
        assert "<ref" not in sentence


@pytest.mark.parametrize(
    ("markup", "plain"),
    [
        ("It is {{convert|7|to|10|kg|lb}} and {{convert|5|km}}.", "It is 7 to 10 kg and 5 km."),
        ("A {{nowrap|b c}}{{snd}}d.", "A b c – d."),  # noqa: RUF001
        ("See [[:Category:X|these]] and [[a (b)|a]]s.", "See these and as."),
        ("Before. {{unclosed|x\nAfter it.", "After it."),
        ("<div>In a box.</div>", "In a box."),
        ("H<sub>2</sub>O ( , ) [] is &amp;lt; x<br/>y ''it''.", "H2O is < x y it."),
        ("One.\n#REDIRECT\n: Indented.\n; Term : x\nTwo.", "One. Two."),
        ("[[Image:a.png|frame|A [[b]] {{c}}\nd]] After.", "After."),
        ("| leftover = 3\n! head\nText.", "Text."),
        ("It is &#xD800; so.", "It is ? so."),
        ("Вид [[Москва|Москвы]].\n[[Категория:Города России]]", "Вид Москвы."),
        ("[[Файл:A.jpg|мини|слева|Вид]] После.", "После."),
        ("भारत।\n[[श्रेणी:भारत]]", "भारत।"),
        (
            "A [[wikt:perfidious|perfidious]] king of [[:fr:Nice|Nice]].",
            "A perfidious king of Nice.",
        ),
        ("It is so. [[w-x:A|a]][[fr:A]][[2001: B|b]]", "It is so. b"),
        (
            "A town\nin the east.\n\n* a list\n\nIt is.\n== H ==\nEnd.",
            "A town in the east. It is. End.",
        ),
    ],
)
def test_wiki_markup_is_converted_to_plain_text(markup, plain):
    assert " ".join(split(markup, "mediawiki")) == plain


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (GOOGLE, "google"),
        ("\n".join(SENTENCES), "google"),
        ("".join(f"{s}\n\n" for s in SENTENCES), "google"),
        ("no full stops here\nand a line of another length , you see\n" * 20, "google"),
        (f"{WRAPPED}\n\n{WRAPPED}", "books"),
        (f"CHAPTER I\n\n{PROSE}\n\n{PROSE}", "books"),
        (f"CHAPTER I\n{PROSE}\n{PROSE}", "books"),
        (f"{PROSE}\n{PROSE}\n \n" * 3, "paragraphs"),
        (f" = A = \n \n {PROSE} \n \n = = B = = \n \n {PROSE} \n", "wikitext"),
        ("第一句。第二句。\n第三句！第四句。\n\n" * 3, "paragraphs"),  # noqa: RUF001
        ("यह एक है। वह दो है।\nयह तीन है। वह चार है।\n\n" * 3, "paragraphs"),
        ("ይህ ነው። ያ ነው።\nይህ ነው። ያ ነው።\n\n" * 3, "paragraphs"),
        ("یہ ایک ہے۔ وہ دو ہے۔\nیہ ایک ہے۔ کیا یہ ہے؟\n\n" * 3, "paragraphs"),  # noqa: RUF001
    ],
)
def test_plain_text_formats_are_detected(text, kind):
    assert formats.kind_of_text(text) == kind


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("He said, “Go now. They are here.” And he left.", 3),
        ("“I am here,” she said. “You are there. He is!” cried Tom.", 3),
        ('"Is it Mr. Smith? No. It is he," said Dr. Jones. "Go!" he said.', 4),
        ("‘I never said so. You did,’ he replied. It was Tom’s.", 3),  # noqa: RUF001
        ("She kept him at arm's length. I think of Lesbia's guide. It is so.", 3),
        ("It's 5 p.m. now. The U.S. is big. J. K. Rowling wrote it.", 3),
        ('He said, "Go!" and left. "Why?" asked she.', 2),
        ("No quotation. (In brackets. There are two.) It ends.", 2),
    ],
)
def test_direct_speech_is_split_into_sentences(text, sentences):
    result = split(text, "jsonl")
    assert " ".join(result) == text
    assert len(result) == sentences


def test_huge_pages_words_and_tags_in_dumps(tmp_path, monkeypatch):
    """Pages, words and tags of any length take bounded memory and time."""
    for module in (corpus, readers):
        monkeypatch.setattr(module, "DOCUMENT_CHARACTERS", 5000)
    path = write(tmp_path / "page.xml", dump(page("It is so. " * 200_000) + page("One more.")))
    documents, report = read(path)
    assert max(len(d.text) for d in documents) < 5000 + (1 << 20)
    assert len(documents) > 2
    assert "a document is longer than" in report.warnings[0]
    for text in ("a" * 1_000_000, "ab=" * 300_000, "<a" * 300_000):
        assert split(f"It is. {text}\n\nThe end.", "mediawiki")[-1] == "The end."
    tag = f'<mediawiki a="{"x" * 6_000_000}"><page/></mediawiki>'
    assert_read_fails(write(tmp_path / "tag.xml", tag), "tag.xml:1: a tag")
