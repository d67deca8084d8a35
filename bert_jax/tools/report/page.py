"""Write self-contained HTML pages: style, script and data inline, no network requests."""

import base64
import gzip
import html
import json
import pathlib
from typing import Any

from bert_jax import files

_HERE = pathlib.Path(__file__).parent
# Content security policy: the browser blocks everything that is not in the file.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
)


def page(title: str, body: str, script: str, data: Any) -> str:
    """Return an HTML document.

    Args:
        title: title and heading, as text.
        body: HTML below the heading, with texts escaped.
        script: name of a script in this folder. It runs after the body has loaded, and reads `data`
            with `JSON.parse` of the text of `#data`.
        data: any JSON value.
    """
    # "</script>" in a string would end the element.
    payload = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
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
<script type="application/json" id="data">{payload}</script>
<script>
{(_HERE / script).read_text()}</script>
</body>
</html>
"""


def write(path: pathlib.Path, text: str) -> None:
    """Write a page atomically.

    Raises:
        UserError: the page cannot be written.
    """
    with files.one_line_errors(f"cannot write the page {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, text)


def table(columns: list[str], rows: list[list[Any]], numbers: bool = True) -> str:
    """Return an HTML table. Cells are texts or numbers; texts are escaped.

    Args:
        columns: titles of the columns.
        rows: cells of each row, the first of which is the row's title.
        numbers: whether to right-align the cells after the first.
    """

    def cell(value: Any) -> str:
        text = f"{value:,}" if isinstance(value, int) else str(value)
        return html.escape(text)

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
