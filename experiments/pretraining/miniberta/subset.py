"""The texts of files.tsv: ten million words, fixed by checksums of their files.

    python experiments/pretraining/miniberta/subset.py DATA                 check that DATA/text has them
    python experiments/pretraining/miniberta/subset.py DATA --select 10000000     select other ones

`--select` writes files.tsv: it takes the files below DATA/text in the order of their checksums until
they have this many words. Another collection of text makes another experiment.
"""

import argparse
import pathlib
import re
from collections.abc import Iterable

from bert_jax.data.compressed import decompressed
from bert_jax.errors import UserError
from bert_jax.storage import files

LIST = pathlib.Path(__file__).with_name("files.tsv")


def read() -> list[tuple[str, int, int, str]]:
    """Return SHA-256, words, bytes, and path below DATA/text of each file."""
    lines = [line.split("\t") for line in LIST.read_text().splitlines()]
    return [(sha256, int(words), int(size), path) for sha256, words, size, path in lines]


def sources(data: pathlib.Path) -> list[str]:
    """Return the sources of text for `bert-jax vocab` and `bert-jax prepare`."""
    paths = [path for *_, path in read()]
    return [f"{'books:' if 'books/' in path else ''}{data}/text/{path}" for path in paths]


def check(data: pathlib.Path) -> None:
    """Check the files of the subset.

    Raises:
        UserError: one is missing or another one.
    """
    for sha256, _, _, name in read():
        path = data / "text" / name
        if not path.is_file() or files.sha256(str(path)) != sha256:
            raise UserError(
                f"{path} is not the file of {LIST.name}: put it there, or select other texts with "
                f"python {LIST.with_name('subset.py')} {data} --select 10000000"
            )


def count(paths: Iterable[pathlib.Path]) -> tuple[int, int]:
    """Return the numbers of words and bytes of files, without WikiExtractor's tags."""
    words = size = 0
    for path in paths:
        with decompressed(path) as stream:
            text = re.sub(rb"<[^>]*>", b"", stream.read())
        words, size = words + len(text.split()), size + len(text)
    return words, size


def select(data: pathlib.Path, words: int) -> None:
    """Write files.tsv for the first files by checksum that have up to `words` words together."""
    lines, total = [], 0
    for path in (data / "text").rglob("*"):
        if path.is_file():
            name = path.relative_to(data / "text").as_posix()
            lines.append((files.sha256(str(path)), *count([path]), name))
    chosen = []
    for line in sorted(lines):
        if total + line[1] <= words:
            chosen.append(line)
            total += line[1]
    files.write(LIST, "".join("\t".join(map(str, line)) + "\n" for line in chosen))
    print(f"{len(chosen)} of {len(lines)} files, {total:,} words")


def main() -> None:
    """Check the subset, or select one."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", type=pathlib.Path)
    parser.add_argument("--select", type=int, metavar="WORDS")
    options = parser.parse_args()
    try:
        select(options.data, options.select) if options.select else check(options.data)
    except UserError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
