"""What a run leaves in its folder, and how to read it again.

config.json       the config it runs with
vocab.txt, …      the vocabulary
starts.jsonl      every start: command, commit, versions, devices, first step
metrics.jsonl     training and held-out metrics by step; the same, bit for bit, for a run that
                  was killed and restarted
speed.jsonl       what the clock says: seconds, tokens a second; differs from run to run
checkpoints/      by step
damaged/          steps whose files were no longer what was saved, set aside
skipped.json      steps whose batches were left out, and what was seen at each of them, of a run
incidents/        whose numbers went wrong (`bert_jax.guard`)
tensorboard/      the same curves as events
profile/          traces of steps, and where their time went (`bert_jax.profile`)
lock              held while a process trains here
"""

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

import bert_jax
from bert_jax import config as config_lib
from bert_jax import files
from bert_jax.config import Run
from bert_jax.data.compressed import whole
from bert_jax.errors import UserError

_PACKAGES = ("bert-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")

# What may differ between the starts of one run without making it another run.
_FREE = (
    "platform", "deterministic", "mesh.", "model.attention", "checkpoint.", "embed.", "guard.",
    "damaged_rows", "profile_steps",
)  # fmt: skip


class Lines:
    """A file of JSON lines that only grows, each line durable before anything that stands on it.

    Lines beyond `last_step` are from steps that will be run again, and are dropped on opening.
    """

    def __init__(self, path: pathlib.Path, last_step: int):
        if path.exists():
            kept = [line for line in read_lines(path) if line["step"] <= last_step]
            files.write(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = open(path, "a")  # noqa: SIM115 (open as long as the run)

    def append(self, line: dict[str, Any]) -> None:
        with files.one_line_errors(f"cannot write {self._file.name}"):
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def sync(self) -> None:
        """Makes all lines so far survive a power failure."""
        with files.one_line_errors(f"cannot write {self._file.name}"):
            os.fsync(self._file.fileno())


def read_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """The complete lines of a JSON lines file; the last one may be cut short by a kill.

    Raises:
        UserError: it cannot be read.
    """
    try:
        texts = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = files.describe(error) if isinstance(error, OSError) else str(error)
        raise UserError(f"cannot read {path}: {why}") from None
    lines = []
    for text in texts:
        try:
            line = json.loads(text)
        except ValueError:
            break
        if isinstance(line, dict):
            lines.append(line)
    return lines


def read_config(workdir: str | pathlib.Path) -> Run:
    """The config of the run in `workdir`.

    Raises:
        UserError: there is none.
    """
    path = pathlib.Path(workdir) / "config.json"
    try:
        return config_lib.from_dict(_told(workdir)["config"])
    except FileNotFoundError:
        raise UserError(f"{workdir} holds no run: it has no config.json") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"cannot read {path}: {error}") from None


def _told(folder: str | pathlib.Path) -> Any:
    """What config.json says."""
    path = pathlib.Path(folder) / "config.json"
    with path.open("rb") as file:
        return json.loads(whole(file, path))


def holds_run(folder: str | pathlib.Path) -> bool:
    """Whether the config.json in a folder is ours: a run's or an imported checkpoint's."""
    try:
        return "config" in _told(folder)
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def read_best_by(folder: str | pathlib.Path) -> dict[str, Any]:
    """Which held-out metric decides, as `Checkpoints` takes it.

    Raises:
        UserError: config.json says something else.
    """
    match _told(folder).get("best", {"best_by": "masked_lm_loss", "highest": False}):
        case {"best_by": str(), "highest": bool(), **more} as best if not more:
            return best
    raise UserError(f"{folder}/config.json does not say which metric is best; copy the run again")


def read_data(folder: str | pathlib.Path) -> list[dict[str, Any]]:
    """For each phase of the run in `folder` what its rows or examples are, as `claim` was told.

    Raises:
        UserError: config.json says something else.
    """
    match _told(folder).get("data"):
        case [*data] if all(isinstance(rows, dict) for rows in data):
            return data
    raise UserError(f"{folder}/config.json does not say what the data are; copy the run again")


class Story(NamedTuple):
    """How a model came to be, as far as its folder tells.

    Attributes:
        imported: of a checkpoint from elsewhere, what `convert.source.Imported.about` says.
        data: for each phase what its rows are.
        starts: the lines of starts.jsonl.
        heldout: the held-out metrics of the step.
    """

    imported: dict[str, Any] | None
    data: list[dict[str, Any]]
    starts: list[dict[str, Any]]
    heldout: dict[str, Any] | None


def read_story(folder: str | pathlib.Path, step: int) -> Story:
    """Of a run's checkpoint, an imported one, or (empty) anything else."""
    if not holds_run(folder):
        return Story(None, [], [], None)
    folder, told = pathlib.Path(folder), _told(folder)
    starts, metrics = (
        read_lines(path) if (path := folder / name).exists() else []
        for name in ("starts.jsonl", "metrics.jsonl")
    )
    heldout = [m for m in metrics if m["split"] == "heldout" and m["step"] == step]
    return Story(
        told.get("imported"), told.get("data", []), starts, heldout[-1] if heldout else None
    )


def versions(packages: Sequence[str] = _PACKAGES) -> dict[str, str]:
    """Return the version of each package, by name. `bert-jax` itself need not be installed."""
    return {
        name: bert_jax.__version__ if name == "bert-jax" else importlib.metadata.version(name)
        for name in packages
    }


def commit(checkout: pathlib.Path = pathlib.Path(__file__).parent) -> str | None:
    """Of this project, marked where files that a run can depend on are changed.

    Results and pages made of them are not such files: a sweep writes to them between its runs.
    None without git, and where this is no checkout.
    """
    git = ["git", "--no-optional-locks", "-C", str(checkout)]
    given = [":(top)", *(f":(top,exclude)*.{kind}" for kind in ("jsonl", "md", "svg"))]
    try:
        found, changed = (
            subprocess.run([*git, *command], capture_output=True, text=True, check=True).stdout
            for command in (
                ("describe", "--always"),
                ("status", "--porcelain", "--untracked-files=no", "--", *given),
            )
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.strip() + ("-dirty" if changed else "")


def identity(config: Run, data: list[dict[str, Any]]) -> dict[str, Any]:
    """What all processes of a run must have in common, by a name for people."""
    settings = {f"config.{key}": value for key, value in config_lib.flatten(config).items()}
    digests = {f"data of phase {i}": rows["digest"] for i, rows in enumerate(data)}
    return {**settings, **digests, **versions(), "commit": commit()}


def claim(
    workdir: pathlib.Path,
    config: Run,
    data: list[dict[str, Any]],
    best: dict[str, Any],
    force: bool,
) -> None:
    """Writes config.json, or checks that the run already here is this one.

    Args:
        workdir: exists and is locked.
        config: as this start was given it.
        data: for each phase what its rows are, wherever they lie: a digest, and what they were
            made of; of fine-tuning also `start`, a digest of the weights it began with.
        best: as `read_best_by` returns it.
        force: go on with a changed config all the same.

    Raises:
        UserError: another config; the line says which keys differ.
    """
    path = workdir / "config.json"
    if path.exists():
        before = json.loads(path.read_text())
        old, new = config_lib.flatten(read_config(workdir)), config_lib.flatten(config)
        differ = [
            f"{key}: {old.get(key)!r} there, {new.get(key)!r} here"
            for key in {**old, **new}
            if old.get(key) != new.get(key)
            and not key.startswith(_FREE)
            and not key.endswith(".rows")
        ]
        if [rows["digest"] for rows in before["data"]] != [rows["digest"] for rows in data]:
            differ.append("the rows are not those the run began with")
        starts = zip(before["data"], data, strict=False)
        if any("start" in old and old["start"] != new.get("start") for old, new in starts):
            differ.append("it began from another checkpoint (--init)")
        if differ and not force:
            raise UserError(
                f"{workdir} holds a run with another config ({'; '.join(differ)}); choose another "
                "workdir, or --resume=force to go on from its last checkpoint with this one"
            )
    files.write_json(path, {"config": config_lib.to_dict(config), "data": data, "best": best})


def record_start(workdir: pathlib.Path, step: int, mesh: jax.sharding.Mesh, config: Run) -> None:
    """Append a line to starts.jsonl that describes this start of the run."""
    start = {
        "step": step,
        "command": shlex.join([pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": commit(),
        "versions": versions(),
        "python": platform.python_version(),
        "devices": f"{mesh.size} {jax.devices()[0].device_kind}",
        "mesh": dict(mesh.shape),
        "processes": jax.process_count(),
        "attention": config.model.attention,
        "deterministic": config.deterministic,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    with open(workdir / "starts.jsonl", "a") as file:
        file.write(json.dumps(start) + "\n")
