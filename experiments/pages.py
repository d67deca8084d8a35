"""Write every page that is generated from results: `python experiments/pages.py`.

`bert-jax report experiments/FOLDER` writes the page of one folder: get_blocks() in its sweep.py defines the
blocks of its README.md. The functions below are shared by the pages that are not about sweeps.
"""

import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from bert_jax.storage import files
from bert_jax.tools import sweep
from bert_jax.tools.sweep import experiment
from bert_jax.tools.sweep.experiment import table as table
from bert_jax.tools.sweep.experiment import with_block as with_block

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


def module(name: str) -> Any:
    """Return the module that defines the page of a folder."""
    return sweep.module_of(HERE / name / "sweep.py")


def pages() -> dict[pathlib.Path, str]:
    """Return the texts of all generated pages."""
    folders = sorted(path.parent for path in HERE.rglob("sweep.py"))
    texts = {folder / "README.md": experiment.readme(folder) for folder in folders}
    front, speed = ROOT / "README.md", ROOT / "docs" / "explanation" / "speed.md"
    texts[front] = with_block(front.read_text(), "results", module("results").front(), front)
    texts[speed] = with_block(speed.read_text(), "speed", module("speed").summary(), speed)
    return texts


def main() -> None:
    """Write the pages."""
    for path, text in pages().items():
        files.write(path, text)


if __name__ == "__main__":
    main()
