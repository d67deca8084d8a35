"""Hooks of MkDocs: the configuration reference, and links to files outside docs/."""

import ast
import pathlib
import re

from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).parent.parent
REPOSITORY = "https://github.com/bert-jax/bert_jax/blob/main"


def on_files(files, config):
    """Add the page of all settings."""
    files.append(File.generated(config, "configuration.md", content=configuration()))
    return files


def on_page_markdown(markdown, page, **_):
    """Point links to the schema to the page of all settings, and others that leave docs/ to the repository."""
    markdown = markdown.replace("](../bert_jax/config/schema.py)", "](configuration.md)")
    depth = page.file.src_uri.count("/") + 1
    return re.sub(rf"\]\((?:\.\./){{{depth}}}(?!\.\.)([^)]+)\)", rf"]({REPOSITORY}/\1)", markdown)


def _default(value: ast.expr) -> str:
    """Return the source of a field's default; "" if a function makes it."""
    if not isinstance(value, ast.Call):
        return ast.unparse(value)
    if ast.unparse(value.func) == "dataclasses.field":
        return ""
    if isinstance(value.args[0], ast.Starred):  # the first choice is none
        return "''"
    return ast.unparse(value.args[0])


def configuration() -> str:
    """Return a section per dataclass of config/: fields, types, defaults, and their comments."""
    folder = ROOT / "bert_jax" / "config"
    source = "\n".join((folder / name).read_text() for name in ("schema.py", "model.py"))
    lines = source.splitlines()
    parts = [
        "# Configuration",
        "Settings of a run and their defaults, from `bert_jax/config/`. Change them on the command "
        "line: `--config.optim.learning_rate=5e-4`, `'--config.phases[0].batch_size=64'`.",
    ]
    for node in ast.parse(source).body:
        if not (isinstance(node, ast.ClassDef) and node.name.endswith("Config")):
            continue
        parts += [f"## {node.name}", ast.get_docstring(node) or ""]
        for field in node.body:
            if not isinstance(field, ast.AnnAssign) or field.value is None:
                continue
            default = _default(field.value)
            comment = []
            for line in reversed(lines[: field.lineno - 1]):
                if not line.strip().startswith("#"):
                    break
                comment.insert(0, line.strip().removeprefix("#").strip())
            head = f"**`{ast.unparse(field.target)}`** : `{ast.unparse(field.annotation)}`"
            head += f" = `{default}`" if default else ""
            parts.append(head + ("<br>\n" + " ".join(comment) if comment else ""))
    return "\n\n".join(parts) + "\n"
