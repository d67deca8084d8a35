"""experiments/speed/gpu.py: what it runs where packages are few, what it keeps, what its page says."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.test_train import ALONE

SCRIPT = pathlib.Path(__file__).parent.parent / "experiments" / "speed" / "gpu.py"
# Of what bert_jax needs, what a machine that came with JAX, PyTorch and transformers may lack.
LACKING = (
    "array_record google_crc32c grain mwparserfromhell ml_collections sentencex tensorboardX "
    "tensorflow_datasets zstandard"
).split()


@pytest.fixture(scope="module")
def gpu():
    spec = importlib.util.spec_from_file_location("speed_gpu", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smoke")
    text = "".join(f"sys.modules[{name!r}] = None\n" for name in LACKING)
    (folder / "sitecustomize.py").write_text(f"import sys\n{text}")
    done = subprocess.run(
        [sys.executable, SCRIPT, "--smoke", "--out", folder / "out", "--minutes", "14"],
        env={**ALONE, "PYTHONPATH": str(folder)},
        capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    log = (folder / "out" / "gpu.log").read_text()
    return [json.loads(x) for x in (folder / "out" / "gpu.jsonl").read_text().splitlines()], log, done.stdout  # fmt: skip


def test_a_machine_with_few_packages_runs_all_of_it(smoke):
    results, log, _ = smoke
    kinds = [line["kind"] for line in results]
    for kind, count in {
        "ceilings": 1, "parity": 2, "parity of steps": 1, "torch": 1, "profile": 1, "left out": 1,
    }.items():  # fmt: skip
        assert kinds.count(kind) == count, (kind, kinds, log[-3000:])
    (refused,) = [line["why"] for line in results if line["kind"] == "left out"]
    assert "runs on a gpu only" in refused
    for line in results:
        if line["kind"] in ("step", "torch"):
            assert len(line["seconds"]) == 3
            assert np.isfinite(line["loss"])
            assert 0.5 < line["real_fraction"] <= 1
    loops = {line["loop"] for line in results if line["kind"] == "step"}
    assert loops == {"scanned", "unrolled"}
    (refused, found) = sorted((x for x in results if x["kind"] == "parity"), key=lambda x: x.get("loss_difference", -1))  # fmt: skip
    assert "refused" in refused
    assert found["loss_difference"] < 0.01
    assert found["gradient_difference"] < 0.1


def test_its_page_has_all_of_it(smoke, gpu):
    results, _, said = smoke
    page = gpu.table(results)
    assert page.strip() in said
    for words in (
        "| L1-H32-A2 | 32 | xla, attention dropout 0.1; layers scanned | ",
        "| L1-H32-A2 | 32 | xla, attention dropout 0.1; layers unrolled | ",
        "| L1-H32-A2 | 32 | cudnn, attention dropout 0; layers scanned | not measured |",
        "| L1-H32-A2 | 32 | transformers, attention dropout 0.1 | 2 | ",
        "| dropout bits | ",
        "- step L1-H32-A2 32 cudnn: config.model.attention='cudnn' runs on a gpu only",
        "- Wanted of base at T=128: 45% of the data sheet's peak; not measured.",
    ):
        assert words in page


def test_without_a_file_nothing_was_measured(tmp_path, gpu):
    told = [sys.executable, SCRIPT, "--table", tmp_path / "none.jsonl"]
    done = subprocess.run(told, capture_output=True, text=True, check=True)
    assert done.stdout == "Speed on a GPU: not measured.\n"


CEILINGS = {
    "kind": "ceilings", "device": "NVIDIA H200", "operations_per_second": 800e12,
    "bytes_per_second": 4.3e12, "sheet_operations_per_second": 1000e12,
    "sheet_bytes_per_second": 4.8e12, "jax": "1", "flax": "2", "torch": "3", "transformers": "4",
}  # fmt: skip


def a_step(rate, **facts):
    return {
        "kind": "step", "size": "base", "tokens": 128, "attention": "cudnn", "loop": "scanned",
        "batch": 256, "seconds": [0.05, 0.04, 0.06], "real_tokens_per_second": rate,
        "operations_per_token": 500e6, **facts,
    }  # fmt: skip


def test_shares_are_of_real_tokens_and_the_fastest_counts(gpu):
    results = [CEILINGS, a_step(8e5), a_step(9.6e5, batch=512), a_step(9e5, batch=1024)]
    page = gpu.table(results)
    assert "| base | 128 | cudnn, attention dropout 0; layers scanned | 512 | 50 (40 to 60) | 960,000 | 48.0% | 60.0% |" in page  # fmt: skip
    assert "45% of the data sheet's peak; 48.0%, reached." in page
    assert (
        "| large | 512 | cudnn, attention dropout 0; layers scanned | not measured | | | | |"
        in page
    )
    assert "bfloat16 beside float32: not measured." in page
    assert "45% of the data sheet's peak; 40.0%, not reached." in gpu.table(results[:2])


def test_an_unsound_attention_reaches_no_target(gpu):
    def seen(name, far):
        return {
            "kind": "parity",
            "attention": name,
            "loss_difference": 0.0,
            "gradient_difference": far,
        }

    slow = a_step(8e5, attention="xla")
    for others, is_unsound in (
        ([seen("xla", 0.02), seen("cudnn", 0.03)], False),
        ([seen("xla", 0.02), seen("cudnn", 0.05)], True),  # farther than twice what XLA's is
        ([seen("cudnn", 0.11)], True),
        ([seen("cudnn", 0.09)], False),
        ([{"kind": "parity", "attention": "cudnn", "refused": "no"}], True),
    ):
        results = [CEILINGS, a_step(9.6e5), slow, *others]
        assert gpu.best(results, "base", 128)["attention"] == ("xla" if is_unsound else "cudnn")
        page = gpu.table(results)
        assert ("layers scanned; **unsound** | 256" in page) == is_unsound
        assert ("48.0%, reached" in page) != is_unsound
        assert is_unsound == ("**unsound** |\n" in page or "| no | | |" in page)


def test_what_goes_on_from_an_earlier_job(gpu):
    results = [a_step(8e5), a_step(9e5, batch=512), a_step(9.5e5, attention="xla")]
    unrolled = {"kind": "step", "size": "base", "tokens": 128, "attention": "cudnn", "batches": "best"}  # fmt: skip
    assert gpu.fill_in(unrolled, results) is None
    assert unrolled["batches"] == [512]
    traced = {"kind": "profile", "of": "base", "tokens": 128}
    assert gpu.fill_in(traced, results) is None
    assert (traced["attention"], traced["batches"]) == ("xla", [256])
    assert "nothing was measured" in gpu.fill_in({**traced, "of": "large"}, results)


def test_more_rows_as_long_as_they_help(gpu, capsys):
    def measure(batch, rates):
        if batch not in rates:
            raise MemoryError
        return {"kind": "step", "seconds": [batch * 32 / rates[batch]], "real_fraction": 1.0}

    def tried(*rates):
        rates = dict(zip((2, 4, 8), rates, strict=False))
        job = {"kind": "step", "size": "base", "tokens": 32, "batches": [2, 4, 8, 16]}
        is_full = lambda error: isinstance(error, MemoryError)  # noqa: E731
        gpu.searched(job, lambda batch: measure(batch, rates), is_full)
        lines = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
        return [(line["kind"], line["batch"]) for line in lines]

    assert tried(100, 101, 200) == [("step", 2), ("step", 4)]
    assert tried(100, 110) == [("step", 2), ("step", 4), ("does not fit", 8)]


def test_no_time_and_too_little_of_it(gpu, tmp_path, monkeypatch, capsys):
    """Without time nothing is begun; with too little a job ends, and what it said before stays."""
    gpu.measure_all(tmp_path / "none", 0, True)
    lines = gpu.read(tmp_path / "none" / "gpu.jsonl")
    assert len(lines) == len(gpu.plan(True))
    assert {line["why"] for line in lines} == {"the time was over"}
    script = tmp_path / "slow.py"
    script.write_text('import time; print(\'{"kind": "step"}\', flush=True); time.sleep(600)')
    monkeypatch.setattr(gpu, "__file__", str(script))
    monkeypatch.setattr(gpu, "plan", lambda smoke: [(3, {"kind": "a"}), (30, {"kind": "b"})])
    monkeypatch.setattr(gpu, "LEAST_SECONDS", 4)
    begun = time.monotonic()
    gpu.measure_all(tmp_path / "some", 5 / 60, True)
    assert time.monotonic() - begun < 60
    lines = gpu.read(tmp_path / "some" / "gpu.jsonl")
    assert [line["kind"] for line in lines] == ["step", "left out", "left out"]
    assert lines[1]["why"] == "broken off after 3 s"
    assert lines[2]["why"] == "the time was over"


def test_a_job_that_fails_costs_no_other(gpu, tmp_path, monkeypatch, capsys):
    script = tmp_path / "broken.py"
    script.write_text("import sys; sys.exit('out of luck')")
    monkeypatch.setattr(gpu, "__file__", str(script))
    monkeypatch.setattr(gpu, "plan", lambda smoke: [(30, {"kind": "a"}), (30, {"kind": "b"})])
    gpu.measure_all(tmp_path, 5, True)
    lines = gpu.read(tmp_path / "gpu.jsonl")
    assert [line["why"] for line in lines] == ["it ended with status 1: see gpu.log"] * 2
    assert "out of luck" in (tmp_path / "gpu.log").read_text()


def test_a_second_call_does_what_the_first_could_not(gpu, tmp_path, monkeypatch, capsys):
    script = tmp_path / "job.py"
    script.write_text('import sys; print(\'{"kind": "step"}\'); sys.exit(\'"b"\' in sys.argv[-1])')
    monkeypatch.setattr(gpu, "__file__", str(script))
    jobs = [{"kind": "step", "size": x, "tokens": 32, "attention": "xla"} for x in "abc"]
    monkeypatch.setattr(gpu, "plan", lambda smoke: [(30, job) for job in jobs[:2]])
    gpu.measure_all(tmp_path / "first", 5, True)
    first = gpu.read(tmp_path / "first" / "gpu.jsonl")
    a, b, c = map(gpu.name_of, jobs)
    told = [("step", a), ("step", b), ("left out", b)]
    assert [(line["kind"], line["name"]) for line in first] == told
    assert "- step b 32 xla: it ended with status 1: see gpu.log" in gpu.table([CEILINGS, first[2]])
    script.write_text('print(\'{"kind": "step"}\')')
    monkeypatch.setattr(gpu, "plan", lambda smoke: [(30, job) for job in jobs])
    gpu.measure_all(tmp_path / "second", 5, True, first)
    second = gpu.read(tmp_path / "second" / "gpu.jsonl")
    assert second[:2] == first[:2]
    assert [line["name"] for line in second[2:]] == [b, c]
    command = [sys.executable, SCRIPT, "--out", tmp_path, "--after", tmp_path / "none.jsonl"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert refused.returncode == 2
    assert "there is no" in refused.stderr


def test_the_rows_are_of_berts_lengths(gpu):
    job = {"size": "L1-H32-A2", "tokens": 128, "smoke": True}
    _, stage = gpu.stage_of(job, gpu.model_of(job), 16)
    batches = gpu.packed_batches(stage, 4, 300, 3)
    assert [batch["tokens"].shape for batch in batches] == [(16, 128)] * 3
    lengths = np.concatenate([batch["length"] for batch in batches])
    assert (lengths.sum(1) <= 128).all()
    assert 0.9 < lengths.sum() / (48 * 128) <= 1
    assert (lengths[:, 1] > 0).any()  # several a row
    for name, shape in stage.batch_shape.items():
        assert (batches[0][name].shape, batches[0][name].dtype) == (shape.shape, shape.dtype)
    again = gpu.packed_batches(stage, 4, 300, 3)
    np.testing.assert_array_equal(batches[2]["tokens"], again[2]["tokens"])


def test_all_that_is_planned_can_be_read(gpu):
    names = [job["kind"] for _, job in [*gpu.plan(False), *gpu.plan(True)]]
    assert set(names) == set(gpu.JOBS)
    assert os.path.commonpath([gpu.ROOT, SCRIPT]) == str(gpu.ROOT)
    for smoke in (False, True):
        called = [gpu.name_of(job) for _, job in gpu.plan(smoke)]
        assert len(set(called)) == len(called)
    for _, job in gpu.plan(False):
        assert job.get("attention", "xla") in gpu.ATTENTIONS
        json.dumps(job)
