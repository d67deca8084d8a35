"""Execution of points: engines, slices, and the order."""

import collections
import contextlib
import dataclasses
import datetime
import itertools
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent import futures
from typing import Any, NamedTuple

from bert_jax.data.workers import cores
from bert_jax.errors import EXIT_INTERRUPTED, EXIT_NEGATIVE, EXIT_USER_ERROR, InUse, UserError
from bert_jax.storage import files
from bert_jax.tools.launch import jobs
from bert_jax.tools.launch.engines import SUBMITTED
from bert_jax.tools.launch.engines.base import FINAL, State, python_command
from bert_jax.tools.launch.plan import (
    KILLED,
    backoff_seconds,
    exit_status,
    signal_groups,
    start_logged,
)
from bert_jax.tools.sweep.folders import STARTED, PointRun, Runs
from bert_jax.tools.sweep.points import FOLDER_OPTION, Point, SweepArgs

# Verbs that engines other than "local" run; the rest runs on this machine.
LAUNCHED = ("pretrain", "finetune")
# Maximum number of restarts of a preempted run (exit status 75), and of a job that was lost or failed for a
# reason that may pass.
_RESTARTS, _RETRIES = 100, 3
_UPLOAD_SECONDS = 10.0  # until what could not be uploaded is tried again


class Engine(NamedTuple):
    """What runs the points."""

    on: str = "local"  # or an engine of `launch`
    options: Sequence[str] = ()  # of `bert-jax launch`; `VERB:OPTION` is for points of a verb
    jobs: int = 1  # maximum number of points that run at once

    def command(self, point: Point, point_runs: dict[str, PointRun], job: str = "") -> list[str]:
        """Return the full command of a point; `job` is the name of its job or slice."""
        parts = point.words(lambda needed: point_runs[needed.name].out)
        point_run = point_runs[point.name]
        if point.verb == "python":
            return [sys.executable, *parts[1:], FOLDER_OPTION["python"], str(point_run.files)]
        command = [*parts, FOLDER_OPTION[point.verb], point_run.out]
        # A killed attempt may have left a vocabulary, which `vocab` does not replace otherwise.
        command += ["--force"] * (point.verb == "vocab")
        if not self.is_launched(point):
            return [*python_command(), *command]
        is_on_slice = self.on == "tpu-vm"
        job = job or ("slice" if is_on_slice else point_run.job_name)
        options = ["--on", self.on, "--name", job, *self.options_of(point.verb)]
        options += ["--keep"] if is_on_slice else []
        return [*python_command(), "launch", *options, "--", *command]

    def options_of(self, verb: str) -> list[str]:
        """Return the arguments of `launch` for points of a verb; of two for one option the last counts."""
        parts = [option.partition(":") for option in self.options]
        common = [before + colon + rest for before, colon, rest in parts if before not in LAUNCHED]
        return common + [rest for before, _, rest in parts if before == verb]

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


def _call(function: Callable[[str], Any], job: str) -> futures.Future:
    """Call a function in a thread, which does not keep the process from ending, as those of executors do."""
    future = futures.Future()

    def run() -> None:
        try:
            future.set_result(function(job))
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


class _Slices:
    """Slices of Cloud TPU VMs, each of which runs one point after the other, as a queue for one takes hours.

    At most `count` of them run. Their names begin with `name`; a kind and a number follow. `of` is the slice of
    each point, by digest, that an earlier sweep has started and that may run; `own` are this sweep's digests.
    """

    def __init__(self, name: str, count: int, of: dict[str, str], own: Collection[str]):
        self._name, self._count, self.of, self._own = name, count, of, own
        self.broken: set[str] = set()  # slices on which a run may go on that is not followed
        self._deleting: dict[str, futures.Future] = {}
        self._left: set[str] = set()  # slices that could not be deleted

    def _used(self) -> set[str]:
        """Return the slices that a point has, or that are deleted or cannot be."""
        return {*self.of.values(), *self._deleting, *self._left}

    def _unused(self) -> list[tuple[str, str]]:
        """Return the kind and name of the slices that may exist and that no point has."""
        used = self._used()
        names = [name for name in jobs.with_machines(f"{self._name}-") if name not in used]
        return [(name.removeprefix(self._name).rpartition("-")[0], name) for name in names]

    def take(self, digest: str, kind: str) -> str:
        """Return the slice of a point, if possible one that exists; "" if one is about to be free."""
        if digest in self.of:
            return self.of[digest]
        taken = {self.of[each] for each in self._own if each in self.of}
        # Launchers that a killed sweep has left.
        others = [name for name in {*self.of.values()} - taken if jobs.is_launched(name)]
        if len(others) + len(taken) >= self._count:
            return ""
        unused = [n for each, n in self._unused() if each == kind and n not in self.broken]
        name = next((name for name in unused if not jobs.is_launched(name)), "")
        if not unused:
            numbered = (f"{self._name}{kind}-{i}" for i in itertools.count())
            name = next(name for name in numbered if name not in self._used() | self.broken)
        if name:
            self.of[digest] = name
        return name

    def delete_idle(self, waiting: Mapping[str, int], free: int) -> bool:
        """Delete slices that no point uses, but for those of each kind that points wait for and may soon take.

        At most `free` points may start. Return whether all deletions that have begun have ended.
        """
        needed = {kind: min(number, free) for kind, number in waiting.items()}
        for kind, name in self._unused():
            if name not in self.broken and needed.get(kind, 0) > 0:
                needed[kind] -= 1
            elif not jobs.is_launched(name):
                print(f"{name}: deleting the slice", file=sys.stderr, flush=True)
                self._deleting[name] = _call(jobs.delete, name)
        for name in [name for name, call in self._deleting.items() if call.done()]:
            # Such as a launcher that runs, or a full disk.
            if (error := self._deleting.pop(name).exception()) is not None:
                self._left.add(name)
                text = f"{name}: the slice was not deleted: {str(error) or repr(error)}"
                print(text, file=sys.stderr, flush=True)
            self.broken.discard(name)
        return not self._deleting


@dataclasses.dataclass
class _Running:
    point_run: PointRun
    process: subprocess.Popen | None  # None for a submitted job
    start_time: float
    lock: contextlib.ExitStack
    job: str  # name of the job or slice
    query_time: float = 0.0  # time of the last answer about the job, or of the last upload
    num_misses: int = 0  # number of queries in a row that did not find it; after two it is lost
    answer: futures.Future | None = None  # to a query that was sent
    note: str = ""  # the last line of the last answer
    is_complete: bool = False  # the run is, and its output is fetched or uploaded


class Scheduler:
    """Runs points, each once its dependencies are done; those that are complete are done at once.

    `done` is called once for each point that is done. The names of slices begin with `name`.
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
        pulled, unfinished = runs.pull(), runs.unfinished("tpu-vm")
        self.point_runs = {point.name: PointRun(point, runs, args.data) for point in points}
        # By name: "waiting", "running", "done", "failed", "stopped" (by a signal, with its state saved, or by the
        # user) or "blocked" (a dependency has not run).
        self.state = dict.fromkeys(self.point_runs, "waiting")
        self._engine, self._done = engine, done
        self._running: dict[str, _Running] = {}
        self._restarts = collections.Counter[str]()
        self._not_before: dict[str, float] = {}  # time of the next attempt
        self._in_use: set[str] = set()  # points reported as waiting for another process
        self._is_stopping = self._are_deleted = False
        own = {point_run.digest for point_run in self.point_runs.values()}
        self._slices = _Slices(name, engine.jobs, unfinished, own)
        for point_name, point_run in self.point_runs.items():
            on = point_run.last_attempt.get("on", engine.on)
            if point_run.is_done:
                if point_run.folder.name not in pulled:
                    point_run.push()
                self._finish(point_run)
            elif point_run.is_open and on not in ("local", engine.on):
                raise UserError(
                    f"{point_name}: its job {point_run.job} on {on} may run: give --on {on}, or stop it "
                    f"with `bert-jax launch stop {point_run.job}` and remove {point_run.folder}"
                )

    def stop(self) -> None:
        """Start nothing more, and signal local processes to save and exit."""
        self._is_stopping = True
        for running in list(self._running.values()):
            if running.process is None or running.is_complete:  # a job continues
                self._release(running, "stopped")
            else:
                signal_groups([running.process], signal.SIGTERM)

    def kill(self) -> None:
        """Kill local processes."""
        processes = [each.process for each in self._running.values() if not each.is_complete]
        signal_groups(filter(None, processes), signal.SIGKILL)

    @property
    def is_over(self) -> bool:
        """Whether nothing runs and nothing more can start."""
        if self._running:
            return False
        return self._is_stopping or (self._are_deleted and "waiting" not in self.state.values())

    def note(self, name: str) -> str:
        """Return the last line of what is known of a running point."""
        running = self._running.get(name)
        return (running.note if running else "") or self.point_runs[name].last_log_line()

    def update(self) -> None:
        """Handle points that have ended and start those that are ready."""
        for running in list(self._running.values()):
            if running.is_complete:
                if time.time() - running.query_time > _UPLOAD_SECONDS:
                    self._complete(running)
            elif running.process is None:
                self._query(running)
            elif running.process.poll() is not None:
                self._ended(running, exit_status(running.process))
        if self._is_stopping:
            return
        waiting = collections.Counter[str]()  # points without a slice, by its kind
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
            is_queued = self.state[name] == "waiting" and self._engine.is_launched(point_run.point)
            if is_queued and point_run.digest not in self._slices.of:
                waiting[self._engine.slice_kind(point_run.point.verb)] += 1
        self._are_deleted = self._slices.delete_idle(
            waiting, self._engine.jobs - len(self._running)
        )

    def _start(self, name: str, point_run: PointRun) -> None:
        engine, point = self._engine, point_run.point
        point_run.create_folder()
        with contextlib.ExitStack() as stack:
            try:
                lock = stack.enter_context(files.lock_folder(point_run.folder))
            except InUse as error:  # by another sweep, or a process that a killed one left
                if name not in self._in_use:
                    self._in_use.add(name)
                    print(f"{name}: waiting: {error}", file=sys.stderr, flush=True)
                return
            if point_run.is_done:
                self._finish(point_run)
                return
            job = point_run.job
            if engine.on == "tpu-vm" and engine.is_launched(point):
                job = self._slices.take(point_run.digest, engine.slice_kind(point.verb))
            if not job:
                return
            running = _Running(point_run, None, time.time(), stack.pop_all(), job)
        # A sweep that was stopped or killed may have submitted a job without recording it.
        is_here = point_run.last_attempt.get("on", "local") == "local"
        if not (point_run.is_open and engine.is_asynchronous(point) and not is_here):
            running.query_time = time.time()
            self._record(running, STARTED)
            command = engine.command(point, self.point_runs, job)
            with open(point_run.log, "ab") as log:
                log.write(f"$ {shlex.join(command)}\n".encode())
                log.flush()
                running.process = start_logged(command, log, [lock])
        self._running[name] = running
        self.state[name] = "running"

    def _ended(self, running: _Running, status: int) -> None:
        """Handle the end of a process."""
        point = running.point_run.point
        is_launched = self._engine.is_launched(point)
        if self._engine.is_asynchronous(point) and status != EXIT_USER_ERROR:
            if status == 0:
                self._record(running, None)  # submitted
            running.process = None  # after any other status the job may exist
            if self._is_stopping:
                self._release(running, "stopped")
            return
        if status == 0:
            self._complete(running)
            return
        if is_launched and status in KILLED:  # the launcher was; the run goes on, on its slice
            status = EXIT_INTERRUPTED
        may_pass = status == EXIT_INTERRUPTED
        is_stopped = self._is_stopping or (is_launched and jobs.was_stopped(running.job))
        if is_stopped and (may_pass or status in KILLED):
            self._record(running, status)
            self._release(running, "stopped")
            return
        if is_launched and not may_pass and not jobs.has_ended(running.job):
            self._slices.broken.add(running.job)
        self._try_again(running, status, _RESTARTS if may_pass else 0)

    def _query(self, running: _Running) -> None:
        """Ask for the state of a job, without waiting for the answer; handle one that has come."""
        if running.answer is None:
            interval = float(os.environ.get("BERT_JAX_SWEEP_QUERY_SECONDS", 60))
            if time.time() - running.query_time >= interval:
                running.answer = _call(jobs.ask, running.job)
            return
        if not running.answer.done():
            return
        try:
            state = running.answer.result()
        except UserError as error:  # it was not launched from this machine
            state = State("lost", text=str(error))
        except Exception as error:  # an answer that cannot be read
            state = State("unknown", text=repr(error))
        running.answer, running.query_time = None, time.time()
        running.note = " ".join([state.kind, *state.text.splitlines()[-1:]])
        running.num_misses = running.num_misses + 1 if state.kind == "lost" else 0
        if state.kind in ("waiting", "running", "unknown") or running.num_misses == 1:
            return
        try:
            is_done = state.kind == "done" or running.point_run.has_ended()
        except UserError as error:  # the storage does not answer
            running.note = str(error)
            return
        if is_done:
            self._complete(running)
            return
        with open(running.point_run.log, "a") as log:
            log.write(f"{running.job}: {state.kind}: {state.text}\n")
        # EXIT_INTERRUPTED is the status of attempts that may go on.
        status = EXIT_NEGATIVE if state.status in (None, 0, EXIT_INTERRUPTED) else state.status
        if state.kind == "stopped":
            self._record(running, status)
            self._release(running, "stopped")
        else:
            limit = 0 if state.status in FINAL else _RETRIES
            self._try_again(running, status, limit, running.note)

    def _try_again(self, running: _Running, status: int, limit: int, why: str = "") -> None:
        """Record the end of an attempt; let the point wait for another, or fail after `limit` others."""
        self._record(running, status)
        name = running.point_run.point.name
        if self._restarts[name] >= limit:
            self._release(running, "failed")
            return
        at_once = status == EXIT_INTERRUPTED and not self._restarts[name]
        wait = 0.0 if at_once else backoff_seconds(self._restarts[name])
        self._restarts[name] += 1
        self._not_before[name] = time.time() + wait
        if why:
            print(f"{name}: {why}: trying again in {wait:g} s", file=sys.stderr, flush=True)
        self._release(running, "waiting")

    def _complete(self, running: _Running) -> None:
        """Record that a point is done, and upload what other machines need; if that fails, later again."""
        running.is_complete, running.query_time = True, time.time()
        try:
            running.point_run.push_output()
            running.point_run.fetch()
            if not running.point_run.is_done:
                self._record(running, 0)
            running.point_run.push()
        except UserError as error:
            running.note = str(error)
            return
        self._release(running, "done")

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

    def _release(self, running: _Running, state: str) -> None:
        name = running.point_run.point.name
        del self._running[name]
        running.lock.close()
        self.state[name] = state
        if state == "failed" or (state == "stopped" and not self._is_stopping):
            self._slices.of.pop(running.point_run.digest, None)
        if state == "done":
            self._finish(running.point_run)

    def _finish(self, point_run: PointRun) -> None:
        self._slices.of.pop(point_run.digest, None)
        self.state[point_run.point.name] = "done"
        if not point_run.files.exists():
            point_run.fetch()
        self._done(point_run)
