"""Requests to object storage, with retries and one-line errors."""

import base64
import concurrent.futures
import contextlib
import errno
import functools
import importlib
import logging
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from bert_jax.errors import Unavailable, UserError
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
    "gcsfs",
    "google",
    "requests",
    "s3fs",
    "urllib3",
)
# How the `ValueError`s begin that gcsfs raises for responses of status 400.
_INVALID_REQUESTS = ("Bad Request: ", "Bucket is requester pays")


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


def check(arguments: Iterable[str]) -> None:
    """Check that the URLs among paths can be used.

    Args:
        arguments: paths, alone or as `--option=PATH` or `KIND:PATH`.
    """
    for argument in arguments:
        url = re.fullmatch(r"(?:-[^=\s]*=|[a-z]+:)?([a-z][a-z0-9+.-]*)://(\S*)", argument)
        if not url:
            continue
        scheme, path = url.groups()
        if scheme not in _SCHEMES:
            raise UserError(
                f"{scheme}://{path}: paths are local, gs://… or s3://…; mount other storage as a folder"
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
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # its exceptions are reported
        if scheme == "s3":
            _retry_s3()
        return fsspec.filesystem("gcs" if scheme == "gs" else scheme)
    except ImportError as error:
        raise UserError(
            f"{scheme}:// needs {library}: pip install 'bert-jax[{extra}]' ({error})"
        ) from None


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
            raise UserError(f"{action}: {files.describe(error)}") from None
        text = " ".join(str(error).split()) or type(error).__name__
        library, code = type(error).__module__.partition(".")[0], getattr(error, "code", None)
        # How gcsfs and s3fs raise responses of status 400 to 499, apart from `code`.
        is_forbidden = isinstance(error, PermissionError) or text.startswith("Forbidden: ")
        is_invalid = (
            (isinstance(error, OSError) and error.errno == errno.EINVAL)
            or type(error).__name__ == "ParamValidationError"
            or (isinstance(error, ValueError) and text.startswith(_INVALID_REQUESTS))
        )
        if not (isinstance(error, OSError) or library in _LIBRARIES or is_invalid):
            raise
        if is_forbidden or code in (401, 403) or "credential" in text.lower():
            raise UserError(
                f"{action}: access denied ({text[:200]}); log in with `gcloud auth application-default "
                "login` or `aws configure`, or give this machine's account access to the bucket"
            ) from None
        if is_invalid or (code in range(400, 500) and code not in (408, 429)):
            raise UserError(
                f"{action}: the storage refuses the request ({text[:200]}); check the bucket and the path"
            ) from None
        raise Unavailable(
            f"{action}: the storage does not answer ({text[:200]}); run the same command again"
        ) from None


def filesystem_of(url: str) -> Any:
    """Return the file system of a URL's scheme."""
    return filesystem(url.partition("://")[0])


def key_of(url: str) -> str:
    """Return the bucket and path of a URL."""
    return url.partition("://")[2].rstrip("/")


def read(url: str) -> bytes:
    """Return the content of an object."""
    with errors_of(f"cannot read {url}"):
        return filesystem_of(url).cat_file(key_of(url))


def write(url: str, content: bytes) -> None:
    """Create or replace an object; readers see the old content or the new one."""
    with errors_of(f"cannot write {url}"):
        filesystem_of(url).pipe_file(key_of(url), content)


def create(url: str, content: bytes) -> bool:
    """Create an object unless it exists; of several processes one succeeds. Return whether it did."""
    with errors_of(f"cannot write {url}"):
        try:
            filesystem_of(url).pipe_file(key_of(url), content, mode="create")
        except FileExistsError:
            return False
    return True


def delete(urls: Sequence[str]) -> None:
    """Delete objects; those that do not exist are ignored."""
    for url in urls:
        with errors_of(f"cannot delete {url}"), contextlib.suppress(FileNotFoundError):
            filesystem_of(url).rm_file(key_of(url))


def listing(url: str) -> dict[str, Stat]:
    """Return all objects below a folder by their path within it, sorted; {} if there are none."""
    with errors_of(f"cannot list {url}"):
        entries = filesystem_of(url).find(key_of(url), detail=True)
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
            return filesystem_of(url).info(key_of(url))["type"] == "file"
        except FileNotFoundError:
            return False


def move(source: str, target: str) -> None:
    """Move all objects below a folder, one by one."""
    with errors_of(f"cannot move {source} to {target}"):
        filesystem = filesystem_of(source)
        for name in sorted(listing(source), key=lambda name: name in DESCRIPTIONS, reverse=True):
            filesystem.cp_file(f"{key_of(source)}/{name}", f"{key_of(target)}/{name}")
            filesystem.rm_file(f"{key_of(source)}/{name}")


def read_ranges(requests: Sequence[tuple[str, int, int]]) -> list[bytes]:
    """Return parts of objects, requested together; each request is (url, start, end)."""
    if not requests:
        return []
    urls, starts, ends = zip(*requests, strict=True)
    with errors_of(f"cannot read {urls[0]}"):
        filesystem = filesystem_of(urls[0])
        keys = [key_of(url) for url in urls]
        return filesystem.cat_ranges(keys, list(starts), list(ends), on_error="raise")


def download(urls: Sequence[str], paths: Sequence[pathlib.Path]) -> None:
    """Copy objects to local files, several at a time."""

    def copy(url: str, path: pathlib.Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with errors_of(f"cannot read {url}"), files.atomic_write(path) as temporary:
            filesystem_of(url).get_file(key_of(url), str(temporary))

    _together(copy, urls, paths)


def upload(paths: Sequence[pathlib.Path], urls: Sequence[str]) -> None:
    """Copy local files to objects, several at a time."""

    def copy(path: pathlib.Path, url: str) -> None:
        with errors_of(f"cannot write {url}"):
            filesystem_of(url).put_file(str(path), key_of(url))

    _together(copy, paths, urls)


def _together(call: Callable[..., None], *arguments: Sequence[Any]) -> None:
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        for _ in pool.map(call, *arguments):  # raises the first error
            pass
