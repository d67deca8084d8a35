"""Paths on object storage, `gs://bucket/…` and `s3://bucket/…`.

The rest of the program works on local files. What it reads is copied into a cache (`local`), what it
writes is uploaded when it is complete (`output`), and the folder of a run has a mirror (`mirrored`):
a local folder whose small files are uploaded as they change. Checkpoints are not mirrored; Orbax
writes and reads them on the storage itself (`remote`).

Object storage has no renames and no locks. A file is replaced as a whole by one request. A folder is
complete when the file that describes it exists, which is written last. One process writes to a run
at a time: it owns a lease, an object that only one process can create and that its owner renews.
"""

from bert_jax.storage.copies import (
    cache_folder,
    find,
    local,
    make_room,
    open_file,
    output,
    remote,
    stat,
    with_local_inputs,
    with_uploaded_output,
)
from bert_jax.storage.lease import Lease
from bert_jax.storage.mirror import mirrored, mirrors, pull, push
from bert_jax.storage.objects import (
    Stat,
    check,
    create,
    delete,
    download,
    errors_of,
    glob,
    is_file,
    is_remote,
    listing,
    move,
    path,
    read,
    read_ranges,
    upload,
    write,
)

__all__ = [
    "Lease", "Stat", "cache_folder", "check", "create", "delete", "download", "errors_of", "find", "glob", "is_file",
    "is_remote", "listing", "local", "make_room", "mirrored", "mirrors", "move", "open_file", "output",
    "path", "pull", "push", "read", "read_ranges", "remote", "stat", "upload", "with_local_inputs",
    "with_uploaded_output", "write",
]  # fmt: skip
