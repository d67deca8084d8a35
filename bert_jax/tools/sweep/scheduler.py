"""Execution of points: folders, engines, and the order."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import datetime
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from bert_jax.data.workers import cores
from bert_jax.errors import EXIT_INTERRUPTED, EXIT_NEGATIVE, EXIT_USER_ERROR, InUse, UserError
from bert_jax.storage import files
from bert_jax.tools.launch import jobs
from bert_jax.tools.launch.engines import SUBMITTED
from bert_jax.tools.launch.engines.base import State, python_command
from bert_jax.tools.launch.plan import KILLED, exit_status, first_wait_seconds, signal_group
from bert_jax.tools.sweep.folders import STARTED, PointRun, Runs
from bert_jax.tools.sweep.points import FOLDER_OPTION, Point, SweepArgs

# Verbs that engines other than "local" run; the rest runs on this machine.
LAUNCHED = ("pretrain", "finetune")
# Maximum number of restarts of a preempted run (exit status 75), and of a job that was lost or failed for a
# reason that may pass.
_RESTARTS, _RETRIES = 100, 3
# Exit statuses of a job that would fail again.
_FINAL = (EXIT_NEGATIVE, EXIT_USER_ERROR)


class Engine(NamedTuple):
    """What runs the points.

    Attributes:
        on: "local", or an engine of `launch`.
        options: arguments of `bert-jax launch`; `VERB:ARGUMENT` is for points of a verb.
        jobs: maximum number of points that run at once.
    """

    on: str = "local"
    options: Sequence[str] = ()
    jobs: int = 1

    def command(self, point: Point, point_runs: dict[str, PointRun], job: str = "") -> list[str]:
        """Return the full command of a point; `job` is the name of its job or slice."""
        parts = [
            point_runs[part.name].out if isinstance(part, Point) else str(part)
            for part in point.command
        ]
        point_run = point_runs[point.name]
        if point.verb == "python":
            return [sys.executable, *parts[1:], FOLDER_OPTION["python"], str(point_run.files)]
        command = [*parts, FOLDER_OPTION[point.verb], point_run.out]
        if not self.is_launched(point):
            return [*python_command(), *command]
        is_on_slice = self.on == "tpu-vm"
        job = job or ("slice" if is_on_slice else point_run.job)
        options = ["--on", self.on, "--name", job, *self.options_of(point.verb)]
        options += ["--keep"] if is_on_slice else []
        return [*python_command(), "launch", *options, "--", *command]

    def options_of(self, verb: str) -> list[str]:
        """Return the arguments of `launch` for points of a verb; of two for one option the last counts."""
        parts = [option.partition(":") for option in self.options]
        own = [rest for before, _, rest in parts if before == verb]
        return [o for o in self.options if o.partition(":")[0] not in LAUNCHED] + own

    def slice_kind(self, verb: str) -> str:
        """Return "" if all verbs have the same slices, else the verb's letter."""
        same = len({tuple(self.options_of(each)) for each in LAUNCHED}) == 1
        return "" if same else f"-{verb[0]}"

    def is_launched(self, point: Point) -> bool:
        """Whether a point runs on other machines."""
        return self.on != "local" and point.verb in LAUNCHED

    def is_asynchronous(self, point: Point) -> bool:
        """Whether the command of a point returns before the point has run."""
        return self.on in SUBMITTED and self.is_launched(point)


class _Slices:
    """Slices of Cloud TPU VMs, each of which runs one point after the other, as a queue for one takes hours.

    Args:
        name: how the names of slices begin; a kind and a number follow.
        jobs: maximum number of slices of a kind.
        unfinished: slice of each point, by name, that an earlier sweep has started and that may run.
    """

    def __init__(self, name: str, jobs: int, unfinished: dict[str, str]):
        self._name, self._jobs, self.of = name, jobs, unfinished
        self._deleting: dict[str, subprocess.Popen] = {}
        self._left: set[str] = set()  # slices that could not be deleted

    def _unused(self, kind: str) -> list[str]:
        used = {*self.of.values(), *self._deleting, *self._left}
        names = [f"{self._name}{kind}-{i}" for i in range(self._jobs)]
        return [name for name in names if name not in used]

    def take(self, point: str, kind: str) -> str:
        """Return the slice of a point, if possible one that exists; "" if all are in use."""
        unused = sorted(self._unused(kind), key=lambda name: not jobs.has_machines(name))
        if name := self.of.get(point) or next(iter(unused), ""):
            self.of[point] = name
        return name

    def delete_idle(self, kind: str, waiting: int) -> None:
        """Begin to delete slices that exist and that no point uses, but for one per waiting point."""
        for name in list(filter(jobs.has_machines, self._unused(kind)))[waiting:]:
            print(f"{name}: deleting the slice, which is no longer needed", file=sys.stderr)
            command = [*python_command(), "launch", "delete", name]
            self._deleting[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )

    def are_deleted(self) -> bool:
        """Whether all deletions have ended; a line names each that failed."""
        for name, process in list(self._deleting.items()):
            if process.poll() is None:
                return False
            del self._deleting[name]
            _, error = process.communicate()
            if process.returncode:
                self._left.add(name)
                reason = (error.strip().splitlines() or [""])[-1]
                print(
                    f"{name}: the slice was not deleted and costs money: run `bert-jax launch delete "
                    f"{name}` ({reason})",
                    file=sys.stderr,
                )
        return True


@dataclasses.dataclass
class _Running:
    point_run: PointRun
    process: subprocess.Popen | None  # None for a submitted job
    start_time: float
    lock: contextlib.ExitStack
    job: str  # name of the job or slice
    query_time: float = 0.0  # time of the last answer about the job
    num_misses: int = 0  # number of queries in a row that did not find it; after two it is lost
    answer: concurrent.futures.Future[State] | None = None  # to a query that was sent
    note: str = ""  # the last line of the last answer


def _ask(job: str) -> State:
    try:
        return jobs.ask(job)
    except UserError as error:  # it was not launched from this machine
        return State("lost", text=str(error))


class Scheduler:
    """Runs points, each once its dependencies are done.

    Args:
        points: the points, each after its dependencies; those that are complete are done at once.
        runs: folder of all points.
        args: arguments of the sweep.
        engine: what runs the points.
        done: called once for each point that is done.
        name: how the names of slices begin.

    Attributes:
        state: state of each point by name: "waiting", "running", "done", "failed", "stopped" (by a
            signal, with its state saved) or "blocked" (a dependency has not run).
    """

    def __init__(
        self,
        points: Sequence[Point],
        runs: Runs,
        args: SweepArgs,
        engine: Engine,
        done: Callable[[PointRun], None],
        name: str = "sweep",
    ):
        self.point_runs: dict[str, PointRun] = {}
        self.state: dict[str, str] = {}
        self._engine, self._done = engine, done
        self._running: dict[str, _Running] = {}
        self._restarts, self._retries = collections.Counter[str](), collections.Counter[str]()
        self._not_before: dict[str, float] = {}  # time of the next attempt
        self._in_use: set[str] = set()  # points reported as waiting for another process
        self._is_stopping = False
        self._queries = concurrent.futures.ThreadPoolExecutor(4)
        runs.pull()
        unfinished: dict[str, str] = {}
        for point in points:
            point_run = PointRun(point, runs, args.data)
            self.point_runs[point.name], self.state[point.name] = point_run, "waiting"
            last = point_run.last_attempt
            if point_run.is_done:
                self._finish(point_run)
            elif last.get("on") == "tpu-vm" and last["status"] in (STARTED, EXIT_INTERRUPTED):
                unfinished[point.name] = last["job"]
        self._slices = _Slices(name, engine.jobs if engine.on == "tpu-vm" else 0, unfinished)

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
        is_idle = not self._running and (self._is_stopping or "waiting" not in self.state.values())
        return is_idle and self._slices.are_deleted()

    @property
    def slices(self) -> list[str]:
        """Slices of points that have not ended, which the same sweep takes up again."""
        return sorted({*self._slices.of.values()})

    def note(self, name: str) -> str:
        """Return the last line of what is known of a running point."""
        running = self._running.get(name)
        return (running.note if running else "") or self.point_runs[name].last_log_line()

    def update(self) -> None:
        """Handle points that have ended and start those that are ready."""
        for name, running in list(self._running.items()):
            if running.process is None:
                self._query(name, running)
            elif running.process.poll() is not None:
                self._ended(name, running, exit_status(running.process))
        if self._is_stopping:
            return
        for name, point_run in self.point_runs.items():
            if self.state[name] != "waiting":
                continue
            needs = {self.state[needed.name] for needed in point_run.point.needs}
            if needs & {"failed", "blocked", "stopped"}:
                self.state[name] = "blocked"
                continue
            has_waited = time.time() >= self._not_before.get(name, 0.0)
            if needs <= {"done"} and has_waited and len(self._running) < self._engine.jobs:
                self._start(name, point_run)
        waiting = collections.Counter(
            self._engine.slice_kind(point_run.point.verb)
            for name, point_run in self.point_runs.items()
            if self.state[name] == "waiting" and self._engine.is_launched(point_run.point)
        )
        for kind in {self._engine.slice_kind(verb) for verb in LAUNCHED}:
            self._slices.delete_idle(kind, waiting[kind])

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
        is_on_slice = self._engine.on == "tpu-vm" and self._engine.is_launched(point_run.point)
        kind = self._engine.slice_kind(point_run.point.verb)
        job = self._slices.take(name, kind) if is_on_slice else point_run.job
        if point_run.is_done or not job:
            lock.close()
            if job:
                self._finish(point_run)
            return
        running = _Running(point_run, None, time.time(), lock, job)
        # A killed sweep may have submitted a job without recording it.
        is_submitted = point_run.last_attempt.get("status", 0) in (None, STARTED)
        if not (is_submitted and self._engine.is_asynchronous(point_run.point)):
            running.query_time = time.time()
            self._record(running, STARTED)
            command = self._engine.command(point_run.point, self.point_runs, job)
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
        if self._engine.is_asynchronous(running.point_run.point) and status == 0:
            self._record(running, None)  # submitted
            running.process = None
            return
        self._record(running, status)
        state = "failed" if status else "done"
        was_stopped = self._engine.is_launched(running.point_run.point) and jobs.was_stopped(
            running.job
        )
        if (self._is_stopping or was_stopped) and status in (EXIT_INTERRUPTED, *KILLED):
            state = "stopped"
        elif status == EXIT_INTERRUPTED and self._restarts[name] < _RESTARTS:
            self._restarts[name] += 1
            state = "waiting"
        self._release(name, state)

    def _query(self, name: str, running: _Running) -> None:
        """Ask for the state of a job, without waiting for the answer; handle one that has come."""
        if running.answer is None:
            interval = float(os.environ.get("BERT_JAX_SWEEP_QUERY_SECONDS", 60))
            if time.time() - running.query_time >= interval:
                running.answer = self._queries.submit(_ask, running.job)
            return
        if not running.answer.done():
            return
        state, running.answer, running.query_time = running.answer.result(), None, time.time()
        running.note = " ".join([state.kind, *state.text.splitlines()[-1:]])
        running.num_misses = running.num_misses + 1 if state.kind == "lost" else 0
        if state.kind in ("waiting", "running", "unknown") or running.num_misses == 1:
            return
        if state.kind == "done" or (state.kind == "lost" and running.point_run.has_ended()):
            self._record(running, 0)
            self._release(name, "done")
            return
        with open(running.point_run.log, "a") as log:
            log.write(f"{running.job}: {state.kind}: {state.text}\n")
        self._record(running, state.status or EXIT_NEGATIVE)
        if state.kind == "stopped":
            self._release(name, "stopped")
        elif state.status in _FINAL or self._retries[name] == _RETRIES:
            self._release(name, "failed")
        else:
            wait = first_wait_seconds() * 2 ** self._retries[name]
            self._retries[name] += 1
            self._not_before[name] = time.time() + wait
            print(
                f"{name}: {running.note}: trying again in {wait:g} s", file=sys.stderr, flush=True
            )
            self._release(name, "waiting")

    def _record(self, running: _Running, status: int | str | None) -> None:
        start = datetime.datetime.fromtimestamp(running.start_time, datetime.UTC)
        running.point_run.add(
            begun=start.isoformat(timespec="seconds"),
            seconds=round(time.time() - running.start_time, 1),
            status=status,
            on=self._engine.on if self._engine.is_launched(running.point_run.point) else "local",
            job=running.job,
            load=round(os.getloadavg()[0], 2),
            cores=cores(),
        )

    def _release(self, name: str, state: str) -> None:
        running = self._running.pop(name)
        running.lock.close()
        self.state[name] = state
        if state in ("done", "failed"):
            self._slices.of.pop(name, None)
        if state == "done":
            running.point_run.push()
            self._finish(running.point_run)

    def _finish(self, point_run: PointRun) -> None:
        self.state[point_run.point.name] = "done"
        point_run.fetch()
        self._done(point_run)
