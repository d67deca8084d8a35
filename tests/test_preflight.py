"""Estimates without the hardware: compiled programs, rooflines, libtpu's compiler."""

import functools
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from bert_jax import cli
from bert_jax.config.model import ModelConfig
from bert_jax.config.schema import Config, PhaseConfig
from bert_jax.objectives import pretraining
from bert_jax.runs import checkpoint
from bert_jax.runtime import chips, sharding
from bert_jax.runtime.topology import parse_topology
from bert_jax.tools.preflight import compiler, estimate, hlo, kernels
from bert_jax.tools.preflight.hlo import Collective, Kernel
from bert_jax.tools.preflight.network import locations, network_seconds
from bert_jax.training import state as state_lib

# A loop of 3 iterations with nested fusions, an asynchronous all-gather that appears twice, a
# reduce-scatter as TPUs write it, a product as a convolution, arrays in VMEM (`S(1)`), a Pallas kernel.
PROGRAM = """HloModule step, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%all-reduce-scatter.1 (input: f32[256,64]) -> f32[128,64] {
  %input = f32[256,64]{1,0:T(8,128)} parameter(0)
  %zero = s32[] constant(0)
  %all-reduce.9 = f32[256,64]{1,0} all-reduce(%input), channel_id=3, replica_groups={{0,1},{2,3}}, to_apply=%add
  ROOT %dynamic-slice.9 = f32[128,64]{1,0} dynamic-slice(%all-reduce.9, %zero, %zero), dynamic_slice_sizes={128,64}
}

%fused_gather (p0: bf16[32,64]) -> bf16[64,64] {
  %p0 = bf16[32,64]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  ROOT %all-gather.2 = bf16[64,64]{1,0:T(8,128)(2,1)S(1)} all-gather(%p0), channel_id=5, replica_groups=mesh['axis_0'=2,'axis_1'=1,'axis_2'=2], device_ids=([2,2]T(1,0)) {'axis_0'}, dimensions={0}
}

%fused_slice (p0.2: bf16[3,64,64], p1.2: s32[]) -> bf16[1,64,64] {
  %p0.2 = bf16[3,64,64]{2,1,0:T(8,128)(2,1)} parameter(0)
  %p1.2 = s32[] parameter(1)
  %zero.2 = s32[] constant(0)
  ROOT %slice.2 = bf16[1,64,64]{2,1,0} dynamic-slice(%p0.2, %p1.2, %zero.2, %zero.2), dynamic_slice_sizes={1,64,64}
}

%fused_product (p0.1: bf16[3,64,64], p1.1: s32[], p2.1: bf16[16,64]) -> bf16[16,64] {
  %p0.1 = bf16[3,64,64]{2,1,0:T(8,128)(2,1)} parameter(0)
  %p1.1 = s32[] parameter(1)
  %p2.1 = bf16[16,64]{1,0:T(8,128)(2,1)} parameter(2)
  %zero.1 = s32[] constant(0)
  %weights = bf16[1,64,64]{2,1,0} fusion(%p0.1, %p1.1), kind=kLoop, calls=%fused_slice
  %flat = bf16[64,64]{1,0} bitcast(%weights)
  ROOT %product = bf16[16,64]{1,0:T(8,128)(2,1)} convolution(%p2.1, %flat), dim_labels=bf_io->bf
}

%body (state: (s32[], bf16[16,64], bf16[3,64,64])) -> (s32[], bf16[16,64], bf16[3,64,64]) {
  %state = (s32[]{:T(128)}, bf16[16,64]{1,0}, /*index=2*/bf16[3,64,64]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %h = bf16[16,64]{1,0:T(8,128)(2,1)} get-tuple-element(%state), index=1
  %w = bf16[3,64,64]{2,1,0:T(8,128)(2,1)} get-tuple-element(%state), index=2
  %one = s32[] constant(1)
  %part = bf16[32,64]{1,0:T(8,128)(2,1)S(1)} custom-call(), custom_call_target="AllocateBuffer"
  %started = bf16[64,64]{1,0:T(8,128)(2,1)S(1)} fusion(%part), kind=kCustom, calls=%fused_gather
  %all-gather.3 = bf16[64,64]{1,0:T(8,128)(2,1)S(1)} all-gather(%part), channel_id=5, replica_groups=[2,2]<=[4], dimensions={0}
  %kernel = bf16[32,64]{1,0:T(8,128)(2,1)S(1)} custom-call(%h), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
  "name": "attend"
}}, metadata={op_name="jit(step)/transpose(jvp(Bert))/layer/attend/pallas_call"}
  %next = bf16[16,64]{1,0:T(8,128)(2,1)} fusion(%w, %i, %h), kind=kOutput, calls=%fused_product
  %j = s32[]{:S(6)} add(%i, %one)
  ROOT %out = (s32[], bf16[16,64]{1,0}, bf16[3,64,64]{2,1,0}) tuple(%j, %next, %w)
}

%condition (state.1: (s32[], bf16[16,64], bf16[3,64,64])) -> pred[] {
  %state.1 = (s32[]{:T(128)}, bf16[16,64]{1,0}, bf16[3,64,64]{2,1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %bound = s32[]{:T(128)} constant(3)
  ROOT %less = pred[]{:T(512)} compare(%i.1, %bound), direction=LT
}

ENTRY %main (a: bf16[16,64], b: bf16[3,64,64], c: f32[256,64], q: f32[2,8,4], k: f32[2,4,16]) -> bf16[16,64] {
  %a = bf16[16,64]{1,0} parameter(0)
  %b = bf16[3,64,64]{2,1,0} parameter(1)
  %c = f32[256,64]{1,0} parameter(2)
  %q = f32[2,8,4]{2,1,0:S(1)} parameter(3)
  %k = f32[2,4,16]{2,1,0:S(1)} parameter(4)
  %start = s32[] constant(0)
  %grads = f32[128,64]{1,0} fusion(%c), kind=kCustom, calls=%all-reduce-scatter.1, backend_config={"estimated_cycles":"300"}
  %scores = f32[2,8,16]{2,1,0:S(1)} dot(%q, %k), lhs_batch_dims={0}, rhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_contracting_dims={1}
  %tuple = (s32[], bf16[16,64]{1,0}, bf16[3,64,64]{2,1,0}) tuple(%start, %a, %b)
  %while.1 = (s32[], bf16[16,64]{1,0}, bf16[3,64,64]{2,1,0}) while(%tuple), condition=%condition, body=%body
  ROOT %result = bf16[16,64]{1,0} get-tuple-element(%while.1), index=1
}
"""


def test_hlo_counts_include_loop_iterations():
    program = hlo.Program(PROGRAM)
    loop, once = 2 * 16 * 64 * 64, 2 * 2 * 8 * 16 * 4
    kinds = {kernel.kind: kernel for kernel in program.kernels}
    assert sum(kernel.flops for kernel in program.kernels) == 3 * loop + once
    # A layer reads one of the three weight slices and reads and writes the hidden states.
    layer = 2 * (64 * 64 + 2 * 16 * 64) + 3 * 4  # and the loop counter: 3 reads, written on chip
    reduced, attended = 4 * (256 + 128) * 64, 2 * 16 * 64
    moved = sum(kernel.bytes for kernel in program.kernels)
    assert moved == pytest.approx(3 * (layer + attended) + reduced, abs=3 * 8)
    assert kinds["attention"] == (
        "attention", "layer/attend (backward)", "bf16[32,64]", 3, 0, 3 * attended, None
    )  # fmt: skip
    assert kinds["collectives"].cycles == 300
    result = {c.kind: c for c in program.collectives}
    assert len(program.collectives) == 2
    gathered, scattered = result["all-gather"], result["reduce-scatter"]
    assert (gathered.bytes, gathered.times) == (64 * 64 * 2, 3)
    assert gathered.group.tolist() == [0, 1]
    assert gathered.sent_bytes == 3 * 64 * 64 * 2 / 2
    assert (scattered.bytes, scattered.times, scattered.sent_bytes) == (256 * 256, 1, 256 * 128)
    # The kernel's instruction spans three lines.
    assert list(program.operations()["kernel"].values()) == [0]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("index=1\n}", "index=1", "ends in the computation main"),
        # Unlike the lines of a kernel's attributes, it follows a complete instruction.
        ("  %one =", "  one is 1\n  %one =", "cannot read this line of a program:   one is 1"),
    ],
)
def test_text_that_is_no_program_is_an_error(old, new, message):
    assert old in PROGRAM
    with pytest.raises(ValueError, match=message):
        hlo.Program(PROGRAM.replace(old, new))


@pytest.mark.parametrize(
    ("text", "group"),
    [
        ("{{0,2},{1,3}}, x", [0, 2]),
        ("[2,2]<=[4], x", [0, 1]),
        ("[2,2]<=[2,2]T(1,0), x", [0, 2]),
        ("mesh['a'=2,'b'=2] {'a'}, x", [0, 2]),
        ("mesh['a'=2,'b'=2] {'a','b'}, x", [0, 1, 2, 3]),
        ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}, x", [0, 1]),
        ("{}, x", [0]),
    ],
)
def test_replica_groups_in_every_notation(text, group):
    assert hlo.first_group(f"channel_id=1, replica_groups={text}").tolist() == group


@pytest.mark.parametrize(
    ("left", "right", "result", "attributes", "flops"),
    [
        ((128, 64), (64, 32), (128, 32), "dim_labels=bf_io->bf", 2 * 128 * 64 * 32),
        # A batched product as TPUs write it: only one position per window is valid.
        ((2, 128, 4, 64), (2, 128, 4, 64), (2, 4, 128, 128),
         "window={size=2x4 stride=1x3 lhs_dilate=2x4}, dim_labels=0b1f_0o1i->01bf",
         2 * 2 * 4 * 128 * 128 * 64),
        # A window of 3 over 5 positions, padded by 1: 13 of 15 products are valid.
        ((1, 5, 1), (3, 1, 1), (1, 5, 1), "window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f", 2 * 13),
    ],
)  # fmt: skip
def test_convolution_flops_exclude_padding(left, right, result, attributes, flops):
    assert hlo.convolution_flops(left, right, result, attributes) == flops


def devices(topology):
    """Return devices with the coordinates of their chips, slice by slice."""
    return [
        SimpleNamespace(slice_index=i, coords=chip)
        for i in range(topology.slices)
        for chip in np.ndindex(*topology.shape)
        for _ in range(topology.chip.devices)
    ]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("v5e:4x4", 2 * 15 / 16 / (2 * 50)),  # a mesh: a corner has two links
        ("v5e:16x16", 2 * 255 / 256 / (4 * 50)),  # a torus: four links
        ("v5p:4x4x4", 2 * 63 / 64 / (6 * 100)),
        ("v5p:2x2x1", 2 * 3 / 4 / (2 * 100)),
        ("v4:2x2x4", 2 * 15 / 16 / (3 * 50)),  # the long axis wraps around only if all do
        ("v5e:16x16,slices=2", 2 * 255 / 256 / (4 * 50) + 1 / 256 / 3.125),
        # Eight devices on four chips; the two of a chip share its links.
        ("tpu7x:2x2x1", 2 * 7 / 8 / (2 * 50)),
        ("h100:8", 2 * 7 / 8 / 450),
        ("h100:16", 2 * 7 / 8 / 450 + 1 / 8 / 50),
    ],
)
def test_network_time_matches_hand_computation(text, seconds):
    topology = parse_topology(text)
    where = locations(topology, devices(topology))
    collective = Collective("all-reduce", 10**9, np.arange(len(where)), 1)
    assert network_seconds(topology, where, collective) == pytest.approx(seconds)


def test_group_along_one_axis_uses_only_its_links():
    topology = parse_topology("v5p:4x4x4")
    row = Collective("all-gather", 10**9, np.arange(4), 5)
    seconds = network_seconds(topology, locations(topology, devices(topology)), row)
    assert seconds == pytest.approx(5 * 3 / 4 / (2 * 100))


@pytest.mark.parametrize(
    ("accelerator", "topology", "devices"),
    [
        ("v5litepod-8", "v5e:2x4", 8),
        ("v5e-1", "v5e:1x1", 1),
        ("v6e-32,slices=2", "v6e:4x8,slices=2", 64),
        # These types count two cores per chip; in JAX a v4 or v5p chip is one device.
        ("v4-8", "v4:2x2x1", 4),
        ("v5p-256", "v5p:4x4x8", 128),
        ("tpu7x-8", "tpu7x:2x2x1", 8),
    ],
)
def test_accelerator_type_parses_to_topology(accelerator, topology, devices):
    parsed = parse_topology(accelerator)
    assert parsed == parse_topology(topology)
    assert parsed.name == topology
    assert parsed.devices == devices
    assert parsed.chips == devices // (2 if "tpu7x" in topology else 1)


def test_roofline_matches_hand_computation():
    chip = chips.CHIPS["v5e"]
    result = estimate.roofline(chip, flops=197e12, traffic=819e9 / 2, network=0.25)
    assert result["compute_seconds"] == pytest.approx(1)
    assert result["memory_seconds"] == pytest.approx(0.5)
    assert (result["step_seconds"], result["bound"]) == (result["compute_seconds"], "compute")
    assert estimate.roofline(chip, 0.0, 0.0, 2.0)["bound"] == "network"


def test_out_of_memory_messages_are_parsed():
    message = (
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
        "(17.75G) exceeds available HBM (15.75G)."
    )
    assert compiler.needed_bytes(message) == 17.75 * 2**30
    message = "Ran out of memory in memory space hbm. Used 512.50M of 15.75G hbm. Exceeded"
    assert compiler.needed_bytes(message) == 512.5 * 2**20
    assert compiler.needed_bytes("INTERNAL: something else") is None


def test_expected_time_takes_the_longer_of_products_and_traffic():
    products = Kernel("products", "layer", "bf16[8,8]", 2, 748e9, 10, None)
    other = Kernel("other", "layer", "bf16[8,8]", 1, 0.0, 2_940_000_000, None)
    h100 = functools.partial(kernels.expected_seconds, chip=chips.CHIPS["h100"], network=0.5)
    assert h100([products, other], passes=1) == pytest.approx(0.5 + 1.4e-3 + 1.02e-3 + 1.44e-3)
    assert h100([products], passes=2) == pytest.approx(0.5 + 1.4e-3 + 2.04e-3)
    # A TPU's compiler has its own estimates.
    timed = other._replace(cycles=3_000_000)
    assert kernels.expected_seconds([timed], chips.CHIPS["v5e"], 1, 0.0) == pytest.approx(2e-3)
    groups = kernels.by_source([products, other, products], chips.CHIPS["h100"], 1)
    assert [(group["kind"], group["times"], group["bytes"]) for group in groups] == [
        ("other", 1, 2_940_000_000),
        ("products", 4, 20),
    ]
    lines = kernels.format_sources(groups[:1], groups, 5)
    assert lines[-1].split() == ["-0.00", "GB", "-2.04", "ms", "4", "x", "layer:", "bf16[8,8]"]


@pytest.mark.parametrize(
    ("device_kind", "chip"),
    [
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        # Chips of other speed or memory whose names begin like those in the table.
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA L40S", None),
        ("cpu", None),
    ],
)
def test_chips_are_found_by_the_whole_name(device_kind, chip):
    assert chips.find(device_kind) == chips.CHIPS.get(chip)


def small_config(**model):
    return Config(
        model=ModelConfig(
            layers=2, hidden=128, heads=2, feed_forward=512, vocab_size=1024, positions=128, **model
        ),
        phases=(PhaseConfig(tokens=128),),
        batch_size=8,  # larger ones take the compiler for TPUs minutes
        steps=100,
    )


def test_abstract_phases_match_phases_with_rows(rows):
    config = small_config(layer_loop="scanned")
    config.model.vocab_size = 0
    config.phases[0].tokens = 32
    config.phases[0].rows = str(rows(32, 3))
    full, _, _, (expected,) = pretraining.make_phases(config)
    empty, (result,) = pretraining.abstract_phases(config, 1)
    assert result.batch_shape == expected.batch_shape
    assert result.objective.flops_per_row == expected.objective.flops_per_row
    assert empty.model.vocab_size == full.model.vocab_size
    config.phases[0].rows, config.model.vocab_size = "", full.model.vocab_size
    _, (without,) = pretraining.abstract_phases(config, 3)
    assert without.batch_shape == expected.batch_shape


@pytest.fixture(autouse=True)
def no_gpu_compiler(monkeypatch):
    monkeypatch.setattr(compiler.device, "has_cuda_plugin", lambda: False)


def run(capsys, *arguments):
    status = cli.main(["preflight", "--config", "configs/pretrain.py:L2-H128-A2,128", *arguments])
    out, err = capsys.readouterr()
    return status, out, err


def test_gpu_estimates_use_the_formula(capsys):
    unpadded = "--config.model.vocab_multiple=1"
    arguments = ["--topology", "h100:8", "--dollars-per-chip-hour", "2", unpadded]
    status, out, _ = run(capsys, *arguments)
    assert status == 0
    assert "BY FORMULA" in out
    assert "30,522" in out
    report = json.loads(run(capsys, *arguments, "--json")[1])
    (phase,) = report["phases"]
    assert report["dollars"] == pytest.approx(2 * 8 * report["hours"])
    assert report["hours"] == pytest.approx(1e6 * phase["roofline"]["step_seconds"] / 3600)
    assert phase["memory"]["parameters"] == 4 * report["parameters"]
    # Two moments and the schedule's step counter.
    assert phase["memory"]["optimizer"] == 8 * report["parameters"] + 4
    sent = phase["collectives"]["all-reduce"]["bytes"]
    assert sent == pytest.approx(2 * 7 / 8 * 4 * report["parameters"])


@pytest.mark.parametrize(
    ("topology", "source", "assumed"),
    [("h100:8", "on one H100", False), ("b200:8", "on one H100", True), ("a100:8", "A100", False)],
)
def test_expected_time_uses_measured_utilization(capsys, topology, source, assumed):
    changes = ["--topology", topology, "--config.model.dtype=bfloat16", "--dollars-per-chip-hour=3"]
    _, out, _ = run(capsys, *changes, "--json")
    report = json.loads(out)
    (phase,) = report["phases"]
    share = report["utilization"]["share"]
    assert source in report["utilization"]["measured"]
    assert report["utilization"]["assumed"] == assumed
    peak = parse_topology(topology).chip.flops
    compute = phase["flops"]["formula"] / (share * peak)
    assert phase["expected_step_seconds"] == pytest.approx(
        max(compute, phase["roofline"]["step_seconds"])
    )
    assert report["expected_hours"] >= report["hours"] > 0
    assert report["expected_dollars"] == pytest.approx(3 * report["expected_chip_hours"])
    _, out, _ = run(capsys, *changes)
    assert f"{report['expected_hours']:,.2f} hours" in out
    assert ("ASSUMED from" in out) == assumed


def test_estimate_resolves_auto_attention(capsys):
    bfloat16 = ["--topology", "h100:8", "--json"]  # what dtype=auto is there
    temporaries = []
    for changes, name in (
        ([], "xla"),
        (["--config.model.attention_dropout=0"], "xla"),  # runs are deterministic by default
        (["--config.model.attention_dropout=0", "--config.deterministic=false"], "cudnn"),
    ):
        _, out, _ = run(capsys, *bfloat16, *changes)
        report = json.loads(out)
        assert report["attention"].startswith(f"attention: {name} ")
        temporaries.append(report["phases"][0]["memory"]["temporaries"])
    # 2 bytes per score, again with dropout, and one for its mask; kernels keep no scores.
    scores = 256 / 8 * 2 * 2 * 128**2
    expected = [temporaries[2] + size * scores for size in (5, 2, 0)]
    assert temporaries == pytest.approx(expected)


def test_estimate_for_causal_models(capsys):
    def estimate(*arguments):
        options = ["--topology", "h100:8", "--json", "--config.model.next_sentence=false"]
        (phase,) = json.loads(run(capsys, *options, *arguments)[1])["phases"]
        return phase["flops"]["formula"], phase["memory"]["temporaries"]

    (flops, memory), (more, larger) = estimate(), estimate("--config.model.causal=true")
    # 127 predictions per row instead of 19, for 256 rows on 8 chips.
    a_prediction = 3 * 2 * 128 * (30_522 + 128)
    assert more - flops == pytest.approx(256 / 8 * (127 - 19) * a_prediction)
    assert larger - memory == pytest.approx(256 / 8 * (127 - 19) * 8 * 30_522)


LARGE = {"layers": 2, "hidden": 16384, "heads": 128, "feed_forward": 65536}


@pytest.mark.parametrize(
    "many",
    [
        ["h100:1", "--config.batch_size=131072"],
        ["h100:8", "--config.mesh.data=8", *(f"--config.model.{k}={v}" for k, v in LARGE.items())],
    ],
)
def test_suggested_change_makes_the_run_fit(many, capsys):
    status, out, _ = run(capsys, "--topology", *many)
    assert status == 1
    assert "DOES NOT FIT" in out
    change = out.split("by estimate ")[1].split(" would fit")[0].split()
    assert change
    status, out, _ = run(capsys, "--topology", *many, *change)
    assert status == 0, (change, out)


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ("v9:4x4", "'v9:4x4'"),
        ("v5e-24", "'v5e-24'"),
        ("v5p:4x4", "v5p:4x4x4"),
        ("v5e:32x32", "v5e:16x16,slices=4"),
        ("h100:8,slices=2", "slices"),
        ("h100:8 --config.mesh.tensor=8", "vocab_multiple"),
        ("h100:8 --config.phases[0].tokens=0", "phase 0"),
        ("h100:8 --sequences 0", "--sequences 0"),
        ("h100:8 --dollars-per-chip-hour -1", "--dollars-per-chip-hour"),
        ("h100:8 --rows a --rows b", "--rows: 2 folders"),
    ],
)
def test_invalid_arguments_give_one_line_errors(capsys, arguments, key):
    status, out, err = run(capsys, "--topology", *arguments.split())
    assert (status, out) == (2, "")
    (line,) = err.strip().splitlines()
    assert key in line


@pytest.fixture(scope="module")
def compiled():
    """The config and phase report of the miniature model, compiled for v5e:2x2."""
    config = small_config(layer_loop="scanned")
    config.mesh.fsdp = 2
    report = estimate.preflight(config, parse_topology("v5e:2x2"))
    return config, report["phases"][0]


@pytest.mark.tpu
def test_compiled_argument_memory_matches_sharding(compiled):
    config, result = compiled
    _, (phase,) = pretraining.abstract_phases(config, 1)
    mesh = jax.sharding.AbstractMesh((2, 2, 1), sharding.AXES)
    _, state = state_lib.initial_state(config, phase, mesh)
    batch = checkpoint.abstract(phase.batch_shape, sharding.row_sharding(mesh))
    memory = result["memory"]
    expected = sharding.bytes_per_device((state, batch))
    # Padding to the chip's tiles comes on top.
    assert memory["arguments"] - memory["padding"] == expected
    assert 0 <= memory["padding"] < expected
    assert result["fits"]


@pytest.mark.tpu
def test_compiled_flops_match_the_formula(compiled):
    _, phase = compiled
    flops = phase["flops"]
    # The formula omits the products that select positions and predicted tokens, one forward and one
    # backward each. (The single [CLS] of a row is selected by a sum.)
    selected = 2 * (128 + 19) * 128 * 128
    assert flops["compiled"] == pytest.approx(flops["formula"] + 2 * 2 * selected, rel=1e-6)
    # XLA's cost analysis counts the body of the layer loop once.
    assert flops["cost_analysis"] < 0.8 * flops["compiled"]


@pytest.mark.tpu
def test_flops_are_read_from_an_unrolled_program_with_a_kernel():
    config = small_config(attention="splash", attention_dropout=0.0, dtype="bfloat16")
    report = estimate.preflight(config, parse_topology("v5e:1x1"))
    flops = report["phases"][0]["flops"]
    selected = 8 * (128 + 19) * 128 * 128
    assert flops["compiled"] == pytest.approx(flops["formula"] + 2 * 2 * selected, rel=0.01)


@pytest.mark.tpu
def test_compiled_collectives_match_the_mesh(compiled):
    config, phase = compiled
    assert {"all-gather", "all-reduce"} <= phase["collectives"].keys()
    gathered = phase["collectives"]["all-gather"]
    # Every sharded kernel is gathered from the other half at least once.
    kernels = config.model.layers * 12 * config.model.hidden**2 * 4
    assert gathered["bytes"] >= kernels / 2
    assert 0 < phase["roofline"]["network_seconds"] < 1
