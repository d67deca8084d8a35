"""Formulas of what a training step needs, and of changes with which it would need less memory."""

import copy
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from bert_jax.config.schema import Config
from bert_jax.errors import UserError
from bert_jax.model import attention
from bert_jax.objectives.base import Phase
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.runs import checkpoint
from bert_jax.runtime import sharding
from bert_jax.runtime.topology import Topology
from bert_jax.tools.preflight.hlo import Collective, Kernel
from bert_jax.training.state import State


class StepCost(NamedTuple):
    """What a training step needs of each device.

    Attributes:
        memory: bytes by purpose; "total" includes parameters, optimizer state and batch.
        flops: FLOPs that are computed, with those of rematerialization.
        traffic: bytes read from and written to main memory.
        collectives: what is sent between devices.
        kernels: the kernels of the compiled program; none for a formula.
        compile_seconds: time of the compilation; None for a formula.
        cost_analysis_flops: XLA's own count, if it gives one.
    """

    memory: dict[str, int | float]
    flops: float
    traffic: float
    collectives: list[Collective]
    kernels: Sequence[Kernel] = ()
    compile_seconds: float | None = None
    cost_analysis_flops: float | None = None


def formula_cost(
    config: Config, phase: Phase, sizes: Sequence[int], params: int, state_bytes: int
) -> StepCost:
    """Return the cost of a step by formula.

    Args:
        config: config of the run, with its attention resolved.
        phase: phase of the step.
        sizes: sizes of the mesh.
        params: bytes of parameters per device.
        state_bytes: bytes of the state and the batch per device.
    """
    temporaries = expected_temporaries(config, phase, sizes, params)
    flops = phase.objective.flops_per_row * phase.batch_size / math.prod(sizes)
    return StepCost(
        {"temporaries": temporaries, "total": state_bytes + temporaries},
        flops * (4 / 3 if config.model.remat == "full" else 1),
        _traffic(config, phase, sizes, params),
        _collectives(config, phase, sizes, params),
    )


def _activation_bytes(config: Config, phase: Phase, rows: int | float) -> float:
    """Return the bytes of activations that the backward pass needs for `rows` rows.

    A layer needs 34 D + 5 N T bytes per token at 2 bytes per number (Korthikanti et al., arXiv
    2205.05198, section 4.1), of which N T are the mask of attention dropout; fused attention kernels do
    not need the 5 N T. With remat "dots" a layer needs the results of its dense layers, with "full"
    its input; one layer at a time is recomputed in full. Of the 34 D, 16 D are the inputs and results
    of an activation of size 4 D; gating needs twice as much.
    """
    tokens, layers = phase.tokens, 0.0
    score_size = 1.0 + 1.5 * bool(config.model.attention_dropout)
    if config.model.attention in attention.KERNELS:
        score_size = 0.0
    generators = [config.model.generator()] if config.model.electra.generator_hidden else []
    for model in [config.model, *generators]:
        wide = model.feed_forward * (1 + model.gated_feed_forward)
        full = 9 * model.hidden + 2 * wide + score_size * model.heads * tokens
        dots = 6 * model.hidden + wide
        kept = {"none": full, "dots": dots, "full": model.hidden}[model.remat]
        layers += (model.layers * kept + full * (model.remat != "none")) * _number_size(model)
    assert isinstance(phase.objective, MaskedLM)
    logits = 2 * 4 * phase.objective.masker.predictions * config.model.vocab_size
    return rows * (tokens * layers + logits)


def _number_size(model: Any) -> int:
    return 2 if model.dtype == "bfloat16" else 4


def expected_temporaries(config: Config, phase: Phase, sizes: Sequence[int], params: int) -> float:
    """Return the formula for temporaries per device in bytes: activations and gradients."""
    data, fsdp, tensor = sizes
    rows = phase.batch_size / (data * fsdp * phase.accumulation)
    # A scan over layers holds their parameters and gradients a second time, stacked.
    copies = 1 + 2 * (config.model.layer_loop == "scanned") + (phase.accumulation > 1)
    return _activation_bytes(config, phase, rows) / tensor + copies * params


def _collectives(
    config: Config, phase: Phase, sizes: Sequence[int], params: int
) -> list[Collective]:
    data, fsdp, _ = sizes
    model, parts = config.model, phase.accumulation
    grid = np.arange(math.prod(sizes)).reshape(sizes)
    rows = phase.batch_size // (data * fsdp * parts)
    hidden = rows * phase.tokens * model.hidden * _number_size(model)
    collectives = [
        Collective("all-reduce", params, grid[:, 0, 0], parts),
        Collective("all-gather", params * fsdp, grid[0, :, 0], 2 * parts),
        Collective("reduce-scatter", params * fsdp, grid[0, :, 0], parts),
        Collective("all-reduce", hidden, grid[0, 0, :], 4 * model.layers * parts),
    ]
    return [collective for collective in collectives if len(collective.group) > 1]


def _traffic(config: Config, phase: Phase, sizes: Sequence[int], params: int) -> float:
    """Return the main-memory traffic of a step in bytes.

    Each accumulation part reads the parameters twice and writes gradients. The update reads
    parameters, gradients and both moments, and writes three of them. Activations are written once and
    read twice.
    """
    data, fsdp, tensor = sizes
    activations = _activation_bytes(config, phase, phase.batch_size / (data * fsdp)) / tensor
    return params * (3 * phase.accumulation + 7) + 3 * activations


def would_fit(
    config: Config, i: int, phase: Phase, topology: Topology, state: State, temporaries: int | float
) -> dict[str, Any] | None:
    """Return the first change with which phase i is estimated to fit, and its total bytes.

    Temporaries by formula are scaled to those of the current program. The cheapest changes come first.
    """
    params = sharding.bytes_per_device(state.params)
    sizes = sharding.mesh_sizes(config.mesh, topology.devices)
    scale = temporaries / expected_temporaries(config, phase, sizes, params)
    # The accumulation of a phase overrides that of the run.
    accumulation = f"phases[{i}].accumulation" if config.phases[i].accumulation else "accumulation"
    parts = [2**i for i in range(1, 11) if phase.batch_size % (2**i * phase.accumulation) == 0]
    shards = [2**i for i in range(1, 11) if topology.devices % 2**i == 0]
    remat = config.model.remat
    stronger = {"none": ("dots", "full"), "dots": ("full",), "full": ()}[remat]

    @functools.cache
    def sharded_bytes(sizes: tuple[int, int, int]) -> tuple[int, int]:
        mesh = jax.sharding.AbstractMesh(sizes, sharding.AXES)
        placed = checkpoint.abstract(state, sharding.shardings(mesh, state))
        return sharding.bytes_per_device(placed), sharding.bytes_per_device(placed.params)

    for other_remat, fsdp, part in (
        *((stronger_remat, 1, 1) for stronger_remat in stronger),
        *((remat, 1, part) for part in parts),
        *((remat, fsdp, 1) for fsdp in shards),
        *(("full", fsdp, part) for fsdp in (1, *shards) for part in parts),
    ):
        other = copy.deepcopy(config)
        changes: dict[str, Any] = {}
        if fsdp > 1:
            changes |= {"mesh.data": -1} if other.mesh.data != -1 else {}
            changes["mesh.fsdp"] = other.mesh.fsdp = fsdp
            other.mesh.data = -1
        if other_remat != remat:
            changes["model.remat"] = other.model.remat = other_remat
        if part > 1:
            changes[accumulation] = part * phase.accumulation
        changed = dataclasses.replace(phase, accumulation=part * phase.accumulation)
        try:
            sizes = sharding.mesh_sizes(other.mesh, topology.devices)
            mesh = jax.sharding.AbstractMesh(sizes, sharding.AXES)
            sharding.check_batch(mesh, phase.batch_size, changed.accumulation)
            total, params = sharded_bytes(sizes)
        except UserError:
            continue
        total += scale * expected_temporaries(other, changed, sizes, params)
        # Only `data` may span slices.
        if total <= topology.chip.memory_bytes and sizes[0] % topology.slices == 0:
            arguments = " ".join(f"--config.{key}={value}" for key, value in changes.items())
            return {"arguments": arguments, "total": total}
    return None
