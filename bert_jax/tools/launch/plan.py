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

from bert_jax.errors import EXIT_INTERRUPTED, UserError
from bert_jax.storage import files

# Time that a run has to save its state between SIGTERM and SIGKILL.
STOP_SECONDS = 180.0

KILLED = range(129, 256)
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
        teardown: commands after the last run, also after one that could not start; they delete the machines.
        retry_statuses: exit statuses after which the run is repeated.
        restarts: maximum number of repetitions.
        status: command that shows the state of the job; () if only this process knows it.
        logs: command that follows its output; () if it is that of this process.
        stop: commands that stop the job after this process has ended.
        active: command that prints something while a job of this name is queued or runs; () if
            there is none.
        folder: folder that the job writes to.
        cost_warning: printed at the end, if machines may remain that cost money.
    """

    files: dict[str, str] = {}  # noqa: RUF012
    setup: Sequence[Sequence[str]] = ()
    processes: Sequence[Process] = ()
    teardown: Sequence[Sequence[str]] = ()
    retry_statuses: frozenset[int] = frozenset()
    restarts: int = 0
    status: Sequence[str] = ()
    logs: Sequence[str] = ()
    stop: Sequence[Sequence[str]] = ()
    active: Sequence[str] = ()
    folder: str = ""
    cost_warning: str = ""


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

    SIGINT and SIGTERM end it. Machines then remain, because the run on them continues.
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
    teardown = plan.teardown
    with signals() as received:  # between commands, which `run_processes` forwards signals to
        for restart in range(plan.restarts + 1):
            command, status, interrupted = _first_failure(plan.setup)
            if status and status not in plan.retry_statuses and not interrupted:
                errors.append(f"{shlex.join(command)} exited with status {status}")
                if status == EXIT_BUSY or command == plan.setup[0]:
                    teardown = ()
            elif not status and not interrupted:
                status, interrupted = run_processes(plan.processes)
            interrupted = interrupted or bool(received)
            if interrupted or status not in plan.retry_statuses:
                break
            if restart < plan.restarts:
                say(f"exit status {status}: restarting ({restart + 1} of {plan.restarts})")
        if interrupted and plan.stop and (status or plan.processes):  # the run is on other machines
            say("a run that has started continues; the same command follows it again")
            status, teardown = EXIT_INTERRUPTED, ()
        command, failure, _ = _first_failure(teardown)
    if failure:
        errors.append(f"{shlex.join(command)} exited with status {failure}: run it again")
    if plan.cost_warning and not teardown:
        say(plan.cost_warning)
    if errors:
        raise UserError("; ".join(errors))
    return status


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
