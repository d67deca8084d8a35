"""Run a command on clusters and clouds.

`request` checks what is asked for, `engines` turns it into a `Plan`, `plan` executes it, and `jobs`
remembers it by name. The scripts and the Dockerfile are in `launch/`.
"""

from bert_jax.tools.launch import jobs, plan
from bert_jax.tools.launch.engines import ENGINES, SUBMITTED, python_command
from bert_jax.tools.launch.jobs import detach, show_logs, show_status, start, stop
from bert_jax.tools.launch.plan import KILLED, Plan, Process, exit_status, run, script, signals
from bert_jax.tools.launch.request import Request, job_name, make_plan

__all__ = [
    "ENGINES",
    "KILLED",
    "SUBMITTED",
    "Plan",
    "Process",
    "Request",
    "detach",
    "exit_status",
    "job_name",
    "jobs",
    "make_plan",
    "plan",
    "python_command",
    "run",
    "script",
    "show_logs",
    "show_status",
    "signals",
    "start",
    "stop",
]
