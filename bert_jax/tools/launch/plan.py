"""Plans: what an engine does to run a command, and its execution."""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bert_jax.errors import EXIT_INTERRUPTED, EXIT_NEGATIVE, UserError
from bert_jax.storage import files

# Time that a run has to save its state between SIGTERM and SIGKILL.
STOP_SECONDS = 180.0

KILLED = range(129, 256)
# An attempt fails early if it does not reach the run, or the run ends within this time. The wait after it
# is twice that after the one before; after several in a row the launcher gives up.
_EARLY_SECONDS, _MAX_EARLY_FAILURES = 60.0, 6
_MAX_WAIT_SECONDS = 600.0
# Exit status of a command of `setup`: the machines run another command, so they must not be deleted.
EXIT_BUSY = 3

_INSTALL = {
    "gcloud": "install the Google Cloud CLI and run `gcloud auth login`",
    "kubectl": "install it and run `gcloud container clusters get-credentials CLUSTER`",
    "sbatch": "run this on a login node of a Slurm cluster",
    "sky": "pip install 'skypilot[gcp]' (or [aws], …) and run `sky check`",
    "git": "install git",
}


class Process(NamedTuple):
    """A process of a run.

    Attributes:
        command: program and arguments.
        environment: variables added to those of this process.
        prefix: prefix of each line of output; "" connects the process to the terminal.
    """

    command: Sequence[str]
    environment: dict[str, str] = {}  # noqa: RUF012 (never changed)
    prefix: str = ""


class Plan(NamedTuple):
    """What to do, in this order.

    Attributes:
        files: content by absolute path, written first.
        setup: idempotent commands before every run; the first creates the machines.
        processes: parallel processes of a run; empty if `setup` submits a job.
        confirm: command that prints 0 first if the run has ended well, as an exit status of 0 may also mean
            that there was no machine; () if the exit status is reliable.
        teardown: commands after the last run, also after one that could not start; they delete the machines.
        retry_statuses: exit statuses after which the run is repeated.
        restarts: maximum number of repetitions.
        query: what the engine's `ask` needs besides the name.
        logs: command that follows its output; () if it is that of this process.
        stop: commands that stop the job after this process has ended.
        delete: command that deletes the machines; () if the engine does so.
        name: name of the job.
        folder: folder that the job writes to.
        dollars_per_hour: price of the machines; 0 if it is unknown.
    """

    files: dict[str, str] = {}  # noqa: RUF012
    setup: Sequence[Sequence[str]] = ()
    processes: Sequence[Process] = ()
    confirm: Sequence[str] = ()
    teardown: Sequence[Sequence[str]] = ()
    retry_statuses: frozenset[int] = frozenset()
    restarts: int = 0
    query: Sequence[str] = ()
    logs: Sequence[str] = ()
    stop: Sequence[Sequence[str]] = ()
    delete: Sequence[str] = ()
    name: str = ""
    folder: str = ""
    dollars_per_hour: float = 0.0


def script(plan: Plan) -> str:
    """Return a plan as a shell script, as `--dry-run` prints it."""
    lines = []
    for path, content in plan.files.items():
        lines.append(f"mkdir -p {shlex.quote(os.path.dirname(path))}")
        lines.append(f"cat > {shlex.quote(path)} <<'END OF {os.path.basename(path)}'")
        lines.append(f"{content}END OF {os.path.basename(path)}")
    lines += map(shlex.join, plan.setup)
    several = len(plan.processes) > 1
    for process in plan.processes:
        settings = [f"{key}={shlex.quote(value)}" for key, value in process.environment.items()]
        line = " ".join([*settings, shlex.join(process.command)])
        lines.append(f"{line} &" if several else line)
    if several:
        lines.append("wait")
    lines += map(shlex.join, plan.teardown)
    return "\n".join(lines)


def run(plan: Plan) -> int:
    """Execute a plan and return the exit status of its last run; 0 for a submitted job.

    SIGINT and SIGTERM end it. Machines then remain, because the run on them continues. After early
    failures it waits before the next attempt, first for $BERT_JAX_LAUNCH_WAIT_SECONDS (default 10).
    """
    for command in [*plan.setup, *(process.command for process in plan.processes)]:
        program = "gcloud" if command[0] == "bash" else command[0]  # a script that calls it
        if not shutil.which(program):
            raise UserError(f"{program} is not on the PATH: {_INSTALL.get(program, 'install it')}")
    for path, content in plan.files.items():
        with files.one_line_errors(f"cannot write {path}"):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            files.write(path, content)

    status, interrupted, errors = 0, False, []
    restarts = early_failures = 0
    teardown, first_wait = plan.teardown, first_wait_seconds()
    price = (
        f"the machines cost ${plan.dollars_per_hour:,.2f} an hour" if plan.dollars_per_hour else ""
    )
    with signals() as received:  # between commands, which `run_processes` forwards signals to
        while True:
            command, status, interrupted = _first_failure(plan.setup)
            start_time = time.monotonic()
            if status and status not in plan.retry_statuses and not interrupted:
                errors.append(f"{shlex.join(command)} exited with status {status}")
                if status == EXIT_BUSY or command == plan.setup[0]:
                    teardown = ()
            elif not status and not interrupted:
                status, interrupted = run_processes(plan.processes)
                if not status and not interrupted and not _is_confirmed(plan.confirm):
                    status = EXIT_NEGATIVE
            interrupted = interrupted or bool(received)
            if interrupted or status not in plan.retry_statuses or restarts == plan.restarts:
                break
            is_early = time.monotonic() - start_time < _EARLY_SECONDS
            early_failures = early_failures + 1 if is_early else 0
            if early_failures == _MAX_EARLY_FAILURES:
                errors.append(
                    f"{early_failures} times in a row the run was not reached or ended within a minute "
                    f"(exit status {status})"
                )
                break
            restarts += 1
            wait = min(first_wait * 2 ** (early_failures - 1), _MAX_WAIT_SECONDS) * is_early
            text = f"exit status {status}: restarting in {wait:g} s ({restarts} of {plan.restarts})"
            say("; ".join(filter(None, [text, price])))
            end_time = time.monotonic() + wait
            while time.monotonic() < end_time and not received:
                time.sleep(0.05)
        if interrupted and plan.stop and (status or plan.processes):  # the run is on other machines
            say("a run that has started continues; the same command follows it again")
            status, teardown = EXIT_INTERRUPTED, ()
        command, failure, _ = _first_failure(teardown)
    if failure:
        errors.append(f"{shlex.join(command)} exited with status {failure}: run it again")
    if plan.delete and not teardown:
        verb = "stop" if plan.delete in plan.stop else "delete"
        price = price or "the machines cost money while they exist"
        say(f"{price}; to delete them: bert-jax launch {verb} {plan.name}")
    if errors:
        raise UserError("; ".join(errors))
    return status


def _is_confirmed(command: Sequence[str]) -> bool:
    if not command:
        return True
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, timeout=120)
        return done.stdout.split(b"\n")[0].strip() == b"0"
    return False


def first_wait_seconds() -> float:
    """Return the time before a second attempt; that before each further one is twice as long."""
    return float(os.environ.get("BERT_JAX_LAUNCH_WAIT_SECONDS", 10))


def run_processes(
    processes: Sequence[Process], stop_seconds: float = STOP_SECONDS, groups: bool = False
) -> tuple[int, bool]:
    """Run processes in parallel until all have exited.

    SIGINT and SIGTERM are forwarded to all of them. If one fails, the others receive SIGTERM. Those
    that still run `stop_seconds` after either are killed.

    Args:
        processes: the processes.
        stop_seconds: time between SIGTERM and SIGKILL.
        groups: start every process in a session of its own, and send signals to all processes in it.

    Returns:
        The exit status (128 + N after signal N): 2 if any process exited with 2, else that of the
        first to fail; and whether a signal was received.
    """
    running: list[subprocess.Popen] = []
    pumps: list[threading.Thread] = []
    failed: list[int] = []
    with signals() as received:
        forwarded, deadline = 0, float("inf")
        try:
            for process in processes:
                running.append(_start(process, groups))
                pumps += _pump(running[-1], process.prefix)
            while running:
                exited = [child for child in running if child.poll() is not None]
                running = [child for child in running if child not in exited]
                bad = sorted(exit_status(child) for child in exited if child.returncode)
                if bad and not failed and running:
                    say(
                        f"a process exited with status {bad[-1]}: stopping the other {len(running)}"
                    )
                    _send(running, signal.SIGTERM)
                    deadline = min(deadline, time.monotonic() + stop_seconds)
                # Of several that failed at once, a killed one explains the errors of the others.
                failed += reversed(bad)
                if len(received) > forwarded:
                    _send(running, received[-1])
                    forwarded = len(received)
                    deadline = min(deadline, time.monotonic() + stop_seconds)
                if time.monotonic() > deadline:
                    _send(running, signal.SIGKILL)
                time.sleep(0.05)
        finally:
            _send(running, signal.SIGKILL)
        for pump in pumps:
            pump.join(timeout=5)  # a grandchild may keep the pipe open
    status = 2 if 2 in failed else (failed[0] if failed else 0)
    return status, bool(received)


@contextlib.contextmanager
def signals() -> Iterator[list[int]]:
    """Catch SIGINT and SIGTERM in the block; yield the list of those received so far."""
    received: list[int] = []
    old = {
        number: signal.signal(number, lambda number, frame: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield received
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _start(process: Process, new_session: bool) -> subprocess.Popen:
    pipe = subprocess.PIPE if process.prefix else None
    with files.one_line_errors(f"cannot start {process.command[0]}"):
        return subprocess.Popen(
            process.command,
            env={**os.environ, **process.environment},
            stdout=pipe,
            stderr=pipe,
            # Otherwise Ctrl-C would reach it twice, from the terminal and from this process.
            start_new_session=new_session or bool(process.prefix),
        )


def _pump(child: subprocess.Popen, prefix: str) -> list[threading.Thread]:
    """Start threads that copy the output of a child line by line, with a prefix."""

    def copy(source, target) -> None:
        for line in source:
            text = line.decode(errors="replace").rstrip("\n")
            target.write(f"{prefix}{text}\n")  # one call, so that lines stay whole
            target.flush()

    streams = [(child.stdout, sys.stdout), (child.stderr, sys.stderr)]
    pumps = [threading.Thread(target=copy, args=s, daemon=True) for s in streams if s[0]]
    for pump in pumps:
        pump.start()
    return pumps


def _send(children: Sequence[subprocess.Popen], number: int) -> None:
    for child in children:
        signal_group(child, number)


def signal_group(child: subprocess.Popen, number: int) -> None:
    """Send a signal to the process group that a running child leads, else to the child alone."""
    with contextlib.suppress(ProcessLookupError):
        if os.getpgid(child.pid) == child.pid:
            os.killpg(child.pid, number)
        else:
            child.send_signal(number)


def exit_status(child: subprocess.Popen | subprocess.CompletedProcess) -> int:
    """Return the exit status as a shell reports it: 128 + N after signal N."""
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _first_failure(commands: Sequence[Sequence[str]]) -> tuple[Sequence[str], int, bool]:
    """Run commands until one fails or a signal is received.

    Returns:
        The last command and its exit status, or () and 0 without one; and whether a signal was received.
    """
    command, status, interrupted = (), 0, False
    for command in commands:
        say("$ " + shlex.join(command))
        status, interrupted = run_processes([Process(command)], groups=True)
        if status or interrupted:
            break
    return command, status, interrupted


def say(line: str) -> None:
    """Print a line to standard error."""
    print(f"launch: {line}", file=sys.stderr, flush=True)
