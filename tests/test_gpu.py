"""Determinism on a GPU: two identical runs end with the same bits."""

import subprocess

import pytest

from tests.helpers.runs import ONE_DEVICE, assert_same_run, command


@pytest.mark.gpu
def test_identical_runs_are_bitwise_identical(tmp_path, rows):
    env = {name: value for name, value in ONE_DEVICE.items() if name != "JAX_PLATFORMS"}
    changes = ("platform=gpu", "steps=30", "model.dropout=0.1", "model.dtype=bfloat16")
    for name in ("one", "two"):
        argv = command(tmp_path / name, [rows()], *changes)
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
    assert_same_run(tmp_path / "one", tmp_path / "two")
