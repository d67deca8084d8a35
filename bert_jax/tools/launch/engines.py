"""Engines: functions from a job and options (their keyword arguments) to a `Plan`.

The options are those of `bert-jax launch`, whose help describes them.
In every engine, a command that exits with status 75 (stopped by a signal, state saved) or whose machine
is preempted is run again, and, except with sky, one that is killed; one that exits with 0, 1 or 2 is not.
"""

import os
import pathlib
import shlex
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import yaml

from bert_jax import storage
from bert_jax.errors import EXIT_INTERRUPTED, EXIT_NEGATIVE, EXIT_USER_ERROR, UserError
from bert_jax.runtime.chips import CHIPS
from bert_jax.tools.launch.plan import KILLED, STOP_SECONDS, Plan, Process
from bert_jax.tools.preflight.topology import Topology, parse_topology, slice_shape

CHECKOUT = pathlib.Path(__file__).resolve().parents[3]
SCRIPTS = CHECKOUT / "launch"
# Verbs that run in one process, on one machine.
ONE_PROCESS = ("finetune", "prepare", "sweep")

_CHIPS_PER_VM = 4
# Extras that workers install, besides that of their accelerator; also in tpu_worker.sh and the Makefile.
_EXTRAS = ("gcs", "s3", "tfds", "wiki", "wandb", "mlflow")


class Job(NamedTuple):
    """A command to run.

    Attributes:
        command: arguments of `bert-jax`, starting with the verb.
        name: name of the job, slice or workload.
        folder: folder that the command writes to.
        environment: environment variables of the command.
        config: config file of the command; "" for none.
        inputs: other paths that the command reads.
    """

    command: Sequence[str]
    name: str
    folder: str
    environment: dict[str, str]
    config: str = ""
    inputs: Sequence[str] = ()

    @property
    def is_distributed(self) -> bool:
        """Whether all processes of all machines take part."""
        return self.command[0] not in ONE_PROCESS


def state_folder(name: str) -> pathlib.Path:
    """Return the folder of this machine that describes a job."""
    root = os.environ.get("BERT_JAX_LAUNCH")
    return pathlib.Path(root or pathlib.Path.home() / ".local/state/bert_jax/launch") / name


def python_command() -> list[str]:
    """Return the command `bert-jax` with this Python."""
    return [sys.executable, "-m", "bert_jax"]


def local(
    job: Job,
    *,
    processes: int = 0,
    devices: int | None = None,
    restarts: int = 0,
) -> Plan:
    """Plan several processes on this machine: 2 by default, or 1 for verbs that run in one."""
    processes = processes or (2 if job.is_distributed else 1)
    if processes > 1 and not job.is_distributed:
        raise UserError(f"--processes {processes}: {job.command[0]} runs in one process")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{listener.getsockname()[1]}"

    def environment(i: int) -> dict[str, str]:
        variables = dict(job.environment)
        if job.is_distributed:
            variables |= {
                "BERT_JAX_COORDINATOR": coordinator,
                "BERT_JAX_PROCESSES": str(processes),
                "BERT_JAX_PROCESS": str(i),
            }
        if devices:
            flag = f"--xla_force_host_platform_device_count={devices}"
            flags = variables.get("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
            variables["XLA_FLAGS"] = f"{flags} {flag}".strip()
        return variables

    return Plan(
        processes=[
            Process([*python_command(), *job.command], environment(i), f"[{i}] ")
            for i in range(processes)
        ],
        retry_statuses=frozenset({EXIT_INTERRUPTED, *KILLED}),
        restarts=restarts,
    )


def slurm(
    job: Job,
    *,
    nodes: int = 1,
    gpus: int = 0,
    image: str = "",
    mount: Sequence[str] = (),
    module: Sequence[str] = (),
    restarts: int = 100,
    extra: Sequence[str] = (),
) -> Plan:
    """Plan a Slurm job, run by this Python in this folder or by a container (of the plugin Pyxis).

    It has a process per GPU, or per node without GPUs, and requeues itself.
    """
    _check_nodes(job, nodes)
    tasks = (gpus or 1) if job.is_distributed else 1
    sizes = [f"--nodes={nodes}", f"--ntasks-per-node={tasks}"]
    if gpus:
        sizes.append(f"--gpus-per-node={gpus}")
    output = f"{job.name}-%j.out"
    submit = ["sbatch", f"--job-name={job.name}", f"--output={output}", *sizes, *extra]
    options = [f"--restarts={restarts}"]
    options += [f"--module={name}" for name in module]
    options += [f"--srun=--container-image={image}"] if image else []
    options += [f"--srun=--container-mounts={','.join(mount)}"] if mount else []
    command = ["bert-jax"] if image else python_command()
    if job.environment:
        command = ["env", *_assignments(job), *command]
    # Not the logs of other jobs whose names start with this one's, such as NAME-large.
    logs = f"{shlex.quote(os.path.join(os.getcwd(), job.name))}-+([0-9]).out"
    follow = (
        f"until logs=({logs}); [ ${{#logs[@]}} -gt 0 ]; do "
        f'[ "$waits" ] || echo "waiting for the job to start" >&2; waits=1; sleep 2; done; '
        'exec tail -n 100 -F "${logs[@]}"'
    )
    return Plan(
        setup=[[*submit, str(SCRIPTS / "slurm.sh"), *options, "--", *command, *job.command]],
        status=["squeue", f"--name={job.name}"],
        logs=["bash", "-O", "extglob", "-O", "nullglob", "-c", follow],
        stop=[["scancel", f"--name={job.name}"]],
        active=["squeue", "--me", "--noheader", f"--name={job.name}"],
    )


def _assignments(job: Job) -> list[str]:
    return [f"{name}={value}" for name, value in job.environment.items()]


def tpu_vm(
    job: Job,
    *,
    accelerator: str,
    zone: str,
    project: str = "",
    spot: bool = False,
    keep: bool = False,
    restarts: int = 100,
    extra: Sequence[str] = (),
) -> Plan:
    """Plan slices of Cloud TPU VMs as a queued resource, deleted after the run.

    The workers receive the commit of this checkout and run the command as a service, whose log is
    copied to the folder that the command writes to. This process follows the log, and creates the
    slices again after preemption.
    """
    topology = _topology(accelerator, vm=True)
    _check_machines(job, accelerator, topology)
    kind, runtime = topology.chip.tpu_vm or ("", "")
    queued = ["gcloud", "compute", "tpus", "queued-resources"]
    location = [f"--zone={zone}", *([f"--project={project}"] if project else [])]
    several = [f"--node-count={topology.slices}", f"--node-prefix={job.name}"]
    create = [
        *(*queued, "create", job.name, *location),
        *(several if topology.slices > 1 else [f"--node-id={job.name}"]),
        *(*_tpu_type(topology, kind), f"--runtime-version={runtime}"),
        *(["--spot"] if spot else []),
        *extra,
    ]
    delete = [*queued, "delete", job.name, *location, "--force", "--quiet"]
    folder = state_folder(job.name)
    script, bundle, worker = folder / "job.sh", folder / "code.bundle", SCRIPTS / "tpu_worker.sh"
    everywhere = [*location, "--worker=all", "--node=all"]

    def on_workers(line: str) -> list[str]:
        return [*queued, "ssh", job.name, *everywhere, f"--command={line}"]

    # Where a worker copies its log, as a URL.
    logs = f"{job.folder.rstrip('/')}/logs" if storage.is_remote(job.folder) else ""
    exports = [f"export {shlex.quote(variable)}\n" for variable in _assignments(job)]
    lines = [
        *("cd ~/bert_jax\n", "export BERT_JAX_DISTRIBUTED=auto\n", *exports),
        f"exec ~/venv/bin/{shlex.join(['bert-jax', *job.command])}\n",
    ]
    return Plan(
        files={str(script): "".join(lines)},
        setup=[
            ["bash", str(SCRIPTS / "tpu_slice.sh"), job.name, *location, "--", *create],
            ["git", "-C", str(CHECKOUT), "bundle", "create", "--quiet", str(bundle), "HEAD"],
            [*queued, "scp", str(bundle), str(script), str(worker), f"{job.name}:", *everywhere],
            on_workers(shlex.join(["bash", worker.name, "start", logs])),
        ],
        processes=[Process(on_workers(f"bash {worker.name} follow"))],
        teardown=[] if keep else [delete],
        # gcloud exits with 1 or 255 when it loses the connection, as after preemption.
        retry_statuses=frozenset({1, EXIT_INTERRUPTED, *KILLED}),
        restarts=restarts,
        status=[*queued, "describe", job.name, *location, "--format=value(state.state)"],
        logs=on_workers(f"bash {worker.name} follow"),
        stop=[on_workers(f"bash {worker.name} stop"), *([] if keep else [delete])],
        cost_warning="the slice costs money while it exists; to delete it: "
        + (shlex.join(delete) if keep else f"bert-jax launch stop {job.name}"),
    )


def _check_nodes(job: Job, nodes: int) -> None:
    if nodes > 1 and not job.is_distributed:
        raise UserError(f"--nodes {nodes}: {job.command[0]} runs on one machine")


def _check_accelerator(on: str, job: Job, accelerator: str) -> None:
    if job.command[0] in ("pretrain", "finetune") and not accelerator:
        raise UserError(f"--on {on} needs --accelerator for {job.command[0]}")
    if job.command[0] == "prepare" and accelerator:
        raise UserError(
            f"--accelerator {accelerator}: prepare runs in one process, on CPUs; remove it"
        )


def _check_machines(job: Job, accelerator: str, topology: Topology, max_chips: int = 0) -> None:
    """Check that the slice of a command in one process has one machine, of at most `max_chips`."""
    max_chips = max_chips or topology.chip.most_on_vm
    if max(topology.chips / max_chips, topology.slices) > 1 and not job.is_distributed:
        raise UserError(
            f"--accelerator {accelerator}: {job.command[0]} runs on one machine, of at most "
            f"{max_chips} chips"
        )


def _topology(accelerator: str, vm: bool = False) -> Topology:
    """Return a topology of TPUs; with `vm`, of those that Cloud TPU VMs have."""
    topology = parse_topology(accelerator)
    tpus = [kind for kind, chip in CHIPS.items() if (chip.tpu_vm if vm else chip.is_tpu)]
    if topology.kind not in tpus:
        raise UserError(f"--accelerator {accelerator}: choose from {', '.join(tpus)}")
    return topology


def _tpu_type(topology: Topology, kind: str) -> list[str]:
    """Return gcloud's options for the type of a slice."""
    cores = topology.chips // topology.slices * topology.chip.cores
    if slice_shape(topology.kind, cores) == topology.shape:
        return [f"--accelerator-type={kind}-{cores}"]
    return [f"--type={kind}", f"--topology={'x'.join(map(str, topology.shape))}"]


def gke(
    job: Job,
    *,
    image: str,
    accelerator: str = "",
    queue: str = "",
    service_account: str = "",
    spot: bool = False,
    restarts: int = 100,
) -> Plan:
    """Plan a JobSet on the current cluster of kubectl, with one job per TPU slice.

    JobSet (https://jobset.sigs.k8s.io) must be installed in the cluster, as xpk and Cluster Toolkit do.
    """
    variables, nodes, resources = dict(job.environment), {}, {}
    slices = machines = 1
    _check_accelerator("gke", job, accelerator)
    if accelerator:
        topology = _topology(accelerator)
        chips, slices = topology.chips // topology.slices, topology.slices
        on_a_machine = min(chips, _CHIPS_PER_VM)
        machines = chips // on_a_machine
        _check_machines(job, accelerator, topology, _CHIPS_PER_VM)
        variables["BERT_JAX_DISTRIBUTED"] = "auto"
        # The nodes of a slice may become available long after those of another.
        variables.setdefault("BERT_JAX_JOIN_SECONDS", "3600")
        nodes = {
            "cloud.google.com/gke-tpu-accelerator": topology.chip.gke,
            "cloud.google.com/gke-tpu-topology": "x".join(map(str, topology.shape)),
        }
        resources = {"limits": {"google.com/tpu": on_a_machine}}
    if spot:
        nodes["cloud.google.com/gke-spot"] = "true"
    pod = {
        **({"serviceAccountName": service_account} if service_account else {}),
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": int(STOP_SECONDS),
        "nodeSelector": nodes,
        "containers": [
            {
                "name": "bert-jax",
                "image": image,
                # Kubernetes expands $(NAME), and turns $$ into $.
                "command": [part.replace("$", "$$") for part in ["bert-jax", *job.command]],
                "env": [{"name": k, "value": v.replace("$", "$$")} for k, v in variables.items()],
                "resources": resources,
            }
        ],
    }
    if slices > 1:  # between slices, a host's own network is faster than that of Kubernetes
        pod |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    # A pod that fails fails its job, which restarts all jobs, but for statuses that are final.
    final = {"operator": "In", "values": [EXIT_NEGATIVE, EXIT_USER_ERROR]}
    slice_job = {
        "parallelism": machines,
        "completions": machines,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": final}]},
        "template": {"spec": pod},
    }
    # JobSet labels the jobs and pods with its name, but not itself; `status` selects by it.
    metadata: dict[str, Any] = {
        "name": job.name,
        "labels": {"jobset.sigs.k8s.io/jobset-name": job.name},
    }
    if queue:
        metadata["labels"]["kueue.x-k8s.io/queue-name"] = queue
    if accelerator:  # each job has a node pool, that is a slice, for itself
        exclusive = "alpha.jobset.sigs.k8s.io/exclusive-topology"
        metadata["annotations"] = {exclusive: "cloud.google.com/gke-nodepool"}
    stop = {"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    manifest = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "failurePolicy": {"maxRestarts": restarts, "rules": [stop]},
            "replicatedJobs": [
                {"name": "slice", "replicas": slices, "template": {"spec": slice_job}}
            ],
        },
    }
    path = str(state_folder(job.name) / "jobset.yaml")
    label = f"--selector=jobset.sigs.k8s.io/jobset-name={job.name}"
    return Plan(
        files={path: _yaml(manifest)},
        setup=[["kubectl", "apply", f"--filename={path}"]],
        status=["kubectl", "get", "jobset,pods", label],
        logs=["kubectl", "logs", "--follow", label, "--prefix", "--tail=100",
              "--max-log-requests=1000"],
        stop=[["kubectl", "delete", "jobset", job.name]],
    )  # fmt: skip


# SkyPilot's variables in the ones of `bert_jax.runtime.distributed`.
_SKY_PROCESSES = """\
export BERT_JAX_COORDINATOR="$(echo "$SKYPILOT_NODE_IPS" | head -n 1):8476"
export BERT_JAX_PROCESSES="$SKYPILOT_NUM_NODES"
export BERT_JAX_PROCESS="$SKYPILOT_NODE_RANK"
"""
_SKY_SETUP = """\
python3 -m pip install --quiet --user uv
[ -d venv ] || ~/.local/bin/uv venv --quiet --python 3.12 venv
~/.local/bin/uv pip install --quiet --python venv/bin/python --editable '.[{extras}]'
"""


def sky(
    job: Job,
    *,
    accelerator: str = "",
    nodes: int = 1,
    image: str = "",
    spot: bool = False,
    extra: Sequence[str] = (),
) -> Plan:
    """Plan a managed SkyPilot job, which moves to other machines after preemption.

    Without an image, its machines install this checkout.
    """
    _check_nodes(job, nodes)
    _check_accelerator("sky", job, accelerator)
    is_tpu = accelerator.startswith("tpu-")
    resources: dict[str, Any] = {
        "use_spot": spot,
        # Preempted machines are always replaced. 75: stopped by a signal, state saved.
        "job_recovery": {"recover_on_exit_codes": [EXIT_INTERRUPTED]},
    }
    if accelerator:
        resources["accelerators"] = accelerator
    if is_tpu:  # SkyPilot's default runtime is wrong for some slices
        topology = _topology(accelerator, vm=True)
        _check_machines(job, accelerator, topology)
        resources["accelerator_args"] = {"runtime_version": (topology.chip.tpu_vm or ("", ""))[1]}
    processes = ""
    if job.is_distributed:
        processes = "export BERT_JAX_DISTRIBUTED=auto\n" if is_tpu else _SKY_PROCESSES
    task: dict[str, Any] = {"name": job.name, "num_nodes": nodes, "resources": resources}
    if job.environment:
        task["envs"] = job.environment
    if image:
        resources["image_id"] = f"docker:{image}"
        start = "cd /opt/bert_jax && exec"  # SkyPilot starts in its own folder
        program = "bert-jax"
    else:
        start = "exec"
        extras = [*_EXTRAS, *(["tpu"] if is_tpu else ["cuda13"] if accelerator else [])]
        task["workdir"] = str(CHECKOUT)
        task["setup"] = _SKY_SETUP.format(extras=",".join(extras))
        program = "venv/bin/bert-jax"
    task["run"] = f"{processes}{start} {shlex.join([program, *job.command])}\n"
    path = str(state_folder(job.name) / "sky.yaml")
    return Plan(
        files={path: _yaml(task)},
        setup=[["sky", "jobs", "launch", "--yes", "--detach-run", *extra, path]],
        status=["sky", "jobs", "queue"],
        logs=["sky", "jobs", "logs", f"--name={job.name}"],
        stop=[["sky", "jobs", "cancel", "--yes", f"--name={job.name}"]],
    )


class _Dumper(yaml.SafeDumper):
    """Writes scripts as blocks of lines, as people do."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, "|" if text.endswith("\n") else None
    ),
)


def _yaml(content: dict[str, Any]) -> str:
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**31)


ENGINES: dict[str, Callable[..., Plan]] = {
    "tpu-vm": tpu_vm,
    "gke": gke,
    "slurm": slurm,
    "sky": sky,
    "local": local,
}
# Engines whose machines do not share the files of this one.
REMOTE = ("tpu-vm", "gke", "sky")
# Engines that queue a job and return.
SUBMITTED = ("slurm", "gke", "sky")
