"""Mirrors: local folders for the small files of runs on object storage."""

import contextlib
import os
import pathlib
import shutil
import threading
from collections.abc import Callable, Iterator

from bert_jax.errors import UserError
from bert_jax.storage import copies, files, objects
from bert_jax.storage.lease import Lease

_PUSH_SECONDS = 15.0
_mirrors: dict[pathlib.Path, "_Mirror"] = {}


class _Mirror:
    """A local folder for the small files of a run on object storage."""

    def __init__(self, url: str, folder: pathlib.Path, lease: Lease | None):
        self.url, self.folder, self.lease = url, folder, lease
        self._pushed: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def pull(self) -> None:
        """Make the local folder equal to the remote one."""
        with self._lock:
            names = [n for n in objects.listing(self.url) if not copies.NOT_COPIED.match(n)]
            if self.folder.exists():
                shutil.rmtree(self.folder)
            self.folder.mkdir(parents=True)
            objects.download([f"{self.url}/{n}" for n in names], [self.folder / n for n in names])
            self._pushed = {name: _version(self.folder / name) for name in names}

    def push(self) -> None:
        """Upload the files that changed; raise a `UserError` if another process has taken over."""
        if self.lease:
            self.lease.check()
        with self._lock:
            versions = {}
            for path in sorted(self.folder.rglob("*")):
                parts = path.relative_to(self.folder).parts
                is_hidden = any(part.startswith(".") or part == files.LOCK for part in parts)
                if not is_hidden and parts[0] != "checkpoints" and path.is_file():
                    versions["/".join(parts)] = _version(path)
            changed = [
                name for name, version in versions.items() if self._pushed.get(name) != version
            ]
            objects.upload([self.folder / n for n in changed], [f"{self.url}/{n}" for n in changed])
            self._pushed |= {name: versions[name] for name in changed}

    def upload_loop(self, stop: threading.Event) -> None:
        """Upload what changed, again and again until `stop` is set."""
        while not stop.wait(_PUSH_SECONDS):
            # The next save tries again, and fails if the error remains. OSError: a file was replaced.
            with contextlib.suppress(UserError, OSError):
                self.push()


def _version(path: pathlib.Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


@contextlib.contextmanager
def mirrored(path: str | os.PathLike, process: int = 0) -> Iterator[pathlib.Path]:
    """Own a run's folder on object storage, and yield its mirror; any other path unchanged.

    `process` is the index of this process among those of the run; only process 0 writes.
    """
    if not objects.is_remote(path):
        yield pathlib.Path(path)
        return
    url = str(path).rstrip("/")
    with contextlib.ExitStack() as stack:
        lease = None if process else stack.enter_context(Lease(url))
        # No other process has this folder, not even one that takes over the lease on this machine.
        mirror = _Mirror(url, copies.copy_of(url, f"{copies.process_folder().name}/run"), lease)
        mirror.pull()
        _mirrors[mirror.folder] = mirror
        stack.callback(_mirrors.pop, mirror.folder)
        stack.callback(shutil.rmtree, mirror.folder.parent, ignore_errors=True)
        if not lease:
            yield mirror.folder
            return
        stop = threading.Event()
        thread = threading.Thread(target=mirror.upload_loop, args=(stop,), daemon=True)
        thread.start()
        stack.callback(thread.join, _PUSH_SECONDS)
        stack.callback(stop.set)
        try:
            yield mirror.folder
        except BaseException:
            with contextlib.suppress(UserError):
                mirror.push()
            raise
        mirror.push()


def mirrors(name: str) -> Callable[[Callable], Callable]:
    """Decorate a function that writes to the run in its argument of this name (see `mirrored`)."""
    return copies.replaces([name], mirrored)


def _mirror_of(path: pathlib.Path) -> _Mirror | None:
    return next((_mirrors[p] for p in (path, *path.parents) if p in _mirrors), None)


def push(path: pathlib.Path) -> str:
    """Upload what changed in the mirror that contains `path`, and return the token of its lease, or ""."""
    if not (mirror := _mirror_of(path.absolute())):
        return ""
    mirror.push()
    return mirror.lease.token if mirror.lease else ""


def pull(path: pathlib.Path) -> None:
    """Download the files of a mirror again, for what another process of the run has written."""
    if mirror := _mirror_of(path.absolute()):
        mirror.pull()
