"""Settings made before JAX starts its threads: memory allocation, XLA flags, platforms."""

import contextlib
import importlib.util
import os
import platform
import subprocess
import sys

import jax.numpy as jnp
import pytest

from bert_jax.config.schema import Config
from bert_jax.errors import UserError
from bert_jax.runtime import device
from tests.helpers import processes
from tests.helpers.runs import ONE_DEVICE, free_port

EIGEN = "--xla_cpu_experimental_ynn_fusion_type=LIBRARY_FUSION_TYPE_REDUCE"
PRODUCT = """
import os, sys
import jax, jax.numpy as jnp
from bert_jax.runtime import device, distributed
distributed.start()
if "start" in sys.argv[1]:
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
        ("join and start", "", False, EIGEN),
        ("start", "--xla_cpu_experimental_ynn_fusion_type=LIBRARY_FUSION_TYPE_DOT", True, None),
    ],
)
def test_matmuls_use_eigen_unless_the_user_overrides_it(argument, flags, product, after):
    """Reductions still use YNNPACK, JAX's default. Flags also apply after joining other processes."""
    env = {**ONE_DEVICE, "XLA_FLAGS": flags}
    if "join" in argument:
        address = f"127.0.0.1:{free_port()}"
        env |= {"BERT_JAX_COORDINATOR": address, "BERT_JAX_PROCESSES": "1", "BERT_JAX_PROCESS": "0"}
    done = processes.run([sys.executable, "-c", PRODUCT, argument], env=env, check=True)
    result, left = done.stdout.splitlines()
    assert result.split()[0] == str(product)
    assert left == (flags if after is None else after)
    if after is not None:
        assert result.split()[1] == "True"


KEPT = """
import pathlib, re, sys
import numpy as np
from bert_jax.runtime import device
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
device.limit_malloc_retention(100)
device.limit_malloc_retention(66)  # three times both are less than half
print(grown(200))
device.limit_malloc_retention(1)
print(grown(400))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's malloc")
def test_freed_memory_is_retained_up_to_a_limit():
    output = subprocess.check_output([sys.executable, "-c", KEPT], env=ONE_DEVICE)
    kept, more, given_back = map(float, output.split())
    assert min(kept, more) > 90
    assert given_back < 10


FLAG = "--xla_gpu_deterministic_ops=true"


@pytest.fixture
def flags(monkeypatch):
    """Call `device.start` on a simulated machine and return the resulting $XLA_FLAGS."""
    monkeypatch.setattr(device.jax, "devices", lambda *_: [])
    monkeypatch.setattr(device.jax.config, "update", lambda *_: None)
    monkeypatch.setattr(device, "retain_freed_memory", lambda: None)

    def start(platforms, plugins, before="", **settings):
        monkeypatch.setenv("XLA_FLAGS", before)
        monkeypatch.setattr(device, "_platforms", lambda: platforms)
        monkeypatch.setattr(device, "_plugins", lambda: plugins)
        device.start("", cache=False, **settings)
        return os.environ["XLA_FLAGS"].split()

    return start


def test_deterministic_flag_is_set_only_for_gpus(flags):
    assert flags("", ["xla_cuda13"], deterministic=True) == [FLAG]
    assert flags("cuda,cpu", ["xla_cuda13"], deterministic=True) == [FLAG]
    assert flags("", ["xla_cuda13"], deterministic=False) == []
    # The flag has no meaning on other platforms.
    assert flags("tpu", ["xla_cuda13", "libtpu"], deterministic=True) == []
    assert flags("", ["libtpu"], deterministic=True) == []
    assert FLAG not in flags("cpu", ["xla_cuda13"], deterministic=True)
    assert FLAG not in flags("", [], deterministic=True)
    # Flags of the user are kept.
    other = "--xla_gpu_deterministic_ops=false"
    assert flags("", ["xla_cuda13"], other, deterministic=True) == [other]
    assert flags("", ["xla_cuda13"], "--a=1", deterministic=True) == ["--a=1", FLAG]


@pytest.mark.parametrize(
    ("plugins", "control", "file"),
    [
        ([], "vfio/vfio", "vfio/0"),
        ([], "vfio/vfio", "accel0"),
        (["xla_cuda13"], "nvidiactl", "nvidia0"),
    ],
)
def test_plugins_are_ignored_on_a_machine_without_their_devices(
    monkeypatch, tmp_path, plugins, control, file
):
    """The control file of a driver may exist on every machine."""
    has_libtpu = True if not plugins else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "libtpu" and has_libtpu)
    monkeypatch.setattr(device, "_installed_plugins", lambda: plugins)
    monkeypatch.setattr(device, "_DEVICES", tmp_path)
    monkeypatch.setattr(device, "_platforms", lambda: "")
    (tmp_path / "vfio").mkdir()
    (tmp_path / control).touch()
    assert device._only_cpu()
    (tmp_path / file).touch()
    assert not device._only_cpu()


def test_unused_gpus_are_explained(monkeypatch, tmp_path):
    monkeypatch.setattr(device, "_DEVICES", tmp_path)

    def line(platforms="", plugins=(), asked="", platform="cpu"):
        monkeypatch.setenv("JAX_PLATFORMS", platforms)
        monkeypatch.setattr(device, "_platforms", lambda: platforms)
        monkeypatch.setattr(device, "_plugins", lambda: list(plugins))
        return "".join(device.unused_gpu(asked, platform))

    (tmp_path / "nvidiactl").touch()
    assert not line()
    (tmp_path / "nvidia1").touch()
    assert "[cuda13]'" in line()
    assert "$JAX_PLATFORMS is 'cpu'" in line("cpu", ["xla_cuda13"])
    assert "cuda12" in line("", ["xla_cuda13"])  # the plugin does not start
    assert not line("cpu", asked="cpu")
    assert not line(platform="gpu")


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        ("", True),
        (f"{FLAG} --xla_gpu_deterministic_ops=false", True),
        (FLAG, False),
        ("--a=1 --xla_gpu_deterministic_ops", False),
    ],
)
def test_gpu_run_without_the_deterministic_flag_is_rejected(monkeypatch, flags, refused):
    monkeypatch.setenv("XLA_FLAGS", flags)
    device.check(Config(), "tpu")
    device.check(Config(), "cpu")
    device.check(Config(deterministic=False), "gpu")
    with pytest.raises(UserError, match=r"config\.platform"):
        device.check(Config(platform="cpu"), "gpu")
    expected = pytest.raises(UserError, match="XLA_FLAGS") if refused else contextlib.nullcontext()
    with expected:
        device.check(Config(), "gpu")


def test_exhausted_memory_is_a_one_line_error():
    with pytest.raises(UserError, match=r"config\.accumulation"), device.one_line_memory_errors():
        jnp.ones((1 << 22, 1 << 22))
