"""What is set up before JAX's threads begin."""

import json
import platform
import statistics
import subprocess
import sys

import pytest

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


PRODUCT = """
import os, sys
import jax, jax.numpy as jnp
from bert_jax import device
if sys.argv[1] == "start":
    device.start("cpu", cache=False)
x = jnp.ones((512, 512))
text = jax.jit(lambda x: x @ x).lower(x).compile().as_text()
print("ynn" in text, jax.jit(lambda x: x.sum(1)).lower(x).compile().as_text().count("ynn") > 0)
print(os.environ["XLA_FLAGS"])
"""


@pytest.mark.parametrize(
    ("argument", "flags", "product", "after"),
    [
        ("as it is", "", True, ""),
        ("start", "", False, "--xla_cpu_experimental_ynn_fusion_type=LIBRARY_FUSION_TYPE_REDUCE"),
        ("start", "--xla_cpu_experimental_ynn_fusion_type=LIBRARY_FUSION_TYPE_DOT", True, None),
    ],
)
def test_products_are_eigens(argument, flags, product, after):
    """Unless the user says otherwise; and reductions YNNPACK's, as JAX has them."""
    done = subprocess.run(
        [sys.executable, "-c", PRODUCT, argument],
        env={**ALONE, "XLA_FLAGS": flags}, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    found, left = done.stdout.splitlines()
    assert found.split()[0] == str(product)
    assert left == (flags if after is None else after)
    if after is not None:
        assert found.split()[1] == "True"


KEPT = """
import pathlib, re, sys
import numpy as np
from bert_jax import device
device.start("cpu", cache=False)
behind = []  # blocks that hold the heap's end

def grown(megabytes):
    def resident():
        status = pathlib.Path("/proc/self/status").read_text()
        return int(re.search(r"VmRSS:\\s+(\\d+) kB", status)[1]) / 1024
    before = resident()
    array = np.ones(megabytes << 20, np.uint8)
    behind.append(np.empty(megabytes - 10 << 20, np.uint8))
    del array
    return resident() - before

print(grown(100))
device._memory_bytes = lambda: 1000
device.mind_memory(166)  # three times that are less than half
print(grown(200))
device.mind_memory(167)
print(grown(400))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's malloc")
def test_what_is_freed_is_kept_unless_that_is_much_of_the_memory():
    said = subprocess.run(
        [sys.executable, "-c", KEPT], capture_output=True, text=True, check=True, env=ALONE
    )
    kept, more, given_back = map(float, said.stdout.split())
    assert kept > 90
    assert more > 90
    assert given_back < 10
