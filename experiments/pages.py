"""Write every page that is generated from results: `python experiments/pages.py`.

`bert-jax report experiments/FOLDER` writes the page of one folder: get_blocks() in its sweep.py defines the
blocks of its README.md. The functions below are shared by the pages that are not about sweeps.
"""

import json
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from bert_jax.storage import files
from bert_jax.tools import sweep
from bert_jax.tools.sweep import experiment

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
Line = dict[str, Any]


class Lines(NamedTuple):
    """A block from a function of the results that returns its lines, and writes its pictures to the folder."""

    make: Callable[[Sequence[Line], pathlib.Path], Sequence[str]]

    def markdown(self, results: Sequence[Line], folder: pathlib.Path) -> str:
        """Return the block."""
        return "\n".join(self.make(results, folder))


def read(path: pathlib.Path) -> list[Line]:
    """Return the lines of a JSON Lines file, none if it is missing."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(head: Sequence[Any], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Return the lines of a Markdown table, or "not run" without rows."""
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (head, *rows)]
    return [lines[0], f"|{'---|' * len(head)}", *lines[1:]] if len(lines) > 1 else ["not run"]


def with_block(text: str, name: str, lines: Sequence[str]) -> str:
    """Replace the lines between `<!-- NAME -->` and `<!-- /NAME -->` of a page."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    before, _, rest = text.partition(begin)
    _, marker, after = rest.partition(end)
    if not marker:
        raise ValueError(f"the page has no block {name}")
    return "\n".join([before + begin.rstrip(), *lines, end + after])


def module(name: str) -> Any:
    """Return the module that defines the page of a folder."""
    return sweep.module_of(HERE / name / "sweep.py")


def pages() -> dict[pathlib.Path, str]:
    """Return the texts of all generated pages."""
    folders = sorted(path.parent for path in HERE.rglob("sweep.py"))
    texts = {folder / "README.md": experiment.readme(folder) for folder in folders}
    front, speed = ROOT / "README.md", ROOT / "docs" / "explanation" / "speed.md"
    texts[front] = with_block(front.read_text(), "results", module("results").front())
    texts[speed] = with_block(speed.read_text(), "speed", module("speed").summary())
    return texts


def main() -> None:
    """Write the pages."""
    for path, text in pages().items():
        files.write(path, text)


if __name__ == "__main__":
    main()
