"""Execution of points: folders, engines, and the order."""

import collections
import contextlib
import dataclasses
import datetime
import fcntl
import itertools
import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from bert_jax.config.schema import Config
from bert_jax.data.workers import cores
from bert_jax.errors import EXIT_INTERRUPTED, InUse
from bert_jax.runs import workdir
from bert_jax.storage import files
from bert_jax.tools.launch.engines import SUBMITTED, python_command
from bert_jax.tools.launch.plan import KILLED, exit_status, signal_group
from bert_jax.tools.launch.request import job_name
from bert_jax.tools.sweep.points import FOLDER_OPTION, Point, SweepArgs

ATTEMPTS, LOG, OUT = "attempts.jsonl", "log", "out"
# Status of an attempt until its end is recorded, which a kill of the sweep can prevent.
_STARTED = "started"
# Verbs that engines other than "local" run; the rest runs on this machine.
LAUNCHED = ("pretrain", "finetune")
# Interval between queries of a queue; a job that is missing twice is gone.
_QUERY_SECONDS = 60.0
# Maximum number of restarts of a preempted run (exit status 75).
_RESTARTS = 100


class PointRun:
    """The folder of a point in `runs`, with its attempts, log and output."""

    def __init__(self, point: Point, runs: pathlib.Path, data: pathlib.Path):
        self.point, self.digest = point, point.digest(data)
        self._runs, self._data = runs, data
        self._find()

    def run_of(self, point: Point) -> "PointRun":
        """Return the folder of another point."""
        return PointRun(point, self._runs, self._data)

    def _find(self) -> None:
        existing = sorted(self._runs.glob(f"*-{self.digest}"))  # perhaps by another sweep's name
        name = re.sub(r"[^\w.-]+", ".", self.point.name)
        self.folder = existing[0] if existing else self._runs / f"{name}-{self.digest}"
        self.out, self.log = self.folder / OUT, self.folder / LOG

    def create_folder(self) -> None:
        """Create the folder, or use the one that another sweep has created since."""
        message = f"cannot use the folder {self._runs}"
        with files.one_line_errors(message), files.open_lock(self._runs / files.LOCK) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self._find()
            self.folder.mkdir(exist_ok=True)

    def attempts(self) -> list[dict[str, Any]]:
        """Return all starts so far, each with its last status."""
        lines = workdir.read_lines(self.folder / ATTEMPTS)
        pairs = itertools.pairwise([*lines, {"status": _STARTED}])
        return [a for a, b in pairs if a["status"] != _STARTED or b["status"] == _STARTED]

    def add(self, **attempt: Any) -> None:
        """Record that an attempt has started, was submitted, or has ended."""
        with open(self.folder / ATTEMPTS, "a") as file:
            file.write(json.dumps(attempt) + "\n")

    @property
    def is_done(self) -> bool:
        """Whether the point is complete."""
        attempts = self.attempts()
        if any(attempt["status"] == 0 for attempt in attempts):
            return True
        return bool(attempts) and attempts[-1]["status"] is None and _has_ended(self.out)

    @property
    def is_submitted(self) -> bool:
        """Whether a job was submitted that is not known to have ended."""
        attempts = self.attempts()
        return bool(attempts) and attempts[-1]["status"] is None and not self.is_done

    def last_log_line(self) -> str:
        """Return the last line of the log."""
        try:
            lines = self.log.read_text(errors="replace").replace("\r", "\n").splitlines()
        except OSError:
            return ""
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _has_ended(out: pathlib.Path) -> bool:
    """Whether a workdir contains a complete run."""
    if (out / "metrics.json").exists():
        return True
    if not (out / "config.json").exists():
        return False
    config = workdir.read_config(out)
    steps = [int(p.name) for p in (out / "checkpoints").glob("*") if p.name.isdigit()]
    return isinstance(config, Config) and max(steps, default=0) >= config.steps


class Engine(NamedTuple):
    """What runs the points.

    Attributes:
        on: "local", or an engine of `launch`.
        options: arguments of `bert-jax launch`.
        jobs: maximum number of points that run at once.
    """

    on: str = "local"
    options: Sequence[str] = ()
    jobs: int = 1

    def command(self, point: Point, point_runs: dict[str, PointRun]) -> list[str]:
        """Return the full command of a point."""
        parts = [
            str(point_runs[part.name].out) if isinstance(part, Point) else str(part)
            for part in point.command
        ]
        folder = [FOLDER_OPTION[point.verb], str(point_runs[point.name].out)]
        if point.verb == "python":
            return [sys.executable, *parts[1:], *folder]
        if self.on == "local" or point.verb not in LAUNCHED:
            return [*python_command(), *parts, *folder]
        options = ["--on", self.on, "--name", _job(point_runs[point.name]), *self.options]
        return [*python_command(), "launch", *options, "--", *parts, *folder]

    def is_queued(self, point_run: PointRun) -> bool:
        """Whether a submitted job is pending or running, as far as is known.

        Only Slurm is queried; jobs on gke and sky count as running.
        """
        if self.on != "slurm":
            return True
        command = ["squeue", "--noheader", f"--name={_job(point_run)}", "--format=%T"]
        try:
            result = subprocess.run(command, capture_output=True, text=True)
        except OSError:
            return True
        return result.returncode != 0 or bool(result.stdout.strip())

    def is_asynchronous(self, point: Point) -> bool:
        """Whether the command of a point returns before the point has run; its workdir shows the end."""
        return self.on in SUBMITTED and point.verb in LAUNCHED


def _job(point_run: PointRun) -> str:
    return f"{job_name(point_run.point.name, 28)}-{point_run.digest}"


@dataclasses.dataclass
class _Running:
    point_run: PointRun
    process: subprocess.Popen | None  # None for a submitted job
    start_time: float
    lock: contextlib.ExitStack
    query_time: float = 0.0  # time of the last query of the queue
    num_misses: int = 0  # number of queries in a row that did not find it


class Scheduler:
    """Runs points, each once its dependencies are done.

    Args:
        points: the points, each after its dependencies; those that are complete are done at once.
        runs: folder of all points.
        args: arguments of the sweep.
        engine: what runs the points.
        resubmit: submit jobs again that have not ended.
        done: called once for each point that is done.

    Attributes:
        state: state of each point by name: "waiting", "running", "done", "failed", "stopped" (by a
            signal, with its state saved) or "blocked" (a dependency failed).
    """

    def __init__(
        self,
        points: Sequence[Point],
        runs: pathlib.Path,
        args: SweepArgs,
        engine: Engine,
        resubmit: bool,
        done: Callable[[PointRun], None],
    ):
        self.point_runs: dict[str, PointRun] = {}
        self.state: dict[str, str] = {}
        self._engine, self._resubmit, self._done = engine, resubmit, done
        self._running: dict[str, _Running] = {}
        self._restarts = collections.Counter[str]()
        self._in_use: set[str] = set()  # points reported as waiting for another process
        self._is_stopping = False
        for point in points:
            point_run = PointRun(point, runs, args.data)
            self.point_runs[point.name], self.state[point.name] = point_run, "waiting"
            if point_run.is_done:
                self._finish(point_run)

    def stop(self) -> None:
        """Start nothing more, and signal local processes to save and exit."""
        self._is_stopping = True
        for name, running in list(self._running.items()):
            if running.process is None:  # the job continues
                self._release(name, "stopped")
            else:
                signal_group(running.process, signal.SIGTERM)

    def kill(self) -> None:
        """Kill local processes."""
        for running in self._running.values():
            if running.process is not None:
                signal_group(running.process, signal.SIGKILL)

    @property
    def is_over(self) -> bool:
        """Whether nothing runs and nothing more can start."""
        return not self._running and (self._is_stopping or "waiting" not in self.state.values())

    def update(self) -> None:
        """Handle points that have ended and start those that are ready."""
        for name, running in list(self._running.items()):
            if running.process is None:
                if running.point_run.is_done:
                    self._release(name, "done")
                else:
                    self._query_queue(name, running)
            elif running.process.poll() is not None:
                self._ended(name, running, exit_status(running.process))
        if self._is_stopping:
            return
        for name, point_run in self.point_runs.items():
            if self.state[name] != "waiting":
                continue
            needs = {self.state[needed.name] for needed in point_run.point.needs}
            if needs & {"failed", "blocked"}:
                self.state[name] = "blocked"
            elif needs <= {"done"} and len(self._running) < self._engine.jobs:
                self._start(name, point_run)

    def _start(self, name: str, point_run: PointRun) -> None:
        point_run.create_folder()
        lock = contextlib.ExitStack()
        try:
            held = lock.enter_context(files.lock_folder(point_run.folder))
        except InUse as error:  # by another sweep, or a process that a killed one left
            if name not in self._in_use:
                self._in_use.add(name)
                print(f"{name}: waiting: {error}", file=sys.stderr, flush=True)
            return
        if point_run.is_done:
            lock.close()
            self._finish(point_run)
            return
        running = _Running(point_run, None, time.time(), lock)
        if self._resubmit or not (
            point_run.is_submitted and self._engine.is_asynchronous(point_run.point)
        ):
            self._record(running, _STARTED)
            command = self._engine.command(point_run.point, self.point_runs)
            with open(point_run.log, "ab") as log:
                log.write(f"$ {shlex.join(command)}\n".encode())
                log.flush()
                running.process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    # Otherwise Ctrl-C would reach it twice, from the terminal and from this process.
                    start_new_session=True,
                    pass_fds=(held,),
                )
        self._running[name] = running
        self.state[name] = "running"

    def _ended(self, name: str, running: _Running, status: int) -> None:
        submitted = self._engine.is_asynchronous(running.point_run.point) and status == 0
        self._record(running, None if submitted else status)
        if submitted:
            running.process = None
            return
        state = "failed" if status else "done"
        if self._is_stopping and status in (EXIT_INTERRUPTED, *KILLED):
            state = "stopped"
        elif status == EXIT_INTERRUPTED and self._restarts[name] < _RESTARTS:
            self._restarts[name] += 1
            state = "waiting"
        self._release(name, state)

    def _query_queue(self, name: str, running: _Running) -> None:
        """Check whether a job is still queued; its workdir may become visible after its end."""
        now, point_run = time.time(), running.point_run
        if now - running.query_time < _QUERY_SECONDS:
            return
        running.query_time = now
        running.num_misses = 0 if self._engine.is_queued(point_run) else running.num_misses + 1
        if running.num_misses < 2:
            return
        with open(point_run.log, "a") as log:
            job = _job(point_run)
            log.write(f"{job} left the queue before it was complete: see {job}-JOB.out\n")
        self._record(running, status=1)
        self._release(name, "failed")

    def _record(self, running: _Running, status: int | str | None) -> None:
        start = datetime.datetime.fromtimestamp(running.start_time, datetime.UTC)
        running.point_run.add(
            begun=start.isoformat(timespec="seconds"),
            seconds=round(time.time() - running.start_time, 1),
            status=status,
            on=self._engine.on,
            load=round(os.getloadavg()[0], 2),
            cores=cores(),
        )

    def _release(self, name: str, state: str) -> None:
        running = self._running.pop(name)
        running.lock.close()
        self.state[name] = state
        if state == "done":
            self._finish(running.point_run)

    def _finish(self, point_run: PointRun) -> None:
        self.state[point_run.point.name] = "done"
        self._done(point_run)
