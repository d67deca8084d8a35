"""Requests to object storage, with retries and one-line errors."""

import base64
import concurrent.futures
import contextlib
import errno
import functools
import importlib
import logging
import math
import os
import pathlib
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from bert_jax.errors import Unavailable, UserError, missing
from bert_jax.storage import files

# Scheme: (extra of this package, library).
_SCHEMES = {"gs": ("gcs", "gcsfs"), "s3": ("s3", "s3fs")}
# Files that mark their folder as complete; written and moved last.
DESCRIPTIONS = ("manifest.json", "config.json", "vocab.txt")
_THREADS = 16
# Libraries whose exceptions report failures of the storage or the network.
_LIBRARIES = (
    "aiobotocore",
    "aiohttp",
    "botocore",
    "fsspec",
    "gcsfs",
    "google",
    "json",  # an answer was cut off
    "requests",
    "s3fs",
    "urllib3",
)
# How the `ValueError`s begin that gcsfs raises for responses of status 400.
_INVALID_REQUESTS = ("Bad Request: ", "Bucket is requester pays")
# What a failed request means, by HTTP status or TensorStore's status code; others are temporary.
_DENIED = {401, 403, "PERMISSION_DENIED", "UNAUTHENTICATED"}
_REFUSED = {*range(400, 500)} - {401, 403, 408, 429} | {
    "FAILED_PRECONDITION", "INVALID_ARGUMENT", "NOT_FOUND", "OUT_OF_RANGE", "UNIMPLEMENTED"
}  # fmt: skip
_TEMPORARY = {
    "ABORTED", "CANCELLED", "DATA_LOSS", "DEADLINE_EXCEEDED", "INTERNAL", "RESOURCE_EXHAUSTED", "UNAVAILABLE",
    "UNKNOWN"
}  # fmt: skip
# A request of N bytes may take this long, plus N bytes at the rate of a slow connection shared by 16.
_DEADLINE_SECONDS, _SLOW_BYTES_PER_SECOND = 30.0, 10_000
_PARTS_BYTES = 5 << 20  # from which gcsfs and s3fs upload in parts
_QUIET_SECONDS = 10.0  # after which a line says that the storage does not answer


class Stat(NamedTuple):
    """Size of an object in bytes, and the checksum that the storage computed of its content.

    The checksum is `crc32c:…` on Google Cloud Storage, and on S3 `md5:…`, or `etag:…` of an object
    that was uploaded in parts.
    """

    size: int
    checksum: str


def is_remote(path: object) -> bool:
    """Whether a path is on object storage."""
    return str(path).startswith(tuple(f"{scheme}://" for scheme in _SCHEMES))


def path(text: str) -> Any:
    """Return a path, of which `/` makes longer ones; a URL is not opened."""
    from etils import epath

    return epath.Path(text) if is_remote(text) else pathlib.Path(text)


def check(arguments: Iterable[str]) -> None:
    """Check that the URLs among paths (alone, or as `--option=PATH` or `KIND:PATH`) can be used."""
    for argument in arguments:
        url = re.fullmatch(r"(?:-[^=\s]*=|[a-z]+:)?([a-z][a-z0-9+.-]*)://(\S*)", argument)
        if not url:
            continue
        scheme, path = url.groups()
        if scheme not in _SCHEMES:
            raise UserError(
                f"{scheme}://{path}: paths are local, gs://… or s3://…; "
                "mount other storage as a folder"
            )
        if not path.partition("/")[0]:
            raise UserError(f"{scheme}://{path}: a bucket is missing; write {scheme}://BUCKET/PATH")
        filesystem(scheme)


@functools.cache
def filesystem(scheme: str) -> Any:
    """Return fsspec's file system, which Orbax uses too."""
    extra, library = _SCHEMES[scheme]
    # By default, gcsfs queries the type of every bucket, which needs more permissions, and caches
    # listings, which then miss what other processes and TensorStore write.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    try:
        import fsspec
        import fsspec.config

        importlib.import_module(library)
        for protocol in ("gs", "gcs", "s3"):
            fsspec.config.conf.setdefault(protocol, {})["use_listings_cache"] = False
        if scheme == "gs":  # s3fs has timeouts
            import aiohttp

            timeout = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=10)
            fsspec.config.conf["gcs"].setdefault("requests_timeout", timeout)
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # its exceptions are reported
        if scheme == "s3":
            _retry_s3()
        return fsspec.filesystem("gcs" if scheme == "gs" else scheme)
    except ImportError as error:
        raise missing(f"{scheme}:// needs {library} ({error})", extra) from None


def _retry_s3() -> None:
    """Make s3fs retry temporary errors of a server, as gcsfs does by default."""
    import botocore.exceptions
    import s3fs.core

    def is_temporary(error: Any) -> bool:
        if isinstance(error, botocore.exceptions.ClientError):
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return status in (408, 429, 500, 502, 503, 504)
        return isinstance(error, botocore.exceptions.HTTPClientError)

    s3fs.core.set_custom_error_handler(is_temporary)
    s3fs.core.S3FileSystem.retries = 10  # in half a minute, as gcsfs


@contextlib.contextmanager
def errors_of(action: str) -> Iterator[None]:
    """Turn an error of a request in the block into a `UserError` that begins with `action`."""
    try:
        yield
    except (UserError, KeyboardInterrupt):
        raise
    except FileNotFoundError:
        raise UserError(f"{action}: it does not exist; check the bucket and the path") from None
    except FileExistsError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in files.USER_ERRORS:  # of the local disk
            raise UserError(f"{action}: {files.format_error(error)}") from None
        text = " ".join(str(error).split()) or type(error).__name__
        library, code = type(error).__module__.partition(".")[0], getattr(error, "code", None)
        if isinstance(error, ValueError) and "Out of memory" not in text:  # of TensorStore
            words = {*re.findall(r"[A-Z_]+(?=:)", text)}
            code = next(iter(words & _TEMPORARY or words & (_DENIED | _REFUSED)), None)
        # How gcsfs and s3fs raise responses of status 400 to 499, apart from `code`.
        is_forbidden = isinstance(error, PermissionError) or text.startswith("Forbidden: ")
        is_invalid = (
            (isinstance(error, OSError) and error.errno == errno.EINVAL)
            or type(error).__name__ == "ParamValidationError"
            or (isinstance(error, ValueError) and text.startswith(_INVALID_REQUESTS))
        )
        if not (isinstance(error, OSError) or library in _LIBRARIES or is_invalid or code):
            raise
        if is_forbidden or code in _DENIED or "credential" in text.lower():
            raise UserError(
                f"{action}: access denied ({text[:200]}); log in with `gcloud auth application-default "
                "login` or `aws configure`, or give this machine's account access to the bucket"
            ) from None
        if is_invalid or code in _REFUSED:
            raise UserError(
                f"{action}: the storage refuses the request ({text[:200]}); check the bucket and the path"
            ) from None
        raise Unavailable(
            f"{action}: the storage does not answer ({text[:200]}); run the same command again"
        ) from None


def _request(method: str, url: str, *arguments: Any, size: int = 0, **options: Any) -> Any:
    """Call a method of the file system of a URL, with a deadline for the transfer of `size` bytes."""
    seconds = size / _SLOW_BYTES_PER_SECOND
    timer = threading.Timer(_QUIET_SECONDS + seconds, _say_quiet, [url])
    timer.daemon = True
    timer.start()
    try:
        call = getattr(filesystem(url.partition("://")[0]), method)
        return call(*arguments, timeout=_DEADLINE_SECONDS + seconds, **options)
    finally:
        timer.cancel()


_last_quiet = [-math.inf]  # when a line was written


def _say_quiet(url: str) -> None:
    if time.monotonic() - _last_quiet[0] >= 30:  # once for many requests
        _last_quiet[0] = time.monotonic()
        print(f"{url}: waiting for an answer of the storage …", file=sys.stderr, flush=True)


def key_of(url: str) -> str:
    """Return the bucket and path of a URL."""
    return url.partition("://")[2].rstrip("/")


def read(url: str) -> bytes:
    """Return the content of an object."""
    with errors_of(f"cannot read {url}"):
        return _request("cat_file", url, key_of(url))


def write(url: str, content: bytes, mode: str = "overwrite") -> None:
    """Create or replace an object; readers see the old content or the new one."""
    with errors_of(f"cannot write {url}"):
        _request("pipe_file", url, key_of(url), content, size=len(content), mode=mode)


def create(url: str, content: bytes) -> bool:
    """Create an object unless it exists; of several processes one succeeds. Return whether it did."""
    try:
        write(url, content, mode="create")
    except FileExistsError:
        return False
    return True


def delete(urls: Sequence[str]) -> None:
    """Delete objects; those that do not exist are ignored."""
    for url in urls:
        with errors_of(f"cannot delete {url}"), contextlib.suppress(FileNotFoundError):
            _request("rm_file", url, key_of(url))


def listing(url: str) -> dict[str, Stat]:
    """Return all objects below a folder by their path within it, sorted; {} if there are none."""
    with errors_of(f"cannot list {url}"):
        entries = _request("find", url, key_of(url), detail=True)
    prefix = key_of(url) + "/"
    return {
        name.removeprefix(prefix): stat_of(entry)
        for name, entry in sorted(entries.items())
        if name.startswith(prefix) and not name.endswith("/")
    }


def stat_of(entry: dict[str, Any]) -> Stat:
    """Return size and checksum from a library's entry of an object."""
    if crc := entry.get("crc32c"):
        return Stat(entry["size"], f"crc32c:{base64.b64decode(crc).hex()}")
    etag = str(entry.get("ETag") or entry.get("etag") or "").strip('"')
    kind = "md5" if re.fullmatch("[0-9a-f]{32}", etag) else "etag"
    return Stat(entry["size"], f"{kind}:{etag}")


def is_file(url: str) -> bool:
    """Whether an object of this name exists."""
    with errors_of(f"cannot read {url}"):
        try:
            return info(url)["type"] == "file"
        except FileNotFoundError:
            return False


def info(url: str) -> dict[str, Any]:
    """Return the library's entry of an object."""
    return _request("info", url, key_of(url))


def glob(pattern: str) -> list[str]:
    """Return the URLs of the objects and folders that match a pattern."""
    scheme = pattern.partition("://")[0]
    with errors_of(f"cannot list {pattern}"):
        names = _request("glob", pattern, pattern.partition("://")[2])
    return [f"{scheme}://{name}" for name in names]


def find(url: str) -> list[str]:
    """Return the URLs of an object and of all objects below a folder."""
    scheme = url.partition("://")[0]
    return [f"{scheme}://{name}" for name in _request("find", url, key_of(url))]


def move(source: str, target: str) -> None:
    """Move all objects below a folder, one by one."""
    with errors_of(f"cannot move {source} to {target}"):
        stats = listing(source)
        for name in sorted(stats, key=lambda name: name in DESCRIPTIONS, reverse=True):
            old, new = f"{key_of(source)}/{name}", f"{key_of(target)}/{name}"
            _request("cp_file", source, old, new, size=stats[name].size)
            _request("rm_file", source, old)


def read_ranges(requests: Sequence[tuple[str, int, int]]) -> list[bytes]:
    """Return parts of objects, requested together; each request is (url, start, end)."""
    if not requests:
        return []
    urls, starts, ends = zip(*requests, strict=True)
    with errors_of(f"cannot read {urls[0]}"):
        keys, size = [key_of(url) for url in urls], sum(ends) - sum(starts)
        arguments = (keys, list(starts), list(ends))
        return _request("cat_ranges", urls[0], *arguments, size=size, on_error="raise")


def download(urls: Sequence[str], paths: Sequence[pathlib.Path]) -> None:
    """Copy objects to local files, several at a time."""

    def copy(url: str, path: pathlib.Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with errors_of(f"cannot read {url}"), files.atomic_write(path) as temporary:
            size = info(url)["size"]
            _request("get_file", url, key_of(url), str(temporary), size=size)

    _together(copy, urls, paths)


def upload(paths: Sequence[pathlib.Path], urls: Sequence[str]) -> None:
    """Copy local files to objects, several at a time."""

    def copy(path: pathlib.Path, url: str) -> None:
        size = path.stat().st_size
        try:
            with errors_of(f"cannot write {url}"):
                _request("put_file", url, str(path), key_of(url), size=size)
        except UserError as error:
            # A part whose answer was lost is sent again, and refused as the server has it.
            if isinstance(error, Unavailable) or size < _PARTS_BYTES:
                raise
            with errors_of(f"cannot write {url}"):
                _request("put_file", url, str(path), key_of(url), size=size)

    _together(copy, paths, urls)


def _together(call: Callable[..., None], *arguments: Sequence[Any]) -> None:
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        for _ in pool.map(call, *arguments):  # raises the first error
            pass
