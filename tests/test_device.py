"""What is set up before JAX's threads begin."""

import json
import statistics
import subprocess
import sys

from tests.test_train import ALONE

# Temporaries of 32 MB, and how many pages the system had to clear for each call.
FAULTS = """
import resource, sys
import jax, jax.numpy as jnp
from bert_jax import device
if sys.argv[1] == "start":
    device.start("cpu")
x = jnp.ones((2048, 2048))
f = jax.jit(lambda x: jnp.sum(jnp.sort(x @ x, axis=0) @ jnp.sort(x, axis=1)))
found = []
for _ in range(12):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    f(x).block_until_ready()
    found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(found)
"""


def faults(argument):
    found = subprocess.run(
        [sys.executable, "-c", FAULTS, argument],
        env=ALONE, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    return statistics.median(json.loads(found.stdout))


def test_what_a_step_frees_is_there_for_the_next():
    assert faults("start") < 100 < faults("as it is") / 10
