"""Slices of Cloud TPU VMs."""

import shlex
import sys
from collections.abc import Sequence

from bert_jax import storage
from bert_jax.errors import EXIT_INTERRUPTED
from bert_jax.tools.launch.engines import base
from bert_jax.tools.launch.engines.base import Job, State
from bert_jax.tools.launch.plan import KILLED, Plan, Process, read_output

_QUEUED = ("gcloud", "compute", "tpus", "queued-resources")
_ALL, _FIRST = ("--worker=all", "--node=all"), ("--worker=0", "--node=0")
_WORKER = base.SCRIPTS / "tpu_worker.sh"


def plan(
    job: Job,
    *,
    accelerator: str,
    zone: str,
    project: str = "",
    spot: bool = False,
    keep: bool = False,
    dollars_per_chip_hour: float = 0.0,
    restarts: int = 100,
    extra: Sequence[str] = (),
) -> Plan:
    """Plan slices of Cloud TPU VMs as a queued resource, deleted after the run.

    The workers receive the commit of this checkout, or a wheel of this package, and run the command as
    a service, whose log is copied to the folder that the command writes to. This process follows the log,
    and creates the slices again after preemption.
    """
    topology = base.tpu_topology(job, accelerator, vm=True)
    kind, software = base.slice_type(topology, optional=topology.kind == "v4")
    shape = ["--type=v4", f"--topology={'x'.join(map(str, topology.shape))}"]
    location = [f"--zone={zone}", *([f"--project={project}"] if project else [])]
    several = [f"--node-count={topology.slices}", f"--node-prefix={job.name}"]
    create = [
        *(*_QUEUED, "create", job.name, *location),
        *(several if topology.slices > 1 else [f"--node-id={job.name}"]),
        *([f"--accelerator-type={kind}"] if kind else shape),
        f"--runtime-version={software}",
        *(["--spot"] if spot else []),
        *extra,
    ]
    delete = [*_QUEUED, "delete", job.name, *location, "--force", "--quiet"]
    folder = base.state_folder(job.name)
    script, code = folder / "job.sh", folder / base.WHEEL
    pack = [sys.executable, "-m", "bert_jax.tools.launch.wheel", str(code)]
    if base.has_checkout():
        code = folder / "code.bundle"
        pack = ["git", "-C", str(base.CHECKOUT), "bundle", "create", "--quiet", str(code), "HEAD"]
    follow = _on_workers(job.name, location, "follow")
    # Where a worker copies its log, as a URL.
    logs = f"{job.folder.rstrip('/')}/logs" if storage.is_remote(job.folder) else ""
    lines = ["cd ~/bert_jax", "export BERT_JAX_DISTRIBUTED=auto"]
    lines += [f"export {shlex.quote(variable)}" for variable in job.assignments]
    lines += [f"exec ~/venv/bin/{shlex.join(['bert-jax', *job.command])}", ""]
    return Plan(
        files={str(script): "\n".join(lines)},
        setup=[
            ["bash", str(base.SCRIPTS / "tpu_slice.sh"), job.name, *location, "--", *create],
            pack,
            [*_QUEUED, "scp", *map(str, (code, script, _WORKER)), f"{job.name}:", *location, *_ALL],
            _on_workers(job.name, location, f"start {shlex.join([code.name, logs])}"),
        ],
        processes=[Process(follow)],
        # gcloud also exits with 0 if no machine of the slice is ready.
        confirm=_on_workers(job.name, location, "state", _FIRST),
        # gcloud exits with 1 or 255 when it loses the connection, as after preemption.
        retry_statuses=frozenset({1, EXIT_INTERRUPTED, *KILLED}),
        restarts=restarts,
        query=location,
        logs=follow,
        stop=[_on_workers(job.name, location, "stop"), *([] if keep else [delete])],
        delete=delete,
        keep=keep,
        dollars_per_hour=topology.chips * dollars_per_chip_hour,
    )


def ask(name: str, query: Sequence[str]) -> State:
    """Ask for the state of a slice, and of the service on its first worker.

    States: https://docs.cloud.google.com/tpu/docs/queued-resources
    """
    state, error = read_output([*_QUEUED, "describe", name, *query, "--format=value(state.state)"])
    if state is None:
        return State("lost" if "NOT_FOUND" in error else "unknown", text=error)
    if state != "ACTIVE":
        is_gone = state in ("FAILED", "SUSPENDED", "SUSPENDING", "DELETING")
        return State("lost" if is_gone else "waiting", text=f"the slice is {state}")
    answer, error = read_output(_on_workers(name, query, "state", _FIRST))
    kind, _, text = (answer or "").partition("\n")
    if kind in ("waiting", "running"):
        return State(kind, text=text)
    if not kind.isdigit():
        return State("unknown", text=error or kind)
    return State("failed" if int(kind) else "done", int(kind), text)


def _on_workers(
    name: str, location: Sequence[str], arguments: str, workers: Sequence[str] = _ALL
) -> list[str]:
    command = f"--command=bash {_WORKER.name} {arguments}"
    return [*_QUEUED, "ssh", name, *location, *workers, command]
