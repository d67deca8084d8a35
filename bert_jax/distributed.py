"""Several processes as one run: how they find each other, agree, and notice that one is gone.

Environment, set by `bert-jax launch` or by hand, the same for `pretrain` and `finetune`:

BERT_JAX_COORDINATOR, BERT_JAX_PROCESSES, BERT_JAX_PROCESS
    host:port of process 0, how many processes there are, and which this one is
BERT_JAX_DISTRIBUTED=auto
    instead of these three: Slurm, Cloud TPU and GKE tell JAX themselves
BERT_JAX_JOIN_SECONDS, BERT_JAX_LOST_SECONDS, BERT_JAX_STUCK_SECONDS
    how long to wait for the others at the start; for a sign of life of one; for a step
"""

import collections
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.distributed import global_state  # JAX has no public door to its key-value store
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bert_jax.errors import UserError
from bert_jax.progress import Progress

EXIT_RUN_AGAIN = 75
_SECONDS = {"JOIN": 300.0, "LOST": 60.0, "STUCK": 1800.0}
_PREFIX = "bert_jax"
_FAREWELL_SECONDS = 5.0


def start() -> None:
    """Joins the other processes, if the environment says that there are any.

    Must come before anything else of JAX. Only process 0 writes to the terminal afterwards, errors
    apart.

    Raises:
        UserError: the environment is incomplete. A process that the others do not find in time
            ends with one line and status 2.
    """
    names = [f"BERT_JAX_{name}" for name in ("COORDINATOR", "PROCESSES", "PROCESS")]
    given = {name: os.environ[name] for name in names if name in os.environ}
    auto = os.environ.get("BERT_JAX_DISTRIBUTED", "")
    if auto not in ("", "auto"):
        raise UserError(f"BERT_JAX_DISTRIBUTED is {auto!r}: it may be 'auto'")
    if not given and not auto:
        return
    # Whoever is told to stop is told by us (`Stopping`); JAX's own would take the signal away.
    jax.config.update("jax_enable_preemption_service", False)
    wait = _seconds("JOIN")
    options: dict[str, Any] = {"initialization_timeout": int(wait) + 60}
    who = "this process"
    if given:
        if missing := [name for name in names if name not in given]:
            raise UserError(f"{', '.join(given)} without {', '.join(missing)}: set all three")
        address, (count, this) = given[names[0]], _numbers(given, names[1:])
        if not 0 <= this < count:
            raise UserError(f"{names[2]} is {this}: it must be 0 to {count - 1}")
        if ":" not in address or not address.rpartition(":")[2].isdigit():
            raise UserError(f"{names[0]} is {address!r}: it must be HOST:PORT")
        who = f"process {this} of {count}"
        options.update(
            coordinator_address=address,
            num_processes=count,
            process_id=this,
            cluster_detection_method="deactivate",
        )
    where = given.get(names[0], "found by JAX")

    def give_up():
        _leave(
            f"{who} waited {wait:g} s for the others (coordinator {where}): start all of them, "
            "where they can reach that address, or raise BERT_JAX_JOIN_SECONDS",
            2,
        )

    timer = threading.Timer(wait, give_up)  # JAX itself would abort with a stack trace
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(**options)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"{who} cannot join the others ({where}): {_line(error)}") from None
    finally:
        timer.cancel()
    if jax.process_index():
        Progress.shown = False
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (as long as the process)


def _numbers(given: dict[str, str], names: list[str]) -> list[int]:
    for name in names:
        if not given[name].isdigit():
            raise UserError(f"{name} is {given[name]!r}: it must be a number")
    return [int(given[name]) for name in names]


def _seconds(name: str) -> float:
    key = f"BERT_JAX_{name}_SECONDS"
    try:
        return float(os.environ.get(key, _SECONDS[name]))
    except ValueError:
        raise UserError(f"{key} is {os.environ[key]!r}: it must be a number of seconds") from None


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def _leave(message: str, status: int) -> None:
    """Ends the process at once: others may wait in a collective, and so would JAX's own farewell."""
    print(f"bert-jax: {message}", file=sys.stderr, flush=True)
    os._exit(status)


_rounds = iter(range(2**62))


def gather(what: str, text: str) -> list[str]:
    """A text from every process, in order; all must call this, in the same order.

    Args:
        what: names the moment in messages.
        text: this process's.

    Raises:
        UserError: a process did not come in time; names it.
    """
    count, client = jax.process_count(), global_state.client
    if count == 1:
        return [text]
    key, wait = f"{_PREFIX}/{next(_rounds)}", _seconds("JOIN")
    client.key_value_set(f"{key}/{jax.process_index()}", text)
    deadline, texts = time.monotonic() + wait, []
    for process in range(count):
        left = max(deadline - time.monotonic(), 1)
        try:
            texts.append(client.blocking_key_value_get(f"{key}/{process}", int(left * 1000)))
        except jax.errors.JaxRuntimeError:
            raise UserError(
                f"process {process} of {count} did not come to {what} within {wait:g} s: look at "
                "its output"
            ) from None
    if jax.process_index():
        client.key_value_set(f"{key}/read/{jax.process_index()}", "")
    else:  # it holds the store: should it leave now, the others could not read
        _wait_for_all(f"{key}/read", deadline)
    return texts


def _wait_for_all(key: str, deadline: float) -> None:
    for process in range(1, jax.process_count()):
        left = max(deadline - time.monotonic(), 0.1)
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            global_state.client.blocking_key_value_get(f"{key}/{process}", int(left * 1000))


def leave() -> None:
    """Before a process ends by a mistake: process 0 lets the others speak first.

    Without it, JAX ends them the moment it is gone.
    """
    if global_state.client is None:
        return
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        if jax.process_index():
            global_state.client.key_value_set(f"{_PREFIX}/left/{jax.process_index()}", "")
        else:
            _wait_for_all(f"{_PREFIX}/left", time.monotonic() + _FAREWELL_SECONDS)


def first(what: str, action: Callable[[], None]) -> None:
    """Process 0 does something, and the others go on when it is done.

    Raises:
        UserError: on all of them what it raised on process 0.
    """
    trouble = ""
    if jax.process_index() == 0:
        try:
            action()
        except UserError as error:
            trouble = str(error)
    trouble = gather(what, trouble)[0]
    if trouble:
        raise UserError(trouble)


def require_same(told: dict[str, Any]) -> None:
    """Refuses to go on unless all processes were told the same.

    Raises:
        UserError: names the processes and the keys that differ.
    """
    own = json.dumps(told, default=str)
    texts = gather("the comparison of their settings", own)
    for process, text in enumerate(texts):
        if text != texts[0]:
            here, there = json.loads(texts[0]), json.loads(text)
            differ = [
                f"{key}: {here.get(key)!r} and {there.get(key)!r}"
                for key in {**here, **there}
                if here.get(key) != there.get(key)
            ]
            raise UserError(
                f"processes 0 and {process} differ ({'; '.join(differ)[:500]}): start all with the "
                "same command and the same versions"
            )


def _of_a_collective(error: BaseException) -> bool:
    # CPU's collectives report a closed connection as a ValueError.
    return isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error)


class Stopping:
    """Whether any process was told to stop; all of them learn it after the same step.

    A step's answer is asked for some steps later, so that nobody waits for it.
    """

    def __init__(self, steps_ahead: int):
        self._ahead, self._asked = steps_ahead, collections.deque()
        self._alone = jax.process_count() == 1  # asking JAX for every step takes its time
        mesh = Mesh(np.array(jax.devices()), "all")
        self._split = NamedSharding(mesh, PartitionSpec("all"))
        self._any = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def __call__(self, told: bool) -> bool:
        """After every step: `told` is this process's."""
        if self._alone:
            return told
        flags = np.full(jax.local_device_count(), told, np.int32)
        flags = jax.make_array_from_process_local_data(self._split, flags)
        self._asked.append(self._any(flags))
        return len(self._asked) > self._ahead and bool(self._asked.popleft())


class Watch:
    """Signs of life: each process tells its step, and a process that is gone or stuck is named.

    A collective waits for ever for a process that is no longer there. So a thread ends this process
    with status 75, "run me again", when another has given no sign of life for a time.

    Attributes:
        step: the last one done.
    """

    def __init__(self) -> None:
        self.step, self._over = 0, threading.Event()
        self._lost, self._stuck = _seconds("LOST"), _seconds("STUCK")

    def __enter__(self) -> "Watch":
        if jax.process_count() > 1:
            threading.Thread(target=self._run, daemon=True).start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Ends the process where a collective failed: the error says what, the others who."""
        cause = error
        while cause is not None and not _of_a_collective(cause):
            cause = cause.__cause__
        if cause is not None and jax.process_count() > 1:
            self._over.wait(self._lost + 3 * self._pause())  # for the thread to name it
            who = f"process {jax.process_index()} of {jax.process_count()}"
            self._tell(f"{who} lost another at step {self.step:,} ({_line(cause)})")
        self._over.set()

    def _tell(self, message: str) -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            key = f"{_PREFIX}/gone"
            global_state.client.key_value_set(key, message, allow_overwrite=True)
            if jax.process_index() == 0:  # it holds the store that the others read this from
                time.sleep(2 * self._pause())
        _leave(f"{message}; run the same command to go on", EXIT_RUN_AGAIN)

    def _pause(self) -> float:
        return min(self._lost / 6, 5.0)

    def _run(self) -> None:
        client, this = global_state.client, jax.process_index()
        # Everybody looks at process 0, and process 0 at everybody.
        others = [0] if this else range(1, jax.process_count())
        heard = {process: ("", time.monotonic()) for process in others}
        moved, beat = (self.step, time.monotonic()), 0
        while not self._over.wait(self._pause()):
            now, beat = time.monotonic(), beat + 1
            if moved[0] != self.step:
                moved = self.step, now
            try:
                sign = f"{beat} {self.step}"
                client.key_value_set(f"{_PREFIX}/alive/{this}", sign, allow_overwrite=True)
                signs = dict(client.key_value_dir_get(f"{_PREFIX}/alive/"))
                gone = dict(client.key_value_dir_get(f"{_PREFIX}/"))
            except jax.errors.JaxRuntimeError:
                continue  # process 0 holds the store: its silence counts
            signs = {int(key.rpartition("/")[2]): value for key, value in signs.items()}
            if message := gone.get(f"{_PREFIX}/gone"):
                _leave(f"{message}; run the same command to go on", EXIT_RUN_AGAIN)
            for process, (before, since) in heard.items():
                sign = signs.get(process, "")
                if sign != before:
                    heard[process] = sign, now
                elif now - since > self._lost:
                    self._tell(
                        f"process {process} of {jax.process_count()} has given no sign of life for "
                        f"{now - since:.0f} s"
                    )
            if now - moved[1] > self._stuck:
                steps = ", ".join(f"{p} at {signs[p].split()[1]}" for p in sorted(signs))
                self._tell(f"no step for {now - moved[1]:.0f} s (processes by step: {steps})")
