"""Engines, a module each: `plan` says what to do to run a job, `ask` what has become of it.

The keyword arguments of a `plan` are the options of `bert-jax launch`, whose help describes them.
In every engine, a command that exits with status 75 (stopped by a signal, state saved) or whose machine
is preempted is run again, and, except with sky, one that is killed; one that exits with 0, 1 or 2 is not.
"""

from bert_jax.tools.launch.engines import gke, local, sky, slurm, tpu_vm

ENGINES = {"tpu-vm": tpu_vm, "gke": gke, "slurm": slurm, "sky": sky, "local": local}
# Engines whose machines do not share the files of this one.
REMOTE = ("tpu-vm", "gke", "sky")
# Engines that queue a job and return.
SUBMITTED = ("slurm", "gke", "sky")
