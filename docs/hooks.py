"""Hooks of MkDocs: the configuration reference, and links to files outside docs/."""

import re

from mkdocs.structure.files import File

from bert_jax.config import listing

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
