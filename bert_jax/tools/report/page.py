"""A page that is one file: its style, its script and its data inside, nothing from a network."""

import base64
import gzip
import html
import json
import pathlib
from typing import Any

from bert_jax import files

_HERE = pathlib.Path(__file__).parent
# A browser refuses whatever is not in the file, were something of it ever to ask.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
)


def page(title: str, body: str, script: str, data: Any) -> str:
    """An HTML document.

    Args:
        title: as text; it is the heading too.
        body: HTML below the heading; what texts it has are escaped already.
        script: a file beside this one. It finds `data` by `JSON.parse` of the text of `#data`, and
            runs after the body is there.
        data: what JSON can hold.
    """
    # "</script>" in a string would end the element; JSON may write any character by its number.
    told = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
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
<script type="application/json" id="data">{told}</script>
<script>
{(_HERE / script).read_text()}</script>
</body>
</html>
"""


def write(path: pathlib.Path, text: str) -> None:
    """Writes a page whole or not at all.

    Raises:
        UserError: it cannot be written.
    """
    with files.one_line_errors(f"cannot write the page {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, text)


def table(columns: list[str], rows: list[list[Any]], numbers: bool = True) -> str:
    """An HTML table; cells are texts or numbers, escaped here.

    Args:
        columns: their titles.
        rows: a cell a column, the first being the row's title.
        numbers: cells after the first stand at the right, as numbers do.
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
    # What is wider than the window scrolls by itself; a key can only scroll what can be focused.
    return (
        f'<div class="wide" tabindex="0"><table{kind}><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def packed(data: bytes) -> str:
    """Bytes, compressed, as a text for `data`; scripts read them by DecompressionStream("gzip")."""
    return base64.b64encode(gzip.compress(data, mtime=0)).decode()
