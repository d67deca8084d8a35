"""Jobs by name: their state, output and end, from any folder and after the launcher has been closed."""

import contextlib
import datetime
import json
import os
import pathlib
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import Any

from bert_jax.errors import EXIT_INTERRUPTED, EXIT_USER_ERROR, InUse, UserError
from bert_jax.storage import files
from bert_jax.tools.launch import plan as plan_lib
from bert_jax.tools.launch.engines import ENGINES, SUBMITTED
from bert_jax.tools.launch.engines.base import State, python_command, state_folder

# The record of a job, its output, a mark that its user has stopped it, and a folder that is locked meanwhile.
_FILE, _LOG, _STOPPED, _STOPPING = "job.json", "log", "stopped", "stopping"
_DELETE_SECONDS = 900


def start(on: str, name: str, plan: plan_lib.Plan) -> int:
    """Execute a plan and return the exit status, as `plan.run`; `status` and others then know the job."""
    folder = state_folder(name)
    with _job_lock(folder, name):
        _check_name(on, name, plan)
        (folder / _STOPPED).unlink(missing_ok=True)
        log = folder / _LOG
        if log.exists() and not os.path.samestat(log.stat(), os.fstat(1)):
            log.unlink()  # of an earlier launcher
        job: dict[str, Any] = {
            "on": on,
            "began": datetime.datetime.now().isoformat(" ", "seconds"),
            "launcher": os.getpid(),
            **{key: getattr(plan, key) for key in ("folder", "query", "logs", "stop", "delete")},
        }
        files.write_json(folder / _FILE, job)
        end: dict[str, Any] = {"ended": EXIT_USER_ERROR, "failed": True}
        try:
            status = plan_lib.run(plan)
            end = {"ended": status}
            if status != EXIT_INTERRUPTED and not plan.keep:
                end["delete"] = ()
        finally:
            files.write_json(folder / _FILE, job | end)
    if on in SUBMITTED:
        plan_lib.say(f"its state, output and end: bert-jax launch status|logs|stop {name}")
    return status


@contextlib.contextmanager
def _job_lock(folder: pathlib.Path, name: str) -> Iterator[None]:
    deadline = time.monotonic() + 1  # `_is_running` has the lock for a moment
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(files.lock_folder(folder))
                break
            except InUse:
                if time.monotonic() > deadline:
                    advice = f"see `bert-jax launch status {name}`, or choose another --name"
                    raise UserError(f"a launcher of {name} is running: {advice}") from None
                time.sleep(0.05)
        yield


def _record(name: str) -> dict[str, Any]:
    path = state_folder(name) / _FILE
    return json.loads(path.read_text()) if path.exists() else {}


def _check_name(on: str, name: str, plan: plan_lib.Plan) -> None:
    """Check that no active job, and no machines, of this name are others: `stop` would end both."""
    record, advice = _record(name), f"choose another --name, or `bert-jax launch {{}} {name}` first"
    if record.get("delete") and [*record["delete"]] != [*plan.delete]:
        raise UserError(f"other machines of the name {name} may exist: {advice.format('delete')}")
    other = record.get("folder", plan.folder)
    if on in SUBMITTED and other != plan.folder and ask(name).kind in ("waiting", "running"):
        where = f"a job {name} that writes to {other} is queued or running"
        raise UserError(f"{where}: {advice.format('stop')}")


def detach(on: str, name: str, arguments: Sequence[str]) -> int:
    """Start a launcher in the background by arguments without `--detach`; return when it has begun."""
    if on in SUBMITTED:
        raise UserError(f"--detach: --on {on} queues the job and returns; remove it")
    folder = state_folder(name)
    with _job_lock(folder, name):
        (folder / _LOG).unlink(missing_ok=True)
        log = open(folder / _LOG, "wb")  # noqa: SIM115 (the launcher's)
    with log:
        process = plan_lib.start_logged([*python_command(), *arguments], log)
    while _record(name).get("launcher") != process.pid:
        if process.poll() is not None:
            lines = (folder / _LOG).read_text(errors="replace").splitlines()
            raise UserError(f"the launcher failed: {lines[-1] if lines else 'without a message'}")
        time.sleep(0.05)
    plan_lib.say(f"{name} runs in the background; its output: bert-jax launch logs {name}")
    return 0


def _read(name: str) -> tuple[pathlib.Path, dict[str, Any]]:
    """Return the folder and the record of a job, which must have one."""
    folder = state_folder(name)
    if job := _record(name):
        return folder, job
    known = ", ".join(sorted(path.parent.name for path in folder.parent.glob(f"*/{_FILE}")))
    raise UserError(f"no job {name} was launched by this user here; known: {known or 'none'}")


def _is_running(folder: pathlib.Path) -> bool:
    """Whether the launcher of a job is running."""
    try:
        with files.lock_folder(folder):
            return False
    except InUse:
        return True


def ask(name: str) -> State:
    """Return the state of a job: what its engine says, or, of a local one, what its launcher recorded."""
    try:
        if not (job := _record(name)):
            return State("lost", text=f"{name} was not launched by this user on this machine")
        if job["on"] == "local":
            state = State("running" if _is_running(state_folder(name)) else "lost")
        else:
            state = ENGINES[job["on"]].ask(name, job["query"])
        is_known = "ended" in job and job["on"] not in SUBMITTED and not job.get("delete")
        if state.kind == "lost" and is_known:  # processes here, or a slice that was deleted
            state = State("failed" if job["ended"] else "done", job["ended"])
        if state.kind in ("failed", "lost") and was_stopped(name):
            state = state._replace(kind="stopped")
        return state
    except Exception as error:  # an answer that cannot be read
        return State("unknown", text=repr(error))


def show_status(name: str) -> int:
    """Print what is known of a job; return 0, or 1 if its engine does not answer."""
    folder, job = _read(name)
    launcher = "killed; the same command starts it again"
    if _is_running(folder):
        launcher = f"running (pid {job['launcher']})"
    elif "ended" in job:
        launcher = f"ended with status {job['ended']}"
    print(f"{name}: on {job['on']} since {job['began']}, launcher {launcher}", flush=True)
    state = ask(name)
    status = f" with exit status {state.status}" if state.status else ""
    print("\n".join(filter(None, [f"{name}: {state.kind}{status}", state.text])), flush=True)
    return int(state.kind == "unknown")


def show_logs(name: str) -> int:
    """Print the output of a job and follow it to its end."""
    folder, job = _read(name)
    log = folder / _LOG
    # The launcher's log has the run's output too, until the launcher is killed and the run goes on.
    is_complete = _is_running(folder) or job.get("ended", EXIT_INTERRUPTED) != EXIT_INTERRUPTED
    if job["logs"] and not (log.exists() and is_complete):
        if status := _call(job["logs"]):  # the job may have ended
            print(ask(name).text)
        return status
    if not log.exists():
        raise UserError(f"the output of {name} is in the terminal that launched it")
    with contextlib.suppress(KeyboardInterrupt), log.open(errors="replace", newline="\n") as file:
        text, is_running = "".join(file.readlines()[-100:]), True
        while is_running:
            is_running = _is_running(folder)  # before the last read
            print(end=text + file.read(), flush=True)
            text = ""
            time.sleep(0.2 if is_running else 0)
    return 0


def stop(name: str) -> int:
    """Stop a job: its state is saved first, wherever the engine allows it."""
    folder, job = _read(name)
    (folder / _STOPPED).touch()
    with files.lock_folder(folder / _STOPPING):
        if _is_running(folder) and "ended" not in job:
            with contextlib.suppress(ProcessLookupError):
                os.kill(job["launcher"], signal.SIGTERM)
            plan_lib.say(f"waiting for the launcher (pid {job['launcher']})")
            deadline = time.monotonic() + plan_lib.STOP_SECONDS + 30
            while _is_running(folder):
                if time.monotonic() > deadline:
                    raise UserError(f"the launcher of {name} (pid {job['launcher']}) does not end")
                time.sleep(0.2)
        # A slice that cannot be reached must be deleted all the same.
        return max([_call(command) for command in job["stop"]], default=0)


def was_stopped(name: str) -> bool:
    """Whether the user has stopped a job since it was last started."""
    return (state_folder(name) / _STOPPED).exists()


def is_launched(name: str) -> bool:
    """Whether a launcher of a job is running, or the job is being stopped."""
    folders = state_folder(name), state_folder(name) / _STOPPING
    return any(folder.exists() and _is_running(folder) for folder in folders)


def has_ended(name: str) -> bool:
    """Whether the last launcher of a job has seen its end, and did not fail itself."""
    return "ended" in (record := _record(name)) and not record.get("failed")


def with_machines(prefix: str) -> list[str]:
    """Return the names that begin like this of jobs whose machines may exist, and cost money."""
    paths = sorted(state_folder(prefix).parent.glob(f"{prefix}*/{_FILE}"))
    return [path.parent.name for path in paths if _record(path.parent.name).get("delete")]


def delete(name: str) -> None:
    """Delete the machines of a job that has ended."""
    folder, _ = _read(name)
    with _job_lock(folder, name):
        _, job = _read(name)
        if not job.get("delete"):
            raise UserError(f"no machines of {name} are known")
        _, error = plan_lib.read_output(job["delete"], _DELETE_SECONDS)
        if error and "NOT_FOUND" not in error:
            raise UserError(f"{error}; try again with `bert-jax launch delete {name}`")
        files.write_json(folder / _FILE, job | {"delete": ()})


def _call(command: Sequence[str]) -> int:
    try:
        return plan_lib.exit_status(subprocess.run(command, check=False))
    except FileNotFoundError:
        raise UserError(f"{command[0]} is not on the PATH") from None
    except KeyboardInterrupt:  # of following
        return 0
