"""Write a wheel of the installed package, for machines that have neither it nor a checkout.

python -m bert_jax.tools.launch.wheel PATH
"""

import importlib.metadata
import pathlib
import sys
import zipfile

from bert_jax.errors import UserError
from bert_jax.storage import files

# What an installer adds to a package, or creates anew.
_OF_INSTALLATION = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")


def write(path: pathlib.Path) -> None:
    """Write the wheel: the files that the installed package lists, and a new list of them."""
    listed = importlib.metadata.distribution("bert-jax").files or ()
    kept = [
        file
        for file in listed
        if file.parts[0] != ".." and file.name not in _OF_INSTALLATION and file.suffix != ".pyc"
    ]
    record = next((file.as_posix() for file in listed if file.name == "RECORD"), "")
    if not record or not any(file.parts[0] == "bert_jax" for file in kept):
        raise UserError("the installed bert-jax does not list its files: reinstall it with pip")
    lines = [f"{record},,\n"]
    with (
        files.atomic_write(path) as beside,
        zipfile.ZipFile(beside, "w", zipfile.ZIP_DEFLATED) as wheel,
    ):
        for file in kept:
            wheel.writestr(file.as_posix(), file.read_binary())
            digest = f"{file.hash.mode}={file.hash.value}" if file.hash else ""
            lines.append(f"{file.as_posix()},{digest},{file.size or ''}\n")
        wheel.writestr(record, "".join(lines))


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]))
