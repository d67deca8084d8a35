"""Orbax checkpoints of a run: saved while the next steps run, sealed and committed by a rename.

A step's folder is there as a whole or not at all, and its manifest says what every file in it must
be; nothing is read from a folder that is not as it says.
"""

import contextlib
import errno
import hashlib
import itertools
import json
import os
import pathlib
import shutil
import sys
from collections.abc import Collection, Iterator
from concurrent import futures
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging
from orbax.checkpoint import checkpoint_managers as managers

from bert_jax import files, workdir
from bert_jax.config import CheckpointConfig, Run
from bert_jax.data import wordpiece
from bert_jax.data.wordpiece import Vocabulary
from bert_jax.errors import UserError
from bert_jax.model import Params, shapes

# The optimizer's copy of the parameters' size is kept apart, so that fine-tuning and prediction
# read the parameters alone.
PARAMS, TRAINING = "params", "training"
METRICS = "metrics"  # as Orbax calls them
MANIFEST = "manifest.json"

# Several files of a state are written, flushed and checked at the same time.
_DATA_FILE_BYTES = 128 << 20
# Checksums of a manifest without this prefix are SHA-256, as older versions wrote them.
_CRC32C = "crc32c:"
# A step that is to go is renamed to this folder's first, or a kill would leave a part of it behind.
_REMOVED = "removed"
# Beside the steps once there has been one: none is there yet, or none is left?
_SAVED = "saved"


def seal(folder: pathlib.Path) -> None:
    """Write the manifest of a step's folder (size and checksum of every other file), durably."""
    paths = [
        path
        for path in sorted(folder.rglob("*"))
        if not path.is_dir() and path != folder / MANIFEST
    ]
    with futures.ThreadPoolExecutor() as pool:
        checksums = pool.map(files.crc32c, paths)
        listed = {
            path.relative_to(folder).as_posix(): [path.stat().st_size, _CRC32C + checksum]
            for path, checksum in zip(paths, checksums, strict=True)
        }
    files.write_json(folder / MANIFEST, {"sha256": _digest(listed), "files": listed})
    files.sync_below(folder)


def _digest(listed: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(listed, sort_keys=True).encode()).hexdigest()


def damage(folder: pathlib.Path, items: Collection[str] | None = None) -> str | None:
    """The first file of a step's folder that is not as it was saved, in words; None if all are.

    Args:
        folder: `WORKDIR/checkpoints/STEP`.
        items: look at these and at the files that belong to none; None looks at all.

    Raises:
        UserError: the folder may not be read.
    """
    with files.one_line_errors(f"cannot read {folder}"):
        try:
            manifest = json.loads((folder / MANIFEST).read_bytes())
            listed = manifest["files"]
            if manifest["sha256"] != _digest(listed):
                return f"{MANIFEST} fails its checksum"
        except FileNotFoundError:
            return f"{MANIFEST} is missing"
        except (ValueError, TypeError, KeyError):
            return f"{MANIFEST} is damaged"
        found = {
            path.relative_to(folder).as_posix(): path.stat().st_size
            for path in folder.rglob("*")
            if not path.is_dir() and path != folder / MANIFEST
        }
        names = [
            name
            for name in sorted(listed.keys() | found.keys())
            if items is None or "/" not in name or name.split("/")[0] in items
        ]
        for name in names:
            if name not in found:
                return f"{name} is missing"
            if name not in listed:
                return f"{name} is not in {MANIFEST}"
            if found[name] != listed[name][0]:
                return f"{name} has {found[name]:,} bytes instead of {listed[name][0]:,}"
        with futures.ThreadPoolExecutor() as pool:
            checked = pool.map(lambda name: _damage_of(folder / name, name, listed[name][1]), names)
            return next(filter(None, checked), None)


def _damage_of(path: pathlib.Path, name: str, checksum: str) -> str | None:
    """What is wrong with the bytes of a file that a manifest calls `name`; None if nothing is."""
    is_crc = str(checksum).startswith(_CRC32C)
    try:
        computed = _CRC32C + files.crc32c(path) if is_crc else files.sha256(path)
    except OSError as error:
        if error.errno != errno.EIO:  # a broken disk
            raise
        return f"{name} cannot be read ({error.strerror})"
    return None if computed == checksum else f"{name} fails its checksum"


def _steps(folder: pathlib.Path) -> list[int]:
    """The committed steps in `WORKDIR/checkpoints`, oldest first."""
    return sorted(int(p.name) for p in folder.glob("*") if p.name.isdecimal())


def set_aside_damaged(folder: pathlib.Path) -> None:
    """Before a run goes on: moves checkpoints it cannot go on from to `WORKDIR/damaged`, and says so.

    The newest whole one is read to the end. Older ones are there to be kept or removed by their
    metrics, so of them only those are looked at.

    Args:
        folder: the workdir; no other process may use it.

    Raises:
        UserError: the run has had checkpoints, and none is whole; nothing is moved then.
    """
    checkpoints, aside, newest = folder / "checkpoints", folder / "damaged", None
    damaged = {}
    for step in reversed(_steps(checkpoints)):
        found = damage(checkpoints / str(step), None if newest is None else [METRICS])
        if found:
            damaged[step] = found
        elif newest is None:
            newest = step
    anew = "to begin anew, choose another workdir or remove this one"
    if newest is None and damaged:
        each = "; ".join(f"step {step}: {found}" for step, found in damaged.items())
        raise UserError(f"every checkpoint in {checkpoints} is damaged ({each}): {anew}")
    gone = not checkpoints.exists() and (folder / "starts.jsonl").exists()
    if newest is None and (gone or aside.exists() or (checkpoints / _SAVED).exists()):
        raise UserError(f"the run in {folder} has lost its checkpoints: put one back, or {anew}")
    for step, found in damaged.items():
        names = itertools.chain([str(step)], (f"{step}.{i}" for i in itertools.count(2)))
        target = next(path for name in names if not (path := aside / name).exists())
        with files.one_line_errors(f"cannot move {checkpoints / str(step)} to {target}"):
            aside.mkdir(exist_ok=True)
            os.replace(checkpoints / str(step), target)
            files.sync_folder(aside)
            files.sync_folder(checkpoints)
        print(
            f"the checkpoint of step {step:,} is damaged ({found}): moved to {target}; "
            f"going on from step {newest:,}",
            file=sys.stderr,
            flush=True,
        )


class _Sealed(ocp.path.atomicity.AtomicRenameTemporaryPath):
    """The folder of a step while it is saved: sealed before it takes its name.

    On process 0 alone, in Orbax's thread, when all processes have written their parts. Orbax uses
    the class for the folders of the items inside as well; those have no metadata.
    """

    async def create(self) -> Any:
        if self._checkpoint_metadata_store:
            shutil.rmtree(self.get_final().parent / _REMOVED, ignore_errors=True)
        return await super().create()

    async def finalize(self) -> None:
        if not self._checkpoint_metadata_store:
            return await super().finalize()
        # Not super's: it writes another file and renames in one go.
        self._checkpoint_metadata_store.wait_until_finished()
        seal(pathlib.Path(self.get()))
        os.rename(self.get(), self.get_final())
        checkpoints = pathlib.Path(self.get_final().parent)
        (checkpoints / _SAVED).touch()
        files.sync_folder(checkpoints)


class Checkpoints:
    """The checkpoints of one workdir, by step.

    Args:
        folder: `WORKDIR/checkpoints`, created if need be.
        config: what to keep.
        best_by: the held-out metric of the best checkpoints.
        highest: whether they have the highest values of it, or the lowest.
        read_only: only look, neither create nor clean up.
    """

    def __init__(
        self,
        folder: str | pathlib.Path,
        config: CheckpointConfig,
        best_by: str = "",
        highest: bool = False,
        read_only: bool = False,
    ):
        # Orbax narrates every save, and a failed one at length before it raises what we report.
        logging.set_verbosity(logging.FATAL)
        self.folder = pathlib.Path(folder).absolute()
        self._read_only = read_only
        self._best_by, self._sign = best_by, -1 if highest else 1
        keep: list[Any] = [managers.LatestN(config.keep_last)]
        if config.keep_best:
            keep.append(
                managers.BestN(
                    get_metric_fn=lambda metrics: metrics[best_by],
                    reverse=not highest,  # the last of the order are kept
                    n=config.keep_best,
                    keep_checkpoints_without_metrics=False,
                )
            )
        options = ocp.CheckpointManagerOptions(
            preservation_policy=managers.AnyPreservationPolicy(keep),
            best_fn=lambda metrics: metrics[best_by],  # without one it saves no metrics
            temporary_path_class=_Sealed,
            todelete_subdir=_REMOVED,
            cleanup_tmp_directories=not read_only,
            create=not read_only,
            read_only=read_only,
            lightweight_initialize=read_only,  # or it would read metrics that may be damaged
        )
        # Random-looking float32 shrinks by 8%, which takes most of the time of a save and a restore.
        handlers = {
            item: ocp.PyTreeCheckpointHandler(use_compression=False) for item in (PARAMS, TRAINING)
        }
        with self._errors("open"):
            self._manager = ocp.CheckpointManager(
                self.folder, item_handlers=handlers, options=options
            )

    def steps(self) -> list[int]:
        """The committed steps, oldest first."""
        return sorted(self._manager.all_steps())

    def save(
        self,
        step: int,
        params: Params,
        training: Any = None,
        heldout: dict[str, float] | None = None,
    ) -> None:
        """Starts saving a step; returns once the arrays are copied.

        Args:
            step: its number.
            params: the parameters.
            training: everything else that resuming needs; None for a model that has no run.
            heldout: held-out metrics at this step, None if it was not evaluated.

        Raises:
            UserError: this save or the one before it failed (a full disk).
        """
        items = {PARAMS: params} if training is None else {PARAMS: params, TRAINING: training}
        args = ocp.args.Composite(
            **{
                name: ocp.args.PyTreeSave(item, ocdbt_target_data_file_size=_DATA_FILE_BYTES)
                for name, item in items.items()
            }
        )
        with self._errors(f"save step {step} to"):
            self._manager.save(step, args=args, metrics=heldout, force=True)

    def wait(self) -> None:
        """Returns once every save has been committed.

        Raises:
            UserError: a save failed.
        """
        with self._errors("save to"):
            self._manager.wait_until_finished()

    def verify(self, step: int, *items: str) -> None:
        """Refuses a step of which a file of one of `items` is damaged.

        Raises:
            UserError: names the file, and the other steps.
        """
        if found := damage(self.folder / str(step), items):
            others = ", ".join(str(other) for other in self.steps() if other != step)
            raise UserError(
                f"the checkpoint of step {step} in {self.folder} is damaged ({found}): "
                + (f"ask for another step ({others})" if others else "there is no other")
            )

    def restore(self, step: int, params: Params, training: Any) -> tuple[Params, Any]:
        """Reads a step into arrays shaped and sharded as the arguments (`jax.ShapeDtypeStruct`)."""
        args = ocp.args.Composite(**{PARAMS: _read(params), TRAINING: _read(training)})
        with self._errors(f"restore step {step} from"):
            restored = self._manager.restore(step, args=args)
        return restored[PARAMS], restored[TRAINING]

    def restore_params(self, step: int, params: Params) -> Params:
        """Reads the parameters of a step alone."""
        args = ocp.args.Composite(**{PARAMS: _read(params)})
        with self._errors(f"restore step {step} from"):
            return self._manager.restore(step, args=args)[PARAMS]

    def best_step(self) -> int:
        """The kept step with the best held-out metric, or the newest if none was evaluated.

        Raises:
            UserError: the metrics of a step are damaged.
        """
        scored = []
        for step in self.steps():
            self.verify(step, METRICS)
            if metrics := self._manager.metrics(step):
                scored.append((self._sign * metrics[self._best_by], step))
        return min(scored)[1] if scored else self.steps()[-1]

    def forget_after(self, step: int) -> None:
        """Deletes the steps after one."""
        self.wait()
        left = [s for s in self.steps() if s <= step]
        if not left and jax.process_index() == 0:  # as before the first: none is lost
            (self.folder / _SAVED).unlink(missing_ok=True)
        with self._errors("delete from"):
            for later in self.steps()[len(left) :]:
                self._manager.delete(later)

    def close(self) -> None:
        """Waits for saves and lets go of the folder's threads."""
        with self._errors("save to"):
            self._manager.close()
        if not self._read_only and jax.process_index() == 0:
            shutil.rmtree(self.folder / _REMOVED, ignore_errors=True)

    @contextlib.contextmanager
    def _errors(self, action: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(f"cannot {action} {self.folder}: {files.describe(error)}") from error
        except Exception as error:
            # TensorStore reports the system's errors as text inside a ValueError.
            text = " ".join(str(error).split())
            if "No space left" in text or "RESOURCE_EXHAUSTED" in text:
                raise UserError(
                    f"cannot {action} {self.folder}: the disk is full; free some space and run the "
                    "same command again: it goes on from the newest complete checkpoint"
                ) from error
            raise UserError(f"cannot {action} {self.folder}: {text[:500]}") from error


def _read(shapes: Any) -> ocp.args.PyTreeRestore:
    """Arguments that restore a tree of `jax.ShapeDtypeStruct` with its shapes and shardings."""
    restore_args = ocp.checkpoint_utils.construct_restore_args(shapes)
    return ocp.args.PyTreeRestore(shapes, restore_args=restore_args)


def abstract(tree: Any, sharding: Any) -> Any:
    """Shapes of a tree (arrays or shapes) with shardings: one for all leaves, or a tree of them."""
    if isinstance(sharding, jax.sharding.Sharding):
        sharding = jax.tree.map(lambda _: sharding, tree)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, sharding
    )


def load_model(
    folder: str | pathlib.Path, which: str = "best"
) -> tuple[Run, Vocabulary, Params, int]:
    """The model of a workdir.

    Args:
        folder: the workdir.
        which: "best" (by the held-out metric of its task), "latest", or a step.

    Returns:
        Its config, with the attention that runs anywhere, vocabulary, parameters and step.

    Raises:
        UserError: no run there, no such checkpoint, or a damaged one.
    """
    config = workdir.read_config(folder)
    config.model.attention = "xla"
    checkpoints = Checkpoints(
        pathlib.Path(folder) / "checkpoints",
        config.checkpoint,
        **workdir.read_best_by(folder),
        read_only=True,
    )
    steps = checkpoints.steps()
    if not steps:
        raise UserError(f"{folder} has no checkpoint yet: let the run reach its first one")
    if which in ("best", "latest"):
        step = checkpoints.best_step() if which == "best" else steps[-1]
    elif which.isdigit() and int(which) in steps:
        step = int(which)
    else:
        kept = ", ".join(map(str, steps))
        raise UserError(f"{folder} has no checkpoint {which!r}: best, latest, or one of {kept}")
    checkpoints.verify(step, PARAMS)
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    params = checkpoints.restore_params(step, abstract(shapes(config.model), here))
    checkpoints.close()
    return config, wordpiece.load(folder), params, step
