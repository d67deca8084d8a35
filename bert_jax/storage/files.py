"""Atomic writes of files and folders, durability, checksums and locks."""

import contextlib
import errno
import fcntl
import glob
import hashlib
import itertools
import json
import os
import pathlib
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from importlib.resources.abc import Traversable
from typing import IO, Any

import google_crc32c

from bert_jax.errors import InUse, UserError

LOCK = "lock"
# Errors of the machine or of a given path, wherever they occur.
USER_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENAMETOOLONG)
_CHUNK_BYTES = 16 << 20

_ADVICE = {
    errno.ENOSPC: "the disk is full; free some space and run the same command again",
    errno.EDQUOT: "the disk quota is used up; free some space and run the same command again",
    errno.EROFS: "the file system is read-only; choose another folder",
    errno.EACCES: "permission denied; choose a folder you may write to",
    errno.EPERM: "operation not permitted; choose a folder you may write to",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
    errno.EISDIR: "it is a folder, not a file",
    errno.ENOENT: "it does not exist",
    errno.EEXIST: "a file of that name is in the way; remove it, or choose another folder",
    errno.ENAMETOOLONG: "the name is too long; choose a shorter one",
}


def format_error(error: OSError) -> str:
    """Return one line that says what is wrong with a file and what to do about it."""
    return _ADVICE.get(error.errno or 0, error.strerror or str(error))


@contextlib.contextmanager
def one_line_errors(action: str) -> Iterator[None]:
    """Turn an `OSError` in the block into a `UserError` that begins with `action`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{action}: {format_error(error)}") from error


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike) -> Iterator[pathlib.Path]:
    """Yield a temporary path to write to; on success it is fsynced and renamed to `path`.

    Readers see either the old file or the complete new one, even after a power failure. If the
    block raises, the temporary file is removed and `path` is unchanged.
    """
    path = pathlib.Path(path)
    handle, temporary = tempfile.mkstemp(
        dir=path.parent, prefix=f".{path.name}.", suffix=".partial"
    )
    os.close(handle)
    temporary = pathlib.Path(temporary)
    try:
        yield temporary
        sync_folder(temporary)
        temporary.chmod(0o644)
        os.replace(temporary, path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def check_new(path: str | os.PathLike) -> pathlib.Path:
    """Return the path of a new folder, without links, after checking that it is missing or empty."""
    path = pathlib.Path(os.path.realpath(path))
    with one_line_errors(f"cannot write {path}"):
        if not path.name or (path.exists() and not (path.is_dir() and not any(path.iterdir()))):
            raise UserError(f"{path} exists: choose another folder or remove it first")
    return path


@contextlib.contextmanager
def new_folder(path: str | os.PathLike) -> Iterator[pathlib.Path]:
    """Yield a hidden temporary folder to fill; on success it is renamed to `path`.

    If the block raises, the folder is removed. Leftovers of a killed process are removed next time.
    """
    path = check_new(path)
    # Nobody can put a link at a name that is unpredictable.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    leftovers = f".{glob.escape(path.name)}.{'[0-9a-f]' * 8}.partial"
    with one_line_errors(f"cannot write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        for leftover in path.parent.glob(leftovers):
            if leftover.is_dir() and not leftover.is_symlink():
                with lock_folder(leftover):
                    shutil.rmtree(leftover, ignore_errors=True)
    with lock_folder(temporary):
        try:
            with one_line_errors(f"cannot write {path}"):
                yield temporary
                (temporary / LOCK).unlink()
                sync_tree(temporary)
                os.replace(temporary, path)
                sync_folder(path.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def write(path: str | os.PathLike, content: str | bytes) -> None:
    """Write `content` to `path` atomically."""
    with atomic_write(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Write `value` to `path` as indented JSON, atomically."""
    write(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def sync_folder(path: str | os.PathLike) -> None:
    """Sync a folder to disk, which makes new and renamed entries durable; or a file."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: pathlib.Path) -> None:
    """Sync a folder and everything in it to disk."""
    for path in [folder, *folder.rglob("*")]:
        sync_folder(path)


def sha256(path: str | Traversable) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    file: Any
    with (pathlib.Path(path) if isinstance(path, str) else path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def md5(path: str | os.PathLike) -> str:
    """Return the MD5 of a file in hexadecimal, which S3 computes of objects."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


def crc32c(path: str | os.PathLike) -> str:
    """Return the CRC-32C of a file in hexadecimal; processors have instructions for it."""
    crc = google_crc32c.Checksum()
    with open(path, "rb") as file:
        for _ in crc.consume(file, _CHUNK_BYTES):
            pass
    return crc.digest().hex()


def move_aside(path: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Move a file or folder into `folder`, under a new name if its own is taken; return its path."""
    names = itertools.chain([path.name], (f"{path.name}.{i}" for i in itertools.count(2)))
    target = next(new for name in names if not os.path.lexists(new := folder / name))
    with one_line_errors(f"cannot move {path} to {target}"):
        folder.mkdir(exist_ok=True)
        os.replace(path, target)
        sync_folder(folder)
        sync_folder(path.parent)
    return target


def refuse_link(path: pathlib.Path) -> None:
    """Refuse a symbolic link in place of a working file or folder, which is overwritten or emptied."""
    if path.is_symlink():
        raise UserError(f"{path} is a symbolic link: remove it")


def open_lock(path: pathlib.Path) -> IO[str]:
    """Open or create a lock file for reading and appending; a symbolic link is refused."""
    refuse_link(path)
    return open(path, "a+", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666))


@contextlib.contextmanager
def lock_folder(folder: str | os.PathLike) -> Iterator[int]:
    """Hold the lock file `LOCK` of a folder during the block; create the folder if necessary.

    The kernel releases the lock when its owner dies, so a crash leaves nothing to clean up. A child
    process that inherits the yielded file descriptor shares the lock. `InUse` names the process that
    holds it.
    """
    folder = pathlib.Path(folder)
    with one_line_errors(f"cannot use the folder {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        file = open_lock(folder / LOCK)
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # EACCES on some network file systems
            file.seek(0)
            owner = file.read().strip() or "unknown"
            raise InUse(
                f"{folder} is in use by another process ({owner}); "
                "wait for it, stop it, or choose another folder"
            ) from None
        except OSError as error:
            raise UserError(f"cannot lock the folder {folder}: {format_error(error)}") from error
        file.truncate(0)
        file.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield file.fileno()
