"""Determinism on a GPU: two identical runs end with the same bits."""

import subprocess

import pytest

from tests.helpers.runs import ONE_DEVICE, assert_same_run, command


def two_runs(folder, rows, platform):
    """Run the same command twice, in separate folders."""
    env = {name: value for name, value in ONE_DEVICE.items() if name != "JAX_PLATFORMS"}
    changes = (f"platform={platform}", "steps=30", "model.dropout=0.1", "model.dtype=bfloat16")
    for name in ("one", "two"):
        argv = command(folder / name, [rows], *changes)
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
    return folder / "one", folder / "two"


@pytest.mark.gpu
def test_identical_runs_are_bitwise_identical(tmp_path, rows):
    one, two = two_runs(tmp_path, rows(), "gpu")
    assert_same_run(one, two)
