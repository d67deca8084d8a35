"""Orbax checkpoints of a run: saved in the background, sealed and committed by a rename.

The folder of a step exists completely or not at all, with a manifest (`bert_jax.runs.manifests`).
"""

import contextlib
import errno
import os
import pathlib
import shutil
import sys
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import etils.epath
import jax
import orbax.checkpoint as ocp
import tensorstore
from absl import logging
from orbax.checkpoint import checkpoint_managers as managers
from orbax.checkpoint._src.path import gcs_utils
from orbax.checkpoint._src.serialization import tensorstore_utils

from bert_jax import storage
from bert_jax.config.model import LoraConfig
from bert_jax.config.schema import CheckpointConfig, TrainConfig, model_at
from bert_jax.data.vocabulary import Vocabulary
from bert_jax.errors import UserError
from bert_jax.model.bert import Params, shapes
from bert_jax.model.layers import merge_lora
from bert_jax.runs import manifests, workdir
from bert_jax.storage import files

# The optimizer state is a separate item, so that fine-tuning and prediction read only parameters.
PARAMS, TRAINING = "params", "training"
METRICS = "metrics"  # Orbax's name

# State is split into files of this size, which are written, flushed and verified in parallel.
_DATA_FILE_BYTES = 128 << 20
# Steps are renamed into this folder before they are deleted, so a kill leaves no partial step.
_REMOVED = "removed"
# Marker file, created with the first step: tells a new run from one that lost its checkpoints.
_SAVED = "saved"
# Marker of a folder on object storage, which has no empty folders.
_OPENED = "opened"
# Orbax's marker of a complete item.
_COMMITTED = ocp.path.atomicity.COMMIT_SUCCESS_FILE


class _StepNames(ocp.path.step.NameFormat[ocp.path.step.Metadata]):
    """Orbax's interface to the names of steps' folders (see `manifests`)."""

    def __init__(self, folder: pathlib.Path, owner: str):
        self._folder, self._owner = folder, owner

    def build_name(self, step: int) -> str:
        return f"{step}-{self._owner}" if self._owner else str(step)

    def find_all(self, base_path: Any) -> Iterator[ocp.path.step.Metadata]:
        for step, path in manifests.committed(self._folder).items():
            yield ocp.path.step.Metadata(step=step, path=etils.epath.Path(base_path) / path.name)

    def find_step(self, base_path: Any, step: int) -> ocp.path.step.Metadata:
        for metadata in self.find_all(base_path):
            if metadata.step == step:
                return metadata
        raise ValueError(f"no step {step} in {base_path}")


def _exists(path: pathlib.Path) -> bool:
    if url := storage.remote(path):
        return storage.is_file(url) or bool(storage.listing(url))
    return path.exists()


def move_damaged(folder: pathlib.Path) -> None:
    """Move damaged checkpoints to `WORKDIR/damaged` before a run resumes, and report them.

    Checkpoints are verified completely from the newest down to the first intact one. Of older ones
    only the metrics are verified, which decide whether they are kept. No other process may use the folder.
    """
    checkpoints, damaged_folder, newest = folder / "checkpoints", folder / "damaged", None
    if not storage.remote(checkpoints) and checkpoints.exists() and not checkpoints.is_dir():
        raise UserError(f"{checkpoints} is a file: restore the folder, or choose another workdir")
    damaged, identity = {}, workdir.read_identity(folder)
    committed = manifests.committed(checkpoints)
    for step, path in reversed(committed.items()):
        items = None if newest is None else [METRICS]
        if description := manifests.find_damage(path, items, identity):
            damaged[step] = description
        elif newest is None:
            newest = step
    advice = "to start over, choose another workdir or remove this one"
    if newest is None and damaged:
        details = "; ".join(f"step {step}: {text}" for step, text in damaged.items())
        raise UserError(f"every checkpoint in {checkpoints} is damaged ({details}): {advice}")
    is_missing = not _exists(checkpoints) and (folder / "starts.jsonl").exists()
    if newest is None and (is_missing or _exists(damaged_folder) or _exists(checkpoints / _SAVED)):
        raise UserError(f"the run in {folder} has lost its checkpoints: restore one, or {advice}")
    for step, description in damaged.items():
        if url := storage.remote(committed[step]):
            target = f"{storage.remote(damaged_folder)}/{committed[step].name}"
            storage.move(url, target)
        else:
            target = files.move_aside(committed[step], damaged_folder)
        print(
            f"the checkpoint of step {step:,} is damaged ({description}): moved to {target}; "
            f"resuming from step {newest:,}",
            file=sys.stderr,
            flush=True,
        )
    if newest is not None:
        manifest = manifests.read_manifest(committed[newest])
        if isinstance(manifest, dict) and "metrics" in manifest:
            workdir.repair_metrics(folder, newest, manifest["metrics"])


class _Sealed(ocp.path.atomicity.AtomicRenameTemporaryPath):
    """Temporary folder of a step, sealed before it is renamed to its final name.

    Orbax calls it on process 0, in its own thread, once all processes have written their parts.
    Orbax also uses the class for the items' folders, which have no metadata store. `Checkpoints`
    makes a subclass with its own `facts`: what goes into the manifest of a step.
    """

    facts: ClassVar[dict[int, dict[str, Any]]] = {}

    async def create(self) -> Any:
        if self._checkpoint_metadata_store:
            shutil.rmtree(self.get_final().parent / _REMOVED, ignore_errors=True)
        return await super().create()

    async def finalize(self) -> None:
        if not self._checkpoint_metadata_store:
            return await super().finalize()
        # super().finalize() would write another file and rename before the folder can be sealed.
        self._checkpoint_metadata_store.wait_until_finished()
        step = int(self.get_final().name)
        manifests.seal(pathlib.Path(self.get()), {"step": step, **self.facts.pop(step, {})})
        os.rename(self.get(), self.get_final())
        checkpoints = pathlib.Path(self.get_final().parent)
        (checkpoints / _SAVED).touch()
        files.sync_folder(checkpoints)


class _SealedRemote(ocp.path.atomicity.CommitFileTemporaryPath):
    """The same on object storage: the folder of a step has its final name from the beginning.

    Orbax ignores and deletes folders without a marker: the manifest of a step, its own of an item.
    """

    facts: ClassVar[dict[int, dict[str, Any]]] = {}
    folder: ClassVar[pathlib.Path] = pathlib.Path()

    @classmethod
    async def validate(cls, temporary_path: Any) -> None:
        if cls._is_committed(temporary_path):
            raise ocp.path.atomicity.ValidationError(f"{temporary_path} is committed")

    @classmethod
    async def validate_final(cls, final_path: Any) -> None:
        if not cls._is_committed(final_path):
            raise ocp.path.atomicity.ValidationError(f"{final_path} is not committed")

    @classmethod
    def _is_committed(cls, path: Any) -> bool:
        return any(
            storage.is_file(f"{os.fspath(path)}/{name}")
            for name in (manifests.MANIFEST, _COMMITTED)
        )

    async def finalize(self) -> None:
        if not self._checkpoint_metadata_store:
            return await super().finalize()
        self._checkpoint_metadata_store.wait_until_finished()
        name = self.get_final().name
        step = manifests.step_of(name)
        manifests.seal(self.folder / name, {"step": step, **self.facts.pop(step, {})})
        storage.write(f"{storage.remote(self.folder)}/{_SAVED}", b"")


def _prepare_orbax() -> None:
    """Let Orbax and TensorStore use object storage, at the addresses that fsspec's libraries use."""
    if emulator := os.environ.get("STORAGE_EMULATOR_HOST"):
        os.environ.setdefault("TENSORSTORE_GCS_HTTP_URL", emulator)
    # TensorStore waits for ever for a server that accepts a connection and never answers. All in all,
    # a request takes up to 40 seconds.
    for name, value in (("CONNECT_TIMEOUT", 5), ("LOW_SPEED_TIME", 5)):
        os.environ.setdefault(f"TENSORSTORE_CURL_{name}_SECONDS", str(value))
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "1")
    # Orbax 0.12 passes all but gs:// to TensorStore as local files.
    gcs_spec, retries = gcs_utils.get_kvstore_for_gcs, {"max_retries": 4}

    def spec(path: str) -> dict[str, Any]:
        if not path.startswith("s3:/"):
            return {**gcs_spec(path), "gcs_request_retries": retries}
        bucket, _, key = path.removeprefix("s3:").lstrip("/").partition("/")
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        options: dict[str, Any] = {"endpoint": endpoint, "aws_region": region}
        if "AWS_ACCESS_KEY_ID" in os.environ:
            options["aws_credentials"] = {"type": "environment"}
        settings = {name: value for name, value in options.items() if value}
        s3 = {"driver": "s3", "bucket": bucket, "path": key, "s3_request_retries": retries}
        return {**s3, **settings}

    if gcs_spec.__module__ != __name__:
        tensorstore_utils._use_gcs_driver = lambda path: path.startswith(("gs://", "s3:/"))
        gcs_utils.get_kvstore_for_gcs = spec


class Checkpoints:
    """The checkpoints of a workdir, by step.

    Args:
        folder: `WORKDIR/checkpoints`, created if necessary.
        config: which checkpoints to keep.
        best_by, highest: held-out metric that ranks checkpoints, and whether higher values are better.
        since: rank only checkpoints from this step on (see `workdir.comparable_since`).
        identity: saved with every step and checked (see `workdir.read_identity`).
        owner: on object storage, the token of the lease (`storage.push`), the same in all processes.
        read_only: neither create nor clean up the folder.
    """

    def __init__(
        self,
        folder: str | pathlib.Path,
        config: CheckpointConfig,
        best_by: str = "",
        highest: bool = False,
        since: int = 0,
        identity: Mapping[str, str] | None = None,
        owner: str = "",
        read_only: bool = False,
    ):
        # Orbax logs every save, and logs a failed one at length before it raises.
        logging.set_verbosity(logging.FATAL)
        self.folder = pathlib.Path(folder).absolute()
        self._read_only = read_only
        self._best_by, self._sign, self._since = best_by, -1 if highest else 1, since
        self._identity, self._facts = dict(identity or {}), {}
        keep: list[Any] = [managers.LatestN(config.keep_last)]
        if config.keep_best:
            keep.append(
                managers.BestN(
                    get_metric_fn=lambda metrics: metrics[best_by],
                    reverse=not highest,  # the last in this order are kept
                    n=config.keep_best,
                    keep_checkpoints_without_metrics=False,
                )
            )
        if config.keep_every_steps:
            keep.append(managers.EveryNSteps(config.keep_every_steps))
        url = storage.remote(self.folder)
        if url:
            _prepare_orbax()
        self._is_remote = bool(url)
        sealed = _SealedRemote if url else _Sealed
        options = ocp.CheckpointManagerOptions(
            step_name_format=_StepNames(self.folder, owner),
            preservation_policy=managers.AnyPreservationPolicy(keep),
            best_fn=lambda metrics: metrics[best_by],  # required for metrics to be saved
            temporary_path_class=type(
                "_SealedStep", (sealed,), {"facts": self._facts, "folder": self.folder}
            ),
            todelete_subdir=None if url else _REMOVED,
            cleanup_tmp_directories=not read_only,
            create=not read_only,
            read_only=read_only,
            lightweight_initialize=read_only,  # do not read metrics, which may be damaged
        )
        # Compression shrinks float32 weights by 8% but dominates the time to save and restore.
        handlers = {
            item: ocp.PyTreeCheckpointHandler(use_compression=False) for item in (PARAMS, TRAINING)
        }
        with self._errors("open"):
            self._manager = ocp.CheckpointManager(
                etils.epath.Path(url or self.folder), item_handlers=handlers, options=options
            )
            if url and not read_only and jax.process_index() == 0:
                storage.write(f"{url}/{_OPENED}", b"")

    def steps(self) -> list[int]:
        """Return the committed steps, oldest first."""
        return sorted(self._manager.all_steps())

    def folder_of(self, step: int) -> pathlib.Path:
        """Return the folder of a committed step."""
        return manifests.committed(self.folder)[step]

    def save(
        self,
        step: int,
        params: Params,
        training: Any = None,
        heldout: dict[str, float] | None = None,
        metrics_checksum: str | None = None,
    ) -> None:
        """Start saving a step in the background; return once the arrays are copied.

        `training` is the rest of the training state, `heldout` the held-out metrics at this step, and
        `metrics_checksum` that of metrics.jsonl, from `Log.sync`; each is None if there is none.
        """
        args = ocp.args.Composite(
            **{
                name: ocp.args.PyTreeSave(item, ocdbt_target_data_file_size=_DATA_FILE_BYTES)
                for name, item in _items(params, training)
            }
        )
        self._facts[step] = dict(self._identity)
        if metrics_checksum:
            self._facts[step]["metrics"] = metrics_checksum
        with self._errors(f"save step {step} to"):
            metrics = heldout if step >= self._since else None
            self._manager.save(step, args=args, metrics=metrics, force=True)

    def wait(self) -> None:
        """Wait until every save is committed."""
        with self._errors("save to"):
            self._manager.wait_until_finished()

    def verify(self, step: int, *items: str) -> None:
        """Check that the files of `items` at a step are intact."""
        if description := manifests.find_damage(self.folder_of(step), items, self._identity):
            others = ", ".join(str(other) for other in self.steps() if other != step)
            advice = f"choose another step ({others})" if others else "there is no other step"
            what = f"the checkpoint of step {step} in {self.folder} is damaged ({description})"
            raise UserError(f"{what}: {advice}")

    def restore(self, step: int, params: Params, training: Any = None) -> tuple[Params, Any]:
        """Restore a step with the shapes and shardings given (`jax.ShapeDtypeStruct`).

        Without those of `training`, restore only the parameters.
        """
        with self._errors(f"restore step {step} from"):
            self._manager.wait_until_finished()  # it may still be saved
            folder, restored = self.folder_of(step), {}
            for name, item in _items(params, training):
                try:
                    restored[name] = _read(folder / name, item)
                except KeyError as error:
                    raise UserError(
                        f"the checkpoint of step {step} in {self.folder} has no {error.args[0]}: "
                        "config.json is of another model; restore that file"
                    ) from None
        return restored[PARAMS], restored.get(TRAINING)

    def best_step(self) -> int:
        """Return the step with the best held-out metric, or the newest if none is ranked.

        Of tied steps it is the newest, which `BestN` keeps.
        """
        scored = []
        for step in self.steps():
            if step < self._since:
                continue
            self.verify(step, METRICS)
            if metrics := self._manager.metrics(step):
                scored.append((-self._sign * metrics[self._best_by], step))
        return max(scored)[1] if scored else self.steps()[-1]

    def close(self) -> None:
        """Wait for pending saves and stop background threads."""
        with self._errors("save to"):
            self._manager.close()
        if not self._is_remote and not self._read_only and jax.process_index() == 0:
            shutil.rmtree(self.folder / _REMOVED, ignore_errors=True)

    @contextlib.contextmanager
    def _errors(self, action: str) -> Iterator[None]:
        action = f"cannot {action} {self.folder}"
        try:
            with storage.errors_of(action) if self._is_remote else contextlib.nullcontext():
                yield
        except UserError:
            raise
        except Exception as error:
            # TensorStore reports system errors and those of object storage as the text of a
            # ValueError.
            text = " ".join(str(error).split())
            is_exhausted = "RESOURCE_EXHAUSTED" in text and "Out of memory" not in text
            if "No space left" in text or is_exhausted:
                error = OSError(errno.ENOSPC, text)
            what = files.format_error(error) if isinstance(error, OSError) else text[:500]
            raise UserError(f"{action}: {what}") from error


def _read(folder: pathlib.Path, shapes: Any) -> Any:
    """Read an item that Orbax wrote, all arrays at once, into the shapes and shardings given.

    Orbax itself takes three times as long for the hundreds of arrays of a state, most of it in Python.

    Raises:
        KeyError: the item has no array of this path, shape and type.
    """
    flat = ocp.tree.to_flat_dict(shapes, sep=".")
    context = tensorstore_utils.get_ts_context()
    url = storage.remote(folder) or os.fspath(folder)
    stores = {
        path: tensorstore.open(
            {"driver": "zarr", "kvstore": tensorstore_utils.build_kvstore_tspec(url, path)},
            context=context,
        )
        for path in flat
    }
    parts: dict[str, dict[str, Any]] = {}
    for path, shape in flat.items():
        name = path.replace(".", "/")
        try:
            store = stores[path].result()
        except ValueError as error:
            if "NOT_FOUND" in str(error):
                raise KeyError(name) from None
            raise
        if (store.shape, store.dtype.numpy_dtype) != (shape.shape, shape.dtype):
            raise KeyError(f"{name} of shape {shape.shape} and type {shape.dtype}")
        indices = shape.sharding.addressable_devices_indices_map(shape.shape).values()
        distinct = {str(index): index for index in indices}
        parts[path] = {key: store[index].read() for key, index in distinct.items()}
    arrays = {
        path: jax.make_array_from_callback(
            shape.shape, shape.sharding, lambda index, read=parts[path]: read[str(index)].result()
        )
        for path, shape in flat.items()
    }
    return ocp.tree.from_flat_dict(arrays, target=shapes, sep=".")


def _items(params: Params, training: Any) -> list[tuple[str, Any]]:
    items = [(PARAMS, params), (TRAINING, training)]
    return items if training is not None else items[:1]


def abstract(tree: Any, sharding: Any) -> Any:
    """Return a tree's shapes with shardings, given one for all leaves or a tree of them."""
    if isinstance(sharding, jax.sharding.Sharding):
        sharding = jax.tree.map(lambda _: sharding, tree)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, sharding
    )


@storage.with_local_inputs("folder")
def kept_steps(folder: str | pathlib.Path) -> list[int]:
    """Return the steps of the checkpoints in a workdir, oldest first."""
    return list(manifests.committed(pathlib.Path(folder) / "checkpoints"))


@storage.with_local_inputs("folder")
def load_model(
    folder: str | pathlib.Path, which: str = "best"
) -> tuple[TrainConfig, Vocabulary, Params, int]:
    """Return the config, vocabulary, parameters and step of a checkpoint of a workdir.

    `which` is "best" (by the held-out metric of its task, on the rows of the last phase), "latest", or a
    step number. Attention and kernels are set to "xla", which runs anywhere, adapters are merged, and the
    base of "rope" is that of the step's phase.
    """
    config = workdir.read_config(folder)
    config.model.attention = config.model.kernels = "xla"
    checkpoints = Checkpoints(
        pathlib.Path(folder) / "checkpoints",
        config.checkpoint,
        **workdir.read_best_by(folder),
        identity=workdir.read_identity(folder),
        read_only=True,
    )
    steps = checkpoints.steps()
    if not steps:
        raise UserError(f"{folder} has no checkpoint yet: wait until the run saves its first one")
    if which in ("best", "latest"):
        step = checkpoints.best_step() if which == "best" else steps[-1]
    elif which.isdigit() and int(which) in steps:
        step = int(which)
    else:
        choices = ", ".join(map(str, ["best", "latest", *steps]))
        raise UserError(f"{folder} has no checkpoint {which!r}: choose one of {choices}")
    checkpoints.verify(step, PARAMS)
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    params, _ = checkpoints.restore(step, abstract(shapes(config.model), sharding))
    checkpoints.close()
    config.model = model_at(config, step)
    if config.model.lora.rank:
        params = merge_lora(params, config.model.lora)
        config.model.lora = LoraConfig()
    return config, workdir.read_vocabulary(folder), params, step
