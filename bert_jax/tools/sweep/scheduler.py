"""Where points are run, by what, and in which order."""

import contextlib
import datetime
import fcntl
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from bert_jax import files, workdir
from bert_jax.config import Config
from bert_jax.data.workers import cores
from bert_jax.errors import UserError
from bert_jax.tools import launch
from bert_jax.tools.sweep.points import FOLDER_OPTION, Given, Point

ATTEMPTS, LOG, OUT = "attempts.jsonl", "log", "out"
# Verbs that other engines run; all else is done here.
LAUNCHED = ("pretrain", "finetune")
# Engines that queue a job and return: it is over when its workdir says so.
HANDED_OVER = ("slurm", "gke", "sky")
# How often a queue is asked for a job; one that it does not know twice is gone.
_ASK_SECONDS = 60.0
# A run that is stopped by others (75) is started again so many times.
_RESTARTS = 100


class Place:
    """Where a point is run and what is known of it there.

    Args:
        point: the point.
        runs: the folder of all sweeps' points.
        data: the folder of the data.
    """

    def __init__(self, point: Point, runs: pathlib.Path, data: pathlib.Path):
        self.point, self.digest, self._runs = point, point.digest(data), runs
        self._look()

    def _look(self) -> None:
        there = sorted(self._runs.glob(f"*-{self.digest}"))  # another sweep may call it otherwise
        name = re.sub(r"[^\w.-]+", ".", self.point.name)
        self.folder = there[0] if there else self._runs / f"{name}-{self.digest}"
        self.out, self.log = self.folder / OUT, self.folder / LOG

    def settle(self) -> None:
        """Makes the folder, or takes that which another sweep has made since we looked."""
        lock, why = self._runs / files.LOCK, f"cannot use the folder {self._runs}"
        with files.one_line_errors(why), open(lock, "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self._look()
            self.folder.mkdir(exist_ok=True)

    def attempts(self) -> list[dict[str, Any]]:
        """Every start so far."""
        path = self.folder / ATTEMPTS
        return workdir.read_lines(path) if path.exists() else []

    def add(self, **attempt: Any) -> None:
        """Notes a start that has ended or was handed over."""
        with open(self.folder / ATTEMPTS, "a") as file:
            file.write(json.dumps(attempt) + "\n")

    @property
    def is_done(self) -> bool:
        """Whether it need not be run any more."""
        attempts = self.attempts()
        if any(attempt["status"] == 0 for attempt in attempts):
            return True
        return bool(attempts) and attempts[-1]["status"] is None and _has_ended(self.out)

    @property
    def is_submitted(self) -> bool:
        """Whether a job was queued for it that is not known to have ended."""
        attempts = self.attempts()
        return bool(attempts) and attempts[-1]["status"] is None and not self.is_done

    def last_words(self) -> str:
        """The last line of its log."""
        try:
            lines = self.log.read_text(errors="replace").replace("\r", "\n").splitlines()
        except OSError:
            return ""
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _has_ended(out: pathlib.Path) -> bool:
    """Whether a workdir holds a run that has come to its end, whoever ran it."""
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
        options: arguments to `bert-jax launch`.
        jobs: points at a time.
    """

    on: str = "local"
    options: Sequence[str] = ()
    jobs: int = 1

    def command(self, point: Point, places: dict[str, Place]) -> list[str]:
        """The whole command of a point."""
        parts = [
            str(places[part.name].out) if isinstance(part, Point) else str(part)
            for part in point.command
        ]
        where = [FOLDER_OPTION[point.verb], str(places[point.name].out)]
        if point.verb == "python":
            return [sys.executable, *parts[1:], *where]
        if self.on == "local" or point.verb not in LAUNCHED:
            return [*launch.python_command(), *parts, *where]
        how = ["--on", self.on, "--name", _job(places[point.name]), *self.options]
        return [*launch.python_command(), "launch", *how, "--", *parts, *where]

    def is_queued(self, place: Place) -> bool:
        """Whether a job that was handed over is still to be run or runs, as far as can be told.

        Of Slurm alone; gke and sky are not asked.
        """
        if self.on != "slurm":
            return True
        command = ["squeue", "--noheader", f"--name={_job(place)}", "--format=%T"]
        try:
            found = subprocess.run(command, capture_output=True, text=True)
        except OSError:
            return True
        return found.returncode != 0 or bool(found.stdout.strip())

    def hands_over(self, point: Point) -> bool:
        """Whether its command returns before the point is run."""
        return self.on in HANDED_OVER and point.verb in LAUNCHED


def _job(place: Place) -> str:
    return f"{launch.job_name(place.point.name, 28)}-{place.digest}"


class _Running(NamedTuple):
    place: Place
    process: subprocess.Popen | None  # None: a job that was handed over
    begun: float
    lock: contextlib.ExitStack
    asked: float = 0.0  # when a queue was asked for it last
    missed: int = 0  # how often it was not there


class Scheduler:
    """Runs points, each when what it needs is done.

    Args:
        runs: the folder of all points.
        given: for the data's folder.
        engine: what runs them.
        resubmit: queue jobs again that were handed over and have not ended.
        done: called once for each point that is done, with its place.

    Attributes:
        state: of each point by name: "waiting", "running", "done", "failed", "stopped" (saved, by a
            signal), "blocked" (what it needs has failed).
    """

    def __init__(
        self,
        runs: pathlib.Path,
        given: Given,
        engine: Engine,
        resubmit: bool,
        done: Callable[[Place], None],
    ):
        self.places: dict[str, Place] = {}
        self.state: dict[str, str] = {}
        self._runs, self._given, self._engine, self._done = runs, given, engine, done
        self._resubmit = resubmit
        self._running: dict[str, _Running] = {}
        self._restarts: dict[str, int] = {}
        self._stopping = False

    def add(self, points: Iterable[Point]) -> None:
        """Takes points on, each after what it needs; what is done already is so at once."""
        for point in points:
            place = Place(point, self._runs, self._given.data)
            self.places[point.name], self.state[point.name] = place, "waiting"
            if place.is_done:
                self._finish(place)

    def stop(self) -> None:
        """Starts nothing more and tells what runs here to save and end."""
        self._stopping = True
        for name, running in list(self._running.items()):
            if running.process is None:  # it goes on without us
                self._release(name, "stopped")
            else:
                running.process.terminate()

    def kill(self) -> None:
        """Ends what runs here at once."""
        for running in self._running.values():
            if running.process is not None:
                running.process.kill()

    @property
    def is_stopping(self) -> bool:
        """Whether nothing more is started."""
        return self._stopping

    @property
    def is_over(self) -> bool:
        """Whether nothing runs and nothing can."""
        return not self._running and (self._stopping or "waiting" not in self.state.values())

    def look(self) -> None:
        """Takes note of what has ended and starts what can be."""
        for name, running in list(self._running.items()):
            if running.process is None:
                if running.place.is_done:
                    self._release(name, "done")
                else:
                    self._ask(name, running)
            elif running.process.poll() is not None:
                self._ended(name, running, launch.exit_status(running.process))
        if self._stopping:
            return
        for name, place in self.places.items():
            if self.state[name] != "waiting":
                continue
            needs = {self.state[needed.name] for needed in place.point.needs}
            if needs & {"failed", "blocked"}:
                self.state[name] = "blocked"
            elif needs <= {"done"} and len(self._running) < self._engine.jobs:
                self._start(name, place)

    def _start(self, name: str, place: Place) -> None:
        place.settle()
        lock = contextlib.ExitStack()
        try:
            held = lock.enter_context(files.only_process(place.folder))
        except UserError:
            return  # another sweep, or what a killed one has started, is at it: wait
        if place.is_done:
            lock.close()
            self._finish(place)
            return
        process = None
        if self._resubmit or not (place.is_submitted and self._engine.hands_over(place.point)):
            command = self._engine.command(place.point, self.places)
            with open(place.log, "ab") as log:
                log.write(f"$ {shlex.join(command)}\n".encode())
                log.flush()
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    # A Ctrl-C in the terminal would else come twice: from it and from us.
                    start_new_session=True,
                    pass_fds=(held,),
                )
        self._running[name] = _Running(place, process, time.time(), lock)
        self.state[name] = "running"

    def _ended(self, name: str, running: _Running, status: int) -> None:
        handed_over = self._engine.hands_over(running.place.point) and status == 0
        self._note(running, None if handed_over else status)
        if handed_over:
            self._running[name] = running._replace(process=None)
            return
        restarts = self._restarts.get(name, 0)
        if status == 0:
            self._release(name, "done")
        elif self._stopping:
            self._release(
                name, "stopped" if status in (launch.STOPPED, *launch.KILLED) else "failed"
            )
        elif status == launch.STOPPED and restarts < _RESTARTS:
            self._restarts[name] = restarts + 1
            self._release(name, "waiting")
        else:
            self._release(name, "failed")

    def _ask(self, name: str, running: _Running) -> None:
        """Whether a job is still there; its workdir may be seen later than its end."""
        now, place = time.time(), running.place
        if now - running.asked < _ASK_SECONDS:
            return
        missed = 0 if self._engine.is_queued(place) else running.missed + 1
        self._running[name] = running._replace(asked=now, missed=missed)
        if missed < 2:
            return
        with open(place.log, "a") as log:
            log.write(f"{_job(place)} has left the queue before its end: see slurm-JOB.out\n")
        self._note(running, status=1)
        self._release(name, "failed")

    def _note(self, running: _Running, status: int | None) -> None:
        begun = datetime.datetime.fromtimestamp(running.begun, datetime.UTC)
        running.place.add(
            begun=begun.isoformat(timespec="seconds"),
            seconds=round(time.time() - running.begun, 1),
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
            self._finish(running.place)

    def _finish(self, place: Place) -> None:
        self.state[place.point.name] = "done"
        self._done(place)
