"""Formulas for what is not compiled: memory, traffic, collectives, and changes that need less memory."""

import copy
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from bert_jax.config.schema import Config
from bert_jax.errors import UserError
from bert_jax.model import attention
from bert_jax.objectives.base import Phase
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.runs import checkpoint
from bert_jax.runtime import sharding
from bert_jax.tools.preflight.hlo import Collective
from bert_jax.tools.preflight.topology import Topology
from bert_jax.training.state import State


def activation_bytes(config: Config, phase: Phase, rows: int | float) -> float:
    """Return the bytes of activations that the backward pass needs for `rows` rows.

    A layer needs 34 D + 5 N T bytes per token at 2 bytes per number (Korthikanti et al., arXiv
    2205.05198, section 4.1), of which N T are the mask of attention dropout; fused attention kernels do
    not need the 5 N T. With remat "dots" a layer needs the results of its dense layers, with "full"
    its input; one layer at a time is recomputed in full. Of the 34 D, 16 D are the inputs and results
    of an activation of size 4 D; gating needs twice as much.
    """
    tokens, layers = phase.tokens, 0.0
    score_size = 0.0 if config.model.attention in attention.KERNELS else 2.0
    score_size += 0.5 * bool(config.model.attention_dropout)
    generators = [config.model.generator()] if config.model.electra.generator_hidden else []
    for model in [config.model, *generators]:
        size = 2 if model.dtype == "bfloat16" else 4
        wide = model.feed_forward * (1 + model.gated_feed_forward)
        full = (9 * model.hidden + 2 * wide + score_size * model.heads * tokens) * size
        dots = (6 * model.hidden + wide) * size
        kept = {"none": full, "dots": dots, "full": model.hidden * size}[model.remat]
        layers += model.layers * kept + (full if model.remat != "none" else 0)
    assert isinstance(phase.objective, MaskedLM)
    predictions = phase.objective.masker.predictions
    logits = 2 * 4 * predictions * config.model.vocab_size
    return rows * (tokens * layers + logits)


def expected_temporaries(config: Config, phase: Phase, sizes: Sequence[int], params: int) -> float:
    """Return the formula for temporaries per chip in bytes: activations and gradients."""
    data, fsdp, tensor = sizes
    parts = phase.accumulation
    rows = phase.batch_size / (data * fsdp * parts)
    # A scan over layers holds their parameters and gradients a second time, stacked.
    copies = 1 + 2 * (config.model.layer_loop == "scanned") + (parts > 1)
    return activation_bytes(config, phase, rows) / tensor + copies * params


def expected_collectives(
    config: Config, phase: Phase, sizes: Sequence[int], params: int
) -> list[Collective]:
    """Return the collectives of a step by formula; `params` is bytes of parameters per chip."""
    data, fsdp, tensor = sizes
    grid = np.arange(math.prod(sizes)).reshape(sizes)
    model, parts = config.model, phase.accumulation
    along_data = grid.transpose(1, 2, 0).reshape(-1, data)
    along_fsdp = grid.transpose(0, 2, 1).reshape(-1, fsdp)
    along_tensor = grid.reshape(-1, tensor)
    size = 2 if model.dtype == "bfloat16" else 4
    rows = phase.batch_size // (data * fsdp * parts)
    hidden = rows * phase.tokens * model.hidden * size
    collectives = [
        Collective("all-reduce", params, along_data, parts),
        Collective("all-gather", params * fsdp, along_fsdp, 2 * parts),
        Collective("reduce-scatter", params * fsdp, along_fsdp, parts),
        Collective("all-reduce", hidden, along_tensor, 4 * model.layers * parts),
    ]
    return [collective for collective in collectives if collective.groups.shape[1] > 1]


def expected_traffic(config: Config, phase: Phase, sizes: Sequence[int], params: int) -> float:
    """Return the main-memory traffic of a step in bytes, by formula.

    Each accumulation part reads the parameters twice and writes gradients. The update reads
    parameters, gradients and both moments, and writes three of them. Activations are written once and
    read twice.
    """
    data, fsdp, tensor = sizes
    rows = phase.batch_size / (data * fsdp)
    activations = activation_bytes(config, phase, rows) / tensor
    return params * (3 * phase.accumulation + 7) + 3 * activations


def _changes(config: Config, i: int, phase: Phase, chips: int) -> Iterator[tuple[str, Config, int]]:
    """Yield changes that need less memory, cheapest first: (arguments, config, accumulation)."""
    # The accumulation of a phase overrides that of the run.
    accumulation = f"phases[{i}].accumulation" if config.phases[i].accumulation else "accumulation"
    parts = [2**i for i in range(1, 11) if phase.batch_size % (2**i * phase.accumulation) == 0]
    shards = [2**i for i in range(1, 11) if chips % 2**i == 0]

    remat = config.model.remat
    stronger = {"none": ("dots", "full"), "dots": ("full",), "full": ()}[remat]
    changes = [
        *((stronger_remat, 1, 1) for stronger_remat in stronger),
        *((remat, 1, part) for part in parts),
        *((remat, fsdp, 1) for fsdp in shards),
        *(("full", fsdp, part) for fsdp in (1, *shards) for part in parts),
    ]
    for other_remat, fsdp, part in changes:
        other, settings = copy.deepcopy(config), []
        if fsdp > 1:
            settings += [] if other.mesh.data == -1 else ["mesh.data=-1"]
            settings.append(f"mesh.fsdp={fsdp}")
            other.mesh.data, other.mesh.fsdp = -1, fsdp
        if other_remat != remat:
            settings.append(f"model.remat={other_remat}")
            other.model.remat = other_remat
        if part > 1:
            settings.append(f"{accumulation}={part * phase.accumulation}")
        arguments = " ".join(f"--config.{setting}" for setting in settings)
        yield arguments, other, part * phase.accumulation


def would_fit(
    config: Config, i: int, phase: Phase, topology: Topology, state: State, temporaries: int | float
) -> dict[str, Any] | None:
    """Return the first change with which phase i is estimated to fit, and its total bytes.

    Temporaries by formula are scaled to those of the current program.
    """
    params = sharding.bytes_per_device(state.params)
    sizes = sharding.mesh_sizes(config.mesh, topology.devices)
    scale = temporaries / expected_temporaries(config, phase, sizes, params)

    @functools.cache
    def sharded_bytes(sizes: tuple[int, int, int]) -> tuple[int, int]:
        mesh = jax.sharding.AbstractMesh(sizes, sharding.AXES)
        placed = checkpoint.abstract(state, sharding.shardings(mesh, state))
        return sharding.bytes_per_device(placed), sharding.bytes_per_device(placed.params)

    for arguments, other, parts in _changes(config, i, phase, topology.devices):
        try:
            sizes = sharding.mesh_sizes(other.mesh, topology.devices)
            if sizes[0] % topology.slices:  # only `data` may span slices
                continue
            mesh = jax.sharding.AbstractMesh(sizes, sharding.AXES)
            sharding.check_batch(mesh, phase.batch_size, parts)
            total, params = sharded_bytes(sizes)
        except UserError:
            continue
        part = dataclasses.replace(phase, accumulation=parts)
        total += scale * expected_temporaries(other, part, sizes, params)
        if total <= topology.chip.memory_bytes:
            return {"arguments": arguments, "total": total}
    return None
