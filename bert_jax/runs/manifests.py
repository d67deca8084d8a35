"""Manifests of checkpoints: the size and checksum of every file, with which damage is found.

A manifest holds the step, the run, and the size and checksum of every file. A folder that does not match
its manifest is never used. On object storage, which has no renames, a step counts when its manifest
exists; it is written last, with the checksums that the storage computed.
"""

import errno
import hashlib
import json
import pathlib
import re
from collections.abc import Collection, Mapping
from concurrent import futures
from typing import Any

from bert_jax import storage
from bert_jax.storage import files

MANIFEST = "manifest.json"
# Names of steps' folders: STEP, or STEP-TOKEN on object storage, with the token of the lease. A process
# that was suspended while it saved, and has lost the lease, thus writes to a folder of its own.
_STEP = re.compile(r"\d+(-\w+)?")
# Prefixes of the checksums in a manifest: ours, and those of object storage.
_CHECKSUMS = ("crc32c:", "md5:", "etag:")


def _stats(folder: pathlib.Path) -> dict[str, storage.Stat]:
    """Return the files of a step by name, except its manifest; checksums on object storage only."""
    if url := storage.remote(folder):
        stats = storage.listing(url)
    else:
        stats = {
            path.relative_to(folder).as_posix(): storage.Stat(path.stat().st_size, "")
            for path in sorted(folder.rglob("*"))
            if not path.is_dir()
        }
    return {name: stat for name, stat in stats.items() if name != MANIFEST}


def seal(folder: pathlib.Path, facts: Mapping[str, Any]) -> None:
    """Write and sync the manifest of a step's folder: `facts`, size and checksum of every other file."""
    stats, url = _stats(folder), storage.remote(folder)

    def entry(name: str) -> list[Any]:
        size, checksum = stats[name]
        return [size, checksum or f"crc32c:{files.crc32c(folder / name)}"]

    with futures.ThreadPoolExecutor() as pool:
        entries = dict(zip(stats, pool.map(entry, stats), strict=True))
    content = {**facts, "files": entries}
    manifest = {"sha256": _digest(content), **content}
    if url:
        # The metrics, before the checkpoint that depends on them, unless another process has taken over.
        storage.push(folder)
        storage.write(f"{url}/{MANIFEST}", json.dumps(manifest, indent=2).encode())
    else:
        files.write_json(folder / MANIFEST, manifest)
        files.sync_tree(folder)


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: pathlib.Path) -> dict[str, Any] | str:
    """Return the manifest of a step's folder, or a description of what is wrong with it."""
    try:
        if url := storage.remote(folder / MANIFEST):
            if not storage.is_file(url):
                raise FileNotFoundError(url)
            manifest = json.loads(storage.read(url))
        else:
            manifest = json.loads((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (ValueError, RecursionError):
        return f"{MANIFEST} is damaged"
    match manifest:
        case {"sha256": str() as sha256, **content} if sha256 != _digest(content):
            return f"{MANIFEST} fails its checksum"
        case {"sha256": str(), "step": int(), "files": dict() as entries} if all(
            isinstance(entry, list)
            and [type(value) for value in entry] == [int, str]
            and entry[1].startswith(_CHECKSUMS)
            for entry in entries.values()
        ):
            return manifest
    return f"{MANIFEST} is damaged or of another version of bert_jax"


def find_damage(
    folder: pathlib.Path,
    items: Collection[str] | None = None,
    identity: Mapping[str, str] | None = None,
) -> str | None:
    """Describe what is wrong with a step's folder in `WORKDIR/checkpoints`; return None if nothing is.

    With `items`, only these and files outside any item are checked. `identity` is what the step must have
    been saved with (see `workdir.read_identity`).
    """
    with files.one_line_errors(f"cannot read {folder}"):
        manifest = read_manifest(folder)
        if isinstance(manifest, str):
            return manifest
        if manifest["step"] != step_of(folder.name):
            return f"it is a copy of step {manifest['step']}"
        for name, value in (identity or {}).items():
            if manifest.get(name) != value:
                return f"it is of another {name}"
        entries, stats = manifest["files"], _stats(folder)

        def damage_of(name: str) -> str | None:
            if name not in stats:
                return f"{name} is missing"
            if name not in entries:
                return f"{name} is not in {MANIFEST}"
            if stats[name].size != entries[name][0]:
                return f"{name} has {stats[name].size:,} bytes instead of {entries[name][0]:,}"
            checksum, computed = entries[name][1], stats[name].checksum  # by object storage, or ""
            kind = checksum.rpartition(":")[0]
            if (computed or kind == "etag") and computed.rpartition(":")[0] != kind:
                return None  # of a run that was copied there; no more than its size is verified
            try:
                path = folder / name
                of_kind = files.md5 if kind == "md5" else files.crc32c
                computed = computed or f"{kind}:{of_kind(path)}"
            except OSError as error:
                if error.errno != errno.EIO:  # EIO: bad sectors, which count as damage
                    raise
                return f"{name} cannot be read ({error.strerror})"
            return None if computed == checksum else f"{name} fails its checksum"

        names = sorted(entries.keys() | stats.keys())
        if items is not None:
            names = [name for name in names if "/" not in name or name.split("/")[0] in items]
        with futures.ThreadPoolExecutor() as pool:
            return next(filter(None, pool.map(damage_of, names)), None)


def committed(folder: pathlib.Path) -> dict[int, pathlib.Path]:
    """Return the folders of the committed steps in `WORKDIR/checkpoints` by step, oldest first."""
    if url := storage.remote(folder):
        paths = [pathlib.PurePosixPath(name) for name in storage.listing(url)]
        names = [str(path.parent) for path in paths if path.name == MANIFEST]
    else:
        names = [path.name for path in folder.glob("*")]
    steps = {step_of(name): folder / name for name in sorted(names) if _STEP.fullmatch(name)}
    return dict(sorted(steps.items()))


def step_of(name: str) -> int:
    """Return the step that a folder of this name holds."""
    return int(name.partition("-")[0])
