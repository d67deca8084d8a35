"""The estimate of a run: memory, time and cost, by phase and in total."""

import dataclasses
from typing import Any

import jax

from bert_jax.config.schema import Config, batch_size_key
from bert_jax.model import attention, kernels
from bert_jax.model.flops import parameter_count
from bert_jax.objectives import pretraining
from bert_jax.objectives.base import Phase
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.runs import checkpoint
from bert_jax.runtime import sharding
from bert_jax.runtime.chips import ASSUMED_UTILIZATION, Chip, speed
from bert_jax.runtime.topology import Topology
from bert_jax.tools.preflight.compiler import abstract_devices, compiled_cost, has_cudnn
from bert_jax.tools.preflight.formulas import StepCost, formula_cost, would_fit
from bert_jax.tools.preflight.kernels import by_source, expected_seconds
from bert_jax.tools.preflight.network import Location, locations, network_seconds
from bert_jax.training.state import initial_state


def preflight(
    config: Config,
    topology: Topology,
    sequences: int = 1,
    dollars_per_chip_hour: float | None = None,
    compiles: bool = True,
) -> dict[str, Any]:
    """Estimate what a run needs on a topology; its rows need not exist.

    `sequences` is S of phases that name no rows. Without `compiles` all is estimated by formula.

    Returns:
        Plain values for JSON, which `format_report` formats. Sizes are in bytes per device and times in
        seconds per step, unless the name says otherwise.

    Raises:
        NotCompiled: the compiler failed for another reason than memory.
    """
    has_vocab_size = bool(config.model.vocab_size)
    if config.model.dtype == "auto":
        config = dataclasses.replace(
            config, model=dataclasses.replace(config.model, dtype="bfloat16")
        )
    sizes = sharding.mesh_sizes(config.mesh, topology.devices)
    platform = "tpu" if topology.is_tpu else "gpu"
    attention.check(config, platform, sizes[-1])
    kernels.check(config, platform)

    def implementation(tokens: int) -> str:
        return attention.choose(config, platform, sizes[-1], tokens).implementation

    mesh = jax.sharding.AbstractMesh(sizes, sharding.AXES)
    devices = abstract_devices(topology) if compiles else []

    def traced(tokens: int) -> str:
        # Without JAX's plugin, or cuDNN, kernels for GPUs cannot be traced.
        name = implementation(tokens)
        return name if devices and (name != "cudnn" or has_cudnn()) else "xla"

    config, phases = pretraining.abstract_phases(config, sequences, traced)
    if devices:
        mesh = sharding.make_mesh(config.mesh, devices)
        devices = mesh.devices.flat
    places = locations(topology, devices)
    for i, phase in enumerate(phases):
        sharding.check_batch(mesh, phase.batch_size, phase.accumulation, batch_size_key(config, i))
    chip, entries, first_step = topology.chip, [], 0
    measured, is_measured = speed(chip)
    utilization = dict(
        zip(("share", "measured"), chip.utilization or ASSUMED_UTILIZATION, strict=True)
    )
    for i, phase in enumerate(phases):
        model = dataclasses.replace(config.model, attention=implementation(phase.tokens))
        resolved = dataclasses.replace(config, model=model)  # for the formulas
        entry = _phase(resolved, i, phase, topology, mesh, places, float(utilization["share"]))
        steps, first_step = phase.end_step - first_step, phase.end_step
        entries.append({
            **entry,
            "steps": steps,
            "rows_from": ", ".join(config.phases[i].folders) or None,
            "hours": steps * entry["roofline"]["step_seconds"] / 3600,
            "expected_hours": steps * entry["expected_step_seconds"] / 3600,
        })  # fmt: skip
    report = {
        "topology": topology.name,
        "chips": topology.chips,
        "devices": topology.devices,
        "dtype": config.model.dtype,
        "attention": attention.attention_line(
            config, platform, sizes[-1], [phase.tokens for phase in phases]
        ),
        "device": chip.device_kinds[0],
        "source": chip.source,
        "mesh": dict(zip(sharding.AXES, sizes, strict=True)),
        "has_compiler": bool(devices),
        "parameters": parameter_count(
            jax.eval_shape(phases[0].objective.init, jax.random.key(0)), config.model
        ),
        "vocab_size": config.model.vocab_size,
        "vocab_size_assumed": not has_vocab_size
        and not any(phase.folders for phase in config.phases),
        "phases": entries,
        "fits": all(entry["fits"] for entry in entries),
        "utilization": {**utilization, "assumed": chip.utilization is None},
        "speed": {"measured": measured.source, "assumed": not is_measured},
    }
    for prefix in ("", "expected_"):
        hours = sum(entry[f"{prefix}hours"] for entry in entries)
        price = dollars_per_chip_hour
        report |= {
            f"{prefix}hours": hours,
            f"{prefix}chip_hours": hours * topology.chips,
            f"{prefix}dollars": price and hours * topology.chips * price,
        }
    return report


def _phase(
    config: Config,
    i: int,
    phase: Phase,
    topology: Topology,
    mesh: Any,
    places: list[Location],
    utilization: float,
) -> dict[str, Any]:
    chip = topology.chip
    _, state = initial_state(config, phase, mesh)
    batch = checkpoint.abstract(phase.batch_shape, sharding.row_sharding(mesh))
    memory: dict[str, Any] = {
        "parameters": sharding.bytes_per_device(state.params),
        "optimizer": sharding.bytes_per_device(state.optimizer),
        "batch": sharding.bytes_per_device(batch),
    }
    state_bytes = sharding.bytes_per_device((state, batch))
    # The cost of the compiled step; the bytes that it needs if it does not fit; None if not compiled.
    outcome: StepCost | float | None = None
    if isinstance(mesh, sharding.Mesh):
        outcome = compiled_cost(config, phase, topology, mesh, state, state_bytes)
    if is_compiled := isinstance(outcome, StepCost):
        cost = outcome
    else:
        sizes = tuple(mesh.shape.values())
        cost = formula_cost(config, phase, sizes, memory["parameters"], state_bytes)
        if outcome:
            cost.memory.update(temporaries=outcome - state_bytes, total=outcome)
    memory |= {**cost.memory, "capacity": chip.memory_bytes}
    # The compiler for TPUs rejects programs that do not fit; that for GPUs does not.
    fits = not isinstance(outcome, float) and memory["total"] <= chip.memory_bytes
    fits = fits or (is_compiled and topology.is_tpu)
    sent: dict[str, dict[str, Any]] = {}
    for collective in cost.collectives:
        kind = sent.setdefault(collective.kind, {"bytes": 0.0, "times": 0, "seconds": 0.0})
        kind["bytes"] += collective.sent_bytes
        kind["times"] += collective.times
        kind["seconds"] += network_seconds(topology, places, collective)
    # By default, TPUs multiply float32 in one bfloat16 pass, and GPUs as TF32 at half the rate.
    passes = 1 if topology.is_tpu or config.model.compute_dtype == "bfloat16" else 2
    peak = chip.flops / passes
    network = sum((kind["seconds"] for kind in sent.values()), 0.0)
    times = roofline(chip._replace(flops=peak), cost.flops, cost.traffic, network)
    # Utilization counts the FLOPs of the model, without recomputation.
    formula_flops = phase.objective.flops_per_row * phase.batch_size / topology.devices
    if is_compiled:
        expected = expected_seconds(cost.kernels, chip, passes, network)
    else:
        expected = formula_flops / (utilization * peak)
    expected = max(times["step_seconds"], expected)
    assert isinstance(phase.objective, MaskedLM)
    change = None if fits else would_fit(config, i, phase, topology, state, memory["temporaries"])
    return {
        "tokens": phase.tokens,
        "sequences": phase.objective.masker.sequences,
        "batch_size": phase.batch_size,
        "accumulation": phase.accumulation,
        "method": "compiled" if is_compiled else "formula",
        "rejected": isinstance(outcome, float),
        "compile_seconds": cost.compile_seconds,
        "memory": memory,
        "fits": fits,
        "would_fit": change,
        "flops": {
            "formula": formula_flops,
            "compiled": cost.flops if is_compiled else None,
            "cost_analysis": cost.cost_analysis_flops,
        },
        "traffic": cost.traffic,
        "collectives": sent,
        "kernels": by_source(cost.kernels, chip, passes),
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
