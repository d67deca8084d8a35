"""Run a command on clusters and clouds: plans for several engines, and their execution.

An engine is a function from a command and options (its keyword arguments) to a `Plan`. In every
engine, a command that exits with status 75 (stopped by a signal, state saved) or is killed is run
again; one that exits with 0, 1 or 2 is not. The scripts are in `launch/`.
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
from bert_jax.errors import EXIT_INTERRUPTED, UserError

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]
SCRIPTS = CHECKOUT / "launch"
# Mount point of a bucket on machines created for the run.
BUCKET = "/bucket"
# Time that a run has to save its state between SIGTERM and SIGKILL.
STOP_SECONDS = 180.0

KILLED = range(129, 256)

_INSTALL = {
    "gcloud": "install the Google Cloud CLI and run `gcloud auth login`",
    "xpk": "pip install xpk (it also needs gcloud, kubectl and docker)",
    "sbatch": "run this on a login node of a Slurm cluster",
    "sky": "pip install 'skypilot[gcp]' (or [aws], …) and run `sky check`",
    "git": "install git",
}

# Default runtime versions by prefix of the accelerator type.
_RUNTIMES = {
    "v2-": "tpu-ubuntu2204-base",
    "v3-": "tpu-ubuntu2204-base",
    "v4-": "tpu-ubuntu2204-base",
    "v5litepod-": "v2-alpha-tpuv5-lite",
    "v5p-": "v2-alpha-tpuv5",
    "v6e-": "v2-alpha-tpuv6e",
}

# Tokens of clouds and hubs. Arguments are logged, and visible to every user of a machine.
_CREDENTIAL = re.compile(
    r"\b(hf_|gh[pousr]_|github_pat_|glpat-|AIza|ya29\.|AKIA|ASIA|xox[abp]-)[\w-]{12,}|-----BEGIN"
)


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
        before: idempotent commands before every run.
        processes: parallel processes of a run; empty if `before` submits a job.
        after: commands after the last run.
        again: exit statuses after which the run is repeated.
        restarts: maximum number of repetitions.
        note: printed at the end, or if the run continues without this process.
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
    """Plan several processes on this machine.

    Args:
        command: arguments of `bert-jax`, starting with the verb.
        name: name of the run.
        processes: number of processes.
        devices: CPU devices per process; None for JAX's default of one.
        restarts: maximum number of restarts.
        port: port of process 0 for the others; None for a free one.
    """
    coordinator = f"127.0.0.1:{port or _free_port()}"

    def environment(i: int) -> dict[str, str]:
        variables = {
            "BERT_JAX_COORDINATOR": coordinator,
            "BERT_JAX_PROCESSES": str(processes),
            "BERT_JAX_PROCESS": str(i),
        }
        if devices:
            flag = f"--xla_force_host_platform_device_count={devices}"
            variables["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
        return variables

    return Plan(
        processes=[
            Process([*python_command(), *command], environment(i), f"[{i}] ")
            for i in range(processes)
        ],
        again=frozenset({EXIT_INTERRUPTED, *KILLED}),
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
    """Plan a Slurm job with one process per GPU, run by this Python in this folder.

    Args:
        command: arguments of `bert-jax`, starting with the verb.
        name: name of the job.
        nodes: number of nodes.
        gpus: GPUs per node; 0 starts one process per node.
        restarts: maximum number of times that the job requeues itself.
        extra: arguments of sbatch: --partition, --time, --account, …
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
    """Plan a slice of Cloud TPU VMs as a queued resource, deleted after the run.

    The workers receive the commit of this checkout and run the command as a service. This process
    follows its log, and creates the slice again after preemption.

    Args:
        command: arguments of `bert-jax`, starting with the verb.
        name: name of the queued resource and of its node.
        accelerator: accelerator type, such as v5litepod-16.
        zone: zone, such as us-west4-a.
        project: project; "" for gcloud's default.
        runtime: runtime version; "" for the default of the accelerator.
        spot: use preemptible capacity.
        bucket: gs://NAME, mounted at /bucket.
        keep: do not delete the slice.
        restarts: maximum number of restarts.
        extra: arguments of `gcloud compute tpus queued-resources create`.

    Raises:
        UserError: the accelerator has no default runtime.
    """
    runtime = runtime or _runtime(accelerator)
    if not runtime:
        raise UserError(
            f"--accelerator {accelerator}: choose from {', '.join(a + 'N' for a in _RUNTIMES)}, or give "
            "the runtime version of another with --runtime"
        )
    tpus = ["gcloud", "compute", "tpus"]
    location = [f"--zone={zone}", *([f"--project={project}"] if project else [])]
    create = [
        *(*tpus, "queued-resources", "create", name, f"--node-id={name}", *location),
        *(f"--accelerator-type={accelerator}", f"--runtime-version={runtime}"),
        *(["--spot"] if spot else []),
        *extra,
    ]
    delete = [*tpus, "queued-resources", "delete", name, *location, "--force", "--quiet"]
    folder = _folder(name)
    job, bundle, worker = folder / "job.sh", folder / "code.bundle", SCRIPTS / "tpu_worker.sh"

    def on_workers(line: str) -> list[str]:
        return [*tpus, "tpu-vm", "ssh", name, *location, "--worker=all", f"--command={line}"]

    start = shlex.join(["bash", worker.name, "start", bucket.removeprefix("gs://")])
    return Plan(
        files={
            str(job): "cd ~/bert_jax\nexport BERT_JAX_DISTRIBUTED=auto\n"
            f"exec ~/venv/bin/{shlex.join(['bert-jax', *command])}\n"
        },
        before=[
            ["bash", str(SCRIPTS / "tpu_slice.sh"), name, *location, "--", *create],
            ["git", "-C", str(CHECKOUT), "bundle", "create", "--quiet", str(bundle), "HEAD"],
            [
                *(*tpus, "tpu-vm", "scp", str(bundle), str(job), str(worker), f"{name}:"),
                *(*location, "--worker=all"),
            ],
            on_workers(start),
        ],
        processes=[Process(on_workers(f"bash {worker.name} follow"))],
        after=[] if keep else [delete],
        # gcloud exits with 1 or 255 when it loses the connection, as after preemption.
        again=frozenset({1, EXIT_INTERRUPTED, *KILLED}),
        restarts=restarts,
        note=f"the slice remains until you delete it: {shlex.join(delete)}",
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
    """Plan a workload of TPU slices on a GKE cluster, with xpk.

    Args:
        command: arguments of `bert-jax`, starting with the verb.
        name: name of the workload.
        accelerator: accelerator type, such as v5litepod-16.
        cluster: name of the cluster.
        zone: zone of the cluster.
        project: project; "" for gcloud's default.
        slices: number of slices.
        image: container image with bert-jax; "" builds one from this checkout.
        spot: use preemptible capacity.
        restarts: maximum number of restarts.
        extra: arguments of `xpk workload create`: --storage, --priority, …
    """
    location = [f"--cluster={cluster}", f"--zone={zone}"]
    location += [f"--project={project}"] if project else []
    if image:
        container, install = [f"--docker-image={image}"], ""
    else:
        container = ["--base-docker-image=python:3.12", f"--script-dir={CHECKOUT}"]
        install = "pip install --quiet --editable '.[tpu]' && "
    # exec, because only this shell receives SIGTERM. Kubernetes expands $(NAME) and turns $$ into $.
    line = f"{install}exec {shlex.join(['bert-jax', *command])}".replace("$", "$$")
    create = [
        *(
            "xpk",
            "workload",
            "create",
            f"--workload={name}",
            *location,
            f"--tpu-type={accelerator}",
        ),
        *(f"--num-slices={slices}", *container, f"--command={line}"),
        *("--env=BERT_JAX_DISTRIBUTED=auto", f"--max-restarts={restarts}"),
        *(f"--restart-on-exit-codes={EXIT_INTERRUPTED}", "--termination-grace-period-seconds=180"),
        *(["--spot"] if spot else []),
        *extra,
    ]
    stop = ["xpk", "workload", "delete", f"--workload={name}", *location]
    return Plan(
        before=[create],
        note=f"state: {shlex.join(['xpk', 'workload', 'list', *location])}; stop: {shlex.join(stop)}",
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
    """Plan a managed SkyPilot job, which moves to other machines after preemption.

    Args:
        command: arguments of `bert-jax`, starting with the verb.
        name: name of the job.
        accelerator: such as H100:8 or tpu-v6e-8.
        nodes: number of such machines (a TPU slice counts as one).
        spot: use preemptible capacity.
        bucket: gs://NAME, mounted at /bucket.
        extra: arguments of `sky jobs launch`: --infra, --memory, …
    """
    mounts = {BUCKET: {"source": bucket, "mode": "MOUNT"}} if bucket else {}
    # SkyPilot's default runtime is wrong for some slices.
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
# Engines whose workers do not share this machine's files.
_REMOTE = ("tpu-vm", "gke", "sky")


def plan(
    on: str, command: Sequence[str], config: str, workdir: str, name: str | None, options: dict
) -> Plan:
    """Check the options and return the plan of an engine.

    Args:
        on: a key of `ENGINES`.
        command: arguments of `bert-jax`, starting with the verb.
        config: config file of the command.
        workdir: workdir of the command.
        name: name of the job, slice or workload; None derives it from the workdir.
        options: keyword arguments of the engine.

    Raises:
        UserError: an option is unknown or missing, a path is not accessible to the workers, or a value
            contains unprintable characters or looks like a credential.
    """
    engine = ENGINES[on]
    parameters = {
        key: parameter
        for key, parameter in inspect.signature(engine).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    known = ", ".join(f"--{key}" for key in parameters)
    for key in options:
        if key not in parameters:
            raise UserError(f"--{key} is not an option of --on {on}, which takes {known}")
    for key, parameter in parameters.items():
        if parameter.default is parameter.empty and key not in options:
            raise UserError(f"--on {on} needs --{key}; it takes {known}")
    for key, value in options.items():
        for part in value if isinstance(value, list) else [value]:
            _check_value(f"--{key}", str(part))
        minimum = 0 if key in ("restarts", "gpus") else 1
        if type(value) is int and value < minimum:
            raise UserError(f"--{key} {value}: it must be {minimum} or more")
        if type(value) is int and value > 100_000:
            raise UserError(f"--{key} {value}: it must be at most 100,000")
    for part in command:
        _check_value("an argument after --", part)
    _check_urls(command, options.get("bucket", ""))
    if on in _REMOTE:
        _check_remote(config, workdir, options.get("bucket", ""))
    if on == "tpu-vm":
        _check_committed()
    if name is not None and not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", name):
        raise UserError(
            f"--name {name}: use up to 40 lowercase letters, digits and hyphens, starting with a letter"
        )
    return engine(command, name or job_name(pathlib.PurePath(workdir).name), **options)


def _check_value(name: str, value: str) -> None:
    if not value.isprintable():  # shells, YAML and Slurm treat these differently
        raise UserError(
            f"{name} {value!r} contains a line break or another unprintable character: remove it"
        )
    if _CREDENTIAL.search(value):
        raise UserError(
            f"{name} looks like a credential, which every user of the machine could read: use the "
            "machines' service account, or set it in their environment"
        )


def _check_urls(command: Sequence[str], bucket: str) -> None:
    for part in command:
        if url := re.search(r"(?:^|=)([a-z0-9]+://\S*)", part):
            raise UserError(
                f"{url[1]}: only local paths are supported; mount the bucket (Cloud Storage FUSE; "
                f"--bucket of --on tpu-vm and sky does) and give its path, such as {BUCKET}/runs/base"
            )
    if bucket and not re.fullmatch(r"gs://[a-z0-9][-._a-z0-9]+", bucket):
        raise UserError(f"--bucket {bucket}: it must be gs://NAME")


def _check_remote(config: str, workdir: str, bucket: str) -> None:
    """Check that the paths exist on machines created for the run, which have only this checkout."""
    if not (SCRIPTS / "sky.yaml").exists():
        raise UserError(
            f"{SCRIPTS} does not exist: run from a checkout, installed by pip install -e"
        )
    if os.path.isabs(config) or not (CHECKOUT / config).exists():
        raise UserError(
            f"--config {config}: workers run in a copy of {CHECKOUT}; give a path relative to it"
        )
    path = pathlib.PurePosixPath(workdir)
    if bucket and not path.is_relative_to(BUCKET):
        raise UserError(
            f"--workdir {workdir}: the bucket is mounted at {BUCKET}; use a folder inside it"
        )
    local_folders = (pathlib.Path.home(), pathlib.Path(tempfile.gettempdir()), CHECKOUT)
    if not path.is_absolute() or any(path.is_relative_to(folder) for folder in local_folders):
        raise UserError(
            f"--workdir {workdir} would be lost with the worker's disk: mount a bucket "
            f"(Cloud Storage FUSE: --bucket gs://NAME, then {BUCKET}/…) or use a shared disk"
        )


def _check_committed() -> None:
    git = ["git", "-C", str(CHECKOUT), "status", "--porcelain", "--untracked-files=no"]
    try:
        result = subprocess.run(git, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UserError(f"git is not on the PATH: {_INSTALL['git']}") from None
    if result.returncode:
        raise UserError(f"{CHECKOUT} is not a git checkout: --on tpu-vm sends the workers a commit")
    if result.stdout:
        changed = result.stdout.split("\n")[0][3:]
        raise UserError(
            f"{CHECKOUT} has uncommitted changes ({changed}, …), and workers receive the commit: "
            "commit or stash them"
        )


def job_name(text: str, max_length: int = 40) -> str:
    """Convert a text to a name that every engine allows."""
    words = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return (words if words[:1].isalpha() else f"bert-{words}")[:max_length].strip("-")


def _runtime(accelerator: str) -> str:
    return next((r for start, r in _RUNTIMES.items() if accelerator.startswith(start)), "")


def python_command() -> list[str]:
    """Return the command `bert-jax` with this Python."""
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
    """Return a plan as a shell script, as `--dry-run` prints it."""
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
    """Execute a plan and return the exit status of its last run; 0 for a submitted job.

    Args:
        plan: the plan.
        stop_seconds: time between SIGTERM and SIGKILL.

    Raises:
        UserError: a program is missing, a command failed, or a file cannot be written.
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
            raise UserError(f"{shlex.join(command)} exited with status {status}")
        if not status:
            status, interrupted = run_processes(plan.processes, stop_seconds)
        if interrupted or status not in plan.again:
            break
        if restart < plan.restarts:
            _say(f"exit status {status}: restarting ( {restart + 1} of {plan.restarts})")
    if interrupted and plan.note:  # the run is on other machines
        _say("the run continues; run the same command to follow it again")
        status = EXIT_INTERRUPTED
    else:
        command, failure = _first_failure(plan.after)
        if failure:
            raise UserError(f"{shlex.join(command)} exited with status {failure}: run it again")
    if plan.note and (interrupted or not plan.after):
        _say(plan.note)
    return status


def run_processes(
    processes: Sequence[Process], stop_seconds: float = STOP_SECONDS
) -> tuple[int, bool]:
    """Run processes in parallel until all have exited.

    SIGINT and SIGTERM are forwarded to all of them. If one fails, the others receive SIGTERM. Those
    that still run `stop_seconds` after either are killed.

    Args:
        processes: the processes.
        stop_seconds: time between SIGTERM and SIGKILL.

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
                running.append(_start(process))
                pumps += _pump(running[-1], process.prefix)
            while running:
                exited = [child for child in running if child.poll() is not None]
                running = [child for child in running if child not in exited]
                bad = sorted(exit_status(child) for child in exited if child.returncode)
                if bad and not failed and running:
                    _say(
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


def _start(process: Process) -> subprocess.Popen:
    pipe = subprocess.PIPE if process.prefix else None
    with files.one_line_errors(f"cannot start {process.command[0]}"):
        return subprocess.Popen(
            process.command,
            env={**os.environ, **process.environment},
            stdout=pipe,
            stderr=pipe,
            # Otherwise Ctrl-C would reach it twice, from the terminal and from this process.
            start_new_session=bool(process.prefix),
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
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(number)


def exit_status(child: subprocess.Popen | subprocess.CompletedProcess) -> int:
    """Return the exit status as a shell reports it: 128 + N after signal N."""
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _first_failure(commands: Sequence[Sequence[str]]) -> tuple[Sequence[str], int]:
    """Run commands until one fails; return it and its status, or () and 0."""
    for command in commands:
        _say("$ " + shlex.join(command))
        if status := exit_status(subprocess.run(command, check=False)):
            return command, status
    return (), 0


def _say(line: str) -> None:
    print(f"launch: {line}", file=sys.stderr, flush=True)
