"""Read and write the files of a run's folder.

config.json       config of the run
vocab.txt, …      vocabulary
starts.jsonl      every start: command, commit, versions, devices, first step
metrics.jsonl     training and held-out metrics by step, and bad steps (`bert_jax.training.guard`); bit for bit
                  the same if the run was killed and restarted
samples.jsonl     how masks of `config.sample_texts` are filled at every evaluation
speed.jsonl       timing: seconds, tokens per second; differs from run to run
checkpoints/      checkpoints by step
damaged/          damaged checkpoints, moved here when a run resumed
log.txt           what the run printed, with the time
tensorboard/      the same curves as TensorBoard events
metrics.json      scores of a fine-tuning run by split (`bert_jax.inference.predict`)
predictions/      predictions of a fine-tuning run by split
profile/          traces of steps and a breakdown of their time (`bert_jax.tools.profile`)
lock              lock file, held while a process trains here
"""

import contextlib
import datetime
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import google_crc32c
import jax

import bert_jax
from bert_jax import storage
from bert_jax.config import fields as fields_lib
from bert_jax.config import schema as config_lib
from bert_jax.config.checks import check_fields
from bert_jax.config.schema import TrainConfig
from bert_jax.data import vocabulary_files as vocabularies
from bert_jax.data.compressed import whole
from bert_jax.data.vocabulary import Vocabulary
from bert_jax.errors import UserError
from bert_jax.model import attention
from bert_jax.runtime import sharding
from bert_jax.storage import files

_PACKAGES = ("bert-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")

LOG, SAMPLES = "log.txt", "samples.jsonl"

# Config keys that may change between starts of the same run; with a final ".", all keys below.
MAY_CHANGE_ON_RESUME = (
    "platform", "deterministic", "mesh.", "model.attention", "model.kernels", "checkpoint.", "embed.",
    "guard.", "damaged_rows", "profile_steps", "sample_texts", "trackers",
)  # fmt: skip


class JsonlFile:
    """Append-only JSON lines file, flushed after every line and synced to disk by `sync`.

    Opening it drops lines after `last_step`, whose steps will run again.
    """

    def __init__(self, path: pathlib.Path, last_step: int):
        content = _lines_up_to(path, last_step)
        with files.one_line_errors(f"cannot write {path}"):
            if path.exists():
                files.write(path, content)
            self._file = open(path, "ab")  # noqa: SIM115 (open during the whole run)
        self._crc = google_crc32c.Checksum(content)

    def append(self, line: dict[str, Any]) -> None:
        """Write a line."""
        content = (json.dumps(line) + "\n").encode()
        with files.one_line_errors(f"cannot write {self._file.name}"):
            self._file.write(content)
            self._file.flush()
        self._crc.update(content)

    def close(self) -> None:
        """Close the file."""
        with files.one_line_errors(f"cannot write {self._file.name}"):
            self._file.close()

    def sync(self) -> None:
        """Sync all lines written so far to disk."""
        with files.one_line_errors(f"cannot write {self._file.name}"):
            os.fsync(self._file.fileno())
            os.stat(self._file.name)  # it may have been deleted

    @property
    def checksum(self) -> str:
        """Checksum of the whole file."""
        return self._crc.digest().hex()


def _lines_up_to(path: pathlib.Path, last_step: int) -> bytes:
    """Return the content of a JSON lines file without damaged lines and those after `last_step`."""
    lines = [line for line in read_steps(path) if line["step"] <= last_step]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def repair_metrics(workdir: pathlib.Path, step: int, checksum: str) -> None:
    """Check metrics.jsonl against the checkpoint that a run resumes from.

    If it is damaged (its `checksum` when the checkpoint of `step` was saved is another), its readable
    lines are kept, the damaged file is moved to `damaged`, and a line on standard error says so.
    """
    path = workdir / "metrics.jsonl"
    content = _lines_up_to(path, step)
    if google_crc32c.Checksum(content).digest().hex() == checksum:
        return
    fate = "missing"
    if path.exists():
        target = files.move_aside(path, workdir / "damaged")
        files.write(path, content)
        kept = len(content.splitlines())
        fate = f"moved to {target}, and the {kept} lines that can be read were kept"
    print(
        f"{path}: lines up to step {step:,}, from which the run resumes, were lost or changed: the "
        f"file is {fate}; training is not affected, but curves and early stopping may be",
        file=sys.stderr,
        flush=True,
    )


def read_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """Return the objects of a JSON lines file; [] if it does not exist.

    Lines that cannot be read are left out, such as the last one after a kill.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"cannot read {path}: {files.format_error(error)}") from None
    lines = []
    for text in content.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            lines.append(json.loads(text))
    return [line for line in lines if isinstance(line, dict)]


def read_steps(path: pathlib.Path) -> list[dict[str, Any]]:
    """Return the objects of a JSON lines file that have a step (see `read_lines`)."""
    return [line for line in read_lines(path) if isinstance(line.get("step"), int)]


@storage.with_local_inputs("workdir")
def read_config(workdir: str | pathlib.Path) -> TrainConfig:
    """Return the config of the run in `workdir`."""
    content = _read_config_json(workdir)
    if "config" not in content:
        raise UserError(
            f"{workdir} holds no run: its config.json is of another project; see `bert-jax import`"
        )
    try:
        config = config_lib.from_dict(content["config"])
        check_fields(config)
        return config
    except (UserError, RecursionError) as error:
        raise UserError(
            f"cannot read {workdir}/config.json: {error}; use the version of bert_jax that wrote it"
        ) from None


def _read_config_json(folder: str | pathlib.Path) -> dict[str, Any]:
    path = pathlib.Path(folder) / "config.json"
    try:
        if path.exists() and not path.is_file():  # opening a named pipe would wait for its writer
            raise OSError("it is not a file")
        with path.open("rb") as file:
            content = json.loads(whole(file, path))
        if not isinstance(content, dict):
            raise ValueError("it is not a JSON object")
        return content
    except FileNotFoundError:
        raise UserError(f"{folder} holds no run: it has no config.json") from None
    except (OSError, ValueError, RecursionError) as error:
        what = files.format_error(error) if isinstance(error, OSError) else error
        raise UserError(f"cannot read {path}: {what}") from None


@storage.with_local_inputs("folder")
def holds_run(folder: str | pathlib.Path) -> bool:
    """Whether a folder holds a run or an imported checkpoint of this project."""
    try:
        return "config" in _read_config_json(folder)
    except UserError:
        return False


def _local(folder: str | os.PathLike, name: str) -> pathlib.Path:
    """Return the path of a file of a workdir, or of its local copy; it may not exist."""
    path = f"{folder}/{name}"
    is_copied = storage.is_remote(path) and storage.is_file(path)
    return pathlib.Path(storage.local(path) if is_copied else path)


def attention_at(folder: str | os.PathLike, start: int = -1) -> dict[int, str]:
    """Return the implementation of attention by T at a start of a run, by default the last; {} without one."""
    lines = read_lines(_local(folder, "starts.jsonl"))
    text = lines[start].get("attention", "") if len(lines) >= -start else ""
    return {int(tokens): name for name, tokens in re.findall(r"(\w+) at T=(\d+)", text)}


def dtype_at(config: TrainConfig, folder: str | os.PathLike = "") -> str:
    """Return the compute dtype of a run; "auto" is the dtype that it began with, else that for this device."""
    if config.model.dtype != "auto":
        return config.model.dtype
    if folder and (path := _local(folder, "config.json")).exists():
        return read_config(path.parent).model.compute_dtype
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def first_start(folder: pathlib.Path) -> str:
    """Return a digest of the first line of starts.jsonl, which no two runs have in common."""
    line = (folder / "starts.jsonl").read_bytes().partition(b"\n")[0]
    return hashlib.sha256(line).hexdigest()[:16]


@storage.with_local_inputs("folder")
def read_identity(folder: str | pathlib.Path) -> dict[str, str]:
    """Return what a run's checkpoints must have been saved with.

    It is `run`, a digest of what the run began with, and the `vocabulary`'s SHA-256.
    """
    match _read_config_json(folder):
        case {"run": str() as run, "vocabulary": {"sha256": str() as sha256}}:
            return {"run": run, "vocabulary": sha256}
    raise _unreadable(folder, "which run and vocabulary its checkpoints have")


def _unreadable(folder: str | pathlib.Path, what: str) -> UserError:
    return UserError(
        f"{folder}/config.json does not say {what}: copy the run again, or use the version that wrote it"
    )


def comparable_since(config: TrainConfig, data: Sequence[Mapping[str, Any]]) -> int:
    """Return the first step whose held-out metrics are comparable with those at the end of the run.

    Losses on rows of different lengths are not: only the last phases on the same rows count. A step at
    the end of a phase is evaluated on that phase's rows. `data` is as for `write_or_check_config`.
    """
    if not isinstance(config, config_lib.Config) or len(data) != len(config.phases):
        return 0
    starts = [0, *config_lib.phase_ends(config)]
    others = [i for i, rows in enumerate(data) if rows["digest"] != data[-1]["digest"]]
    return starts[others[-1] + 1] + 1 if others else 0


@storage.with_local_inputs("folder")
def read_best_by(folder: str | pathlib.Path) -> dict[str, Any]:
    """Return what ranks checkpoints, as keyword arguments of `Checkpoints`."""
    match _read_config_json(folder).get("best"):
        case {"best_by": str(), "highest": bool(), **more} as best if not more:
            return best | {"since": comparable_since(read_config(folder), read_data(folder))}
    raise _unreadable(folder, "which metric is best")


@storage.with_local_inputs("folder")
def read_data(folder: str | pathlib.Path) -> list[dict[str, Any]]:
    """Return the description of each phase's rows or examples, as passed to `write_or_check_config`."""
    match _read_config_json(folder).get("data"):
        case [*data] if all(isinstance(rows, dict) and "digest" in rows for rows in data):
            return data
    raise _unreadable(folder, "what the data are")


@storage.with_local_inputs("folder")
def read_vocabulary(folder: str | pathlib.Path) -> Vocabulary:
    """Load the vocabulary of a run, and check that it is the one it was trained with."""
    vocabulary = vocabularies.load(folder)
    known = {"sha256": vocabulary.sha256, **vocabulary.settings}
    if _read_config_json(folder).get("vocabulary") != known:
        raise UserError(
            f"{folder}: {vocabulary.file} or its settings is not the vocabulary that the model was "
            "trained with: copy both from its rows, or from an export of the model"
        )
    if not vocabulary.is_wordpiece:
        return vocabulary.resized(read_config(folder).model.vocab_size)
    return vocabulary


class Provenance(NamedTuple):
    """Provenance of a model, as far as its folder records it."""

    imported: dict[str, Any] | None  # of an imported checkpoint, `convert.source.Imported.about`
    data: list[dict[str, Any]]  # description of the rows of each phase
    starts: list[dict[str, Any]]  # lines of starts.jsonl
    heldout: dict[str, Any] | None  # held-out metrics at the step


@storage.with_local_inputs("folder")
def read_provenance(folder: str | pathlib.Path, step: int) -> Provenance:
    """Return the provenance of a run's or an imported checkpoint; empty for anything else."""
    if not holds_run(folder):
        return Provenance(None, [], [], None)
    folder = pathlib.Path(folder)
    starts, metrics = (read_steps(folder / name) for name in ("starts.jsonl", "metrics.jsonl"))
    heldout = [m for m in metrics if m.get("split") == "heldout" and m["step"] == step]
    imported = _read_config_json(folder).get("imported")
    return Provenance(imported, read_data(folder), starts, heldout[-1] if heldout else None)


def versions(packages: Sequence[str] = _PACKAGES) -> dict[str, str]:
    """Return the version of each package by name; `bert-jax` itself need not be installed."""
    return {
        name: bert_jax.__version__ if name == "bert-jax" else importlib.metadata.version(name)
        for name in packages
    }


def commit(checkout: pathlib.Path = pathlib.Path(__file__).parent) -> str | None:
    """Return the git commit of this project, with "-dirty" if files that runs depend on changed.

    Results and the pages made from them do not count, since sweeps write them between runs. Return
    None without git or outside a checkout.
    """
    git = ["git", "--no-optional-locks", "-C", str(checkout)]
    pathspecs = [":(top)", *(f":(top,exclude)*.{kind}" for kind in ("jsonl", "md", "svg"))]
    try:
        # Not of a repository that holds an environment in which this project is installed.
        subprocess.run([*git, "ls-files", "--error-unmatch", "."], capture_output=True, check=True)
        description, changes = (
            subprocess.run([*git, *command], capture_output=True, text=True, check=True).stdout
            for command in (
                ("describe", "--always"),
                ("status", "--porcelain", "--untracked-files=no", "--", *pathspecs),
            )
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return description.strip() + ("-dirty" if changes else "")


def identity(config: TrainConfig, data: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what must be the same in all processes of a run, by descriptive names."""
    settings = {f"config.{key}": value for key, value in fields_lib.flatten(config).items()}
    digests = {
        f"{name} of phase {i}": rows.get(key)
        for i, rows in enumerate(data)
        for key, name in (("digest", "data"), ("start", "--init"), ("teacher", "teacher"))
    }
    return {**settings, **digests, **versions(), "commit": commit()}


def write_or_check_config(
    workdir: pathlib.Path,
    config: TrainConfig,
    data: list[dict[str, Any]],
    best: dict[str, Any],
    force: bool,
    vocabulary: Vocabulary,
    imported: dict[str, Any] | None = None,
) -> None:
    """Write config.json and the vocabulary, or check that the run already in `workdir` has the same config.

    Args:
        workdir: existing, locked folder.
        config: config of this start.
        data: description of each phase's rows, independent of their location: a digest and their
            sources; for fine-tuning also `start`, a digest of the initial parameters; `objective` if
            it is the user's own; `teacher`, a digest of the teacher's parameters.
        best: metric that ranks checkpoints, and whether higher is better.
        force: accept a changed config.
        vocabulary, imported: of the run; of an imported checkpoint, `convert.source.Imported.about`.
    """
    path = workdir / "config.json"
    new = fields_lib.flatten(config)
    known = {"sha256": vocabulary.sha256, **vocabulary.settings}
    content = {
        "config": fields_lib.to_dict(config),
        "data": data,
        "best": best,
        "vocabulary": known,
    }
    if imported:
        content["imported"] = imported
    if path.exists():
        old = fields_lib.flatten(read_config(workdir))
        differ = [
            f"{key}: was {old.get(key)!r}, is now {new.get(key)!r}"
            for key in {**old, **new}
            if old.get(key) != new.get(key) and _matters(key)
        ]
        saved_data = read_data(workdir)
        for key, problem in (
            ("digest", "the rows are not those that the run began with"),
            ("objective", "it began with another objective"),
            ("teacher", "its teacher had other parameters"),
            ("start", "it began from another checkpoint (--init)"),
        ):
            both = zip(saved_data, data, strict=False)
            if any(saved.get(key) != rows.get(key) for saved, rows in both):
                differ.append(problem)
        if differ and not force:
            raise UserError(
                f"{workdir} holds a run with another config ({'; '.join(differ)}): choose another "
                "workdir, or pass --resume=force to resume the run with this config"
            )
        content["run"] = read_identity(workdir)["run"]  # it stays the same run
    elif (workdir / "checkpoints").exists():
        raise UserError(
            f"{workdir} holds checkpoints but no config.json, so they may be another run's: restore it, "
            "or choose another workdir"
        )
    else:
        begun = {**content, "config": {key: value for key, value in new.items() if _matters(key)}}
        begun["data"] = [{key: rows.get(key) for key in ("digest", "start")} for rows in data]
        content["run"] = hashlib.sha256(json.dumps(begun, sort_keys=True).encode()).hexdigest()[:16]
    with files.one_line_errors(f"cannot write {workdir}"):
        files.write_json(path, content)
        vocabulary.save(workdir)


def _matters(key: str) -> bool:
    """Whether a config key must be the same in all starts of a run."""
    free = any(
        key.startswith(name) if name.endswith(".") else key == name for name in MAY_CHANGE_ON_RESUME
    )
    return not free and not key.endswith(".rows")


def record_start(
    workdir: pathlib.Path,
    step: int,
    mesh: sharding.Mesh,
    config: TrainConfig,
    tokens: Iterable[int],
) -> None:
    """Append a line to starts.jsonl that describes this start of the run, whose rows have `tokens`."""
    kept = attention_at(workdir)
    start = {
        "step": step,
        "command": shlex.join([pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": commit(),
        "versions": versions(),
        "python": platform.python_version(),
        "devices": f"{mesh.size} {jax.devices()[0].device_kind}",
        "mesh": dict(mesh.shape),
        "processes": jax.process_count(),
        "attention": ", ".join(f"{attention.resolve(config, t, kept)} at T={t}" for t in tokens),
        "kernels": "pallas" if config.model.kernels == "pallas" else "xla",
        "deterministic": config.deterministic,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    path = workdir / "starts.jsonl"
    with files.one_line_errors(f"cannot write {path}"), open(path, "a") as file:
        file.write(json.dumps(start) + "\n")


def require_same_kind(folder: pathlib.Path, seeds: int) -> None:
    """Refuse to mix a run of one seed with runs of several: both write the same metrics.json."""
    seed_configs = sorted(folder.glob("seed_*/config.json"))
    if seed_configs and seeds == 1:
        raise UserError(
            f"{folder} holds runs of several seeds ({seed_configs[0].parent.name}, …): add --seeds, or "
            "choose another workdir"
        )
    if seeds > 1 and (folder / "config.json").exists():
        raise UserError(
            f"{folder} holds a run of one seed: choose another workdir for {seeds} seeds"
        )
