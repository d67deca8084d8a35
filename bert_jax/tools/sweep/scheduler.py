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
from bert_jax.tools.launch import jobs, plan
from bert_jax.tools.launch.engines import SUBMITTED
from bert_jax.tools.launch.engines.base import FINAL, State, python_command
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
        on_slice = self.on == "tpu-vm"
        job = job or ("slice" if on_slice else point_run.job_name)
        options = ["--on", self.on, "--name", job, *self.options_of(point.verb)]
        return [*python_command(), "launch", *options, *["--keep"] * on_slice, "--", *command]

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


def _call(function: Callable[[Any], Any], argument: Any) -> futures.Future:
    """Call a function in a thread, which does not keep the process from ending, as those of executors do."""
    future = futures.Future()

    def run() -> None:
        try:
            future.set_result(function(argument))
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
        # By slice; None if it could not be deleted.
        self._deletions: dict[str, futures.Future | None] = {}

    def _unused(self) -> dict[str, str]:
        """Return the kind by name of slices that may exist, that no point has and that are not deleted."""
        names = jobs.with_machines(f"{self._name}-")
        unused = [n for n in names if n not in {*self.of.values(), *self._deletions}]
        return {name: name.removeprefix(self._name).rpartition("-")[0] for name in unused}

    def take(self, digest: str, kind: str) -> str:
        """Return the slice of a point, if possible one that exists; "" if one is about to be free."""
        if digest in self.of:
            return self.of[digest]
        # Of this sweep, or of a launcher that a killed sweep has left.
        taken = {n for each, n in self.of.items() if each in self._own or jobs.is_launched(n)}
        if len(taken) >= self._count:
            return ""
        numbered = (f"{self._name}{kind}-{i}" for i in itertools.count())
        used = {*self.of.values(), *self._deletions, *self.broken}
        unused = [n for n, each in self._unused().items() if each == kind and n not in self.broken]
        names = unused or (name for name in numbered if name not in used)
        if name := next((name for name in names if not jobs.is_launched(name)), ""):
            self.of[digest] = name
        return name

    def delete_idle(self, waiting: Mapping[str, int], free: int) -> bool:
        """Delete slices that no point uses, but for those of each kind that points wait for and may soon take.

        At most `free` points may start. Return whether all deletions that have begun have ended.
        """
        needed = {kind: min(number, free) for kind, number in waiting.items()}
        for name, kind in self._unused().items():
            if name not in self.broken and needed.get(kind, 0) > 0:
                needed[kind] -= 1
            elif not jobs.is_launched(name):
                say(f"{name}: deleting the slice")
                self._deletions[name] = _call(jobs.delete, name)
        ended = {name: call for name, call in self._deletions.items() if call and call.done()}
        for name, call in ended.items():
            del self._deletions[name]
            self.broken.discard(name)
            # Such as a launcher that runs, or a full disk.
            if (error := call.exception()) is not None:
                self._deletions[name] = None
                say(f"{name}: the slice was not deleted: {str(error) or repr(error)}")
        return not any(self._deletions.values())


def say(line: str) -> None:
    """Print a line to standard error."""
    print(line, file=sys.stderr, flush=True)


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
                stop = f"`bert-jax launch stop {point_run.job}` and remove {point_run.folder}"
                raise UserError(f"{point_name}: its job on {on} may run: give --on {on}, or {stop}")

    def stop(self) -> None:
        """Start nothing more, and signal local processes to save and exit."""
        self._is_stopping = True
        for running in list(self._running.values()):
            if running.process is None:  # a job continues
                self._release(running, "stopped")
            else:
                plan.signal_groups([running.process], signal.SIGTERM)

    def kill(self) -> None:
        """Kill local processes."""
        processes = [running.process for running in self._running.values()]
        plan.signal_groups(filter(None, processes), signal.SIGKILL)

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
            if self._is_stopping and running.process is None:
                self._release(running, "stopped")
            elif (end := self._poll(running)) is not None:
                self._ended(running, end)
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
        free = self._engine.jobs - len(self._running)
        self._are_deleted = self._slices.delete_idle(waiting, free)

    def _start(self, name: str, point_run: PointRun) -> None:
        engine, point = self._engine, point_run.point
        point_run.create_folder()
        with contextlib.ExitStack() as stack:
            try:
                lock = stack.enter_context(files.lock_folder(point_run.folder))
            except InUse as error:  # by another sweep, or a process that a killed one left
                if name not in self._in_use:
                    self._in_use.add(name)
                    say(f"{name}: waiting: {error}")
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
                running.process = plan.start_logged(command, log, [lock])
        self._running[name] = running
        self.state[name] = "running"

    def _poll(self, running: _Running) -> State | None:
        """Return the state of a process or job that has ended; None of others."""
        point, process = running.point_run.point, running.process
        if running.is_complete:
            is_due = time.time() - running.query_time > _UPLOAD_SECONDS
            return State("done") if is_due else None
        if process is None:
            interval = float(os.environ.get("BERT_JAX_SWEEP_QUERY_SECONDS", 60))
            if running.answer is None and time.time() - running.query_time >= interval:
                running.answer = _call(self._ask, running)
            if running.answer is None or not running.answer.done():
                return None
            end, running.answer, running.query_time = running.answer.result(), None, time.time()
            return end
        if process.poll() is None:
            return None
        status = plan.exit_status(process)
        if self._engine.is_asynchronous(point) and status != EXIT_USER_ERROR:
            running.process = None  # the job exists, or may after a status other than 0
            return None
        if status == 0:
            return State("done")
        is_stopped = self._is_stopping
        if self._engine.is_launched(point):
            if status in plan.KILLED:  # the launcher was; the run goes on, on its slice
                status = EXIT_INTERRUPTED
            is_stopped = is_stopped or jobs.was_stopped(running.job)
            if status != EXIT_INTERRUPTED and not jobs.has_ended(running.job):
                self._slices.broken.add(running.job)
        may_pass = status == EXIT_INTERRUPTED or status in plan.KILLED
        return State("stopped" if is_stopped and may_pass else "failed", status)

    def _ask(self, running: _Running) -> State | None:
        """Return the state of a job that has ended; None of others."""
        state = jobs.ask(running.job)
        running.note = " ".join([state.kind, *state.text.splitlines()[-1:]])
        running.num_misses = running.num_misses + 1 if state.kind == "lost" else 0
        if state.kind in ("waiting", "running", "unknown") or running.num_misses == 1:
            return None
        try:
            if state.kind == "done" or running.point_run.has_ended():
                return State("done")
        except UserError as error:  # the storage does not answer
            running.note = str(error)
            return None
        with open(running.point_run.log, "a") as log:
            log.write(f"{running.job}: {state.kind}: {state.text}\n")
        return state

    def _ended(self, running: _Running, end: State) -> None:
        """Handle the end of a process or job; after one that may pass, let the point wait for another."""
        if end.kind == "done":
            self._complete(running)
            return
        name, status = running.point_run.point.name, end.status
        limit = _RESTARTS if status == EXIT_INTERRUPTED else 0
        if running.process is None:
            limit = 0 if status in FINAL else _RETRIES
            # EXIT_INTERRUPTED is the status of attempts that may go on.
            status = EXIT_NEGATIVE if status in (None, 0, EXIT_INTERRUPTED) else status
        self._record(running, status)
        num_restarts = self._restarts[name]
        if end.kind == "stopped" or num_restarts >= limit:
            self._release(running, end.kind if end.kind == "stopped" else "failed")
            return
        at_once = status == EXIT_INTERRUPTED and not num_restarts
        wait = 0.0 if at_once else plan.backoff_seconds(num_restarts)
        self._restarts[name] += 1
        self._not_before[name] = time.time() + wait
        if running.note:
            say(f"{name}: {running.note}: trying again in {wait:g} s")
        self._release(running, "waiting")

    def _complete(self, running: _Running) -> None:
        """Record that a point is done, and upload what other machines need; if that fails, later again."""
        running.process, running.is_complete, running.query_time = None, True, time.time()
        try:
            running.point_run.push_output()
            running.point_run.fetch()
            if not running.point_run.is_done:
                self._record(running, 0)
            running.point_run.push()
        except UserError as error:
            running.note = str(error)
        else:
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
