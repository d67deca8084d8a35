"""Commands, settings, code and links in the documentation."""

import ast
import dataclasses
import itertools
import json
import pathlib
import re
import shlex

import pytest

import bert_jax
from bert_jax import cli
from bert_jax.config import flags
from bert_jax.config.fields import flatten
from bert_jax.config.schema import Config, FinetuneConfig
from bert_jax.data.rows import Manifest, RowFormat
from bert_jax.tools.launch import request
from bert_jax.tools.sweep import module_of

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "tests/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
# All pages, with those of the experiments.
LINKED = [*PAGES, ROOT / "CHANGELOG.md", *sorted((ROOT / "experiments").rglob("*.md"))]
KINDS = {"pretrain": Config, "preflight": Config, "finetune": FinetuneConfig}


def blocks(path: pathlib.Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(), re.DOTALL)


def commands(path: pathlib.Path) -> list[list[str]]:
    """Return the arguments of every bert-jax command on a page."""
    lines = re.sub(r"\\\n\s*", "", "\n".join(blocks(path, "sh"))).splitlines()
    # Drop environment variables before the command, and redirections and pipes after it.
    lines = [re.sub(r"^(\w+=\S+ )+(?=bert-jax )|\s[<>|]\s.*", "", line) for line in lines]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("bert-jax ")]


def check(arguments: list[str]) -> None:
    """Parse a command and load its config, as the command itself does before it reads any data."""
    own = list(itertools.takewhile(lambda part: part != "--", arguments))
    settings, rest = flags.split(own)
    options = cli.parse(rest)
    if getattr(options, "teacher", ""):
        settings = [*settings, f"--config.distill.teacher={options.teacher}"]
    if settings:
        flags.load(settings, KINDS[options.verb])
    inner = arguments[len(own) + 1 :]
    if inner and options.verb in ("sweep", "launch"):
        check([*inner, "--workdir=x"] if options.verb == "sweep" else inner)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_documented_commands_are_valid(path, monkeypatch):
    """Commands and their settings parse; `launch` commands also pass a dry run."""
    monkeypatch.chdir(ROOT)
    # `launch` refuses a checkout with uncommitted changes, which this one may have.
    monkeypatch.setattr(request, "_check_tpu_vm", lambda request: None)
    result = commands(path)
    assert result or path.parent.name != "launch" or path.stem == "README"
    for arguments in result:
        if arguments[0] == "launch" and "--" in arguments:
            assert cli.main(["launch", "--dry-run", *arguments[1:]]) == 0, arguments
        check(arguments)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_documented_settings_are_config_fields(path):
    known = set(flatten(Config())) | set(flatten(FinetuneConfig()))
    groups = {key.rpartition(".")[0] for key in known}
    named = re.findall(r"config\.((?:\w+(?:\[0\])?\.)*[a-z_0-9]+)", path.read_text())
    assert not {*named} - known - groups - {"py", "json", "key"}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_documented_python_uses_existing_names(path):
    """The code parses, and the attributes of `bert_jax` and `Model` that it uses exist."""
    for code in blocks(path, "python"):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "bert_jax":
                assert hasattr(bert_jax, node.attr), node.attr
            if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "model":
                fields = bert_jax.api.Model.__dataclass_fields__
                assert node.attr in fields or hasattr(bert_jax.api.Model, node.attr), node.attr


def anchors(path: pathlib.Path) -> set[str]:
    """Return the anchors of a page's headings."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", LINKED, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_and_anchors_exist(path):
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)", path.read_text()):
        target, _, anchor = link.partition("#")
        file = path.parent / target if target else path
        if "://" in link or (file.exists() and (not anchor or anchor in anchors(file))):
            continue
        broken.append(link)
    assert not broken


def test_features_are_those_of_the_tests():
    """docs/reference/features.md and tests/README.md list the same features in the same order."""
    first = [
        re.findall(r"^\| ([^|]+) \|", (ROOT / path).read_text(), re.MULTILINE)[1:]
        for path in ("docs/reference/features.md", "tests/README.md")
    ]
    assert first[0] == first[1]


@pytest.fixture(scope="module")
def hooks():
    """The hooks of MkDocs, which the extra `docs` installs."""
    pytest.importorskip("mkdocs")
    return module_of(ROOT / "docs" / "hooks.py")


def test_page_of_commands_has_every_option(hooks):
    page = hooks.commands()
    for verb, parser in cli.parser().verbs.items():
        _, heading, section = page.partition(f"\n## {verb}\n")
        section = section.partition("\n## ")[0]
        options = {name for action in parser._actions for name in action.option_strings}
        assert heading, verb
        assert {x for x in options - {"-h", "--help", "--quiet"} if x not in section} == set()


def test_page_of_file_formats_has_every_field(hooks):
    page = hooks.file_formats()
    names = [field.name for field in dataclasses.fields(Manifest)]
    names += ["vocab.txt", "metrics.jsonl", "checkpoints/", *RowFormat(8, 1, 8).dtype.names]
    assert [name for name in names if name not in page] == []


def test_pages_of_notebooks_have_their_cells_and_pictures(hooks):
    for path in hooks.NOTEBOOKS:
        files = hooks.notebook(path)
        page = files[f"tutorials/{path.stem}.md"]
        cells = json.loads(path.read_text())["cells"]
        assert page.count("```python\n") == sum(cell["cell_type"] == "code" for cell in cells)
        assert ".ipynb)" not in page.replace(f"{path.name})", "")
        pictures = re.findall(r"!\[.*\]\((.*)\)", page)
        assert {f"tutorials/{name}" for name in pictures} == files.keys() - {
            f"tutorials/{path.stem}.md"
        }
        assert all(files[f"tutorials/{name}"].startswith(b"\x89PNG") for name in pictures)


def test_links_to_files_lead_to_pages_of_the_site_or_to_the_repository(hooks):
    class Page:
        class file:
            src_uri = "how_to/data.md"

    text = (
        "[a](../../bert_jax/config/schema.py) [b](../../bert_jax/cli/__init__.py) [c](../index.md) "
        "[d](../../examples/tour.ipynb) [e](../../experiments/speed/README.md#mup) [f](rows.md)"
    )
    links = re.findall(r"\]\((.*?)\)", hooks.on_page_markdown(text, Page))
    repository = f"{hooks.REPOSITORY}/experiments/speed/README.md#mup"
    pages = ["../reference/configuration.md", "../reference/commands.md", "../index.md"]
    assert links == [*pages, "../tutorials/tour.md", repository, "rows.md"]
