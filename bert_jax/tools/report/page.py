"""Write self-contained HTML pages: style, script, data and pictures inline, no network requests."""

import base64
import gzip
import html
import json
import pathlib
from typing import Any

from bert_jax.storage import files

_HERE = pathlib.Path(__file__).parent


def page(title: str, body: str, script: str = "", data: Any = None) -> str:
    """Return an HTML document with a title, which is text, and a body, which is HTML.

    `script` is the name of a script in this folder, or "". It runs after the body has loaded, and
    reads `data`, any JSON value, with `JSON.parse` of the text of `#data`.
    """
    # Content security policy: the browser blocks everything that is not in the file.
    policy, scripts = "default-src 'none'; style-src 'unsafe-inline'; img-src data:", ""
    if script:
        policy += "; script-src 'unsafe-inline'"
        # "</script>" in a string would end the element.
        payload = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
        scripts = f"""<script type="application/json" id="data">{payload}</script>
<script>
{(_HERE / script).read_text()}</script>
"""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{html.escape(title)}</title>
<link rel="icon" href="data:,">
<style>
{(_HERE / "page.css").read_text()}</style>
</head>
<body>
<main>
<h1>{html.escape(title)}</h1>
{body}
</main>
{scripts}</body>
</html>
"""


def write(path: pathlib.Path, content: str | bytes) -> pathlib.Path:
    """Write a page or picture atomically, with its folder, and return its path."""
    with files.one_line_errors(f"cannot write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, content)
    return path


def table(columns: list[str], rows: list[list[Any]], numbers: bool = True) -> str:
    """Return an HTML table of texts, which are escaped, and numbers.

    The first cell of a row is its title; `numbers` aligns the others to the right.
    """

    def cell(value: Any) -> str:
        form = "," if isinstance(value, int) else ".5g" if isinstance(value, float) else ""
        return html.escape(format(value, form))

    head = "".join(f'<th scope="col">{cell(title)}</th>' for title in columns)
    lines = [
        f'<tr><th scope="row">{cell(first)}</th>{"".join(f"<td>{cell(x)}</td>" for x in rest)}</tr>'
        for first, *rest in rows
    ]
    kind = ' class="numbers"' if numbers else ""
    # Wide tables scroll; tabindex makes that work with the keyboard.
    return (
        f'<div class="wide" tabindex="0"><table{kind}><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def packed(data: bytes) -> str:
    """Compress bytes to text for `data`, which scripts read with DecompressionStream("gzip")."""
    return base64.b64encode(gzip.compress(data, mtime=0)).decode()
