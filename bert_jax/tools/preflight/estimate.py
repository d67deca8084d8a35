"""The estimate of a run: memory, time and cost, by phase and in total."""

import dataclasses
import time
from typing import Any

import jax

from bert_jax.config.schema import Config, batch_size_key
from bert_jax.model import attention
from bert_jax.model.flops import parameter_count
from bert_jax.objectives import pretraining
from bert_jax.objectives.base import Phase
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.runs import checkpoint
from bert_jax.runtime import sharding
from bert_jax.runtime.chips import CHIPS, Chip
from bert_jax.tools.preflight import hlo
from bert_jax.tools.preflight.compiler import NotCompiled, compile_for, tpu_devices
from bert_jax.tools.preflight.formulas import (
    expected_collectives,
    expected_temporaries,
    expected_traffic,
    would_fit,
)
from bert_jax.tools.preflight.topology import Location, Topology, locations, network_seconds
from bert_jax.training.state import initial_state

# Whose utilization is assumed for chips on which BERT was not measured.
_ASSUMED = "h100"


def utilization(chip: Chip) -> dict[str, Any]:
    """Return the expected utilization of a chip, and whether it was measured on another one."""
    measured_here = chip.utilization
    share, measured = measured_here or CHIPS[_ASSUMED].utilization or (1.0, "")
    return {"share": share, "measured": measured, "assumed": measured_here is None}


def preflight(
    config: Config,
    topology: Topology,
    sequences: int = 1,
    dollars_per_chip_hour: float | None = None,
) -> dict[str, Any]:
    """Estimate what a run needs on a topology; its rows need not exist.

    `sequences` is S of phases that name no rows.

    Returns:
        Plain values for JSON, which `format_report` formats. Sizes are in bytes per device and times in
        seconds per step, unless the name says otherwise.

    Raises:
        NotCompiled: libtpu failed for another reason than memory.
    """
    has_vocab_size = bool(config.model.vocab_size)
    sizes = sharding.mesh_sizes(config.mesh, topology.devices)
    platform = "tpu" if topology.is_tpu else "gpu"
    attention.check(config, platform, sizes[-1])

    def implementation(tokens: int) -> str:
        return attention.choose(config, platform, sizes[-1], tokens).implementation

    # GPU kernels cannot be traced without the GPU's libraries, and nothing is compiled for GPUs.
    traced = implementation if topology.is_tpu else lambda _: "xla"
    config, phases = pretraining.abstract_phases(config, sequences, traced)
    if topology.is_tpu:
        devices = tpu_devices(topology)
        mesh = sharding.make_mesh(config.mesh, list(devices))
        device_locations = locations(topology, list(mesh.devices.flat))
    else:
        mesh = jax.sharding.AbstractMesh(sizes, sharding.AXES)
        device_locations = locations(topology)
    for i, phase in enumerate(phases):
        sharding.check_batch(mesh, phase.batch_size, phase.accumulation, batch_size_key(config, i))
    entries, first_step = [], 0
    for i, (phase_config, phase) in enumerate(zip(config.phases, phases, strict=True)):
        model = dataclasses.replace(config.model, attention=implementation(phase.tokens))
        resolved = dataclasses.replace(config, model=model)  # for the formulas
        entry = _phase(resolved, i, phase, topology, mesh, sizes, device_locations)
        steps = phase.end_step - first_step
        entry |= {"steps": steps, "rows_from": phase_config.rows or None}
        for prefix, seconds in (
            ("", entry["roofline"]["step_seconds"]),
            ("expected_", entry["expected_step_seconds"]),
        ):
            entry |= _hours(prefix, steps * seconds / 3600, topology)
        entries.append(entry)
        first_step = phase.end_step
    shapes = jax.eval_shape(phases[0].objective.init, jax.random.key(0))
    report = {
        "topology": topology.name,
        "chips": topology.chips,
        "devices": topology.devices,
        "attention": attention.attention_line(
            config, platform, sizes[-1], [phase.tokens for phase in phases]
        ),
        "device": topology.chip.device_kinds[0],
        "source": topology.chip.source,
        "mesh": dict(zip(sharding.AXES, sizes, strict=True)),
        "parameters": parameter_count(shapes, config.model),
        "vocab_size": config.model.vocab_size,
        "vocab_size_assumed": not has_vocab_size and not any(phase.rows for phase in config.phases),
        "phases": entries,
        "fits": all(entry["fits"] for entry in entries),
        "utilization": utilization(topology.chip),
    }
    for prefix in ("", "expected_"):
        report |= _hours(prefix, sum(entry[f"{prefix}hours"] for entry in entries), topology)
        price = dollars_per_chip_hour
        report[f"{prefix}dollars"] = price and report[f"{prefix}chip_hours"] * price
    return report


def _hours(prefix: str, hours: float, topology: Topology) -> dict[str, float]:
    return {f"{prefix}hours": hours, f"{prefix}chip_hours": hours * topology.chips}


def _phase(
    config: Config,
    i: int,
    phase: Phase,
    topology: Topology,
    mesh: Any,
    sizes: tuple[int, int, int],
    device_locations: list[Location],
) -> dict[str, Any]:
    chip, model = topology.chip, config.model
    _, state = initial_state(config, phase, mesh)
    batch = checkpoint.abstract(phase.batch_shape, sharding.row_sharding(mesh))
    params = sharding.bytes_per_device(state.params)
    state_bytes = sharding.bytes_per_device((state, batch))
    memory: dict[str, Any] = {
        "parameters": params,
        "optimizer": sharding.bytes_per_device(state.optimizer),
        "batch": sharding.bytes_per_device(batch),
    }
    formula_flops = phase.objective.flops_per_row * phase.batch_size / topology.devices
    flops: dict[str, Any] = {"formula": formula_flops, "compiled": None, "cost_analysis": None}
    compiled, compile_seconds, needed = None, None, None
    if topology.is_tpu:
        start = time.monotonic()
        compiled, needed = compile_for(config, phase, topology, mesh, state)
        compile_seconds = time.monotonic() - start
    if compiled is not None:
        analysis, program = compiled.memory_analysis(), hlo.read(compiled.as_text())
        arguments = analysis.argument_size_in_bytes
        new = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
        memory |= {
            "padding": arguments - program.argument_bytes,
            "temporaries": analysis.temp_size_in_bytes,
            "program": analysis.generated_code_size_in_bytes,
            "arguments": arguments,
        }
        memory["total"] = arguments + new + memory["temporaries"] + memory["program"]
        # A Pallas kernel's products are not in the program's text.
        kernel_flops = 0.0
        if model.attention in attention.KERNELS:
            kernel_flops = 12.0 * model.layers * phase.tokens**2 * model.hidden
            kernel_flops *= phase.batch_size / topology.devices
        flops["compiled"] = computed = program.matrix_flops + kernel_flops
        if program.matrix_flops < (formula_flops - kernel_flops) / 2:
            raise NotCompiled(
                f"{topology.name}: the program that libtpu compiled has {program.matrix_flops:.3g} FLOPs "
                f"besides attention, by formula the step has {formula_flops - kernel_flops:.3g}: this "
                "version of bert_jax cannot read the text of libtpu's programs; use the versions of JAX "
                "and libtpu that it was tested with"
            )
        flops["cost_analysis"] = (compiled.cost_analysis() or {}).get("flops")
        collectives, traffic = program.collectives, program.traffic_bytes
    else:
        memory["temporaries"] = (
            needed - state_bytes if needed else expected_temporaries(config, phase, sizes, params)
        )
        memory["total"] = state_bytes + memory["temporaries"]
        collectives = expected_collectives(config, phase, sizes, params)
        traffic = expected_traffic(config, phase, sizes, params)
        computed = formula_flops * (4 / 3 if model.remat == "full" else 1)
    fits = compiled is not None or (not needed and memory["total"] <= chip.memory_bytes)
    sent: dict[str, dict[str, Any]] = {}
    for collective in collectives:
        kind = sent.setdefault(collective.kind, {"bytes": 0.0, "times": 0, "seconds": 0.0})
        kind["bytes"] += collective.sent_bytes
        kind["times"] += collective.times
        kind["seconds"] += network_seconds(topology, device_locations, collective)
    # By default, TPUs multiply float32 in one bfloat16 pass, and GPUs as TF32 at half the rate.
    peak = chip.flops / (1 if topology.is_tpu or model.dtype == "bfloat16" else 2)
    network = sum((kind["seconds"] for kind in sent.values()), 0.0)
    times = roofline(chip._replace(flops=peak), computed, traffic, network)
    # Utilization counts the FLOPs of the model, without recomputation.
    share = utilization(topology.chip)["share"]
    expected = max(times["step_seconds"], formula_flops / (share * peak))
    assert isinstance(phase.objective, MaskedLM)
    temporaries = memory["temporaries"]
    return {
        "tokens": phase.tokens,
        "sequences": phase.objective.masker.sequences,
        "batch_size": phase.batch_size,
        "accumulation": phase.accumulation,
        "method": "formula" if compiled is None else "compiled",
        "compile_seconds": compile_seconds,
        "memory": {**memory, "capacity": chip.memory_bytes},
        "fits": fits,
        "would_fit": None if fits else would_fit(config, i, phase, topology, state, temporaries),
        "flops": flops,
        "traffic": traffic,
        "collectives": sent,
        "roofline": times,
        "tokens_per_second": phase.batch_size * phase.tokens / times["step_seconds"],
        "expected_step_seconds": expected,
        "expected_tokens_per_second": phase.batch_size * phase.tokens / expected,
    }


def roofline(chip: Chip, flops: float, traffic: float, network: float) -> dict[str, Any]:
    """Return the minimum time of a step: the longest of compute, memory and network, in seconds."""
    times: dict[str, Any] = {
        "compute_seconds": flops / chip.flops,
        "memory_seconds": traffic / chip.memory_bandwidth,
        "network_seconds": network,
    }
    bound = max(times, key=lambda name: times[name])
    step = {"step_seconds": times[bound], "bound": bound.removesuffix("_seconds")}
    return {**times, **step, "peak_flops": chip.flops}
