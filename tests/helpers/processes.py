"""Start Python commands quickly: fork them from a server that has imported bert_jax and JAX.

Importing takes most of the time of a short command, and many tests start several. A forked command
is a separate process with its own arguments, environment, JAX backend and exit status, and can be
killed at any moment. A test of how `bert-jax` itself starts uses `subprocess`.
"""

import atexit
import contextlib
import multiprocessing
import multiprocessing.reduction
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.util import Finalize

import psutil

# Modules that are imported lazily.
PRELOAD = (
    "bert_jax.cli",
    "bert_jax.training.evaluate",
    "bert_jax.inference.predict",
    "bert_jax.training.log",
    "bert_jax.tools.sweep.run",
    "bert_jax.objectives.pretraining",
    "bert_jax.train",
    "grain",
    "tensorboardX",
)


class Process:
    """A running Python command with the subset of the `subprocess.Popen` API that tests need.

    Args:
        command: `[sys.executable, "-c", code, *arguments]`, `[sys.executable, "-m", module,
            *arguments]` or `[sys.executable, script, *arguments]`.
        env: environment variables; defaults to those of this process. JAX was already imported with
            this process's environment, so variables read at import (`JAX_…`) have no effect;
            `XLA_FLAGS` does.
        cwd: working directory; defaults to that of this process.

    Attributes:
        stdout: text stream of the standard output.
        stderr: text stream of the standard error.
    """

    def __init__(self, command, env=None, cwd=None):
        program, what, *arguments = map(str, command)
        assert program == sys.executable, command
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOAD))
        (out, child_out), (error, child_error) = os.pipe(), os.pipe()
        self.stdout, self.stderr = os.fdopen(out), os.fdopen(error)
        self._process = context.Process(
            target=_Child(what, arguments, dict(env or os.environ), cwd or os.getcwd()),
            args=(_Pipe(child_out), _Pipe(child_error)),
        )
        self._process.start()
        os.close(child_out)
        os.close(child_error)
        self.pid = self._process.pid

    @property
    def returncode(self):
        """Exit status, the negative signal number if killed by a signal, or None while running."""
        return self._process.exitcode

    def poll(self):
        """Return the exit status, or None while the process runs."""
        return self.returncode

    def wait(self, timeout=None):
        """Wait for the process to end, and return the exit status."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("forked command", timeout)
        return self.returncode

    def stop(self):
        """Stop the process and wait until it is stopped."""
        self.send_signal(signal.SIGSTOP)
        while psutil.Process(self.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.001)

    def send_signal(self, number):
        """Send a signal unless the process has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self):
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self):
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout=240):
        """Wait for the process to end, and return the rest of standard output and error."""
        expired = threading.Event()
        timer = threading.Timer(timeout, lambda: (expired.set(), self.kill()))
        timer.start()
        texts = {}
        readers = [
            threading.Thread(
                target=lambda name=name: texts.update({name: getattr(self, name).read()})
            )
            for name in ("stdout", "stderr")
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        self._process.join()
        timer.cancel()
        if expired.is_set():
            raise subprocess.TimeoutExpired("forked command", timeout, *texts.values())
        return texts["stdout"], texts["stderr"]


def run(command, env=None, cwd=None, timeout=240, check=False):
    """Run a command to its end, like `subprocess.run` with captured text output."""
    process = Process(command, env, cwd)
    out, error = process.communicate(timeout)
    done = subprocess.CompletedProcess(command, process.returncode, out, error)
    assert not check or done.returncode == 0, error
    return done


class _Pipe:
    """The write end of a pipe, which the fork server passes to the child."""

    def __init__(self, descriptor):
        self._descriptor = descriptor

    def __reduce__(self):
        return _open_pipe, (multiprocessing.reduction.DupFd(self._descriptor),)


def _open_pipe(copy):
    return copy.detach()


class _Child:
    """The target of the forked process."""

    def __init__(self, what, arguments, env, cwd):
        self.what, self.arguments, self.env, self.cwd = what, arguments, env, cwd

    def __call__(self, out, error):
        for descriptor, ours in ((out, 1), (error, 2)):
            os.dup2(descriptor, ours)
            os.close(descriptor)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
        # The fork server ignores SIGINT; a command must not.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(self.env)
        os.chdir(self.cwd)
        atexit.register = _at_exit
        if self.what == "-c":
            code, *arguments = self.arguments
            sys.argv = ["-c", *arguments]
            exec(code, {"__name__": "__main__"})
        elif self.what == "-m":
            sys.argv = self.arguments
            runpy.run_module(self.arguments[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [self.what, *self.arguments]
            sys.path.insert(0, os.path.dirname(os.path.abspath(self.what)))
            runpy.run_path(self.what, run_name="__main__")


def _at_exit(function, *arguments, **options):
    """Replace `atexit.register`, whose functions a child of multiprocessing does not call."""
    Finalize(None, function, arguments, options, exitpriority=0)
    return function


# Hands its arguments, environment and output to `Program`, and ends as the command that this starts.
_CLIENT = """#!/bin/bash
run=$(mktemp -d {folder}/run.XXXXXX)
printf '%s\\0' "$@" > "$run/arguments"
env -0 > "$run/environment"
pwd > "$run/folder"
trap 'touch "$run/stop"' TERM INT
echo $$ > "$run/pid.new" && mv "$run/pid.new" "$run/pid"
until [ -e "$run/status" ]; do sleep 0.02; done
exit "$(cat "$run/status")"
"""


class Program:
    """An executable that stands for `bert-jax`, and for `python -m bert_jax`, and starts quickly.

    SIGTERM and SIGINT reach the command; if the executable is killed, so is the command.

    Args:
        folder: new folder.
        code: Python code that runs the command.

    Attributes:
        path: path of the executable.
    """

    def __init__(self, folder, code):
        folder.mkdir()
        self.path, self._folder, self._code, self._runs = folder / "bert-jax", folder, code, {}
        self.path.write_text(_CLIENT.format(folder=folder))
        self.path.chmod(0o755)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self):
        """Kill the commands that run."""
        self._is_closed.set()
        self._thread.join()

    def _serve(self):
        while not self._is_closed.wait(0.02):
            for mark in self._folder.glob("run.*/pid"):
                if mark.parent not in self._runs:
                    self._runs[mark.parent] = self._start(mark.parent, int(mark.read_text()))
            for run, (process, client) in self._runs.items():
                if process.exitcode is not None and not (run / "status").exists():
                    status = process.exitcode
                    (run / "status.new").write_text(str(status if status >= 0 else 128 - status))
                    (run / "status.new").rename(run / "status")
                elif (run / "stop").exists() and process.exitcode is None:
                    (run / "stop").unlink()
                    process.terminate()
                elif process.exitcode is None and not psutil.pid_exists(client):
                    process.kill()
        for process, _ in self._runs.values():
            process.kill()

    def _start(self, run, client):
        arguments = (run / "arguments").read_text().split("\0")[:-1]
        if arguments[:2] == ["-m", "bert_jax"]:
            del arguments[:2]
        variables = (run / "environment").read_text().split("\0")[:-1]
        environment = dict(variable.split("=", 1) for variable in variables)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOAD))
        outputs = [os.open(f"/proc/{client}/fd/{i}", os.O_WRONLY | os.O_APPEND) for i in (1, 2)]
        folder = (run / "folder").read_text().strip()
        process = context.Process(
            target=_Child("-c", [self._code, *arguments], environment, folder),
            args=[_Pipe(each) for each in outputs],
        )
        process.start()
        for each in outputs:
            os.close(each)
        return process, client
