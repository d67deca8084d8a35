"""Hooks of MkDocs: generated pages, and links to files outside docs/."""

import argparse
import ast
import base64
import contextlib
import json
import os
import pathlib
import posixpath
import re
import textwrap
from collections.abc import Iterator

from mkdocs.structure.files import File

from bert_jax import cli
from bert_jax.config import listing
from bert_jax.data.rows import RowFormat

ROOT = pathlib.Path(__file__).parent.parent
REPOSITORY = "https://github.com/bert-jax/bert_jax/blob/main"
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
# Files of the repository whose content is a page of the site, to which links lead there.
PAGES = {
    "bert_jax/config/schema.py": "reference/configuration.md",
    "bert_jax/cli/__init__.py": "reference/commands.md",
    "bert_jax/runs/workdir.py": "reference/file_formats.md",
    "bert_jax/data/rows.py": "reference/file_formats.md",
    **{f"examples/{path.name}": f"tutorials/{path.stem}.md" for path in NOTEBOOKS},
}


def on_files(files, config):
    """Add the generated pages, and the pictures of the notebooks."""
    generated: dict[str, str | bytes] = {
        "reference/configuration.md": configuration(),
        "reference/commands.md": commands(),
        "reference/file_formats.md": file_formats(),
    }
    for path in NOTEBOOKS:
        generated |= notebook(path)
    for path, content in generated.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown, page, **_):
    """Point links that leave docs/ to the site's page of the file, or to the repository."""
    folder = posixpath.dirname(page.file.src_uri)

    def link(match: re.Match) -> str:
        path = posixpath.normpath(posixpath.join("docs", folder, match[1]))
        if path in PAGES:
            return f"]({posixpath.relpath(PAGES[path], folder or '.')}"
        return match[0] if path.startswith("docs/") else f"]({REPOSITORY}/{path}"

    return re.sub(r"\]\((\.\./[^)#\s]+)", link, markdown)


def configuration() -> str:
    """Return a section per group of settings."""
    parts = [
        "# Configuration",
        "Settings of a run and their defaults, as `bert-jax config --all` lists them. Change them on the "
        "command line: `--config.optim.learning_rate=5e-4`, `'--config.phases[0].batch_size=64'`.",
    ]
    for group in listing.defaults():
        parts += [f"## {group.key}", group.help]
        for key, value, _, text in group.settings:
            parts.append(f"**`config.{key}`** = `{value!r}`" + (f"<br>\n{text}" if text else ""))
    return "\n\n".join(parts) + "\n"


@contextlib.contextmanager
def _columns(number: int) -> Iterator[None]:
    """Let argparse wrap its text at a number of columns."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(number)
    try:
        yield
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before


def _plain(text: str) -> str:
    """Return text in which Markdown sees no emphasis, HTML or links."""
    return re.sub(r"([*_<\[\\])", r"\\\1", text)


def commands() -> str:
    """Return a section per verb of the command line, from its parser: usage, arguments, examples."""
    parser = cli.parser()
    choices = next(x for x in parser._actions if isinstance(x, argparse._SubParsersAction))
    summaries = {action.dest: action.help or "" for action in choices._choices_actions}
    parts = [
        "# Commands",
        f"{parser.description} `bert-jax VERB --help` prints the section of a verb.",
        "\n".join(
            ["| verb | |", "|---|---|"]
            + [f"| [`{verb}`](#{verb}) | {_plain(text)} |" for verb, text in summaries.items()]
        ),
        "Every verb takes `--quiet`. `bert-jax --version` prints versions and devices; "
        "`bert-jax --print-completion bash` (zsh, tcsh, fish, powershell) prints a script that "
        "completes commands in a shell. [Exit statuses](../explanation/reliability.md#exit-statuses) "
        "are the same for all verbs.",
    ]
    with _columns(80):
        for verb, sub in parser.verbs.items():
            formatter = sub._get_formatter()
            usage = sub.format_usage().removeprefix("usage: ")
            parts += [f"## {verb}", _plain(sub.description or ""), f"```text\n{usage}```"]
            for action in sub._actions:
                if action.dest in ("help", "quiet"):
                    continue
                name = formatter._format_action_invocation(action)
                text = _plain(formatter._expand_help(action)) if action.help else ""
                parts.append(f"**`{name}`**<br>\n{text}")
            examples = textwrap.dedent((sub.epilog or "").partition("\n")[2]).strip()
            parts += [f'```text title="Examples"\n{examples}\n```'] if examples else []
    return "\n\n".join(parts) + "\n"


def file_formats() -> str:
    """Return the page of the files of a run and of rows, from the docstrings of their modules."""
    workdir = _docstrings("bert_jax/runs/workdir.py")[""]
    rows = _docstrings("bert_jax/data/rows.py")
    record = RowFormat(tokens=128, sequences=4, vocab_size=30_522).dtype
    fields = [
        f"| `{name}` | {part.base.name} | {part.shape[0] if part.shape else 1} |"
        for name, (part, *_) in record.fields.items()
    ]
    return "\n\n".join(
        [
            "# File formats",
            "## A run",
            "The workdir of `pretrain` and `finetune` holds these files. Commands that take `--init` read "
            "them; a run needs nothing else to resume, to be moved or to be exported.",
            _table("file", re.findall(r"^(\S.*?) {2,}(.+(?:\n .+)*)", workdir, re.MULTILINE)),
            "A checkpoint is a folder in Orbax's format, with a `manifest.json`.",
            _docstrings("bert_jax/runs/manifests.py")[""].partition("\n\n")[2],
            "## Rows",
            "A folder that `prepare` wrote has the vocabulary, `manifest.json`, and shards named "
            "`….arrayrecord`, in the format of [ArrayRecord](https://github.com/google/array_record), whose "
            "records are rows.",
            rows[""].partition("\n\n")[2],
            "A record has a fixed size. With T = 128, S = 4 and a vocabulary of up to 65,536 it has "
            f"{record.itemsize} bytes, all little-endian:",
            "\n".join(["| field | type | number |", "|---|---|---|", *fields]),
            "`a_length` and `length` count the tokens of segment a and of the whole sequence, with their "
            "[CLS] and [SEP], and are 0 for unused slots. `label` is 0 if b follows a, 1 if b is random, and "
            "-1 without pairs. `crc32` is the checksum of the bytes before it.",
            "`manifest.json` has these fields:",
            _table("field", _attributes(rows["Manifest"])),
            "A split has these:",
            _table("field", _attributes(rows["Split"])),
        ]
    )


def _docstrings(path: str) -> dict[str, str]:
    """Return the docstrings of a module ("") and of its classes."""
    tree = ast.parse((ROOT / path).read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    return {name: ast.get_docstring(node) or "" for name, node in {"": tree, **classes}.items()}


def _attributes(docstring: str) -> list[tuple[str, str]]:
    """Return the names and descriptions below "Attributes:"."""
    text = textwrap.dedent(docstring.partition("Attributes:\n")[2])
    return re.findall(r"^(\w[\w, ]*): (.+(?:\n .+)*)", text, re.MULTILINE)


def _table(head: str, rows: list[tuple[str, str]]) -> str:
    """Return a table of names, or lists of them, and descriptions."""
    lines = [f"| {head} | |", "|---|---|"]
    for names, text in rows:
        codes = ", ".join(f"`{name.rstrip(',')}`" for name in names.split(", "))
        lines.append(f"| {codes} | {' '.join(text.split())} |")
    return "\n".join(lines)


def notebook(path: pathlib.Path) -> dict[str, str | bytes]:
    """Return the page of a notebook and its pictures, by path in the site."""
    parts, files = [], {}
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"]).rstrip()
        if cell["cell_type"] == "markdown":
            parts.append(re.sub(r"\]\((\w+)\.ipynb\)", r"](\1.md)", source))
            continue
        parts.append(f"```python\n{source}\n```")
        printed = [output for output in cell["outputs"] if output["output_type"] == "stream"]
        if text := "".join("".join(output["text"]) for output in printed).rstrip():
            parts.append(f'```text title="Output"\n{text}\n```')
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{path.stem}_{len(files) + 1}.png"
                files[f"tutorials/{name}"] = base64.b64decode("".join(data["image/png"]))
                parts.append(f"![Output of the cell above]({name})")
            elif "text/plain" in data:
                text = "".join(data["text/plain"])
                parts.append(f'```text title="Output"\n{text}\n```')
    name = f"examples/{path.name}"
    link = f"This page is the notebook [{name}]({REPOSITORY}/{name}), with the outputs of a recorded run."
    head, _, rest = parts[0].partition("\n")
    parts[0] = f"{head}\n\n{link}\n{rest}"
    return {f"tutorials/{path.stem}.md": "\n\n".join(parts) + "\n"} | files
