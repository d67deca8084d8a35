"""Several processes on this machine."""

import os
import socket

from bert_jax.errors import EXIT_INTERRUPTED
from bert_jax.tools.launch.engines import base
from bert_jax.tools.launch.engines.base import Job
from bert_jax.tools.launch.plan import KILLED, Plan, Process


def plan(job: Job, *, processes: int = 0, devices: int | None = None, restarts: int = 0) -> Plan:
    """Plan several processes on this machine: 2 by default, or 1 for verbs that run in one."""
    processes = processes or (2 if job.is_distributed else 1)
    base.check_one(job, f"--processes {processes}", processes > 1, "in one process")
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
            Process([*base.python_command(), *job.command], environment(i), f"[{i}] ")
            for i in range(processes)
        ],
        retry_statuses=frozenset({EXIT_INTERRUPTED, *KILLED}),
        restarts=restarts,
    )
