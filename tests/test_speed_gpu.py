"""experiments/speed/gpu.py: the plan, the smoke run, the recorded results, and the page."""

import importlib
import json
import pathlib
import re
import subprocess
import sys
import time

import numpy as np
import pytest

import bert_jax
from tests.helpers import processes
from tests.helpers.runs import ONE_DEVICE

HERE = pathlib.Path(__file__).parent.parent / "experiments" / "speed"
SCRIPT = HERE / "gpu.py"
# Dependencies of bert_jax that a machine with JAX, PyTorch and transformers may lack.
LACKING = (
    "array_record google_crc32c grain mwparserfromhell ml_collections sentencex tensorboardX "
    "tensorflow_datasets"
).split()
# Simulate a machine without them, on which bert_jax is not installed either.
BARE = f"""
import importlib.metadata, sys
sys.modules.update(dict.fromkeys({LACKING}))
installed = importlib.metadata.distribution

def distribution(name):
    if name == "bert-jax":
        raise importlib.metadata.PackageNotFoundError(name)
    return installed(name)

importlib.metadata.distribution = distribution
"""


@pytest.fixture(scope="module")
def modules():
    """Import the modules `gpu` and `report`."""
    sys.path.insert(0, str(HERE))
    try:
        yield {name: importlib.import_module(name) for name in ("gpu", "report")}
    finally:
        sys.path.remove(str(HERE))


@pytest.fixture
def gpu(modules):
    return modules["gpu"]


@pytest.fixture
def section(modules):
    """Return a function that renders the GPU section of the page from result lines."""
    return lambda lines: "\n".join(modules["report"].gpu_section(lines))


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smoke")
    (folder / "sitecustomize.py").write_text(BARE)
    done = subprocess.run(
        [sys.executable, SCRIPT, "--smoke", "--out", folder / "out", "--minutes", "14"],
        env={**ONE_DEVICE, "PYTHONPATH": str(folder)}, cwd=folder,
        capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = (folder / "out" / "gpu.jsonl").read_text().splitlines()
    assert (folder / "out" / "profile.xplane.pb.gz").stat().st_size
    return [json.loads(line) for line in lines], done.stdout


# --- The plan -------------------------------------------------------------------------------------


def test_plan_takes_less_than_nine_minutes(gpu):
    jobs = gpu.plan()
    total = sum(gpu.START + sum(seconds for seconds, _ in job.rows) for job in jobs)
    assert total < 540
    printed = processes.run([sys.executable, SCRIPT, "--plan"], check=True)
    lines = printed.stdout.splitlines()
    assert lines[-1].split()[2] == str(total)
    assert len(lines) == len(jobs) + sum(len(job.rows) for job in jobs)
    # Estimates include compilation: 25 s for base, 50 s for large, 60 s for torch.compile.
    least = {"base": 25, "large": 50}
    for seconds, row in (pair for job in jobs for pair in job.rows):
        fails = row.get("attention") == "cudnn" and row.get("deterministic")
        if row["kind"] == "step" and not fails:
            assert seconds > least[row["size"]]
        assert row["kind"] != "torch" or seconds > 60


def test_plan_has_every_row_in_priority_order(gpu):
    rows = [row for job in gpu.plan() for _, row in job.rows]
    keys = [gpu.key_of(row) for row in rows]
    assert len(set(keys)) == len(keys)
    steps = {key[1:] for key in keys if key[0] == "step"}
    for deterministic in (False, True):
        for attention in (("xla", 0.1), ("xla", 0.0), ("cudnn", 0.0)):
            assert ("base", 128, 256, *attention, deterministic) in steps
    assert ("base", 128, 1024, "cudnn", 0.0, False) in steps
    assert ("large", 512, 64, "cudnn", 0.0, False) in steps
    assert ("base", 512, 64, "cudnn", 0.0, False) in steps
    assert {row["kind"] for row in rows} == set(gpu.MEASURES)
    torch = next(i for i, row in enumerate(rows) if row["kind"] == "torch")
    assert {(row["size"], row["tokens"]) for row in rows[1:torch]} == {("base", 128)}


def test_selected_rows_are_those_whose_names_match(gpu):
    patterns = ["ceilings", "torch*", "step base*1,024 rows*"]
    jobs = gpu.selected(gpu.plan(), patterns)
    assert [[gpu.name_of(row) for _, row in job.rows] for job in jobs] == [
        ["ceilings", "step base T=128, 1,024 rows, cudnn"],
        ["torch base T=128, 256 rows, sdpa with attention dropout"],
    ]
    assert gpu.selected(gpu.plan(), []) == gpu.plan()
    options = [f"--only={pattern}" for pattern in patterns]
    printed = processes.run([sys.executable, SCRIPT, "--plan", *options], check=True).stdout
    assert len(printed.splitlines()) == 5


@pytest.mark.parametrize("smoke", [False, True])
def test_deterministic_rows_run_with_the_xla_flag(gpu, smoke):
    for job in gpu.plan(smoke):
        kinds = {row["kind"] for _, row in job.rows}
        if kinds == {"torch"}:
            assert job.environment["JAX_PLATFORMS"] == "cpu"
            continue
        assert "torch" not in kinds
        fixed = {row.get("deterministic", False) for _, row in job.rows}
        flags = job.environment["XLA_FLAGS"].split()
        assert fixed == {flags[-1] == "--xla_gpu_deterministic_ops=true"}


# --- The smoke run --------------------------------------------------------------------------------


def test_smoke_run_on_bare_machine_measures_every_row(smoke, gpu):
    lines, _ = smoke
    planned = [gpu.key_of(row) for job in gpu.plan(True) for _, row in job.rows]
    assert [gpu.key_of(line) for line in lines] == planned
    for line in lines:
        assert line["bert-jax"] == bert_jax.__version__
        if line.get("attention") == "cudnn":
            assert line["status"] == "failed"
            assert "runs on a gpu only" in line["why"]
            continue
        assert "status" not in line, line
        if line["kind"] in ("step", "torch"):
            assert len(line["seconds"]) == 3
            # The initial loss is that of a uniform guess over the vocabulary and two labels.
            assert abs(line["loss"] - np.log(2 * 30_592)) < 0.2
            assert 0.5 < line["real_fraction"] <= 1
        if line["kind"] == "parity":
            assert 0 < line["gradient_difference"] < 0.1
            assert line["loss_difference"] < 0.01
    (traced,) = (line["table"] for line in lines if line["kind"] == "profile")
    assert sum(part["seconds"] for part in traced["parts"]) == pytest.approx(traced["step_seconds"])


def test_smoke_run_page_has_every_row(smoke, section):
    lines, printed = smoke
    page = section(lines)
    assert page in printed
    steps = [line for line in lines if line["kind"] in ("step", "torch")]
    assert len(re.findall(r"^\| L1-H32-A2, T=32 \|", page, re.MULTILINE)) == len(steps)
    for words in ("| xla, deterministic | 0.1 | 4 | ", "| sdpa | 0.1 | 4 | ", "| vocabulary head | ", "| failed | UserError: "):  # fmt: skip
        assert words in page


# --- Recorded results -----------------------------------------------------------------------------


def planned(*names):
    return [
        (1, {"kind": "step", "size": name, "tokens": 32, "rows": 2, "attention": "xla",
             "attention_dropout": 0.0, "deterministic": False})
        for name in names
    ]  # fmt: skip


# A fake worker that measures every row, but exits in row "crash" and never ends in row "hang".
FAKE = """
import json, sys, time
for _, row in json.loads(sys.argv[-1])["rows"]:
    if row["size"] == "crash": sys.exit("out of luck")
    if row["size"] == "hang": time.sleep(600)
    print(json.dumps({**row, "loss": 1.0}), flush=True)
"""


@pytest.fixture
def faked(gpu, tmp_path, monkeypatch):
    """Return a function that measures rows of the given names in fake worker processes."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    monkeypatch.setattr(gpu, "__file__", str(script))
    monkeypatch.setattr(gpu, "START", 1)

    def measure(*jobs, minutes=5.0, earlier=()):
        monkeypatch.setattr(
            gpu, "plan", lambda smoke: [gpu.Job({}, planned(*names)) for names in jobs]
        )
        lines = gpu.measure_all(tmp_path / "out", minutes, True, earlier, "abc")
        assert lines == gpu.read(tmp_path / "out" / "gpu.jsonl")
        return lines

    return measure


def outcomes(lines):
    return [(line["size"], line.get("status")) for line in lines]


def test_crash_fails_only_its_own_row(faked, tmp_path):
    lines = faked(["a", "crash", "b"], ["c"])
    assert outcomes(lines) == [("a", None), ("crash", "failed"), ("b", None), ("c", None)]
    assert lines[1]["why"] == "the process ended with 1; see gpu.log"
    assert "out of luck" in (tmp_path / "out" / "gpu.log").read_text()
    assert {line["commit"] for line in lines} == {"abc"}


def test_hanging_row_is_stopped(faked):
    lines = faked(["hang", "a"])
    assert outcomes(lines) == [("hang", "failed"), ("a", None)]
    assert lines[0]["why"] == "stopped after 6 s; see gpu.log"


def test_after_option_runs_only_missing_rows(faked):
    nothing = faked(["a"], ["b", "c"], minutes=0)
    assert outcomes(nothing) == [("a", "not run"), ("c", "not run"), ("b", "not run")]
    first = [*faked(["a", "crash"]), nothing[1]]
    second = faked(["a"], ["crash", "b", "c"], earlier=first)
    assert second[:2] == first[:2]
    assert outcomes(second[2:]) == [("b", None), ("c", None)]


def test_after_option_needs_an_existing_file(tmp_path):
    command = [sys.executable, SCRIPT, "--out", tmp_path, "--after", tmp_path / "none.jsonl"]
    refused = processes.run(command, timeout=60)
    assert refused.returncode == 2
    assert "none.jsonl does not exist" in refused.stderr


def test_row_is_started_only_if_it_fits_the_deadline(gpu, monkeypatch, capsys, tmp_path):
    def measure(row, out):
        if row["size"] == "broken":
            raise IndexError("no such\nkey")
        return {"loss": 1.0}

    monkeypatch.setitem(gpu.MEASURES, "step", measure)
    rows = [(seconds, row) for seconds, (_, row) in zip((5, 900, 5, 5), planned("a", "b", "broken", "c"), strict=True)]  # fmt: skip
    gpu.work({"rows": rows, "deadline": time.time() + 600, "round_seconds": 0}, tmp_path)
    lines = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert outcomes(lines) == [("a", None), ("b", "not run"), ("broken", "failed"), ("c", None)]
    assert lines[2]["why"] == "IndexError: no such"


# --- Benchmark inputs -----------------------------------------------------------------------------


def test_packed_batches_have_bert_sequence_lengths(gpu):
    batches = gpu.packed_batches(128, 16, 4, 3)
    assert [batch["tokens"].shape for batch in batches] == [(16, 128)] * 3
    lengths = np.concatenate([batch["length"] for batch in batches])
    assert (lengths.sum(1) <= 128).all()
    assert 0.9 < lengths.sum() / (48 * 128) <= 1
    assert (lengths[:, 1] > 0).any()  # several sequences per row
    alone = gpu.packed_batches(128, 16, 1, 3)[0]["length"]
    assert alone.shape == (16, 1)
    assert 0.5 < (alone == 128).mean() < 1


@pytest.mark.slow
def test_random_params_match_init_distribution(gpu):
    import jax

    row = dict(zip(gpu.KEYS, ("step", "L1-H32-A2", 32, 2, "xla", 0.1, False), strict=True))
    _, phase = gpu.phase_at_step(row)
    params = phase.objective.init(jax.random.key(0))
    made = gpu.random_params(jax.eval_shape(phase.objective.init, jax.random.key(0)))
    assert jax.tree.structure(params) == jax.tree.structure(made)
    for right, ours in zip(jax.tree.leaves(params), jax.tree.leaves(made), strict=True):
        assert (right.shape, right.dtype) == (ours.shape, ours.dtype)
        np.testing.assert_allclose(ours.mean(), right.mean(), atol=0.01)
        if right.size >= 1000 or not right.std():  # the deviation of fewer values is noisy
            np.testing.assert_allclose(ours.std(), right.std(), rtol=0.25)


# --- The page -------------------------------------------------------------------------------------

CEILINGS = {
    "kind": "ceilings", "device": "NVIDIA H200", "operations_per_second": 800e12,
    "bytes_per_second": 4.3e12, "sheet_operations_per_second": 1000e12, "jax": "1", "commit": "abc",
}  # fmt: skip


def a_step(rate, kind="step", **changes):
    return {
        "kind": kind, "size": "base", "tokens": 128, "rows": 256, "attention": "cudnn",
        "attention_dropout": 0.0, "deterministic": False, "program": "as committed",
        "seconds": [0.05, 0.04, 0.06], "real_tokens_per_second": rate, "operations_per_token": 5e8,
        **changes,
    }  # fmt: skip


def test_section_without_results_says_not_run(section):
    assert section([]) == "Not run."


def test_shares_speedups_and_targets(section):
    lines = [
        CEILINGS,
        a_step(8e5, rows=1024),
        a_step(6e5),
        a_step(9e5, program="patched"),
        a_step(9.9e5, program="patched", variant="no dropout"),
        a_step(0, size="large", tokens=512, status="not run", why="no time left"),
        a_step(5e5, "torch", attention="sdpa", program="transformers"),
    ]
    page = section(lines)
    for words in (
        # Speed-ups compare equal numbers of rows; variants do not count towards targets.
        "| base, T=128: 1.3 times the real tokens/s of torch.compile | 1.20: not reached | 1.80: reached |",
        "| base, T=128: 40% of the bfloat16 peak | 40.0%: reached | 45.0%: reached |",
        "| large, T=512: 45% of the bfloat16 peak | not run | not run |",
        "| base, T=128 |  | cudnn | 0 | 1,024 | 50 (40 to 60) | 800,000 | 40.0% |  |",
        "| base, T=128 |  | cudnn | 0 | 256 | 50 (40 to 60) | 600,000 | 30.0% | 1.20 |",
        "| no dropout | 256 | 50 (40 to 60) | 990,000 | 49.5% | 1.98 |",
        "| large, T=512 |  | cudnn | 0 | 256 | not run | no time left |  |  |",
    ):
        assert words in page


@pytest.mark.parametrize(
    ("xla", "cudnn", "wrong"),
    [(0.02, 0.03, False), (0.02, 0.05, True), (None, 0.11, True), (None, 0.09, False)],
)
def test_attention_with_wrong_gradients_reaches_no_target(section, xla, cudnn, wrong):
    lines = [CEILINGS, a_step(9e5), a_step(7e5, attention="xla")]
    for name, difference in (("xla", xla), ("cudnn", cudnn)):
        if difference:
            line = a_step(0, "parity", attention=name, loss_difference=0.0)
            lines.append({**line, "gradient_difference": difference})
    page = section(lines)
    assert ("40% of the bfloat16 peak | 45.0%: reached" in page) != wrong
    assert ("40% of the bfloat16 peak | 35.0%: not reached" in page) == wrong
    assert ("(**too far**)" in page) == wrong


def test_page_shows_the_h100_results(gpu):
    page = (HERE / "README.md").read_text().split("## On a GPU")[1]
    lines = gpu.read(HERE / "gpu_h100.jsonl")
    assert {line["commit"] for line in lines} == {"1a92bec"}
    assert "not measured" not in page
    for line in lines:
        if "real_tokens_per_second" in line:
            assert f"{line['real_tokens_per_second']:,.0f}" in page
        if line["kind"] == "determinism":
            assert line["result"] in page
