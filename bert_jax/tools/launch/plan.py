"""Plans: what an engine does to run a command, and its execution."""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from typing import IO, NamedTuple

from bert_jax.errors import EXIT_INTERRUPTED, EXIT_NEGATIVE, UserError
from bert_jax.runtime.signals import record_signals
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
}


class Process(NamedTuple):
    """A process of a run."""

    command: Sequence[str]
    environment: dict[str, str] = {}  # added to that of this process  # noqa: RUF012
    prefix: str = ""  # of each line of output; "" connects the process to the terminal


class Plan(NamedTuple):
    """What to do, in this order: write files, set up and run until no restart is due, delete the machines."""

    files: dict[str, str] = {}  # content by absolute path  # noqa: RUF012
    # Idempotent commands before every run; the first creates the machines.
    setup: Sequence[Sequence[str]] = ()
    processes: Sequence[Process] = ()  # run in parallel; () if `setup` submits a job
    # Prints 0 first if the run has ended well, as an exit status of 0 may also mean that there was no machine;
    # () if the exit status is reliable.
    confirm: Sequence[str] = ()
    delete: Sequence[str] = ()  # deletes the machines; () if the engine does so
    # Whether the machines remain; else they are deleted, also if no run could start.
    keep: bool = False
    retry_statuses: frozenset[int] = frozenset()  # exit statuses after which the run is repeated
    restarts: int = 0  # maximum number of repetitions
    query: Sequence[str] = ()  # what the engine's `ask` needs besides the name
    logs: Sequence[str] = ()  # follows the output; () if it is that of this process
    stop: Sequence[Sequence[str]] = ()  # stop the job after this process has ended
    name: str = ""  # of the job
    folder: str = ""  # that the job writes to
    dollars_per_hour: float = 0.0  # price of the machines; 0 if it is unknown


def script(plan: Plan) -> str:
    """Return a plan as a shell script, as `--dry-run` prints it."""
    lines = []
    for path, content in plan.files.items():
        end = f"END OF {os.path.basename(path)}"
        lines.append(f"mkdir -p {shlex.quote(os.path.dirname(path))}")
        lines.append(f"cat > {shlex.quote(path)} <<'{end}'\n{content}{end}")
    lines += map(shlex.join, plan.setup)
    background = " &" if len(plan.processes) > 1 else ""
    for process in plan.processes:
        settings = [f"{key}={shlex.quote(value)}" for key, value in process.environment.items()]
        lines.append(" ".join([*settings, shlex.join(process.command)]) + background)
    lines += ["wait"] if background else []
    lines += [shlex.join(plan.delete)] if plan.delete and not plan.keep else []
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

    status, errors, restarts, early_failures = EXIT_INTERRUPTED, [], 0, 0
    delete, price = () if plan.keep else plan.delete, ""
    if plan.dollars_per_hour:
        price = f"the machines cost ${plan.dollars_per_hour:,.2f} an hour"
    with record_signals() as received:
        while not received:
            command, status = _run_commands(plan.setup, received)
            start_time = time.monotonic()
            if status and status not in plan.retry_statuses and not received:
                errors.append(f"{shlex.join(command)} exited with status {status}")
                if status == EXIT_BUSY or command == plan.setup[0]:
                    delete = ()
            elif not status and plan.processes:
                status = EXIT_INTERRUPTED if received else run_processes(plan.processes, received)
                if not status and not received and plan.confirm:
                    answer, _ = read_output(plan.confirm)
                    status = 0 if (answer or "").split("\n")[0] == "0" else EXIT_NEGATIVE
            if received or status not in plan.retry_statuses or restarts == plan.restarts:
                break
            is_early = time.monotonic() - start_time < _EARLY_SECONDS
            early_failures = early_failures + 1 if is_early else 0
            if early_failures == _MAX_EARLY_FAILURES:
                times = f"{early_failures} times in a row the run was not reached or ended within a minute"
                errors.append(f"{times} (exit status {status})")
                break
            restarts += 1
            wait = backoff_seconds(early_failures - 1) if is_early else 0.0
            text = f"exit status {status}: restarting in {wait:g} s ({restarts} of {plan.restarts})"
            say("; ".join(filter(None, [text, price])))
            end_time = time.monotonic() + wait
            while time.monotonic() < end_time and not received:
                time.sleep(0.05)
        if received and plan.stop and (status or plan.processes):  # the run is on other machines
            say("a run that has started continues; the same command follows it again")
            status, delete = EXIT_INTERRUPTED, ()
        if delete and (failure := _run_commands([delete], received)[1]):
            errors.append(f"{shlex.join(delete)} exited with status {failure}: run it again")
    if plan.delete and not delete:
        verb = "delete" if plan.keep else "stop"
        price = price or "the machines cost money while they exist"
        say(f"{price}; to delete them: bert-jax launch {verb} {plan.name}")
    if errors:
        raise UserError("; ".join(errors))
    return status


def read_output(command: Sequence[str], seconds: float = 120.0) -> tuple[str | None, str]:
    """Return the output of a command and "", or None and the line that says why it failed."""
    try:
        done = subprocess.run(command, capture_output=True, errors="replace", timeout=seconds)
    except FileNotFoundError:
        return None, f"{command[0]} is not on the PATH"
    except subprocess.TimeoutExpired:
        return None, f"{shlex.join(command)} did not answer within {seconds:g} s"
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        errors = [line for line in lines if re.match("error", line, re.IGNORECASE)] + lines[-1:]
        return None, errors[0] if errors else f"{command[0]} exited with status {done.returncode}"
    return done.stdout.strip(), ""


def backoff_seconds(failures: int) -> float:
    """Return the time before another attempt after a first one and this number of others have failed."""
    first = float(os.environ.get("BERT_JAX_LAUNCH_WAIT_SECONDS", 10))
    return min(first * 2**failures, _MAX_WAIT_SECONDS)


def run_processes(
    processes: Sequence[Process], received: Sequence[int], stop_seconds: float = STOP_SECONDS
) -> int:
    """Run processes in parallel until all have exited, and return the exit status (128 + N after signal N).

    It is 2 if any process exited with 2, else that of the first to fail. Each process has a session of its own,
    since Ctrl-C would otherwise reach it twice. Signals in `received`, which `record_signals` adds to,
    are forwarded to all. If one fails, the others receive SIGTERM; those that still run `stop_seconds` after either
    are killed.
    """
    running: list[subprocess.Popen] = []
    pumps: list[threading.Thread] = []
    failed: list[int] = []
    forwarded, deadline = 0, float("inf")
    try:
        for process in processes:
            child, threads = _start(process)
            running.append(child)
            pumps += threads
        while running:
            exited = [child for child in running if child.poll() is not None]
            running = [child for child in running if child not in exited]
            bad = sorted(exit_status(child) for child in exited if child.returncode)
            number = 0
            if bad and not failed and running:
                say(f"a process exited with status {bad[-1]}: stopping the other {len(running)}")
                number = signal.SIGTERM
            # Of several that failed at once, a killed one explains the errors of the others.
            failed += reversed(bad)
            if len(received) > forwarded:
                number, forwarded = received[-1], len(received)
            if number:
                deadline = min(deadline, time.monotonic() + stop_seconds)
            if time.monotonic() > deadline:
                number = signal.SIGKILL
            signal_groups(running, number)
            time.sleep(0.05)
    finally:
        signal_groups(running, signal.SIGKILL)
    for pump in pumps:
        pump.join(timeout=5)  # a grandchild may keep the pipe open
    return 2 if 2 in failed else (failed[0] if failed else 0)


def start_logged(
    command: Sequence[str], log: IO[bytes], descriptors: Sequence[int] = ()
) -> subprocess.Popen:
    """Start a process that writes to a log, and inherits file descriptors, in a session of its own."""
    output = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
    return subprocess.Popen(command, **output, start_new_session=True, pass_fds=descriptors)


def _start(process: Process) -> tuple[subprocess.Popen, list[threading.Thread]]:
    """Start a process, and threads that copy its output line by line if it has a prefix."""
    pipe = subprocess.PIPE if process.prefix else None
    variables = {**os.environ, **process.environment}
    with files.one_line_errors(f"cannot start {process.command[0]}"):
        child = subprocess.Popen(
            process.command, env=variables, stdout=pipe, stderr=pipe, start_new_session=True
        )

    def copy(source, target) -> None:
        for line in source:
            text = line.decode(errors="replace").rstrip("\n")
            target.write(f"{process.prefix}{text}\n")  # one call, so that lines stay whole
            target.flush()

    streams = [(child.stdout, sys.stdout), (child.stderr, sys.stderr)]
    pumps = [threading.Thread(target=copy, args=s, daemon=True) for s in streams if s[0]]
    for pump in pumps:
        pump.start()
    return child, pumps


def signal_groups(children: Iterable[subprocess.Popen], number: int) -> None:
    """Send a signal to the process groups that running children lead; 0 sends none."""
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)


def exit_status(child: subprocess.Popen | subprocess.CompletedProcess) -> int:
    """Return the exit status as a shell reports it: 128 + N after signal N."""
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _run_commands(
    commands: Sequence[Sequence[str]], received: Sequence[int]
) -> tuple[Sequence[str], int]:
    """Run commands until one fails or a signal is received; return the last one and its exit status."""
    command, status = (), 0
    for command in commands:
        say("$ " + shlex.join(command))
        status = run_processes([Process(command)], received)
        if status or received:
            break
    return command, status


def say(line: str) -> None:
    """Print a line to standard error."""
    print(f"launch: {line}", file=sys.stderr, flush=True)
