"""Jobs of a Slurm cluster, whose machines share a folder with this one."""

import datetime
import os
import pathlib
import re
import shlex
from collections.abc import Sequence

from bert_jax.tools.launch.engines import base
from bert_jax.tools.launch.engines.base import Job, State
from bert_jax.tools.launch.plan import Plan, read_output

# States of jobs that the accounting has not yet seen to leave the queue.
_UNFINISHED = ("COMPLETING", "PENDING", "REQUEUED", "RESIZING", "RUNNING", "SUSPENDED")


def plan(
    job: Job,
    *,
    nodes: int = 1,
    gpus: int = 0,
    cpus: int = 4,
    image: str = "",
    mount: Sequence[str] = (),
    module: Sequence[str] = (),
    restarts: int = 100,
    extra: Sequence[str] = (),
) -> Plan:
    """Plan a Slurm job, run by this Python in this folder or by a container (of the plugin Pyxis).

    It has a process per GPU, or per node without GPUs, and requeues itself. A process has `cpus` CPUs.
    """
    base.check_one(job, f"--nodes {nodes}", nodes > 1)
    tasks = (gpus or 1) if job.is_distributed else 1
    sizes = [f"--nodes={nodes}", f"--ntasks-per-node={tasks}", f"--cpus-per-task={cpus}"]
    sizes += [f"--gpus-per-node={gpus}"] if gpus else []
    output = f"{job.name}-%j.out"
    submit = ["sbatch", f"--job-name={job.name}", f"--output={output}", *sizes, *extra]
    options = [f"--restarts={restarts}"]
    options += [f"--module={name}" for name in module]
    options += [f"--srun=--container-image={image}"] if image else []
    options += [f"--srun=--container-mounts={','.join(mount)}"] if mount else []
    command = ["bert-jax"] if image else base.python_command()
    if job.environment:
        command = ["env", *job.assignments, *command]
    # Not the logs of other jobs whose names start with this one's, such as NAME-large.
    logs = f"{shlex.quote(os.path.join(os.getcwd(), job.name))}-+([0-9]).out"
    follow = (
        f"until logs=({logs}); [ ${{#logs[@]}} -gt 0 ]; do "
        f'[ "$waits" ] || echo "waiting for the job to start" >&2; waits=1; sleep 2; done; '
        'exec tail -n 100 -F "${logs[@]}"'
    )
    return Plan(
        setup=[[*submit, str(base.SCRIPTS / "slurm.sh"), *options, "--", *command, *job.command]],
        query=[os.getcwd(), datetime.datetime.now().isoformat(timespec="seconds")],
        logs=["bash", "-O", "extglob", "-O", "nullglob", "-c", follow],
        stop=[["scancel", f"--name={job.name}"]],
    )


def ask(name: str, query: Sequence[str]) -> State:
    """Ask the queue for a job and, when it has left, the accounting, which not every cluster has.

    Job states: https://slurm.schedmd.com/job_state_codes.html
    """
    folder, since = query
    of_job = ["--noheader", f"--name={name}"]
    queued, error = read_output(["squeue", "--me", *of_job, "--format=%T %r"])
    if queued is None:
        return State("unknown", text=error)
    logs = sorted(pathlib.Path(folder).glob(f"{name}-[0-9]*.out"), key=os.path.getmtime)
    output = "\n".join(logs[-1].read_text(errors="replace").splitlines()[-5:]) if logs else ""
    if queued:
        is_active = re.search(r"^(RUNNING|COMPLETING|STOPPED|SIGNALING|STAGE_OUT)", queued, re.M)
        return State("running" if is_active else "waiting", text=output if is_active else queued)
    columns = ["--parsable2", "--allocations", "--format=State,ExitCode"]
    ended, _ = read_output(["sacct", *of_job, f"--starttime={since}", *columns])
    # "CANCELLED by 1000", 0:15
    state, _, code = (ended or "").rpartition("\n")[2].partition("|")
    status, _, signal = code.partition(":")
    if state == "COMPLETED":
        return State("done", 0)
    if state == "FAILED":
        return State("failed", int(status) or 128 + int(signal), f"{state}\n{output}")
    if not state or state in _UNFINISHED:
        return State("lost", text=f"{name} has left the queue\n{output}")
    kind = "stopped" if state.startswith("CANCELLED") else "failed"  # or TIMEOUT, NODE_FAIL, …
    return State(kind, None, f"{state}\n{output}")
