"""Files that are never half-written, and a folder that only one process writes to."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import pathlib
import shutil
import socket
import tempfile
from collections.abc import Iterator
from importlib.resources.abc import Traversable
from typing import Any

from bert_jax.errors import UserError

LOCK = "lock"
_PIECE_BYTES = 16 << 20

_ADVICE = {
    errno.ENOSPC: "the disk is full; free some space and run the same command again",
    errno.EDQUOT: "the disk quota is used up; free some space and run the same command again",
    errno.EROFS: "the file system is read-only; choose another folder",
    errno.EACCES: "permission denied; choose a folder you may write to",
    errno.EPERM: "operation not permitted; choose a folder you may write to",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
    errno.EISDIR: "it is a folder, not a file",
    errno.ENOENT: "it does not exist",
}


def describe(error: OSError) -> str:
    """What went wrong with a file and what to do about it, in one line."""
    return _ADVICE.get(error.errno, error.strerror or str(error))


@contextlib.contextmanager
def one_line_errors(action: str) -> Iterator[None]:
    """Turns an `OSError` inside the block into a `UserError` that begins with `action`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{action}: {describe(error)}") from error


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[pathlib.Path]:
    """Yields a path beside `path` to write to; on success it is fsynced and takes `path`'s place.

    A reader sees the old file or the whole new one, whenever the power fails. On an error inside
    the block the file beside it is removed and `path` is as it was.
    """
    path = pathlib.Path(path)
    handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
    os.close(handle)
    beside = pathlib.Path(beside)
    try:
        yield beside
        with open(beside, "rb") as file:
            os.fsync(file.fileno())
        beside.chmod(0o644)
        os.replace(beside, path)
        sync_folder(path.parent)
    finally:
        beside.unlink(missing_ok=True)


def check_new(path: str | os.PathLike) -> pathlib.Path:
    """The absolute path of a folder that is not there yet, or empty.

    Raises:
        UserError: something is at `path` already, or nothing can be.
    """
    path = pathlib.Path(os.path.abspath(path))
    with one_line_errors(f"cannot write {path}"):
        if not path.name or (path.exists() and not (path.is_dir() and not any(path.iterdir()))):
            raise UserError(f"{path} exists: choose another folder or remove it first")
    return path


@contextlib.contextmanager
def new_folder(path: str | os.PathLike) -> Iterator[pathlib.Path]:
    """Yields a hidden folder beside `path` to fill; on success it is renamed to `path`.

    On an error inside the block it is removed, and what a kill leaves is removed the next time.

    Raises:
        UserError: something is at `path` already, or it cannot be written there.
    """
    path = check_new(path)
    beside = path.with_name(f".{path.name}.partial")
    with one_line_errors(f"cannot write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
    with only_process(beside):
        try:
            with one_line_errors(f"cannot write {path}"):
                for old in beside.iterdir():
                    if old.name != LOCK:
                        shutil.rmtree(old) if old.is_dir() else old.unlink()
                yield beside
                (beside / LOCK).unlink()
                sync_below(beside)
                os.replace(beside, path)
                sync_folder(path.parent)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise


def write(path: str | os.PathLike, content: str | bytes) -> None:
    """Replaces the content of `path` as a whole."""
    with replacing(path) as beside:
        beside.write_bytes(content.encode() if isinstance(content, str) else content)


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Replaces `path` by `value` as indented JSON."""
    write(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def sync_folder(folder: str | os.PathLike) -> None:
    """Makes a rename or a new name inside `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_below(folder: pathlib.Path) -> None:
    """Makes a folder and all that is in it durable."""
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir():
            sync_folder(path)
        else:
            with open(path, "rb") as written:
                os.fsync(written.fileno())


def sha256(path: str | os.PathLike | Traversable) -> str:
    """The hexadecimal SHA-256 of a file's bytes."""
    with (pathlib.Path(path) if isinstance(path, str) else path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def crc32c(path: str | os.PathLike) -> str:
    """The hexadecimal CRC-32C of a file's bytes, which processors compute as fast as they read."""
    import google_crc32c

    crc = 0
    with open(path, "rb") as file:
        while piece := file.read(_PIECE_BYTES):
            crc = google_crc32c.extend(crc, piece)
    return f"{crc:08x}"


@contextlib.contextmanager
def only_process(folder: str | os.PathLike) -> Iterator[int]:
    """Holds the file `LOCK` in a folder for as long as the block runs, creating the folder if need be.

    The kernel releases the lock when its owner dies, however it dies, so a crash leaves nothing
    to clean up. A child that is given the yielded file descriptor owns it too.

    Raises:
        UserError: another live process holds it; the line names that process.
    """
    folder = pathlib.Path(folder)
    with one_line_errors(f"cannot use the folder {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / LOCK, "a+")  # noqa: SIM115 (closed by the `with` below)
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            owner = file.read().strip() or "unknown"
            raise UserError(
                f"{folder} is in use by another process ({owner}); "
                "wait for it, stop it, or choose another folder"
            ) from None
        file.truncate(0)
        file.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield file.fileno()
