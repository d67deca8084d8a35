"""experiments/speed: cases match their functions, and the benchmark of a GPU runs."""

import importlib
import inspect
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from bert_jax.tools.sweep import module_of
from tests.helpers.runs import ONE_DEVICE

ROOT = pathlib.Path(__file__).parent.parent
HERE = ROOT / "experiments" / "speed"


@pytest.fixture(scope="module")
def speed():
    """Import the folder's modules and return them by name."""
    sys.path.insert(0, str(HERE))
    try:
        names = ("cases", "gpu", "ours", "peers")
        return {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(HERE))


def test_contender_settings_match_maker_signatures(speed):
    for case in speed["cases"].CASES.values():
        for path, settings in case.values():
            module, function = path.split(":")
            maker = getattr(speed[module], function)
            for given in (settings, speed["cases"].quick(settings)):
                inspect.signature(maker).bind(**given)


@pytest.mark.nightly
def test_smoke_run_of_the_gpu_benchmark_measures_every_row(speed, tmp_path):
    out, gpu = tmp_path / "out", speed["gpu"]
    command = [sys.executable, HERE / "gpu.py", "--smoke", "--out", out, "--minutes", "14"]
    done = subprocess.run(command, env=ONE_DEVICE, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (out / "gpu.jsonl").read_text().splitlines()]
    for line, row in zip(lines, gpu.plan(smoke=True), strict=True):
        assert line == {**line, **row.settings}
        if line.get("attention") == "cudnn":
            assert line["status"] == "failed"
            continue
        assert "status" not in line, line
        if line["kind"] != "ceilings":
            # The initial loss is that of a uniform guess over the vocabulary and two labels.
            assert abs(line["loss"] - np.log(2 * 30_592)) < 0.2
    assert "\n".join(module_of(HERE / "sweep.py").gpu_section(lines)) in done.stdout
