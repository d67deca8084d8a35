"""Folders of points: their attempts, logs and outputs, on this machine and on object storage."""

import fcntl
import itertools
import json
import os
import pathlib
import re
import secrets
import shutil
from typing import Any

from bert_jax import storage
from bert_jax.config.schema import Config
from bert_jax.errors import EXIT_INTERRUPTED
from bert_jax.runs import checkpoint, workdir
from bert_jax.storage import files
from bert_jax.tools.launch.request import job_name
from bert_jax.tools.sweep.points import RUNS, Point

ATTEMPTS, LOG, OUT = "attempts.jsonl", "log", "out"
# Status of an attempt until its end is recorded, which a kill of the sweep can prevent.
STARTED = "started"
_OPEN = (STARTED, EXIT_INTERRUPTED, None)  # None: a submitted job of an older version


class Runs:
    """The folders of the points of all sweeps."""

    def __init__(self, where: str | os.PathLike):
        # Of the outputs, on object storage; "" if they are in `folder`, which is on this machine. For a URL it is
        # `runs/sweeps/gs/BUCKET/…`, which has the attempts, the logs and the small files of the outputs.
        self.url = str(where).rstrip("/") if storage.is_remote(where) else ""
        local = pathlib.Path(RUNS, self.url.replace("://", "/")) if self.url else where
        self.folder = pathlib.Path(local).absolute()

    def pull(self) -> set[str]:
        """Fetch the attempts of points that another machine has completed; return the names of all these."""
        urls = storage.glob(f"{self.url}/*/{ATTEMPTS}") if self.url else []
        names = [url.split("/")[-2] for url in urls]
        for name, url in zip(names, urls, strict=True):
            if all(attempt["status"] != 0 for attempt in _attempts(self.folder / name)):
                shutil.rmtree(self.folder / name / OUT, ignore_errors=True)  # older files
                storage.download([url], [self.folder / name / ATTEMPTS])
        return {*names}

    def unfinished(self, on: str) -> dict[str, str]:
        """Return the job on an engine, by digest, of each point whose last attempt may run."""
        found = []
        for path in self.folder.glob(f"*/{ATTEMPTS}"):
            last = (_attempts(path.parent) or [{}])[-1]
            if last.get("on") == on and last["status"] in _OPEN:
                found.append((last["begun"], last["job"], path.parent.name.rpartition("-")[2]))
        newest = {job: digest for _, job, digest in sorted(found)}
        return {digest: job for job, digest in newest.items()}


def _attempts(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Return all starts of a point so far, each with its last status."""
    lines = workdir.read_lines(folder / ATTEMPTS)
    pairs = itertools.pairwise([*lines, {"status": STARTED}])
    return [last for last, following in pairs if following["status"] == STARTED]


class PointRun:
    """The folder of a point, with its attempts, log and output."""

    def __init__(self, point: Point, runs: Runs, data: Any):
        self.point, self.digest = point, point.digest(data)
        self._runs, self._data = runs, data
        self._find()

    def run_of(self, point: Point) -> "PointRun":
        """Return the folder of another point."""
        return PointRun(point, self._runs, self._data)

    def _find(self) -> None:
        folder = self._runs.folder
        existing = sorted(folder.glob(f"*-{self.digest}"))  # perhaps by another sweep's name
        name = re.sub(r"[^\w.-]+", ".", self.point.name)
        self.folder = existing[0] if existing else folder / f"{name}-{self.digest}"
        self.log = self.folder / LOG
        self.files = self.folder / OUT  # the output, or its small files after `fetch`
        self._url = f"{self._runs.url}/{self.folder.name}" if self._runs.url else ""
        self.out = f"{self._url}/{OUT}" if self._url else str(self.files)  # for commands

    def create_folder(self) -> None:
        """Create the folder, or use the one that another sweep has created since."""
        runs = self._runs.folder
        message = f"cannot use the folder {runs}"
        with files.one_line_errors(message), files.open_lock(runs / files.LOCK) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self._find()
            self.folder.mkdir(exist_ok=True)

    def attempts(self) -> list[dict[str, Any]]:
        """Return all starts so far, each with its last status."""
        return _attempts(self.folder)

    def add(self, **attempt: Any) -> None:
        """Record that an attempt has started or ended."""
        with open(self.folder / ATTEMPTS, "a") as file:
            file.write(json.dumps(attempt) + "\n")

    def fetch(self) -> None:
        """Copy the small files of an output on object storage to `files`."""
        pattern = re.compile(r"(seed_\d+/)?[\w.-]+\.jsonl?")
        listing = storage.listing(self.out) if self._url else []
        names = [name for name in listing if pattern.fullmatch(name)]
        storage.download([f"{self.out}/{n}" for n in names], [self.files / n for n in names])

    def push_output(self) -> None:
        """Upload the output of a script, which has written it on this machine."""
        if self._url and self.point.verb == "python":
            paths = [path for path in self.files.rglob("*") if path.is_file()]
            names = [path.relative_to(self.files).as_posix() for path in paths]
            storage.upload(paths, [f"{self.out}/{name}" for name in names])

    def push(self) -> None:
        """Upload the attempts of a point that is done."""
        if self._url:
            storage.upload([self.folder / ATTEMPTS], [f"{self._url}/{ATTEMPTS}"])

    @property
    def is_done(self) -> bool:
        """Whether the point is complete."""
        return any(attempt["status"] == 0 for attempt in self.attempts())

    @property
    def last_attempt(self) -> dict[str, Any]:
        """The last start; {} if there was none."""
        return (self.attempts() or [{}])[-1]

    @property
    def is_open(self) -> bool:
        """Whether the job of the last attempt may run."""
        return self.last_attempt.get("status", 0) in _OPEN

    @property
    def job_name(self) -> str:
        """How the names of jobs begin."""
        return f"{job_name(self.point.name, 24)}-{self.digest}"

    @property
    def job(self) -> str:
        """The name of the job that may run, or a new one: jobs that have ended keep theirs."""
        last = self.last_attempt if self.is_open else {}
        return last.get("job") or f"{self.job_name}-{secrets.token_hex(2)}"

    def has_ended(self) -> bool:
        """Whether the output is that of a complete run."""
        self.fetch()
        if (self.files / "metrics.json").exists():
            return True
        if not (self.files / "config.json").exists():
            return False
        config = workdir.read_config(self.files)
        steps = checkpoint.kept_steps(self.out)
        return isinstance(config, Config) and max(steps, default=0) >= config.steps

    def last_log_line(self) -> str:
        """Return the last line of the log, without those of the launcher if there are others."""
        try:
            lines = self.log.read_text(errors="replace").replace("\r", "\n").splitlines()
        except OSError:
            return ""
        lines = [line.strip() for line in reversed(lines) if line.strip()]
        return next((line for line in lines if not line.startswith("launch: ")), "".join(lines[:1]))
