"""Commands, settings, code and links in the documentation."""

import ast
import itertools
import pathlib
import re
import shlex

import pytest

import bert_jax
from bert_jax import cli
from bert_jax.config import flags
from bert_jax.config.fields import flatten
from bert_jax.config.schema import Config, FinetuneConfig
from bert_jax.tools.launch import request

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
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


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
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


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_documented_settings_are_config_fields(path):
    known = set(flatten(Config())) | set(flatten(FinetuneConfig()))
    groups = {key.rpartition(".")[0] for key in known}
    named = re.findall(r"config\.((?:\w+(?:\[0\])?\.)*[a-z_0-9]+)", path.read_text())
    assert not {*named} - known - groups - {"py", "json", "key"}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
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
