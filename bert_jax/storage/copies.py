"""Local copies of files on object storage, for reading and writing."""

import atexit
import contextlib
import functools
import hashlib
import inspect
import io
import itertools
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bert_jax import errors
from bert_jax.errors import UserError
from bert_jax.storage import files, objects
from bert_jax.storage.lease import Lease, is_running, this_process

# Files of a run that local copies leave out; Orbax reads checkpoints and states from the storage.
NOT_COPIED = re.compile(r"(seed_\d+/)?(checkpoints|damaged|lease|profile)/")
_BLOCK_BYTES = 16 << 20
# Local paths that stand for remote ones.
_urls: dict[pathlib.Path, str] = {}


def cache_folder() -> pathlib.Path:
    """Return the folder of local copies: `$BERT_JAX_STORAGE_CACHE`, or `~/.cache/bert_jax_storage`."""
    folder = os.environ.get("BERT_JAX_STORAGE_CACHE")
    return pathlib.Path(folder or pathlib.Path.home() / ".cache" / "bert_jax_storage").absolute()


def make_room(folder: pathlib.Path, needed: int) -> bool:
    """Delete old copies until `needed` bytes fit; return whether they do.

    The cache holds `$BERT_JAX_STORAGE_CACHE_GB`, or half of what the disk has free without it. The files
    of `folder` stay, as do those of folders that are locked.
    """
    sizes = {path: _folder_bytes(path) for path in folder.parent.iterdir()}
    limit = os.environ.get("BERT_JAX_STORAGE_CACHE_GB")
    free = shutil.disk_usage(folder).free
    bound = float(limit) * 1e9 if limit else (free + sum(sizes.values())) / 2
    oldest = sorted((p for p in sizes if p != folder), key=lambda path: path.stat().st_mtime)

    def fits() -> bool:
        return sum(sizes.values()) + needed <= bound and needed < shutil.disk_usage(folder).free

    while not fits() and oldest:
        evicted = oldest.pop(0)
        with contextlib.suppress(UserError), files.lock_folder(evicted):
            shutil.rmtree(evicted, ignore_errors=True)
            del sizes[evicted]
    return fits()


def _folder_bytes(folder: pathlib.Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # another thread has just renamed it
            total += path.stat().st_size if path.is_file() else 0
    return total


@functools.cache
def process_folder() -> pathlib.Path:
    """Return a folder of copies for this process, and delete those of processes that were killed.

    Folders from other hosts and pid namespaces, such as containers that share the disk, remain.
    """
    here = this_process()
    namespace = re.sub(r"\D", "", here["namespace"])  # of pid:[4026531836]
    prefix = f"process_{here['host']}_{namespace}_"
    for path in cache_folder().glob(f"{prefix}*") if namespace else ():
        if not is_running(path.name.removeprefix(prefix)):
            shutil.rmtree(path, ignore_errors=True)
    folder = cache_folder() / f"{prefix}{here['pid']}"
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def copy_of(url: str, kind: str) -> pathlib.Path:
    """Return the path of the local copy of a URL; errors about it then name the URL."""
    digest = hashlib.sha256(url.encode()).hexdigest()[:16]
    path = cache_folder() / kind / digest / url.rstrip("/").rpartition("/")[2]
    _urls[path] = url.rstrip("/")
    # The folder, because `output` also uploads other files in it.
    errors.RENAMED[str(path.parent)] = url.rstrip("/").rpartition("/")[0]
    return path


def remote(path: str | os.PathLike) -> str | None:
    """Return the URL that a local copy or a path within it stands for; None for any other path."""
    if objects.is_remote(path):
        return str(path).rstrip("/")
    path = pathlib.Path(path).absolute()
    for parent in (path, *path.parents):
        if parent in _urls:
            return "/".join([_urls[parent], *path.relative_to(parent).parts])
    return None


@functools.cache
def _fetched(url: str, only: tuple[str, ...]) -> pathlib.Path:
    copy = copy_of(url, f"{process_folder().name}/{len(only)}")
    if not only and objects.is_file(url):
        objects.download([url], [copy])
        return copy
    if only:
        names = [name for name in only if objects.is_file(f"{url}/{name}")]
    else:
        names = list(objects.listing(url))
        if any(re.match(r"(seed_\d+/)?checkpoints/", name) for name in names):  # a run, or seeds
            names = [name for name in names if not NOT_COPIED.match(name)]
    if not names:
        raise UserError(f"{url} does not exist or is empty; check the bucket and the path")
    objects.download([f"{url}/{name}" for name in names], [copy / name for name in names])
    return copy


def local(path: str | os.PathLike, only: Sequence[str] = ()) -> Any:
    """Return a local copy of a file or folder on object storage; any other path unchanged.

    The copy is made once per process, of a whole folder or of the files in it that `only` names. That
    of a run has no checkpoints, which are read from the storage.
    """
    if not objects.is_remote(path):
        return path
    return _fetched(str(path).rstrip("/"), tuple(only))


def find(pattern: str) -> list[pathlib.Path]:
    """Return the objects that a URL stands for: an object, or all in a folder or matching a glob.

    They are returned in the order of their URLs as placeholder paths, accepted by `stat` and `open_file`.
    """
    with objects.errors_of(f"cannot list {pattern}"):
        names = objects.glob(pattern) if re.search(r"[*?\[]", pattern) else [pattern.rstrip("/")]
        found = itertools.chain.from_iterable(objects.find(name) for name in names)
        urls = sorted({url for url in found if not _is_hidden(url, pattern)})
    return [copy_of(url, "sources") for url in urls]


def _is_hidden(name: str, pattern: str) -> bool:
    """Whether a name is of a folder, or hidden below the folder that is named."""
    below = name.removeprefix(pattern).split("/") if name.startswith(pattern) else []
    return name.endswith("/") or any(part.startswith(".") for part in below)


@functools.cache
def _info(url: str) -> tuple[int, str]:
    with objects.errors_of(f"cannot read {url}"):
        entry = objects.info(url)
    return entry["size"], objects.stat_of(entry).checksum


def stat(path: pathlib.Path) -> tuple[int, Any]:
    """Return the size of a local file or of one of `find`, and a value that changes with its content."""
    if path.exists() or not (url := remote(path)):
        local_stat = path.stat()
        return local_stat.st_size, local_stat.st_mtime_ns
    return _info(url)


def open_file(path: pathlib.Path) -> io.RawIOBase | None:
    """Open one of `find` for reading; return None for other paths."""
    if path.exists() or not (url := remote(path)):
        return None
    return _Stream(url)


class _Stream(io.RawIOBase):
    """A seekable stream of an object, which is read in blocks."""

    mode = "rb"

    def __init__(self, url: str):
        self._url, self._size = url, _info(url)[0]
        self._position = self._start = 0
        self._block = b""

    def readable(self) -> bool:
        return True

    seekable = readable

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = max((0, self._position, self._size)[whence] + offset, 0)
        return self._position

    def readinto(self, buffer: Any) -> int:
        end = min(self._position + _BLOCK_BYTES, self._size)
        if self._position >= end:
            return 0
        if not self._start <= self._position < self._start + len(self._block):
            self._start = self._position
            (self._block,) = objects.read_ranges([(self._url, self._start, end)])
        begin = self._position - self._start
        data = self._block[begin : begin + len(buffer)]
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


@contextlib.contextmanager
def output(path: str | os.PathLike, new: bool = False, resumable: bool = False) -> Iterator[Any]:
    """Yield a local path to write a file or folder to; on success it is uploaded to `path`.

    The files that describe a folder are uploaded last, after objects of an earlier version are
    deleted. A path that is not on object storage is yielded unchanged. With `new`, a path at which
    anything exists is refused. With `resumable`, what was written before an error is kept.
    """
    if not objects.is_remote(path):
        yield path
        return
    url = str(path).rstrip("/")
    names = objects.listing(url) if new else {}
    if new and _INCOMPLETE not in names and (names or objects.is_file(url)):
        raise UserError(f"{url} exists: choose another folder or remove it first")
    copy = copy_of(url, "outputs")
    with files.lock_folder(copy.parent):
        if not resumable:
            if copy.is_dir():
                shutil.rmtree(copy)
            else:
                copy.unlink(missing_ok=True)
        description, finished = copy / "manifest.json", b""
        # The description that a call that failed has read from the storage, which may be gone.
        downloaded = copy.parent / ".downloaded"
        if downloaded.exists() and _content(description) == downloaded.read_bytes():
            description.unlink()
        if resumable and objects.is_file(f"{url}/{description.name}"):
            finished = objects.read(f"{url}/{description.name}")
            copy.mkdir(exist_ok=True)
            downloaded.write_bytes(finished)
            description.write_bytes(finished)
        yield copy
        if copy.is_dir() and not (finished and _content(description) == finished):
            with Lease(url) as lease:
                _upload_folder(copy, url, lease)
        elif copy.is_file():
            # Files beside it first, such as NAME.lengths.npy of NAME.npy.
            beside = sorted(p for p in copy.parent.glob(f"{copy.stem}.*") if p != copy)
            names = [f"{url.rpartition('/')[0]}/{path.name}" for path in beside]
            objects.upload([*beside, copy], [*names, url])
        shutil.rmtree(copy.parent, ignore_errors=True)


def _content(path: pathlib.Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


# Shards, the manifest, and the files of any vocabulary.
_OF_ROWS = re.compile(
    r"[\w-]+-of-\d+\.arrayrecord|manifest\.json|vocab\.(txt|json)|merges\.txt|"
    r"(tokenizer|tokenizer_config|special_tokens_map|added_tokens)\.json|"
    r"(sentencepiece\.bpe|spiece|tokenizer)\.model"
)


# Marker of a folder whose upload is not finished.
_INCOMPLETE = ".incomplete"


def _upload_folder(folder: pathlib.Path, url: str, lease: Lease) -> None:
    paths = {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if not path.is_dir() and not any(p.startswith(".") for p in path.relative_to(folder).parts)
    }
    last = [n for d in objects.DESCRIPTIONS for n in paths if n.rpartition("/")[2] == d]
    first = [name for name in paths if name not in last and name != files.LOCK]
    if "manifest.json" in last:  # rows, which another version of them may be mixed with
        old = [name for name in objects.listing(url) if _OF_ROWS.fullmatch(name)]
        objects.delete([f"{url}/{name}" for name in last if name in old])
        objects.delete([f"{url}/{name}" for name in old if name not in paths])
    objects.write(f"{url}/{_INCOMPLETE}", b"")
    objects.upload([paths[name] for name in first], [f"{url}/{name}" for name in first])
    lease.check()
    for name in reversed(last):
        objects.upload([paths[name]], [f"{url}/{name}"])
    objects.delete([f"{url}/{_INCOMPLETE}"])


def replaces(
    names: Sequence[str], replace: Callable[[Any], contextlib.AbstractContextManager[Any]]
) -> Callable[[Callable], Callable]:
    """Decorate a function: its arguments of these names become what `replace` yields for them."""

    def decorate(function: Callable) -> Callable:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            with contextlib.ExitStack() as stack:
                for name in names:
                    if name in bound.arguments:
                        bound.arguments[name] = stack.enter_context(replace(bound.arguments[name]))
                return function(*bound.args, **bound.kwargs)

        return call

    return decorate


def with_local_inputs(*names: str) -> Callable[[Callable], Callable]:
    """Decorate a function whose arguments of these names may be on object storage (`local`)."""

    def copies_of(value: Any) -> Any:
        if isinstance(value, list):
            return [copies_of(part) for part in value]
        return str(local(value)) if objects.is_remote(value) else value

    return replaces(names, lambda value: contextlib.nullcontext(copies_of(value)))


def with_uploaded_output(name: str, **options: bool) -> Callable[[Callable], Callable]:
    """Decorate a function that writes to its argument of this name (see `output`)."""

    @contextlib.contextmanager
    def outputs(value: Any) -> Iterator[Any]:
        with output(value, **options) as path:
            yield str(path) if objects.is_remote(value) else value

    return replaces([name], outputs)
