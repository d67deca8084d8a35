"""The cache of shards on object storage."""

import fcntl
import os
import pathlib
import sys
import weakref
from collections.abc import Sequence

from bert_jax import storage
from bert_jax.data.rows import Shard
from bert_jax.errors import UserError
from bert_jax.storage import files


class ShardCache:
    """Local copies of the shards of a folder on object storage.

    Copies are verified when they are made, kept for other runs, and bounded in size together. The
    processes of a machine share them, and none deletes those that another has open.

    Args:
        url: folder of the shards.
        digest: what identifies their content.

    Attributes:
        folder: where the copies are.
    """

    def __init__(self, url: str, digest: str):
        self._url = url
        self.folder = storage.cache_folder() / "rows" / digest
        with files.one_line_errors(f"cannot write {self.folder}"):
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = files.open_lock(self.folder / files.LOCK)
            weakref.finalize(self, lock.close)
            fcntl.flock(lock, fcntl.LOCK_SH)  # `make_room` keeps the folder
            os.utime(self.folder)

    def copy(self, shards: Sequence[Shard]) -> list[pathlib.Path]:
        """Copy the shards that have no copy, and return the paths of all.

        A copy with another checksum than its shard's has the suffix ".altered", so that no other
        run takes it for a verified one.
        """
        paths = [self.folder / shard.name for shard in shards]
        altered = [path.with_name(f"{path.name}.altered") for path in paths]
        with (
            files.one_line_errors(f"cannot write {self.folder}"),
            files.open_lock(self.folder / "copying") as lock,
        ):
            fcntl.flock(lock, fcntl.LOCK_EX)  # wait while another process copies
            missing = [i for i, path in enumerate(paths) if not path.exists()]
            if missing:
                size = sum(shards[i].bytes for i in missing)
                text = f"{len(missing):,} shards ({size / 1e6:,.1f} MB) of {self._url}"
                if not storage.make_room(self.folder, size):
                    raise UserError(
                        f"no room for {text} in {storage.cache_folder()}; raise "
                        "BERT_JAX_STORAGE_CACHE_GB, or set BERT_JAX_STORAGE_CACHE to a larger disk"
                    )
                print(f"copying {text} to {self.folder}", file=sys.stderr)
                storage.download(
                    [f"{self._url}/{shards[i].name}" for i in missing],
                    [altered[i] for i in missing],
                )
            for i in missing:
                if files.sha256(str(altered[i])) == shards[i].sha256:
                    os.replace(altered[i], paths[i])
        return [
            path if path.exists() else other for path, other in zip(paths, altered, strict=True)
        ]
