"""Print the size of the package by folder, and of the tests and experiments.

    python tests/count.py

Lines are those of .py, .js and .css files that git tracks; nodes are those of Python's syntax tree,
which formatting and comments do not change.
"""

import ast
import collections
import itertools
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).parents[1]
CODE = (".py", ".js", ".css")


def tracked(folder: str) -> list[pathlib.Path]:
    """Return the tracked files of code below a folder of the repository, without links."""
    command = ["git", "ls-files", "-z", folder]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in names.split("\0") if name.endswith(CODE)]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def lines(paths: list[pathlib.Path]) -> int:
    """Return the number of lines of files."""
    return sum(path.read_text().count("\n") for path in paths)


def nodes(paths: list[pathlib.Path]) -> int:
    """Return the number of nodes in the syntax trees of Python files."""
    sources = (path.read_text() for path in paths if path.suffix == ".py")
    return sum(1 for source in sources for _ in ast.walk(ast.parse(source)))


def main() -> None:
    """Print the tables."""
    folders = collections.defaultdict(list)
    for path in tracked("bert_jax"):
        parts = path.relative_to(ROOT / "bert_jax").parts
        folders[f"{parts[0]}/" if len(parts) > 1 else ""].append(path)
    print(f"{'bert_jax/':24}{'files':>8}{'lines':>8}{'nodes':>9}")
    for name, paths in sorted(folders.items()):
        print(f"  {name or '(root)':22}{len(paths):8,}{lines(paths):8,}{nodes(paths):9,}")
    everything = list(itertools.chain(*folders.values()))
    print(f"  {'total':22}{len(everything):8,}{lines(everything):8,}{nodes(everything):9,}")
    for name in ("tests", "experiments", "configs", "launch"):
        paths = tracked(name)
        print(f"{name + '/':24}{len(paths):8,}{lines(paths):8,}{nodes(paths):9,}")


if __name__ == "__main__":
    main()
