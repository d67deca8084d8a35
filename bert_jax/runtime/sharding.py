"""The device mesh and the sharding of parameters, optimizer state and rows."""

import functools
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from bert_jax.config.schema import MeshConfig
from bert_jax.errors import UserError, counted

AXES = ("data", "fsdp", "tensor")
# Rows are sharded over both data-parallel axes.
ROWS = PartitionSpec(("data", "fsdp"))
# Queries, keys and values, [B T N K].
QKV_SPEC = PartitionSpec(("data", "fsdp"), None, "tensor")

# The first pattern that matches a parameter's path applies. Paths of optimizer state have the same
# suffixes.
PARTITION_RULES = (
    # Adafactor's second moments of the rows and columns of a matrix.
    (r"(^|/)v_(row|col)/", PartitionSpec()),
    (r"embeddings/word/embedding$", PartitionSpec("tensor", "fsdp")),
    (r"embeddings/(position|segment)/embedding$", PartitionSpec(None, "fsdp")),
    (r"attention/(query|key|value)/kernel$", PartitionSpec("fsdp", "tensor", None)),
    (r"attention/(query|key|value)/bias$", PartitionSpec("tensor", None)),
    (r"attention/output/kernel$", PartitionSpec("tensor", None, "fsdp")),
    (r"feed_forward/(intermediate|gate)/kernel$", PartitionSpec("fsdp", "tensor")),
    (r"feed_forward/(intermediate|gate)/bias$", PartitionSpec("tensor")),
    (r"feed_forward/output/kernel$", PartitionSpec("tensor", "fsdp")),
    (r"attention/(query|key|value)/lora_b$", PartitionSpec(None, "tensor", None)),
    (r"attention/output/lora_a$", PartitionSpec("tensor", None, None)),
    (r"(query|key|value|intermediate)/lora_a$", PartitionSpec("fsdp", None)),
    (r"feed_forward/output/lora_a$", PartitionSpec("tensor", None)),
    (r"intermediate/lora_b$", PartitionSpec(None, "tensor")),
    (r"output/lora_b$", PartitionSpec(None, "fsdp")),
    # The recurrent kernel of an LSTM is used for every token, so it is replicated (last pattern).
    (r"(transform|pooler|project|teacher_projection)/kernel$", PartitionSpec("fsdp", None)),
    (r"(lstm/.*/input|span_boundary/(first|second))/kernel$", PartitionSpec("fsdp", None)),
    (r"masked_lm/decoder$", PartitionSpec("fsdp", "tensor")),
    (r"(masked_lm|span_boundary)/bias$", PartitionSpec("tensor")),
    (r"", PartitionSpec()),
)


def mesh_sizes(config: MeshConfig, devices: int) -> tuple[int, int, int]:
    """Return the sizes of `AXES` for a number of devices."""
    axes = f"data={config.data}, fsdp={config.fsdp}, tensor={config.tensor}"
    try:
        return np.empty(devices).reshape(config.data, config.fsdp, config.tensor).shape
    except ValueError:
        divisors = [d for d in range(1, devices + 1) if devices % d == 0]
        raise UserError(
            f"config.mesh ({axes}) does not multiply to {devices} devices: choose each from {divisors}"
        ) from None


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """Arrange the devices (by default all) in the configured mesh.

    Slices of TPUs, which the data center network connects, each have a contiguous part of the axis
    "data", so that only gradients cross that network, once a step.
    """
    # Sort by process, so that each process holds a contiguous range of rows.
    devices = sorted(
        jax.devices() if devices is None else devices,
        key=lambda d: (slice_of(d), d.process_index, d.id),
    )
    sizes, slices = mesh_sizes(config, len(devices)), len({slice_of(d) for d in devices})
    if sizes[0] % slices:
        inside, size = sizes[1] * sizes[2], len(devices) // slices
        raise UserError(
            f"config.mesh (data={sizes[0]}, fsdp={sizes[1]}, tensor={sizes[2]}) needs {inside} devices "
            f"for fsdp and tensor, more than fit evenly in one of {slices} slices of {size}: choose "
            f"fsdp x tensor from {[d for d in range(1, size + 1) if size % d == 0]}"
        )
    return Mesh(np.array(devices).reshape(sizes), AXES)


def compiler_options(mesh: Mesh) -> dict[str, Any]:
    """Return XLA's options for programs on a mesh.

    On TPUs XLA turns a product with a sharded operand into a loop over its parts, which exchanges them
    meanwhile. For products of BERT's size on an axis of 8 or more the parts are so small that this moves
    several times as much memory, so gather or reduce at once. Compilations fail if libtpu does not know the
    option, so check it when pyproject.toml allows a newer JAX.
    """
    is_tpu = mesh.devices.flat[0].platform == "tpu"
    return {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000} if is_tpu else {}


def slice_of(device: Any) -> int:
    """Return the index of a device's slice, 0 if there is one slice.

    The TPU runtime knows it, or MEGASCALE_NUM_SLICES says into how many slices the processes are divided.
    """
    index = getattr(device, "slice_index", None)
    count = int(os.environ.get("MEGASCALE_NUM_SLICES") or 1)
    if device.platform == "tpu" or count == 1:
        return index or 0
    return device.process_index * count // jax.process_count()


def mesh_line(mesh: Mesh) -> str:
    """Return one line about the devices and how they are used."""
    devices = list(mesh.devices.flat)
    slices = len({slice_of(d) for d in devices})
    count = counted(len(devices), "device")
    if slices > 1:
        count += f" in {slices} slices"
    axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    return f"{count} ({devices[0].device_kind}), mesh {axes}"


def num_row_shards(mesh: Mesh | AbstractMesh) -> int:
    """Return the number of shards that rows are split into."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def process_row_shard(mesh: Mesh) -> tuple[int, int]:
    """Return the index of this process's part of a batch and the number of parts.

    Processes that differ only in their position on the tensor axis hold the same part.
    """
    shards = mesh.devices.reshape(num_row_shards(mesh), -1)
    this = jax.process_index()
    local = [i for i, row in enumerate(shards) if this in [d.process_index for d in row]]
    num_parts = len(shards) // len(local)
    if local != list(range(local[0], local[0] + len(local))) or local[0] % len(local):
        raise UserError(
            f"config.mesh ({dict(mesh.shape)}) cuts across the {jax.process_count()} processes: tensor "
            f"must divide the {jax.local_device_count()} devices per process, or be a multiple of it"
        )
    return local[0] // len(local), num_parts


def check_batch(
    mesh: Mesh | AbstractMesh, batch_size: int, accumulation: int, key: str = "batch_size"
) -> None:
    """Check that the mesh can split a batch evenly; `key` of the config sets its size."""
    shards = num_row_shards(mesh) * accumulation
    if batch_size % shards:
        nearest = max(batch_size // shards, 1) * shards
        raise UserError(
            f"config.{key} {batch_size} is not divisible by {shards} "
            f"(data x fsdp x accumulation): set it to {nearest} or {nearest + shards}"
        )


def specs(tree: Any) -> Any:
    """Return the `PartitionSpec` of every leaf of a tree of parameters or optimizer state."""

    def spec(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        match = next(spec for pattern, spec in PARTITION_RULES if re.search(pattern, name))
        # Adafactor has arrays of one element in place of moments that it does not keep.
        return match if len(match) <= np.ndim(leaf) and leaf.size > 1 else PartitionSpec()

    return jax.tree_util.tree_map_with_path(spec, tree)


def shardings(mesh: Mesh | AbstractMesh, tree: Any) -> Any:
    """Return the `NamedSharding` of every leaf of a tree of parameters or optimizer state."""

    def sharding(path, leaf, spec):
        named = NamedSharding(mesh, spec)
        try:
            named.shard_shape(np.shape(leaf))
        except ValueError as error:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise UserError(
                f"config.mesh does not divide {name} of shape {np.shape(leaf)}: choose other fsdp and "
                "tensor sizes (--config.model.vocab_multiple=128 pads the vocabulary)"
            ) from error
        return named

    return jax.tree_util.tree_map_with_path(sharding, tree, specs(tree))


def row_sharding(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Return the sharding of a batch of rows: the first axis is split over data and fsdp."""
    return NamedSharding(mesh, ROWS)


def keep_rows(x: Array) -> Array:
    """Shard hidden states [B T D] by rows alone over the current mesh (`jax.set_mesh`), if there is one.

    Else the compiler may move activations, which are larger, instead of the parameters of a layer.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return x if mesh.empty or mesh.size == 1 else jax.lax.with_sharding_constraint(x, ROWS)


def shard_attention(attend: Callable[..., Array]) -> Callable[..., Array]:
    """Shard an attention kernel, which the compiler cannot partition, over rows and heads.

    The kernel is a function (query, key, value [B T N K], segment_ids [B T]) -> [B T N K]. The result is
    the same over the mesh (`jax.set_mesh`) at trace time, or `attend` itself if there is none.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return attend
    in_specs = (QKV_SPEC, QKV_SPEC, QKV_SPEC, ROWS)
    return jax.shard_map(attend, in_specs=in_specs, out_specs=QKV_SPEC, check_vma=False)


def shard_rows(function: Callable[..., Any], has_sums: bool = False) -> Callable[..., Any]:
    """Shard a kernel, which the compiler cannot partition, over rows.

    The kernel is a function (number of the shard, arrays [B …], arrays that each device has) -> arrays
    [B …]; if `has_sums` is true, -> (arrays [B …], arrays), where the last are added over all rows. The
    result takes the same arguments without the number. Without a mesh (`jax.set_mesh`) at trace time,
    there is one shard.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return functools.partial(function, 0)

    def run(rows: Any, others: Any) -> Any:
        results = function(jax.lax.axis_index(ROWS[0]), rows, others)
        return (results[0], jax.lax.psum(results[1], ROWS[0])) if has_sums else results

    everywhere = PartitionSpec()
    out_specs = (ROWS, everywhere) if has_sums else ROWS
    return jax.shard_map(run, in_specs=(ROWS, everywhere), out_specs=out_specs, check_vma=False)


def shard_heads(function: Callable[..., Any]) -> Callable[..., Any]:
    """Shard a kernel, which the compiler cannot partition, over rows and heads.

    The kernel is a function (numbers of the shards of rows and heads, arrays [B n N …], segment_ids [B T],
    array that each device has) -> arrays [B n N …]. The result takes the same arguments without the numbers.
    Without a mesh (`jax.set_mesh`) at trace time, there is one shard.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return functools.partial(function, (0, 0))

    def run(*arguments: Any) -> Any:
        return function((jax.lax.axis_index(ROWS[0]), jax.lax.axis_index("tensor")), *arguments)

    in_specs = (QKV_SPEC, ROWS, PartitionSpec())
    return jax.shard_map(run, in_specs=in_specs, out_specs=QKV_SPEC, check_vma=False)


def sum_over_rows(function: Callable[..., Array]) -> Callable[..., Array]:
    """Apply a function of arrays [B …] to each device's rows, and add the results of all devices.

    Without a mesh (`jax.set_mesh`) at trace time, return `function` itself.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return function

    def add(*arrays: Array) -> Array:
        return jax.lax.psum(function(*arrays), ROWS[0])

    return jax.shard_map(add, in_specs=ROWS, out_specs=PartitionSpec(), check_vma=False)


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Return the sharding that replicates an array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def bytes_per_device(tree: Any) -> int:
    """Return the bytes per device of a tree of arrays or shapes with shardings."""
    return sum(
        int(np.prod(x.sharding.shard_shape(x.shape), dtype=np.int64)) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
    )


def shard_batch(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, Any]:
    """Assemble the global batch on the mesh from the rows of each process.

    On a single device, return the batch unchanged: a compiled program transfers it to the device
    in a tenth of the time.
    """
    if mesh.size == 1:
        return batch
    rows = row_sharding(mesh)
    return {k: jax.make_array_from_process_local_data(rows, v) for k, v in batch.items()}
