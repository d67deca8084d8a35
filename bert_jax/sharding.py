"""The device mesh, and one table that says where every parameter lies."""

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from bert_jax.config import MeshConfig
from bert_jax.errors import UserError

AXES = ("data", "fsdp", "tensor")
# Rows are split over both axes that hold different data.
ROWS = PartitionSpec(("data", "fsdp"))
# Queries, keys and values, [B T N K].
HEADS = PartitionSpec(("data", "fsdp"), None, "tensor")

# The first pattern found in a parameter's path decides; optimizer state ends in the same paths.
TABLE = (
    (r"embeddings/word/embedding$", PartitionSpec("tensor", "fsdp")),
    (r"embeddings/(position|segment)/embedding$", PartitionSpec(None, "fsdp")),
    (r"attention/(query|key|value)/kernel$", PartitionSpec("fsdp", "tensor", None)),
    (r"attention/(query|key|value)/bias$", PartitionSpec("tensor", None)),
    (r"attention/output/kernel$", PartitionSpec("tensor", None, "fsdp")),
    (r"feed_forward/intermediate/kernel$", PartitionSpec("fsdp", "tensor")),
    (r"feed_forward/intermediate/bias$", PartitionSpec("tensor")),
    (r"feed_forward/output/kernel$", PartitionSpec("tensor", "fsdp")),
    # An LSTM's other kernel is wanted once a token, so it lies whole on every device.
    (r"(transform|pooler|lstm/.*/input)/kernel$", PartitionSpec("fsdp", None)),
    (r"masked_lm/decoder$", PartitionSpec("fsdp", "tensor")),
    (r"masked_lm/bias$", PartitionSpec("tensor")),
    (r"", PartitionSpec()),
)


def mesh_sizes(config: MeshConfig, devices: int) -> tuple[int, int, int]:
    """The size of each of `AXES` for a number of devices.

    Raises:
        UserError: the axes do not multiply to it.
    """
    sizes = [config.data, config.fsdp, config.tensor]
    named = f"data={config.data}, fsdp={config.fsdp}, tensor={config.tensor}"
    fixed = int(np.prod([size for size in sizes if size != -1]))
    if -1 in sizes and devices % fixed == 0:
        sizes[sizes.index(-1)] = devices // fixed
    if np.prod(sizes) != devices:
        divisors = [d for d in range(1, devices + 1) if devices % d == 0]
        raise UserError(
            f"config.mesh ({named}) does not fit {devices} devices: "
            f"sizes must multiply to that, so each is one of {divisors}"
        )
    return tuple(sizes)


def make_mesh(config: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """Arranges the devices (all there are by default) as configured.

    Raises:
        UserError: the axes do not multiply to the number of devices.
    """
    # Those of a process next to each other, so that its part of the rows is one stretch.
    devices = sorted(
        jax.devices() if devices is None else devices, key=lambda d: (d.process_index, d.id)
    )
    return Mesh(np.array(devices).reshape(mesh_sizes(config, len(devices))), AXES)


def row_shards(mesh: Mesh | AbstractMesh) -> int:
    """Over how many places rows are split."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def row_part(mesh: Mesh) -> tuple[int, int]:
    """Which part of how many of every batch this process holds.

    Processes that differ by their place on the tensor axis alone hold the same part.

    Raises:
        UserError: its devices hold no such part.
    """
    shards = mesh.devices.reshape(row_shards(mesh), -1)
    own = [
        i
        for i, row in enumerate(shards)
        if any(d.process_index == jax.process_index() for d in row)
    ]
    parts = len(shards) // len(own)
    if own != list(range(own[0], own[0] + len(own))) or own[0] % len(own):
        raise UserError(
            f"config.mesh ({dict(mesh.shape)}) cuts across the {jax.process_count()} processes: "
            f"tensor must divide the {jax.local_device_count()} devices of one, or be a multiple"
        )
    return own[0] // len(own), parts


def check_batch(mesh: Mesh | AbstractMesh, batch_size: int, accumulation: int) -> None:
    """Refuses a batch that the mesh cannot split evenly.

    Raises:
        UserError: says which batch sizes would do.
    """
    shards = row_shards(mesh) * accumulation
    if batch_size % shards:
        near = max(batch_size // shards, 1) * shards
        raise UserError(
            f"config.batch_size {batch_size} is not divisible by {shards} "
            f"(data x fsdp x accumulation): {near} or {near + shards} would be"
        )


def specs(tree: Any) -> Any:
    """The `PartitionSpec` of every leaf of a tree of parameters or optimizer state."""

    def spec(path, leaf):
        name = "/".join(str(getattr(k, "key", getattr(k, "name", k))) for k in path)
        found = next(spec for pattern, spec in TABLE if re.search(pattern, name))
        return found if len(found) <= np.ndim(leaf) else PartitionSpec()

    return jax.tree_util.tree_map_with_path(spec, tree)


def shardings(mesh: Mesh | AbstractMesh, tree: Any) -> Any:
    """The `NamedSharding` of every leaf of a tree of parameters or optimizer state."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs(tree),
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


def rows(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Where a batch of rows lies: its first axis split over data and fsdp."""
    return NamedSharding(mesh, ROWS)


def on_each_device(attend: Callable[..., Array]) -> Callable[..., Array]:
    """Splits a kernel, which the compiler cannot: each device attends in its own rows and heads.

    Args:
        attend: (query, key, value [B T N K], sequence [B T]) to [B T N K], on one device.

    Returns:
        The same on the mesh in force (`jax.set_mesh`) while it is traced; without one, `attend`.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return attend
    places = (HEADS, HEADS, HEADS, ROWS)
    return jax.shard_map(attend, in_specs=places, out_specs=HEADS, check_vma=False)


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """The same on every device."""
    return NamedSharding(mesh, PartitionSpec())


def bytes_per_device(tree: Any) -> int:
    """Bytes that one device holds of a tree of arrays or shapes with shardings."""
    return sum(
        int(np.prod(x.sharding.shard_shape(x.shape), dtype=np.int64)) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
    )
