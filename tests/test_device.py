"""What is set up before JAX's threads begin."""

import json
import statistics
import subprocess
import sys

from tests.test_train import ALONE

# A temporary of 64 MB, and how many pages the system had to clear for each call. On a busy machine what
# one call freed may come too late for the next, which then takes more: the first calls say nothing.
FAULTS = """
import resource, sys
import jax, jax.numpy as jnp
from bert_jax import device
if sys.argv[1] == "start":
    device.start("cpu")
x = jnp.ones((4096, 8))
f = jax.jit(lambda x: jnp.sum((x @ x.T) @ x))
found = []
for _ in range(100):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    f(x).block_until_ready()
    found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(found[50:])
"""


def faults(argument):
    found = subprocess.run(
        [sys.executable, "-c", FAULTS, argument],
        env=ALONE, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    return statistics.median(json.loads(found.stdout))


def test_what_a_step_frees_is_there_for_the_next():
    assert faults("start") < 100 < faults("as it is") / 10
