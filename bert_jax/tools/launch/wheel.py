"""Write a wheel of the installed package, for machines that have neither it nor a checkout.

python -m bert_jax.tools.launch.wheel PATH
"""

import base64
import csv
import hashlib
import importlib.metadata
import io
import pathlib
import sys
import zipfile

from bert_jax.errors import UserError
from bert_jax.storage import files

# What an installer adds to a package, or creates anew.
_OF_INSTALLATION = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")


def write(path: pathlib.Path) -> None:
    """Write the wheel: the files that the installed package lists, and a new list of them."""
    package = importlib.metadata.distribution("bert-jax")
    kept = [
        file
        for file in package.files or ()
        if file.parts[0] != ".." and file.name not in _OF_INSTALLATION and file.suffix != ".pyc"
    ]
    info = next((file.parts[0] for file in kept if file.parts[0].endswith(".dist-info")), "")
    if not info or not any(file.parts[0] == "bert_jax" for file in kept):
        raise UserError("the installed bert-jax does not list its files: reinstall it with pip")
    record = io.StringIO()
    lines = csv.writer(record, lineterminator="\n")
    with (
        files.atomic_write(path) as beside,
        zipfile.ZipFile(beside, "w", zipfile.ZIP_DEFLATED) as wheel,
    ):
        for file in kept:
            content = file.read_binary()
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            lines.writerow([file.as_posix(), f"sha256={digest}", len(content)])
            wheel.writestr(file.as_posix(), content)
        lines.writerow([f"{info}/RECORD", "", ""])
        wheel.writestr(f"{info}/RECORD", record.getvalue())


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]))
