"""Managed jobs of SkyPilot, on any cloud that it knows."""

import json
import re
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from bert_jax.errors import EXIT_INTERRUPTED, UserError
from bert_jax.tools.launch.engines import base
from bert_jax.tools.launch.engines.base import Job, State
from bert_jax.tools.launch.plan import Plan, read_output

# Statuses of managed jobs: https://docs.skypilot.co/en/latest/reference/cli.html#sky-jobs-queue
_KINDS = {
    "RUNNING": "running",
    "WINDING_DOWN": "running",
    "SUCCEEDED": "done",
    "CANCELLING": "stopped",
    "CANCELLED": "stopped",
}
# SkyPilot's variables in the ones of `bert_jax.runtime.distributed`.
_SKY_PROCESSES = """\
export BERT_JAX_COORDINATOR="$(echo "$SKYPILOT_NODE_IPS" | head -n 1):8476"
export BERT_JAX_PROCESSES="$SKYPILOT_NUM_NODES"
export BERT_JAX_PROCESS="$SKYPILOT_NODE_RANK"
"""
_SKY_SETUP = """\
[ -x uv/bin/uv ] || {{ python3 -m venv uv && uv/bin/pip install --quiet uv; }}
[ -d venv ] || uv/bin/uv venv --quiet --python 3.12 venv
uv/bin/uv pip install --quiet --python venv/bin/python {package}
"""


def plan(
    job: Job,
    *,
    accelerator: str = "",
    nodes: int = 1,
    image: str = "",
    spot: bool = False,
    extra: Sequence[str] = (),
) -> Plan:
    """Plan a managed SkyPilot job, which moves to other machines after preemption.

    Without an image, its machines install this checkout, or a wheel of this package.
    """
    base.check_one(job, f"--nodes {nodes}", nodes > 1)
    base.check_accelerator("sky", job, accelerator)
    is_tpu = accelerator.startswith("tpu")
    # Preempted machines are always replaced. 75: stopped by a signal, state saved.
    recovery = {"recover_on_exit_codes": [EXIT_INTERRUPTED]}
    resources: dict[str, Any] = {"use_spot": spot, "job_recovery": recovery}
    if accelerator:
        resources["accelerators"] = accelerator
    if is_tpu:  # SkyPilot's default runtime is wrong for some slices
        topology = base.tpu_topology(job, accelerator, vm=True)
        if topology.slices > 1:
            raise UserError(f"--accelerator {accelerator}: SkyPilot has one slice for a job")
        kind, software = base.slice_type(topology)
        resources["accelerators"] = f"tpu-{kind}"
        resources["accelerator_args"] = {"runtime_version": software}
    processes, setup = "", []
    if job.is_distributed:
        processes = "export BERT_JAX_DISTRIBUTED=auto\n" if is_tpu else _SKY_PROCESSES
    task: dict[str, Any] = {"name": job.name, "num_nodes": nodes, "resources": resources}
    if job.environment:
        task["envs"] = job.environment
    if image:
        resources["image_id"] = f"docker:{image}"
        program = "cd /opt/bert_jax && exec bert-jax"  # SkyPilot starts in its own folder
    else:
        program = "exec venv/bin/bert-jax"
        extras = "[cloud,tpu]" if is_tpu else "[cloud,cuda13]" if accelerator else "[cloud]"
        if base.has_checkout():
            task["workdir"], package = str(base.CHECKOUT), f"--editable '.{extras}'"
        else:
            wheel = str(base.state_folder(job.name) / base.WHEEL)
            setup = [[sys.executable, "-m", "bert_jax.tools.launch.wheel", wheel]]
            # The package, whose commands run in SkyPilot's own folder, in the home folder.
            task["file_mounts"] = {f"~/{base.WHEEL}": wheel}
            package = f"~/{base.WHEEL}'{extras}'"
        task["setup"] = _SKY_SETUP.format(package=package)
    task["run"] = f"{processes}{program} {shlex.join(job.command)}\n"
    path = str(base.state_folder(job.name) / "sky.yaml")
    return Plan(
        files={path: base.to_yaml(task)},
        setup=[*setup, ["sky", "jobs", "launch", "--yes", "--detach-run", *extra, path]],
        retry_statuses=frozenset({1}),  # the job may have been submitted all the same
        logs=["sky", "jobs", "logs", f"--name={job.name}"],
        stop=[["sky", "jobs", "cancel", "--yes", f"--name={job.name}"]],
    )


def ask(name: str, query: Sequence[str]) -> State:
    """Ask for the status of the newest managed job of a name."""
    queue = ["sky", "jobs", "queue", "--all", "--verbose", "--refresh", "--output=json"]
    text, error = read_output(queue)
    try:
        jobs = json.loads((text or "")[(text or "").index("[") :])
    except ValueError:
        # There is no controller before the first job, nor some time after the last one.
        kind = "lost" if "No in-progress managed jobs" in error else "unknown"
        return State(kind, text=error or "sky jobs queue printed no JSON")
    jobs = [job for job in jobs if job["job_name"] == name]
    if not jobs:
        return State("lost", text=f"sky knows no job {name}")
    job = max(jobs, key=lambda job: job["job_id"])
    reason, status = job.get("failure_reason") or "", job["status"]
    if not status.startswith("FAILED"):
        return State(_KINDS.get(status, "waiting"), text=f"{status} {reason}".strip())
    # By name, only jobs that have not ended are found.
    output, _ = read_output(["sky", "jobs", "logs", "--no-follow", "--tail=5", str(job["job_id"])])
    code = re.search(r"exit codes? \[?(\d+)", reason)
    return State("failed", int(code[1]) if code else None, f"{status} {reason}\n{output or ''}")
