"""Fuzz every reader: it must return a result or raise a one-line `UserError`.

Each reader gets valid files, then copies with changed bytes or JSON values, and random bytes in
their place. `BERT_JAX_SOAK=n` runs n times as many examples.
"""

import contextlib
import functools
import io
import itertools
import json
import os
import pathlib
import re
import resource
import shutil
import zipfile

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bert_jax import cli
from bert_jax.config import fields, flags
from bert_jax.config import schema as configs
from bert_jax.config.checks import validate
from bert_jax.config.schema import Config, FinetuneConfig, TaskConfig
from bert_jax.convert import huggingface, pytorch, source, weights
from bert_jax.convert.tokenizer import tokenizer_files
from bert_jax.data import corpus, tables, texts, vocabulary_files
from bert_jax.data.loader import RowDataset
from bert_jax.data.rows import read_manifest
from bert_jax.data.sentences import split_sentences
from bert_jax.data.vocabulary import SPECIAL, Vocabulary
from bert_jax.errors import UserError
from bert_jax.runs import workdir
from bert_jax.tasks import conll as tagging
from bert_jax.tasks import conll_score, glue, score, squad, squad_score
from bert_jax.tasks import swag as choice
from bert_jax.tasks import tables as classification
from tests.helpers.checkpoints import BEST, TF1
from tests.helpers.compression import COMPRESSIONS
from tests.test_classification import SWAG, SWAG_HEADER
from tests.test_corpus import EXAMPLES, GOOGLE

SOAK = int(os.environ.get("BERT_JAX_SOAK", 1))
MOST_BYTES = 1 << 29  # memory that a reader may use for these small files
LINE = 3000  # maximum length of an error message, in characters
ROOT = pathlib.Path(__file__).parent.parent
VOCABULARY = Vocabulary((*SPECIAL, *"abcdefghij", *(f"##{c}" for c in "abcdefghij")), True)

# --- Faults ---------------------------------------------------------------------------------------

NASTY_BYTES = [
    b"\0", b"\n", b"\r", b"\t", b'"', b",", b"|", b"\\", b"\xff", b"\xef\xbb\xbf", b"\xed\xa0\x80",
    b"\x1b[2J", "\u2028\u0300\u202e".encode(), b"-1", b"9" * 5000, b"[" * 20_000, b'{"a":' * 20_000,
    b"1e999", b"NaN", b"../", b"\xff" * 8, b"\x7f" + b"\xff" * 7, b"-DOCSTART- ", b"<doc ", b"<!DOCTYPE",
]  # fmt: skip
NASTY_VALUES = [
    None, True, False, -1, 0, 1, 2**31, 2**63, 2**64, 10**30, 1.5, -0.0, 1e308, float("nan"),
    float("inf"), "", " ", "x", "\ud800", "a\nb", "../x", "/etc/passwd", "9" * 400, "\x1b[2J",
    [], [[]], ["a"], [1, "a"], {}, {"a": 1}, {"": None},
]  # fmt: skip

places = st.integers(0, 1 << 20)
# Some bytes are replaced by others; neither need be there.
lengths = st.sampled_from([0, 1, 2, 40, 1 << 30])
byte_changes = st.tuples(lengths, st.sampled_from(NASTY_BYTES) | st.binary(max_size=60))
value_changes = st.sampled_from(["remove", "rename", "set"]), st.sampled_from(NASTY_VALUES)
changes = st.lists(
    st.tuples(st.integers(0, 99), places, byte_changes | st.tuples(*value_changes)),
    min_size=1,
    max_size=3,
)


def nested_values(value, holder=None, key=None):
    """Yield (container, key) of every value nested in a JSON value."""
    if holder is not None:
        yield holder, key
    items = value.items() if isinstance(value, dict) else ()
    for inside, each in enumerate(value) if isinstance(value, list) else items:
        yield from nested_values(each, value, inside)


def change_value(content: bytes, at, kind, value) -> bytes:
    """Change one value of a JSON text, or of one line of JSON Lines."""
    lines = [content] if b"\n{" not in content else content.split(b"\n")
    line = at % len(lines)
    try:
        parsed = json.loads(lines[line])
        result = list(nested_values(parsed))
    except (ValueError, RecursionError):
        return content
    if not result:
        return json.dumps(value).encode()
    holder, key = result[at % len(result)]
    if kind == "remove":
        del holder[key]
    elif kind == "rename" and isinstance(holder, dict):
        holder[str(value)] = holder.pop(key)
    else:
        holder[key] = value
    lines[line] = json.dumps(parsed).encode()
    return b"\n".join(lines)


def changed(files: dict[str, bytes], wrong) -> dict[str, bytes]:
    """Return the files with the given faults applied."""
    files = dict(files)
    for number, at, (how, value) in wrong:
        name = sorted(files)[number % len(files)]
        if isinstance(how, str):
            files[name] = change_value(files[name], at, how, value)
        else:
            start = at % (len(files[name]) + 1)
            files[name] = files[name][:start] + value + files[name][start + how :]
    return files


def place(folder: pathlib.Path, files: dict[str, bytes]) -> pathlib.Path:
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@contextlib.contextmanager
def only_user_errors(most_bytes=MOST_BYTES):
    """Check that the block succeeds or raises a one-line `UserError`, and uses little memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        yield
    except UserError as error:
        line = str(error)
        assert line
        assert line.isprintable()
        assert len(line) < LINE, line
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < most_bytes >> 10


# --- Readers and their valid files ----------------------------------------------------------------


def parquet(**columns) -> bytes:
    import pyarrow
    from pyarrow import parquet as library

    out = io.BytesIO()
    library.write_table(pyarrow.table(columns), out, row_group_size=2)
    return out.getvalue()


def read_corpus(folder, kind=None):
    spec = f"{kind}:{folder}" if kind else str(folder)
    report = corpus.Report()
    for document in corpus.read(corpus.parse_source(spec), report):
        split_sentences(document)
    return report.warnings


def read_table(folder):
    (path,) = folder.iterdir()
    return list(tables.read(path, ["text"], ["label"], optional=["other"]))


def read_texts(folder):
    (path,) = folder.iterdir()
    return list(texts.read(str(path), "text").texts)


def learn(problem, **fields):
    """Return a function that reads a training file into a `FinetuneDataset`."""

    def read(folder):
        (path,) = folder.iterdir()
        return problem(TaskConfig(train=str(path), **{"tokens": 16} | fields), VOCABULARY)

    return read


def read_score(benchmark, *names):
    return lambda folder: score.score(benchmark, *(str(folder / name) for name in names))


def read_vocabulary(folder):
    return vocabulary_files.load(folder).encode("abc def")


def read_rows(folder):
    opened = RowDataset(folder, "train")
    return opened.read(range(min(len(opened), 8)))


def read_run(folder):
    workdir.holds_run(folder)
    config = workdir.read_config(folder)
    workdir.read_best_by(folder)
    validate(config)
    return config


TABLE = {"text": ["a b", "c", "d"], "label": ["x", "y", "x"], "other": ["1", "2", "3"]}
LINES = list(zip(*TABLE.values(), strict=True))
QUESTIONS = [
    {"id": name, "question": "a b", "answers": [{"text": "de", "answer_start": 4}]} for name in "pq"
]
PARAGRAPH = {"context": "abc de fgh", "qas": QUESTIONS}
SQUAD = {"version": "1", "data": [{"title": "t", "paragraphs": [PARAGRAPH]}]}
CONLL = "-DOCSTART- O\n\na B-X\nb I-X\nc O\n\nd O\ne B-Y\n"
GLUE_STSB = "index\tsentence1\tsentence2\tscore\n0\ta\tb\t1.5\n1\tc\td\t4\n2\ta\ta\t5.0\n"


def separated(delimiter) -> bytes:
    return "".join(f"{delimiter.join(row)}\n" for row in [tuple(TABLE), *LINES]).encode()


def json_lines(rows) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


OBJECTS = json_lines(dict(zip(TABLE, row, strict=True)) for row in LINES)


def run_config(config) -> bytes:
    return json.dumps({"config": fields.to_dict(config), "data": [], "best": BEST}).encode()


classes = learn(classification.Classification, objective="classes")
number = learn(classification.Classification, objective="number")
READERS = {
    **{
        f"corpus {kind}": ({"a.txt": text.encode()}, read_corpus)
        for kind, (text, _) in EXAMPLES.items()
    },
    **{
        f"corpus {kind} named": ({"a": text.encode()}, functools.partial(read_corpus, kind=kind))
        for kind, (text, _) in EXAMPLES.items()
    },
    **{
        f"corpus {name}": ({"a": compress(GOOGLE.encode() * 20)}, read_corpus)
        for name, compress in COMPRESSIONS.items()
    },
    "corpus parquet": ({"a": parquet(text=["One is.", "Two is.", None] * 3)}, read_corpus),
    "table tsv": ({"a.tsv": separated("\t")}, read_table),
    "table csv": ({"a.csv": separated(",") + b'"a ""b""\nc",x,y\n'}, read_table),
    "table jsonl": ({"a.jsonl": OBJECTS}, read_table),
    "table parquet": ({"a.parquet": parquet(**TABLE)}, read_table),
    "texts txt": ({"a.txt": GOOGLE.encode()}, read_texts),
    "texts jsonl": ({"a.jsonl": OBJECTS}, read_texts),
    "texts parquet": ({"a.parquet": parquet(**TABLE)}, read_texts),
    "task csv": ({"a.csv": separated(",")}, learn(classification.Classification)),
    "task jsonl classes": (
        {"a.jsonl": json_lines({"text": "a", "label": label} for label in (["x", "y"], ["x"], []))},
        classes,
    ),
    "task jsonl number": (
        {"a.jsonl": json_lines({"text": "a", "label": label} for label in (1, 2.5, "3"))},
        number,
    ),
    "task glue": ({"train.tsv": GLUE_STSB.encode()}, learn(glue.Glue, name="stsb")),
    "task swag": (
        {"a.csv": "\n".join([SWAG_HEADER, *SWAG]).encode()},
        learn(choice.MultipleChoice, kind="choice", name="swag"),
    ),
    "task conll": ({"a.txt": CONLL.encode()}, learn(tagging.TokenClassification, kind="tagging")),
    "task squad": (
        {"a.json": json.dumps(SQUAD).encode()},
        learn(squad.Squad, kind="squad", question_tokens=4, stride_tokens=3),
    ),
    "score squad2": (
        {
            **{"data": json.dumps(SQUAD).encode(), "predictions": b'{"p": "de", "q": ""}'},
            "odds": b'{"p": 0.5, "q": -3}',
        },
        read_score("squad2", "data", "predictions", "odds"),
    ),
    "score stsb": (
        {"data": GLUE_STSB.encode(), "p": b"index\tprediction\n0\t1\n1\t3.5\n2\t5\n"},
        read_score("glue:stsb", "data", "p"),
    ),
    "score conll": (
        {"data": CONLL.encode(), "p": b"a B-X\nb I-X\nc O\n\nd O\ne O\n"},
        read_score("conll", "data", "p"),
    ),
    "vocabulary": (
        {
            "vocab.txt": VOCABULARY.to_bytes(),
            "vocab.json": json.dumps(VOCABULARY.settings).encode(),
        },
        read_vocabulary,
    ),
    "run": ({"config.json": run_config(Config())}, read_run),
    "run of a task": ({"config.json": run_config(FinetuneConfig())}, read_run),
}
CHECKPOINTS = ["google", "safetensors", "sharded"]  # test_checkpoint_files.py has PyTorch's


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def checkpoints():
    """Name -> (files of a checkpoint, function that reads their folder)."""
    from safetensors.numpy import save

    imported = source.read(str(TF1 / "bert_model.ckpt"))
    tensors = huggingface.to_huggingface(imported.params, imported.config.model)
    settings_ = huggingface.huggingface_config(imported.config.model, imported.vocabulary)
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [
        {"idx": i, "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds)
    ]
    tokenizer = tokenizer_files(imported.vocabulary, 16)
    plain = {
        "config.json": json.dumps(settings_).encode(),
        **{name: text.encode() for name, text in tokenizer.items() if isinstance(text, str)},
        "modules.json": json.dumps(modules).encode(),
        "1_Pooling/config.json": b'{"pooling_mode_mean_tokens": true, "pooling_mode_cls_token": false}',
        "sentence_bert_config.json": b'{"max_seq_length": 16}',
    }
    first = dict(itertools.islice(tensors.items(), 5))
    rest = {name: value for name, value in tensors.items() if name not in first}
    index = {name: "a.safetensors" if name in first else "b.safetensors" for name in tensors}
    result = {
        "google": {name: x for name, x in contents(TF1).items() if name.startswith(("bert", "vo"))},
        "safetensors": {**plain, "model.safetensors": save(tensors, {"crc32c": "{}"})},
        "sharded": {
            **plain,
            "model.safetensors.index.json": json.dumps({"weight_map": index}).encode(),
            "a.safetensors": save(first),
            "b.safetensors": save(rest),
        },
    }
    return {
        name: (files, lambda folder: source.read(str(folder))) for name, files in result.items()
    }


@pytest.fixture(scope="module")
def shards(rows):
    return contents(pathlib.Path(rows())), read_rows


@pytest.fixture
def reader(request):
    """(files, function that reads their folder) of the reader that the parameter names."""
    if request.param == "rows":
        return request.getfixturevalue("shards")
    if request.param in CHECKPOINTS:
        return request.getfixturevalue("checkpoints")[request.param]
    return READERS[request.param]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "files"


FIXTURES = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@pytest.mark.parametrize("reader", [*sorted(READERS), "rows", *CHECKPOINTS], indirect=True)
def test_valid_files_are_read(reader, folder):
    files, read = reader
    read(place(folder, files))


@pytest.mark.parametrize("reader", [*sorted(READERS), "rows"], indirect=True)
@settings(max_examples=30 * SOAK, deadline=None, suppress_health_check=FIXTURES)
@given(wrong=changes)
def test_damaged_files_end_in_one_line(reader, folder, wrong):
    files, read = reader
    with only_user_errors():
        read(place(folder, changed(files, wrong)))


@pytest.mark.parametrize("reader", CHECKPOINTS, indirect=True)
@settings(max_examples=8 * SOAK, deadline=None, suppress_health_check=FIXTURES)
@given(wrong=changes)
def test_damaged_checkpoints_end_in_one_line(reader, folder, wrong):
    files, read = reader
    with only_user_errors():
        read(place(folder, changed(files, wrong)))


# --- Decompression bombs and oversized inputs -----------------------------------------------------


def zeros(kind: str, size: int, byte: bytes = b" ") -> bytes:
    """Return `size` equal bytes, compressed to a few thousandths of that."""
    block = COMPRESSIONS[kind](byte * (1 << 26))
    return block * (size >> 26)  # each format allows concatenated streams


@pytest.mark.parametrize(
    ("name", "kind"),
    [*itertools.product(["corpus", "conll", "squad", "table"], ["gz"]), ("corpus", "zst")],
)
def test_decompression_bombs_are_streamed_or_refused(tmp_path, monkeypatch, name, kind):
    monkeypatch.setattr(squad_score, "DATA_BYTES", 1 << 24)  # it is read as a whole

    def read_lengths(path):
        documents = corpus.read(corpus.parse_source(path), corpus.Report())
        return sum(len(document.text) for document in documents)

    read = {
        "corpus": read_lengths,
        "conll": conll_score.read,
        "squad": squad_score.read,
        "table": lambda path: list(tables.read(path, ["text"], kind=".tsv")),
    }[name]
    path = tmp_path / "a"
    path.write_bytes(zeros(kind, 1 << 27, b"a"))
    with only_user_errors(most_bytes=1 << 27), contextlib.ExitStack() as stack:
        if name != "corpus":
            stack.enter_context(pytest.raises(UserError, match=str(path)))
        read(str(path))


def test_oversized_metadata_files_are_refused(tmp_path):
    for name, read in (
        ("vocab.txt", lambda: vocabulary_files.load(tmp_path)),
        ("vocab.json", lambda: vocabulary_files.load(tmp_path)),
        ("manifest.json", lambda: read_manifest(tmp_path)),
        ("config.json", lambda: source.read(str(tmp_path))),
    ):
        (tmp_path / "vocab.txt").write_bytes(VOCABULARY.to_bytes())
        (tmp_path / "model.safetensors").touch()
        with open(tmp_path / name, "wb") as file:
            file.truncate(1 << 40)  # sparse, so it takes no disk space
        with only_user_errors(), pytest.raises(UserError, match="more than 64 MB"):
            read()
        (tmp_path / name).unlink()


def test_zip_bomb_is_refused(tmp_path):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("bert_config.json", "bert_model.ckpt.index"):
            archive.writestr(name, b" " * (1 << 26))
    with (
        only_user_errors(),
        pytest.raises(UserError, match=r"a\.zip unpacks to"),
    ):
        source.read(str(path))


def test_many_tensors_sharing_storage_are_refused(tmp_path):
    """Views of one storage take no memory until each of them is copied."""
    import torch

    one = torch.zeros(100_000)
    torch.save(dict.fromkeys(map(str, range(12)), one), tmp_path / "a.bin")
    with only_user_errors(), pytest.raises(UserError, match="share more"):
        pytorch.read(tmp_path / "a.bin")


# --- Paths and code -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../secret", "/etc/hosts", "..", "a/../../secret"])
@pytest.mark.parametrize("file", ["model.safetensors.index.json", "modules.json"])
def test_path_traversal_in_index_files_is_refused(checkpoints, folder, monkeypatch, file, name):
    files, read = checkpoints["sharded"]
    value = json.loads(files[file])
    if file == "modules.json":
        value[1]["path"] = name
    else:
        value["weight_map"] = dict.fromkeys(value["weight_map"], name)
    place(folder, {**files, file: json.dumps(value).encode()})
    place(folder.parent / "secret", {"config.json": b"{}"})
    opened, read_bytes = [], weights.read_bytes
    monkeypatch.setattr(weights, "read_bytes", lambda f: opened.append(f) or read_bytes(f))
    with pytest.raises(UserError, match=r"same folder|not a subfolder"):
        read(folder)
    assert all(path.resolve().is_relative_to(folder.resolve()) for path in opened)


def test_python_files_in_a_model_folder_are_not_executed(tmp_path, checkpoints):
    files, read = checkpoints["safetensors"]
    trap = f"open({str(tmp_path / 'ran')!r}, 'w')\n".encode()
    names = ["config.py", "sweep.py", "modeling_bert.py", "tokenization.py", "__init__.py"]
    extra = {name: trap for name in names}
    settings_ = json.loads(files["config.json"]) | {"auto_map": {"AutoModel": "modeling_bert.X"}}
    folder = place(
        tmp_path / "model", {**files, **extra, "config.json": json.dumps(settings_).encode()}
    )
    read(folder)
    assert not (tmp_path / "ran").exists()


# --- Settings and command lines -------------------------------------------------------------------

KEYS = sorted(fields.flatten(Config())) + sorted(fields.flatten(FinetuneConfig()))
values = st.one_of(
    st.sampled_from([str(v) for v in NASTY_VALUES] + ["()", "('a',)", "1,2", "true", "None", "{}"]),
    st.integers().map(str),
    st.floats().map(str),
    st.text(max_size=8),
)
keys = st.one_of(
    st.sampled_from(KEYS),
    st.text(max_size=8),
    st.sampled_from(["phases", "phases[7].rows", "model."]),
)


@settings(max_examples=40 * SOAK, deadline=None)
@given(
    st.sampled_from(["pretrain.py:mini", "table.py"]),
    st.lists(st.tuples(keys, values), min_size=1, max_size=3),
)
def test_any_setting_is_accepted_or_rejected(file, given_):
    kind = FinetuneConfig if file == "table.py" else Config
    arguments = [f"--config={ROOT / 'configs' / file}"]
    arguments += [f"--config.{key}={value}" for key, value in given_]
    with only_user_errors():
        config = flags.load(arguments, kind)
        assert configs.from_dict(json.loads(json.dumps(fields.to_dict(config)))) == config


# {odd}: a path that no command can use; {text}, {vocab}, {rows} and {model}: valid ones.
COMMANDS = [
    "vocab {text} --out {new} --size {number} --min-frequency {number}",
    "vocab {odd} --out {odd}",
    "prepare {text} --vocab {vocab} --out {new} --tokens {number} --sequences {number} --workers 1",
    "prepare {text}@{number} --vocab {vocab} --out {new} --seed {number} --workers 1",
    "prepare {text} --vocab {vocab} --out {new} --passes {number} --heldout-fraction {number} "
    "--short-fraction {number} --workers 1",
    "prepare {odd} --vocab {odd} --out {odd} --workers 1",
    "pretrain --config {odd} --workdir {new} --rows {odd}",
    "pretrain --config CONFIGS/pretrain.py:mini,128 --workdir {new} --rows {odd}",
    "finetune --config CONFIGS/table.py --init {odd} --workdir {new} --data {odd} --seeds {number}",
    "finetune --config CONFIGS/glue.py:{odd} --init none --vocab {vocab} --workdir {new}",
    "predict {odd} --workdir {odd} --out {new} --checkpoint {number}",
    "score {odd} {odd} {odd}",
    "glue-zip {odd} --out {new}",
    "evaluate --workdir {odd} --rows {rows} --checkpoint {number}",
    "fill-mask --init {model} --top {number} [MASK]",
    "import {odd} --out {new} --vocab {odd}",
    "export --init {model} --out {odd} --checkpoint {number}",
    "embed {text} --init {model} --out {new}.npy --layers={number} --weights={number}",
    "embed {odd} --init {model} --out {new}.npy --tokens {number} --long window --overlap {number}",
    "launch --on local --dry-run --processes {number} --devices {number} -- pretrain --config {odd} "
    "--workdir {odd}",
    "launch --on slurm --dry-run --nodes {number} --gpus {number} -- pretrain --config "
    "CONFIGS/pretrain.py:mini,128 --rows {rows} --workdir {odd}",
    "preflight --config CONFIGS/pretrain.py:mini --topology {odd} --sequences {number}",
    "sweep {odd} --dry-run --jobs {number} --seeds {number} --runs {new}",
    "report {odd} --out {new}.html",
    "attention --init {model} --text {number} --text-b {odd} --out {new}.html",
    "{odd} {odd}",
]
NUMBERS = [
    "-1", "0", "1", "-0.0", "1.5", "nan", "inf", "1e999", "x", "", "9" * 30, "9" * 5000, "--",
]  # fmt: skip


@pytest.fixture(scope="module")
def odd_paths(folder):
    """Paths of all kinds, none of which gives a command everything that it needs."""
    place(folder, {"binary": bytes(range(256)), "empty": b"", "deep/[x]/a.txt": b"a\n\nb\n"})
    place(
        folder / "run", {"config.json": b"[" * 20_000, "manifest.json": b"[1]", "vocab.txt": b"\n"}
    )
    inside = [folder, *sorted(folder.rglob("*")), folder / "gone", folder / "empty" / "x"]
    return [str(path) for path in inside] + [
        "", ".", "/", "/dev/null", "x" * 300, "../" * 40, "a\nb", "~nobody/x", "\udcff", "tfds:x",
        "books:", "*", "**", "a@b", "a:b", "OWNER/NAME", "http://localhost/x", "-", "--", "-x", "\0",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def valid_paths(corpus, rows, checkpoints, tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    text = folder / "text.txt"
    text.write_text("\n\n".join(corpus.read_text().split("\n\n")[:6]))
    model = place(folder / "model", checkpoints["safetensors"][0])
    return {"text": text, "vocab": rows() / "vocab.txt", "rows": rows(), "model": model}


@settings(max_examples=50 * SOAK, deadline=None, suppress_health_check=FIXTURES)
@given(st.data())
def test_any_command_line_ends_in_one_line(
    odd_paths, valid_paths, folder, monkeypatch, capsys, data
):
    """It succeeds, or fails with one line and the status of an error of the user."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\n")))
    monkeypatch.chdir(folder.parent)
    new = folder.parent / "new"
    shutil.rmtree(new, ignore_errors=True)
    new.with_suffix(".npy").unlink(missing_ok=True)
    values = {name: st.just(str(path)) for name, path in valid_paths.items()}
    values |= {"odd": st.sampled_from(odd_paths), "number": st.sampled_from(NUMBERS)}
    values |= {"new": st.just(str(new)) | st.just(str(new)) | st.sampled_from(odd_paths)}
    command = data.draw(st.sampled_from(COMMANDS)).replace("CONFIGS", str(ROOT / "configs"))
    arguments = [
        re.sub(r"\{(\w+)\}", lambda name: data.draw(values[name[1]]), part)
        for part in command.split()
    ]
    before = sorted(folder.rglob("*"))
    capsys.readouterr()
    try:
        status = cli.main(arguments)
    except SystemExit as stopped:
        status = stopped.code
    output = capsys.readouterr().err
    assert status in (0, cli.EXIT_USER_ERROR), (arguments, output)
    assert "Traceback" not in output
    if status == cli.EXIT_USER_ERROR:
        last = output.strip().splitlines()[-1]
        assert last.startswith("bert-jax"), arguments
        assert len(last) < LINE
    assert [path for path in before if not path.exists()] == []


@pytest.mark.parametrize("setting", ["steps=3000000000", "phases[0].batch_size=99999999999999"])
def test_counts_that_overflow_int32_are_refused(setting):
    key = setting.partition("=")[0]
    with pytest.raises(UserError, match=re.escape(f"config.{key} is ")):
        flags.load([f"--config={ROOT / 'configs' / 'pretrain.py'}:mini", f"--config.{setting}"])
