"""A command on many machines by engines that exist: what to call, and a runner that calls it.

An engine is a function from a command and its options, which are its keyword arguments, to a `Plan`.
Every plan keeps one rule: a command that ends with 75 (stopped by a signal and saved) or whose
process was killed is run again, one that ends with 0, 1 or 2 is not. The scripts are in `launch/`.
"""

import contextlib
import inspect
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import socket
import string
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from bert_jax import files
from bert_jax.errors import UserError

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]
SCRIPTS = CHECKOUT / "launch"
# Where a bucket is mounted on machines that are made for the run.
BUCKET = "/bucket"
# A run that was told to stop has this long to save before it is killed.
STOP_SECONDS = 180.0

STOPPED = 75
KILLED = range(129, 256)

_INSTALL = {
    "gcloud": "install the Google Cloud CLI and run `gcloud auth login`",
    "xpk": "pip install xpk (it needs gcloud, kubectl and docker too)",
    "sbatch": "run this on a login node of a Slurm cluster",
    "sky": "pip install 'skypilot[gcp]' (or [aws], …) and run `sky check`",
    "git": "install git",
}

# What gcloud calls the software of a slice, by what the accelerator's name begins with.
_RUNTIMES = {
    "v2-": "tpu-ubuntu2204-base",
    "v3-": "tpu-ubuntu2204-base",
    "v4-": "tpu-ubuntu2204-base",
    "v5litepod-": "v2-alpha-tpuv5-lite",
    "v5p-": "v2-alpha-tpuv5",
    "v6e-": "v2-alpha-tpuv6e",
}

# What cloud and hub tokens look like: arguments are seen by every user of a machine and are logged.
_CREDENTIAL = re.compile(
    r"\b(hf_|gh[pousr]_|github_pat_|glpat-|AIza|ya29\.|AKIA|ASIA|xox[abp]-)[\w-]{12,}|-----BEGIN"
)


class Process(NamedTuple):
    """One process of a run.

    Attributes:
        command: program and arguments.
        environment: added to this process's own.
        prefix: put before each line that it prints; "" leaves it the terminal.
    """

    command: Sequence[str]
    environment: dict[str, str] = {}  # noqa: RUF012 (never changed)
    prefix: str = ""


class Plan(NamedTuple):
    """What an engine is asked to do, in this order.

    Attributes:
        files: content by absolute path, written first.
        before: commands before every run; doing them again does no harm.
        processes: the run, side by side; none where `before` has handed it over for good.
        after: commands at the end of the last run.
        again: statuses of the run after which there is another.
        restarts: how many others at most.
        note: for the user, when all is done or the run goes on without us.
    """

    files: dict[str, str] = {}  # noqa: RUF012
    before: Sequence[Sequence[str]] = ()
    processes: Sequence[Process] = ()
    after: Sequence[Sequence[str]] = ()
    again: frozenset[int] = frozenset()
    restarts: int = 0
    note: str = ""


def local(
    command: Sequence[str],
    name: str,
    *,
    processes: int = 2,
    devices: int | None = None,
    restarts: int = 0,
    port: int | None = None,
) -> Plan:
    """Several processes on this machine.

    Args:
        command: of `bert-jax`, from the verb on.
        name: of the run.
        processes: how many.
        devices: CPU devices a process (default: JAX's one).
        restarts: most runs after the first.
        port: of the first process, where the others find it (default: one that is free).
    """
    coordinator = f"127.0.0.1:{port or _free_port()}"

    def environment(i: int) -> dict[str, str]:
        found = {
            "BERT_JAX_COORDINATOR": coordinator,
            "BERT_JAX_PROCESSES": str(processes),
            "BERT_JAX_PROCESS": str(i),
        }
        if devices:
            flag = f"--xla_force_host_platform_device_count={devices}"
            found["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
        return found

    return Plan(
        processes=[
            Process([*python_command(), *command], environment(i), f"[{i}] ")
            for i in range(processes)
        ],
        again=frozenset({STOPPED, *KILLED}),
        restarts=restarts,
    )


def slurm(
    command: Sequence[str],
    name: str,
    *,
    nodes: int = 1,
    gpus: int = 0,
    restarts: int = 100,
    extra: Sequence[str] = (),
) -> Plan:
    """A Slurm job of one process a GPU, run by this Python in this folder.

    Args:
        command: of `bert-jax`, from the verb on.
        name: of the job.
        nodes: how many.
        gpus: a node; 0 starts one process a node.
        restarts: most times that the job queues itself again.
        extra: arguments to sbatch: --partition, --time, --account, …
    """
    sizes = [f"--nodes={nodes}", f"--ntasks-per-node={gpus or 1}"]
    if gpus:
        sizes.append(f"--gpus-per-node={gpus}")
    script = str(SCRIPTS / "slurm.sh")
    submit = ["sbatch", f"--job-name={name}", *sizes, *extra]
    return Plan(
        before=[[*submit, script, str(restarts), *python_command(), *command]],
        note=f"follow: tail -F slurm-JOB.out; state: squeue --name {name}; stop: scancel --name {name}",
    )


def tpu_vm(
    command: Sequence[str],
    name: str,
    *,
    accelerator: str,
    zone: str,
    project: str = "",
    runtime: str = "",
    spot: bool = False,
    bucket: str = "",
    keep: bool = False,
    restarts: int = 100,
    extra: Sequence[str] = (),
) -> Plan:
    """A slice of Cloud TPU VMs from gcloud's queue, deleted when the run is over.

    The workers get this checkout's commit and run the command as a service; we follow it, and
    make the slice again when it is taken back.

    Args:
        command: of `bert-jax`, from the verb on.
        name: of the queued resource and of its node.
        accelerator: such as v5litepod-16.
        zone: such as us-west4-a.
        project: the default is gcloud's.
        runtime: the machines' software; the default goes by the accelerator.
        spot: take machines that may be taken back.
        bucket: gs://NAME, mounted at /bucket.
        keep: leave the slice there at the end.
        restarts: most runs after the first.
        extra: arguments to `gcloud compute tpus queued-resources create`.

    Raises:
        UserError: an accelerator whose runtime is not known.
    """
    runtime = runtime or _runtime(accelerator)
    if not runtime:
        raise UserError(
            f"--accelerator {accelerator}: known are {', '.join(a + 'N' for a in _RUNTIMES)}; "
            "for another give its software with --runtime"
        )
    tpus = ["gcloud", "compute", "tpus"]
    where = [f"--zone={zone}", *([f"--project={project}"] if project else [])]
    create = [
        *(*tpus, "queued-resources", "create", name, f"--node-id={name}", *where),
        *(f"--accelerator-type={accelerator}", f"--runtime-version={runtime}"),
        *(["--spot"] if spot else []),
        *extra,
    ]
    delete = [*tpus, "queued-resources", "delete", name, *where, "--force", "--quiet"]
    folder = _folder(name)
    job, bundle, worker = folder / "job.sh", folder / "code.bundle", SCRIPTS / "tpu_worker.sh"

    def on_workers(does: str) -> list[str]:
        return [*tpus, "tpu-vm", "ssh", name, *where, "--worker=all", f"--command={does}"]

    start = shlex.join(["bash", worker.name, "start", bucket.removeprefix("gs://")])
    return Plan(
        files={
            str(job): "cd ~/bert_jax\nexport BERT_JAX_DISTRIBUTED=auto\n"
            f"exec ~/venv/bin/{shlex.join(['bert-jax', *command])}\n"
        },
        before=[
            ["bash", str(SCRIPTS / "tpu_slice.sh"), name, *where, "--", *create],
            ["git", "-C", str(CHECKOUT), "bundle", "create", "--quiet", str(bundle), "HEAD"],
            [
                *(*tpus, "tpu-vm", "scp", str(bundle), str(job), str(worker), f"{name}:"),
                *(*where, "--worker=all"),
            ],
            on_workers(start),
        ],
        processes=[Process(on_workers(f"bash {worker.name} follow"))],
        after=[] if keep else [delete],
        # 1 and 255 are gcloud's when it loses the connection, as it does when machines are taken.
        again=frozenset({1, STOPPED, *KILLED}),
        restarts=restarts,
        note=f"the slice is there until you delete it: {shlex.join(delete)}",
    )


def gke(
    command: Sequence[str],
    name: str,
    *,
    accelerator: str,
    cluster: str,
    zone: str,
    project: str = "",
    slices: int = 1,
    image: str = "",
    spot: bool = False,
    restarts: int = 100,
    extra: Sequence[str] = (),
) -> Plan:
    """A workload of TPU slices on a GKE cluster, by xpk.

    Args:
        command: of `bert-jax`, from the verb on.
        name: of the workload.
        accelerator: such as v5litepod-16.
        cluster: its name.
        zone: of the cluster.
        project: the default is gcloud's.
        slices: how many.
        image: a container image that holds bert-jax; by default xpk makes one of this checkout.
        spot: take machines that may be taken back.
        restarts: most times that the workload is started again.
        extra: arguments to `xpk workload create`: --storage, --priority, …
    """
    where = [f"--cluster={cluster}", f"--zone={zone}"]
    where += [f"--project={project}"] if project else []
    if image:
        container, install = [f"--docker-image={image}"], ""
    else:
        container = ["--base-docker-image=python:3.12", f"--script-dir={CHECKOUT}"]
        install = "pip install --quiet --editable '.[tpu]' && "
    # exec, because SIGTERM goes to this shell alone. Kubernetes would take $(NAME) for a variable
    # and makes one dollar of two.
    line = f"{install}exec {shlex.join(['bert-jax', *command])}".replace("$", "$$")
    create = [
        *("xpk", "workload", "create", f"--workload={name}", *where, f"--tpu-type={accelerator}"),
        *(f"--num-slices={slices}", *container, f"--command={line}"),
        *("--env=BERT_JAX_DISTRIBUTED=auto", f"--max-restarts={restarts}"),
        *(f"--restart-on-exit-codes={STOPPED}", "--termination-grace-period-seconds=180"),
        *(["--spot"] if spot else []),
        *extra,
    ]
    stop = ["xpk", "workload", "delete", f"--workload={name}", *where]
    return Plan(
        before=[create],
        note=f"state: {shlex.join(['xpk', 'workload', 'list', *where])}; stop: {shlex.join(stop)}",
    )


def sky(
    command: Sequence[str],
    name: str,
    *,
    accelerator: str,
    nodes: int = 1,
    spot: bool = False,
    bucket: str = "",
    extra: Sequence[str] = (),
) -> Plan:
    """A managed SkyPilot job, which it moves to other machines when its own are taken back.

    Args:
        command: of `bert-jax`, from the verb on.
        name: of the job.
        accelerator: such as H100:8 or tpu-v6e-8.
        nodes: machines of that kind (a TPU slice counts as one).
        spot: take machines that may be taken back.
        bucket: gs://NAME, mounted at /bucket.
        extra: arguments to `sky jobs launch`: --infra, --memory, …
    """
    mounts = {BUCKET: {"source": bucket, "mode": "MOUNT"}} if bucket else {}
    # Without it SkyPilot gives some slices the software of others.
    runtime = _runtime(accelerator.removeprefix("tpu-")) if accelerator.startswith("tpu-") else ""
    values = {
        "name": name,
        "nodes": nodes,
        "checkout": str(CHECKOUT),
        "accelerator": accelerator,
        "software": {"runtime_version": runtime} if runtime else {},
        "spot": spot,
        "mounts": mounts,
    }
    values = {key: json.dumps(value, ensure_ascii=False) for key, value in values.items()}
    values["extra"] = "tpu" if accelerator.startswith("tpu-") else "cuda"
    values["command"] = shlex.join(["bert-jax", *command])
    path = str(_folder(name) / "sky.yaml")
    return Plan(
        files={path: _Template(_script("sky.yaml")).substitute(values)},
        before=[["sky", "jobs", "launch", "--yes", "--detach-run", *extra, path]],
        note="follow: sky jobs logs; state: sky jobs queue; stop: sky jobs cancel --name " + name,
    )


ENGINES: dict[str, Callable[..., Plan]] = {
    "tpu-vm": tpu_vm,
    "gke": gke,
    "slurm": slurm,
    "sky": sky,
    "local": local,
}
# Their workers have none of this machine's files.
_ELSEWHERE = ("tpu-vm", "gke", "sky")


def plan(
    on: str, command: Sequence[str], config: str, workdir: str, name: str | None, options: dict
) -> Plan:
    """The plan of an engine, once everything that can be checked from here has been.

    Args:
        on: a key of `ENGINES`.
        command: of `bert-jax`, from the verb on.
        config: the command's config file.
        workdir: the command's folder.
        name: of the job, slice or workload (default: after the workdir).
        options: what the user has given of the engine's keyword arguments.

    Raises:
        UserError: an option that the engine lacks or needs, a path that its workers cannot reach,
            a value that does not survive a shell or that looks like a credential.
    """
    engine = ENGINES[on]
    takes = {
        key: parameter
        for key, parameter in inspect.signature(engine).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    known = ", ".join(f"--{key}" for key in takes)
    for key in options:
        if key not in takes:
            raise UserError(f"--{key} is not an option of --on {on}, which takes {known}")
    for key, parameter in takes.items():
        if parameter.default is parameter.empty and key not in options:
            raise UserError(f"--on {on} needs --{key}; it takes {known}")
    for key, value in options.items():
        for part in value if isinstance(value, list) else [value]:
            _check_value(f"--{key}", str(part))
        least = 0 if key in ("restarts", "gpus") else 1
        if type(value) is int and value < least:
            raise UserError(f"--{key} {value}: it must be {least} or more")
        if type(value) is int and value > 100_000:
            raise UserError(f"--{key} {value}: there are no engines of that size")
    for part in command:
        _check_value("an argument after --", part)
    _check_urls(command, options.get("bucket", ""))
    if on in _ELSEWHERE:
        _check_elsewhere(config, workdir, options.get("bucket", ""))
    if on == "tpu-vm":
        _check_committed()
    if name is not None and not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", name):
        raise UserError(
            f"--name {name}: up to 40 small letters, digits and hyphens, a letter first"
        )
    return engine(command, name or job_name(pathlib.PurePath(workdir).name), **options)


def _check_value(what: str, value: str) -> None:
    if not value.isprintable():  # shells, YAML and Slurm each do something else with these
        raise UserError(
            f"{what} {value!r} holds a line break or another character that cannot be printed: "
            "remove it"
        )
    if _CREDENTIAL.search(value):
        raise UserError(
            f"{what} looks like a credential, which everybody on the machine could read: use the "
            "machines' service account, or set it in their environment"
        )


def _check_urls(command: Sequence[str], bucket: str) -> None:
    for part in command:
        if url := re.search(r"(?:^|=)([a-z0-9]+://\S*)", part):
            raise UserError(
                f"{url[1]}: runs read and write folders only; mount the bucket (Cloud Storage FUSE; "
                f"--bucket of --on tpu-vm and sky does) and give its path, such as {BUCKET}/runs/base"
            )
    if bucket and not re.fullmatch(r"gs://[a-z0-9][-._a-z0-9]+", bucket):
        raise UserError(f"--bucket {bucket}: write gs://NAME")


def _check_elsewhere(config: str, workdir: str, bucket: str) -> None:
    """Refuses paths that machines made for the run cannot have: they get this checkout alone."""
    if not (SCRIPTS / "sky.yaml").exists():
        raise UserError(f"{SCRIPTS} is not there: run from a checkout, installed by pip install -e")
    if os.path.isabs(config) or not (CHECKOUT / config).exists():
        raise UserError(
            f"--config {config}: the workers get {CHECKOUT} and run in it; give a path from there"
        )
    path = pathlib.PurePosixPath(workdir)
    if bucket and not path.is_relative_to(BUCKET):
        raise UserError(f"--workdir {workdir}: the bucket is mounted at {BUCKET}, write below it")
    mine = (pathlib.Path.home(), pathlib.Path(tempfile.gettempdir()), CHECKOUT)
    if not path.is_absolute() or any(path.is_relative_to(folder) for folder in mine):
        raise UserError(
            f"--workdir {workdir} would be on a worker's own disk and lost with it: mount a bucket "
            f"(Cloud Storage FUSE: --bucket gs://NAME, then {BUCKET}/…) or use a shared disk"
        )


def _check_committed() -> None:
    git = ["git", "-C", str(CHECKOUT), "status", "--porcelain", "--untracked-files=no"]
    try:
        found = subprocess.run(git, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UserError(f"git is not on the PATH: {_INSTALL['git']}") from None
    if found.returncode:
        raise UserError(f"{CHECKOUT} is no git checkout: --on tpu-vm sends the workers a commit")
    if found.stdout:
        changed = found.stdout.split("\n")[0][3:]
        raise UserError(
            f"{CHECKOUT} has changes that are not committed ({changed}, …): the workers get the "
            "commit; commit or stash them first"
        )


def job_name(text: str, most: int = 40) -> str:
    """A name like a text that every engine allows."""
    words = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return (words if words[:1].isalpha() else f"bert-{words}")[:most].strip("-")


def _runtime(accelerator: str) -> str:
    return next((r for start, r in _RUNTIMES.items() if accelerator.startswith(start)), "")


def python_command() -> list[str]:
    """The command `bert-jax`, by this Python, wherever its folder is shared."""
    return [sys.executable, "-m", "bert_jax"]


def _folder(name: str) -> pathlib.Path:
    return CHECKOUT / ".launch" / name


def _script(name: str) -> str:
    with files.one_line_errors(f"cannot read {SCRIPTS / name}"):
        return (SCRIPTS / name).read_text()


class _Template(string.Template):
    delimiter = "@"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def script(plan: Plan) -> str:
    """The plan as a shell script of one run: what `--dry-run` prints."""
    lines = []
    for path, content in plan.files.items():
        lines.append(f"mkdir -p {shlex.quote(os.path.dirname(path))}")
        lines.append(f"cat > {shlex.quote(path)} <<'END OF {os.path.basename(path)}'")
        lines.append(f"{content}END OF {os.path.basename(path)}")
    lines += map(shlex.join, plan.before)
    several = len(plan.processes) > 1
    for process in plan.processes:
        settings = [f"{key}={shlex.quote(value)}" for key, value in process.environment.items()]
        line = " ".join([*settings, shlex.join(process.command)])
        lines.append(f"{line} &" if several else line)
    if several:
        lines.append("wait")
    lines += map(shlex.join, plan.after)
    return "\n".join(lines)


def run(plan: Plan, stop_seconds: float = STOP_SECONDS) -> int:
    """Carries out a plan and returns the status of its last run, 0 where that is not ours to see.

    Args:
        plan: of an engine.
        stop_seconds: how long a process may take to end after it was told to.

    Raises:
        UserError: a program is missing, a command of the plan failed, a file cannot be written.
    """
    for command in [*plan.before, *(process.command for process in plan.processes)]:
        if not shutil.which(command[0]):
            advice = _INSTALL.get(command[0], "install it")
            raise UserError(f"{command[0]} is not on the PATH: {advice}")
        if command[0] == "bash" and not shutil.which("gcloud"):
            raise UserError(f"gcloud is not on the PATH: {_INSTALL['gcloud']}")
    for path, content in plan.files.items():
        with files.one_line_errors(f"cannot write {path}"):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            files.write(path, content)

    status, interrupted = 0, False
    for restart in range(plan.restarts + 1):
        command, status = _first_failure(plan.before)
        if status and status not in plan.again:
            raise UserError(f"{shlex.join(command)} ended with status {status}")
        if not status:
            status, interrupted = run_processes(plan.processes, stop_seconds)
        if interrupted or status not in plan.again:
            break
        if restart < plan.restarts:
            _say(f"status {status}, run again (restart {restart + 1} of {plan.restarts})")
    if interrupted and plan.note:  # it is on machines of its own
        _say("the run goes on without this command, and the same command follows it again")
        status = STOPPED
    else:
        command, failure = _first_failure(plan.after)
        if failure:
            raise UserError(f"{shlex.join(command)} ended with status {failure}: run it again")
    if plan.note and (interrupted or not plan.after):
        _say(plan.note)
    return status


def run_processes(
    processes: Sequence[Process], stop_seconds: float = STOP_SECONDS
) -> tuple[int, bool]:
    """Runs processes side by side until all have ended.

    SIGINT and SIGTERM are passed on to all of them. When one fails, the others get SIGTERM. Who is
    still there `stop_seconds` after either is killed.

    Args:
        processes: any number.
        stop_seconds: how long a process may take to end after it was told to.

    Returns:
        The status that counts, a death by signal N being 128 + N: 2 if a process says so, else that
        of the first one to fail, the rest having been stopped because of it. And whether a signal
        came.
    """
    running: list[subprocess.Popen] = []
    pumps: list[threading.Thread] = []
    failed: list[int] = []
    with signals() as received:
        passed_on, deadline = 0, float("inf")
        try:
            for process in processes:
                running.append(_start(process))
                pumps += _pump(running[-1], process.prefix)
            while running:
                ended = [child for child in running if child.poll() is not None]
                running = [child for child in running if child not in ended]
                bad = sorted(exit_status(child) for child in ended if child.returncode)
                if bad and not failed and running:
                    _say(
                        f"a process ended with status {bad[-1]}: stopping the other {len(running)}"
                    )
                    _send(running, signal.SIGTERM)
                    deadline = min(deadline, time.monotonic() + stop_seconds)
                # Several may have fallen over together: a kill explains the others' tracebacks.
                failed += reversed(bad)
                if len(received) > passed_on:
                    _send(running, received[-1])
                    passed_on = len(received)
                    deadline = min(deadline, time.monotonic() + stop_seconds)
                if time.monotonic() > deadline:
                    _send(running, signal.SIGKILL)
                time.sleep(0.05)
        finally:
            _send(running, signal.SIGKILL)
        for pump in pumps:
            pump.join(timeout=5)  # a grandchild may hold the pipe for longer
    status = 2 if 2 in failed else (failed[0] if failed else 0)
    return status, bool(received)


@contextlib.contextmanager
def signals() -> Iterator[list[int]]:
    """The list of the SIGINTs and SIGTERMs that come during the block."""
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


def _start(process: Process) -> subprocess.Popen:
    pipe = subprocess.PIPE if process.prefix else None
    with files.one_line_errors(f"cannot start {process.command[0]}"):
        return subprocess.Popen(
            process.command,
            env={**os.environ, **process.environment},
            stdout=pipe,
            stderr=pipe,
            # A Ctrl-C in the terminal would else come twice: from it and from us.
            start_new_session=bool(process.prefix),
        )


def _pump(child: subprocess.Popen, prefix: str) -> list[threading.Thread]:
    """Threads that copy what a child prints, line by line, with a prefix."""

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
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(number)


def exit_status(child: subprocess.Popen | subprocess.CompletedProcess) -> int:
    """As a shell tells it."""
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _first_failure(commands: Sequence[Sequence[str]]) -> tuple[Sequence[str], int]:
    """Runs commands up to the first that fails; it and its status, or nothing and 0."""
    for command in commands:
        _say("$ " + shlex.join(command))
        if status := exit_status(subprocess.run(command, check=False)):
            return command, status
    return (), 0


def _say(line: str) -> None:
    print(f"launch: {line}", file=sys.stderr, flush=True)
