"""Multi-process runs: startup, agreement between processes, and detection of lost processes.

Environment variables, set by `bert-jax launch` or by hand, for `pretrain` (fine-tuning runs in one process):

BERT_JAX_COORDINATOR, BERT_JAX_PROCESSES, BERT_JAX_PROCESS
    HOST:PORT of process 0, number of processes, index of this process
BERT_JAX_DISTRIBUTED=auto
    instead of these three, on Slurm, Cloud TPU and GKE, where JAX detects them
BERT_JAX_JOIN_SECONDS, BERT_JAX_LOST_SECONDS, BERT_JAX_STUCK_SECONDS
    timeouts (300, 60, 1800): for all processes to start; for a heartbeat of a process; for a step with
    the evaluation, save or compilation that follows it, so longer than an evaluation takes
"""

import collections
import contextlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.distributed import global_state  # JAX has no public API for its key-value store
from jax.experimental import multihost_utils

from bert_jax.config.schema import MeshConfig
from bert_jax.errors import EXIT_INTERRUPTED, Unavailable, UserError
from bert_jax.runtime import sharding
from bert_jax.runtime.progress import Progress

_SECONDS = {"JOIN": 300.0, "LOST": 60.0, "STUCK": 1800.0}
_PREFIX = "bert_jax"
_FAREWELL_SECONDS = 5.0


def start() -> None:
    """Connect to the other processes of a multi-process run, as the environment specifies.

    Call this before any other use of JAX, `device.start` included. Afterwards only process 0 writes
    to the terminal, except for errors. A process that cannot connect within the timeout exits with
    status 2.
    """
    names = [f"BERT_JAX_{name}" for name in ("COORDINATOR", "PROCESSES", "PROCESS")]
    variables = {name: os.environ[name] for name in names if name in os.environ}
    auto = os.environ.get("BERT_JAX_DISTRIBUTED", "")
    if auto not in ("", "auto"):
        raise UserError(f"BERT_JAX_DISTRIBUTED is {auto!r}: unset it or set it to 'auto'")
    if not variables and not auto:
        return
    # JAX's preemption service would catch SIGTERM, which `train.catch_signals` handles.
    jax.config.update("jax_enable_preemption_service", False)
    timeout = _seconds("JOIN")
    options: dict[str, Any] = {"initialization_timeout": int(timeout) + 60}
    label, coordinator = "this process", "detected by JAX"
    if variables:
        if missing := [name for name in names if name not in variables]:
            raise UserError(f"{', '.join(variables)} without {', '.join(missing)}: set all three")
        coordinator, count, this = variables.values()
        is_valid = re.fullmatch(r".+:\d+", coordinator) and count.isdigit() and this.isdigit()
        if not is_valid or int(this) >= int(count):
            given = ", ".join(f"{name}={value}" for name, value in variables.items())
            raise UserError(f"{given}: set them to HOST:PORT, N, and a number from 0 to N-1")
        label = f"process {this} of {count}"
        options |= {
            "coordinator_address": coordinator,
            "num_processes": int(count),
            "process_id": int(this),
            "cluster_detection_method": "deactivate",
        }

    def give_up():
        _exit(
            f"{label} waited {timeout:g} s for the others (coordinator {coordinator}): start all "
            "processes where they can reach that address, or increase BERT_JAX_JOIN_SECONDS",
            2,
        )

    timer = threading.Timer(timeout, give_up)  # JAX itself would abort with a stack trace
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(**options)
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"{label} cannot connect to the others (coordinator {coordinator}): {_line(error)}"
        ) from None
    finally:
        timer.cancel()
    # jax.process_index() would start JAX's backends, before `device.start` sets their flags.
    if global_state.process_id:
        Progress.shown = False
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (open until the process exits)


def _seconds(name: str) -> float:
    key = f"BERT_JAX_{name}_SECONDS"
    try:
        return float(os.environ.get(key, _SECONDS[name]))
    except ValueError:
        raise UserError(f"{key} is {os.environ[key]!r}: it must be a number of seconds") from None


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def _exit(message: str, status: int) -> None:
    """Exit at once; a regular exit would wait for processes that hang in a collective."""
    print(f"bert-jax: {message}", file=sys.stderr, flush=True)
    os._exit(status)


_rounds = iter(range(2**62))


def gather(what: str, text: str) -> list[str]:
    """Return the strings of all processes, by process index; all must call this in the same order.

    `what` names this synchronization point in error messages.
    """
    count = jax.process_count()
    if count == 1:
        return [text]
    client = _client()
    key, timeout = f"{_PREFIX}/{next(_rounds)}", _seconds("JOIN")
    client.key_value_set(f"{key}/{jax.process_index()}", text)
    deadline, texts = time.monotonic() + timeout, []
    for process in range(count):
        left = max(deadline - time.monotonic(), 1)
        try:
            texts.append(client.blocking_key_value_get(f"{key}/{process}", int(left * 1000)))
        except jax.errors.JaxRuntimeError:
            late = f"process {process} of {count} did not get to {what!r} within {timeout:g} s"
            raise UserError(f"{late}: check its output") from None
    if jax.process_index():
        client.key_value_set(f"{key}/read/{jax.process_index()}", "")
    else:  # process 0 hosts the store, so it must outlive the reads of the others
        _wait_for_all(f"{key}/read", deadline)
    return texts


def _client() -> Any:
    """Return the key-value store of the processes, which `start` has connected to."""
    return global_state.client


def _wait_for_all(key: str, deadline: float) -> None:
    for process in range(1, jax.process_count()):
        left = max(deadline - time.monotonic(), 0.1)
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            _client().blocking_key_value_get(f"{key}/{process}", int(left * 1000))


def leave() -> None:
    """Call before exiting with an error, so that all processes can report theirs.

    Process 0 waits briefly for the others, which JAX aborts as soon as process 0 is gone.
    """
    if global_state.client is None:
        return
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        if jax.process_index():
            _client().key_value_set(f"{_PREFIX}/left/{jax.process_index()}", "")
        else:
            _wait_for_all(f"{_PREFIX}/left", time.monotonic() + _FAREWELL_SECONDS)


def run_on_process_0(what: str, action: Callable[[], str | None]) -> str | None:
    """Run `action` on process 0 while the others wait; all return its result or raise its `UserError`.

    `what` names this synchronization point in error messages.
    """
    cause, kind, text = None, "", None
    if jax.process_index() == 0:
        try:
            text = action()
        except UserError as error:
            cause, kind, text = error, type(error).__name__, str(error)
    kind, text = json.loads(gather(what, json.dumps([kind, text]))[0])
    if kind:
        raise (Unavailable if kind == Unavailable.__name__ else UserError)(text) from cause
    return text


def check_same_on_all_processes(settings: dict[str, Any]) -> None:
    """Check that all processes have the same settings."""
    texts = gather("comparing settings", json.dumps(settings, default=str))
    for process, text in enumerate(texts):
        if text != texts[0]:
            first, other = json.loads(texts[0]), json.loads(text)
            differ = [
                f"{key}: {first.get(key)!r} and {other.get(key)!r}"
                for key in {**first, **other}
                if first.get(key) != other.get(key)
            ]
            text = "; ".join(differ)[:500]
            raise UserError(
                f"processes 0 and {process} differ ({text}): start all "
                "with the same command and the same versions"
            )


def _is_collective_error(error: BaseException) -> bool:
    # Collectives on CPU report a closed connection as a ValueError.
    return isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error)


class StopFlag:
    """A stop flag, reduced over all processes so that all stop after the same step.

    The result of a step is read `steps_ahead` steps later, so that no process waits for it.
    """

    def __init__(self, steps_ahead: int):
        self._steps_ahead, self._pending = steps_ahead, collections.deque()
        self._is_single = jax.process_count() == 1  # jax.process_count() is too slow for every step
        # Every device contributes the flag of its process.
        mesh = sharding.make_mesh(MeshConfig())
        self._sharding = sharding.row_sharding(mesh)
        self._any = jax.jit(jnp.max, out_shardings=sharding.replicated(mesh))

    def __call__(self, should_stop: bool) -> bool:
        """Return whether to stop; call after every step with the flag of this process."""
        if self._is_single:
            return should_stop
        flags = np.full(jax.local_device_count(), should_stop, np.int32)
        flags = jax.make_array_from_process_local_data(self._sharding, flags)
        self._pending.append(self._any(flags))
        return len(self._pending) > self._steps_ahead and bool(self._pending.popleft())


class Heartbeat:
    """Heartbeats between processes, to detect and report one that is lost or stuck.

    Collectives wait forever for a lost process. Process 0 therefore watches the heartbeats of all
    others, and they watch those of process 0, which hosts the store. When they stop, a thread exits
    the process with status 75, which asks for the run to be restarted, and its message ends the
    others. In the store, all read `to_all`, which has at most two keys, and only process 0 `to_0`.
    `step` is the number of training steps that this process has dispatched.
    """

    def __init__(self) -> None:
        self.step, self._done = 0, threading.Event()
        self._lost_seconds, self._stuck_seconds = _seconds("LOST"), _seconds("STUCK")
        self._interval = min(self._lost_seconds / 6, 5.0)

    def __enter__(self) -> "Heartbeat":
        if jax.process_count() > 1:
            threading.Thread(target=self._run, daemon=True).start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Exit the process if a collective failed, after the thread had time to find the cause."""
        cause = error
        while cause is not None and not _is_collective_error(cause):
            cause = cause.__cause__
        if cause is not None and jax.process_count() > 1:
            # The thread exits the process first if it finds out which process is lost.
            self._done.wait(self._lost_seconds + 3 * self._interval)
            name = f"process {jax.process_index()} of {jax.process_count()}"
            lost = f"lost its connection to another at step {self.step:,}"
            self._report(f"{name} {lost} ({_line(cause)})")
        self._done.set()

    def _report(self, message: str) -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            key = f"{_PREFIX}/to_all/gone"
            _client().key_value_set(key, message, allow_overwrite=True)
            if jax.process_index() == 0:  # it hosts the store: let the others read the message
                time.sleep(2 * self._interval)
        _exit(f"{message}; run the same command to resume", EXIT_INTERRUPTED)

    @staticmethod
    def _read(folder: str) -> dict[str, str]:
        pairs = _client().key_value_dir_get(f"{_PREFIX}/{folder}/")
        return {key.rpartition("/")[2]: value for key, value in pairs}

    def _run(self) -> None:
        this = jax.process_index()
        key = f"{_PREFIX}/{'to_0' if this else 'to_all'}/{this}"
        others = ["0"] if this else [str(i) for i in range(1, jax.process_count())]
        last_heartbeat = {process: ("", time.monotonic()) for process in others}
        last_progress, beat = (self.step, time.monotonic()), 0
        while not self._done.wait(self._interval):
            now, beat = time.monotonic(), beat + 1
            if last_progress[0] != self.step:
                last_progress = self.step, now
            try:
                _client().key_value_set(key, f"{beat} {self.step}", allow_overwrite=True)
                heartbeats = self._read("to_all")
                is_stuck = now - last_progress[1] > self._stuck_seconds
                if not this or is_stuck:
                    heartbeats |= self._read("to_0")
            except jax.errors.JaxRuntimeError:
                continue  # process 0 hosts the store: a failure counts as its silence
            if message := heartbeats.pop("gone", ""):
                _exit(f"{message}; run the same command to resume", EXIT_INTERRUPTED)
            for process, (previous, since) in last_heartbeat.items():
                heartbeat = heartbeats.get(process, "")
                if heartbeat != previous:
                    last_heartbeat[process] = heartbeat, now
                elif now - since > self._lost_seconds:
                    name = f"process {process} of {jax.process_count()}"
                    self._report(f"{name} has been silent for {now - since:.0f} s")
            if is_stuck:
                order = sorted(heartbeats, key=int)
                steps = ", ".join(f"{p} at {heartbeats[p].split()[1]}" for p in order)
                waited = f"{now - last_progress[1]:.0f} s"
                self._report(f"no step for {waited} (processes by step: {steps})")


def to_hosts(tree: Any) -> Any:
    """Gather arrays with the rows of all processes on every host."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    return multihost_utils.process_allgather(tree, tiled=True)
