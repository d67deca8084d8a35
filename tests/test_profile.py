"""Profiled runs: profiling changes no result, and the times in the table add up."""

import json
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from bert_jax import train as loop
from bert_jax.config import schema as configs
from bert_jax.config.checks import validate
from bert_jax.config.schema import Config, FinetuneConfig, PhaseConfig
from bert_jax.errors import UserError
from bert_jax.runtime.sharding import shard_batch
from bert_jax.tools import profile
from bert_jax.tools.preflight import hlo
from bert_jax.tools.profile import PARTS
from bert_jax.training import tracing
from tests.helpers.runs import assert_same_run, train_here

SHORT = ("steps=20", "checkpoint.every_steps=5", "evaluate_every_steps=10")
COMPILED = {}
TWO_PHASES = (PhaseConfig(fraction=0.9), PhaseConfig(fraction=0.1))


def run(folder, rows, *changes, bad=()):
    """Train for 20 steps in this process; all runs share one compiled program."""
    train_here(folder, rows, *SHORT, *changes, bad=bad, compiled=COMPILED)


@pytest.fixture(scope="module")
def plain(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("profile") / "plain"
    run(folder, rows)
    assert not (folder / tracing.FOLDER).exists()
    return folder


def only_profile(folder):
    """Return the name and the table of the only profile of a run."""
    (place,) = (folder / tracing.FOLDER).iterdir()
    assert len(list(place.rglob("*.xplane.pb"))) == 1
    return place.name, json.loads((place / "table.json").read_text())


def test_profiled_run_is_the_same_and_its_parts_sum_to_the_step_time(tmp_path, rows, plain):
    """An evaluation and a checkpoint are among the profiled steps."""
    run(tmp_path, rows, "profile_steps=8,12")
    assert_same_run(tmp_path, plain)
    name, table = only_profile(tmp_path)
    assert (name, table["steps"]) == ("steps_8_12", 4)
    rows = {row["part"]: row for row in table["parts"]}
    assert [row["part"] for row in table["parts"]] == list(PARTS)
    spent = {part: row["seconds"] for part, row in rows.items()}
    assert sum(spent.values()) == pytest.approx(table["step_seconds"])
    idle = spent["input wait"] + spent["host"]
    assert table["device_seconds"] == pytest.approx(table["step_seconds"] - idle)
    assert all(value > 0 for part, value in spent.items() if part != "collectives")
    text = (tmp_path / tracing.FOLDER / name / "table.txt").read_text()
    for part in PARTS:
        assert len(re.findall(rf"^{part} {{2,}}", text, re.MULTILINE)) == 1


def test_resumed_run_traces_the_remaining_steps(tmp_path, rows, plain, monkeypatch):
    """Interrupt at step 11, after the step-10 checkpoint."""
    dispatched = []

    def interrupt(batch, mesh):
        if len(dispatched) == 11:
            raise KeyboardInterrupt
        dispatched.append(batch)
        return shard_batch(batch, mesh)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "shard_batch", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, rows, "profile_steps=8,12")
    assert not list((tmp_path / tracing.FOLDER).iterdir())
    killed = tmp_path / tracing.FOLDER / ".steps_8_12.00000000.partial"  # left by a killed process
    killed.mkdir()
    (killed / "half").touch()
    run(tmp_path, rows, "profile_steps=8,12")
    assert_same_run(tmp_path, plain)
    name, table = only_profile(tmp_path)
    assert (name, table["steps"]) == ("steps_8_12", 2)


def test_only_the_first_process_traces(tmp_path, monkeypatch):
    config = Config(profile_steps=(2, 4), steps=6)
    for process in (1, 0):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        with tracing.StepTracer(config, range(6), tmp_path, None, print) as tracer:
            for step in range(6):
                assert tracer.is_boundary(step) == (step in (2, 4))  # in all processes
                tracer.update(step)
        assert any(tmp_path.iterdir()) == (process == 0)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        *((Config(profile_steps=steps), "FIRST,END") for steps in ((7,), (7, 7), (9, 7), (-1, 7))),
        (Config(profile_steps=(5, 11), steps=10), "10 steps"),
        (FinetuneConfig(profile_steps=(5, 11), steps=10), "10 steps"),
        (Config(profile_steps=(8, 10), steps=10, phases=TWO_PHASES), "step 9"),
    ],
)
def test_invalid_profile_steps_are_refused(config, key):
    with pytest.raises(UserError, match=f"config.profile_steps.*{key}"):
        validate(config)


def test_valid_profile_steps_are_accepted():
    assert configs.profiled_steps(Config()) == range(0)
    assert configs.profiled_steps(Config(profile_steps=(0, 10), steps=10)) == range(10)
    # The number of fine-tuning steps depends on data that have not been read yet.
    validate(FinetuneConfig(profile_steps=(5, 11)))
    for steps in ((7, 9), (9, 10)):
        validate(Config(profile_steps=steps, steps=10, phases=TWO_PHASES))


def test_time_is_divided_among_concurrent_operations():
    spans = np.array([(10, 30), (20, 30), (20, 40), (-5, 2)], float)
    waits = np.array([(25, 45), (50, 52)], float)
    times, wait, host = profile.divide(spans, waits, (0.0, 60.0))
    third = 10 / 3
    assert times == pytest.approx([10 + third, third, third + 10, 2])
    assert (wait, host) == pytest.approx((5 + 2, 21))


PROGRAM = """HloModule jit_step, is_scheduled=true, num_partitions=2

%inside (p: f32[8,16], q: f32[16,4]) -> f32[8,4] {
  %p = f32[8,16]{1,0} parameter(0)
  %q = f32[16,4]{1,0} parameter(1)
  %dot.1 = f32[8,4]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(step)/jvp(Bert)/attention/query/dot_general"}
  %tanh.1 = f32[8,4]{1,0} tanh(%dot.1), metadata={op_name="jit(step)/jvp(Bert)/attention/dropout/ge"}
  ROOT %negate.1 = f32[8,4]{1,0} negate(%tanh.1)
}

%body (s: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %s = (s32[], f32[8,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[8,4]{1,0} get-tuple-element(%s), index=1
  %exp.1 = f32[8,4]{1,0} exponential(%x), metadata={op_name="jit(step)/inputs/exp"}
  ROOT %t = (s32[], f32[8,4]{1,0}) tuple(%i, %exp.1)
}

%condition (s: (s32[], f32[8,4])) -> pred[] {
  %s = (s32[], f32[8,4]{1,0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main (a: f32[8,16], b: f32[16,4]) -> f32[8,4] {
  %a = f32[8,16]{1,0} parameter(0), metadata={op_name="state.params"}
  %b = f32[16,4]{1,0} parameter(1)
  %copy.1 = f32[8,16]{0,1} copy(%a), metadata={op_name="state.params"}
  %fused.1 = f32[8,4]{1,0} fusion(%copy.1, %b), kind=kLoop, calls=%inside, metadata={op_name="jit(step)/optimizer/mul"}
  %zero = s32[] constant(0)
  %start = (s32[], f32[8,4]{1,0}) tuple(%zero, %fused.1)
  %while.1 = (s32[], f32[8,4]{1,0}) while(%start), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %gemm.1 = (f32[8,4]{1,0}, s8[64]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", metadata={op_name="jit(step)/jvp(Bert)/masked_lm/dot_general"}, backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  %attends.1 = f32[8,4]{1,0} custom-call(%a), custom_call_target="__cudnn$fmhaSoftmax", metadata={op_name="jit(step)/jvp(Bert)/attention/attend/dot"}
  %all-reduce.1 = f32[8,4]{1,0} all-reduce(%attends.1), replica_groups={{0,1}}, to_apply=%condition
  ROOT %copy.2 = f32[8,4]{1,0} copy(%all-reduce.1)
}
"""


def test_executed_instructions_and_their_operations():
    result = hlo.Program(PROGRAM).operations()
    assert set(result) == set(
        "copy.1 fused.1 while.1 exp.1 gemm.1 attends.1 all-reduce.1 copy.2".split()
    )
    assert result["fused.1"] == {
        "jit(step)/optimizer/mul": 0,
        "jit(step)/jvp(Bert)/attention/query/dot_general": 2 * 8 * 4 * 16,
        # The negation has no op_name, so it counts for its operand.
        "jit(step)/jvp(Bert)/attention/dropout/ge": 2 * 8 * 4,
    }
    assert result["while.1"]["jit(step)/inputs/exp"] == 5 * 8 * 4
    assert result["gemm.1"] == {"jit(step)/jvp(Bert)/masked_lm/dot_general": 1024}
    # A copy counts for its user. The last copy has none and counts for its operand.
    assert list(result["copy.1"]) == ["jit(step)/optimizer/mul"]
    assert list(result["copy.2"]) == ["jit(step)/jvp(Bert)/attention/attend/dot"]


@pytest.mark.parametrize(
    ("scopes", "part"),
    [
        ("jvp(Bert)/encoder/Layer/attention/attend/dropout/xor", "dropout bits"),
        ("jvp(Bert)/encoder/Layer/attention/norm/rsqrt", "LayerNorm and GELU"),
        ("jvp(Bert)/encoder/Layer/feed_forward/erf", "LayerNorm and GELU"),
        ("jvp(Bert)/encoder/Layer/feed_forward/output/add", "matmul"),
        ("jvp(Bert)/embeddings/norm/sub", "embeddings"),
        ("transpose(jvp(loss))/mul", "vocabulary head"),
        ("optimizer/sqrt", "optimizer"),
        ("add", "other"),
    ],
)
def test_part_of_an_operation_by_its_scopes(scopes, part):
    assert profile.part_of(f"jit(step)/{scopes}") == part


@pytest.fixture
def gpu_trace(tmp_path, monkeypatch):
    """Return a function that simulates a GPU's trace, given its events and the host's.

    Events are (name, begin, end, stats), with times in nanoseconds. Returns the folder of the trace.
    """

    def event(name, begin, end, stats):
        times = {"start_ns": float(begin), "end_ns": float(end)}
        return SimpleNamespace(name=name, stats=list(stats.items()), **times)

    def plane(name, events):
        line = SimpleNamespace(name="", events=[event(*each) for each in events])
        return SimpleNamespace(name=name, lines=[line])

    def write(on_device, on_host):
        planes = [plane("/host:CPU", on_host), plane("/device:GPU:0", on_device)]
        (tmp_path / "x.xplane.pb").touch()
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        data = SimpleNamespace(from_file=lambda path: SimpleNamespace(planes=planes))
        monkeypatch.setattr(jax.profiler, "ProfileData", data)
        return tmp_path

    return write


def test_gpu_trace_is_divided_into_parts(gpu_trace):
    """CUPTI's events are on streams, named by instruction or kernel, beside the host's events."""

    def stats(operation, module="jit_step"):
        return {"hlo_op": operation, "hlo_module": module}

    on_host = [
        ("bert_jax steps", 0, 10_000, {}),
        ("bert_jax input wait", 0, 1_000, {}),
        ("launch", 500, 9_500, stats("fused.1")),
    ]
    on_device = [
        ("nvjet_hsh_128x256", 2_000, 3_000, stats("gemm.1")),
        ("fused_1", 3_000, 4_600, {}),
        ("cudnn_fmha_fprop", 4_600, 5_000, {}),
        ("ncclAllReduce", 5_000, 5_500, stats("all-reduce.1")),
        ("loop", 6_000, 7_000, stats("loop.7", "jit_measure(7)")),
        ("MemcpyH2D", 7_000, 7_500, {}),
    ]
    _, parts = profile.part_seconds(gpu_trace(on_device, on_host), PROGRAM, 1)
    spent = {part: seconds * 1e9 for part, seconds in parts.items() if seconds}
    in_fusion = 1_600 / (2 * 8 * 4 * 16 + 2 * 8 * 4)
    assert spent == pytest.approx(
        {
            "vocabulary head": 1_000,
            "matmul": in_fusion * 2 * 8 * 4 * 16,
            "dropout bits": in_fusion * 2 * 8 * 4,
            "attention": 400,
            "collectives": 500,
            "other programs": 1_500,
            "input wait": 1_000,
            "host": 4_000,
        }
    )


def test_cuda_graph_kernels_are_identified_by_name(gpu_trace):
    """Kernels have their own names, but their `hlo_op` names the graph."""
    text = PROGRAM.replace(
        "  %gemm.1 =",
        '  %loss.2 = f32[8,4]{1,0} exponential(%b), metadata={op_name="jit(step)/jvp(loss)/exp"}\n'
        "  %gemm.1 =",
    )
    kernels = [
        ("nvjet_sm90_tst_128x160", 300),
        ("fused_1", 800),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 200),
        ("loss_2", 50),
        ("sm90_xmma_gemm_f32f32_tf32f32", 400),  # matrix products of the vocabulary head
        ("nvjet_sm90_tss_192x96", 100),
        ("exp_1", 25),
        ("nvjet_sm90_tst_128x160", 300),
        ("unknown_kernel", 5),
    ]
    events, now = [], 0
    for name, duration in 2 * kernels:
        stats = {"hlo_op": "command_buffer_1", "hlo_module": "jit_step"}
        events.append((name, now, now + duration, stats))
        now += duration
    folder = gpu_trace(events, [("bert_jax steps", 0, now, {})])
    step, parts = profile.part_seconds(folder, text, 2)
    assert step * 1e9 == pytest.approx(now / 2)
    spent = {part: value * 1e9 for part, value in parts.items() if value}
    in_fusion = 800 / (16 + 1)  # matrix products and dropout, by their operations
    assert spent == pytest.approx(
        {
            "matmul": 600 + in_fusion * 16,
            "dropout bits": in_fusion,
            "attention": 200,
            "vocabulary head": 50 + 500,
            "masking": 25,
            "other": 5,
        }
    )
