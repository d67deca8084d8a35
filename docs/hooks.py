"""Hooks of MkDocs: the configuration reference, and links to files outside docs/."""

import posixpath
import re

from mkdocs.structure.files import File

from bert_jax.config import listing

REPOSITORY = "https://github.com/bert-jax/bert_jax/blob/main"
# Files of the repository whose content is a page of the site, to which links lead there.
PAGES = {"bert_jax/config/schema.py": "reference/configuration.md"}


def on_files(files, config):
    """Add the page of all settings."""
    files.append(File.generated(config, "reference/configuration.md", content=configuration()))
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
