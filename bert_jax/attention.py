"""Attention over packed rows: one function, and what may compute it.

"xla" runs everywhere, in any float, with dropout. The others are kernels that never write down the
T² scores of a head; each is for one kind of hardware (`KERNELS`), none has dropout inside.

Shapes: B rows, T tokens a row, N heads, K head size.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from bert_jax import sharding
from bert_jax.config import Run
from bert_jax.dropout import dropout
from bert_jax.errors import UserError


def attention(
    query: Float[Array, "B T N K"],
    key: Float[Array, "B T N K"],
    value: Float[Array, "B T N K"],
    sequence: Int[Array, "B T"],
    dropout_rate: float,
    dropout_key: Key[Array, ""] | None,
    implementation: str,
    interpret: bool = False,
    causal: bool = False,
) -> Float[Array, "B T N K"]:
    """Scaled dot-product attention in which a token sees its own sequence only.

    Padding forms a sequence of its own, so nothing real sees it and no row of the softmax is empty.

    Args:
        query, key, value: projections of the hidden states.
        sequence: which sequence of its row a token belongs to (`rows.Layout.sequence`), from 0 on.
        dropout_rate: of the attention probabilities (Vaswani et al., section 5.4, as BERT uses it).
        dropout_key: None switches dropout off.
        implementation: "xla" (also "auto", unresolved), or one of `KERNELS` that passed `check`.
        interpret: compute a Pallas kernel in Pallas' interpreter, on any hardware.
        causal: of its sequence a token sees itself and what is before it.

    Raises:
        ValueError: dropout with a kernel.
    """
    if implementation in ("auto", "xla"):
        return _xla(query, key, value, sequence, dropout_rate, dropout_key, causal)
    if dropout_rate and dropout_key is not None:
        raise ValueError(f"attention {implementation!r} has no dropout")
    kernel = KERNELS[implementation]
    tokens = query.shape[1]
    missing = -tokens % kernel.block_tokens

    def run(query, key, value, sequence):
        return kernel.run(query, key, value, sequence, interpret, causal)

    if missing:
        filling = [(0, 0), (0, missing), (0, 0), (0, 0)]
        query, key, value = (jnp.pad(x, filling) for x in (query, key, value))
        sequence = jnp.pad(sequence, filling[:2], constant_values=-1)  # a sequence of its own
    return sharding.on_each_device(run)(query, key, value, sequence)[:, :tokens]


def _sees(sequence: Int[Array, "B T"], causal: bool) -> Bool[Array, "B 1 T T"]:
    """Which token (third axis) sees which (fourth)."""
    same = sequence[:, None, :, None] == sequence[:, None, None, :]
    # A row holds its sequences in their order, so what is before in one is before in the row.
    return jnp.tril(same) if causal else same


def probabilities(
    query: Float[Array, "B T N K"],
    key: Float[Array, "B T N K"],
    sequence: Int[Array, "B T"],
    causal: bool = False,
) -> Float[Array, "B N T T"]:
    """How much each token (third axis) attends to each (fourth), as "xla" computes it; float32.

    Args are those of `attention`. A row sums to 1 and is 0 outside its token's sequence.
    """
    query, key = (x.swapaxes(1, 2) for x in (query, key))
    exponentials, total = _softmax_parts(query, key, sequence, causal)
    return exponentials / total


def _softmax_parts(
    query: Float[Array, "B N T K"],
    key: Float[Array, "B N T K"],
    sequence: Int[Array, "B T"],
    causal: bool,
) -> tuple[Float[Array, "B N T T"], Float[Array, "B N T 1"]]:
    """What the softmax of the scores divides, and by what; float32."""
    scores = jnp.einsum("bntk,bnuk->bntu", query * query.shape[-1] ** -0.5, key)
    # The softmax is in float32: its sum over hundreds of tokens loses too much in bfloat16.
    least = jnp.finfo(jnp.float32).min
    scores = jnp.where(_sees(sequence, causal), scores.astype(jnp.float32), least)
    largest = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    exponentials = jnp.exp(scores - largest)
    return exponentials, exponentials.sum(-1, keepdims=True)


def _xla(query, key, value, sequence, dropout_rate, dropout_key, causal):
    # Heads before tokens, the small operand scaled, and the sum divided by after the product with
    # the values: a CPU takes half the time of the same in textbook order.
    query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))
    exponentials, total = _softmax_parts(query, key, sequence, causal)
    kept = dropout(exponentials.astype(value.dtype), dropout_rate, dropout_key)
    summed = jnp.einsum("bntu,bnuk->bntk", kept, value)
    return (summed.astype(total.dtype) / total).astype(value.dtype).swapaxes(1, 2)


def _cudnn(query, key, value, sequence, interpret, causal):
    # A mask, the same for all heads, says which token sees which. Before JAX 0.12 the backward pass
    # also computes a gradient of the mask, which nothing uses.
    mask = _sees(sequence, causal)
    return jax.nn.dot_product_attention(query, key, value, mask=mask, implementation="cudnn")


def _pallas(query, key, value, sequence, interpret, causal):
    from jax.experimental.pallas.ops.gpu.attention import mha

    return mha(query, key, value, sequence, query.shape[-1] ** -0.5, causal, interpret=interpret)


def _splash(query, key, value, sequence, interpret, causal):
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    heads, tokens = query.shape[2], query.shape[1]
    block = next(size for size in (512, 256, 128) if tokens % size == 0)
    sizes = "block_q block_kv block_q_dkv block_kv_dkv block_q_dq block_kv_dq".split()
    mask = splash.CausalMask if causal else splash.FullMask
    run = splash.make_splash_mha(
        splash.MultiHeadMask([mask((tokens, tokens))] * heads),
        block_sizes=splash.BlockSizes(**dict.fromkeys(sizes, block)),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    query = query * query.shape[-1] ** -0.5
    query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))
    return jax.vmap(run)(query, key, value, splash.SegmentIds(sequence, sequence)).swapaxes(1, 2)


class Kernel(NamedTuple):
    """What computes attention on one kind of hardware.

    Attributes:
        run: (query, key, value, sequence, interpret, causal) to the result, on one device.
        platform: "gpu" or "tpu".
        dtypes: of queries, keys and values.
        head_sizes: K.
        block_tokens: T is filled up to a multiple of it.
    """

    run: Callable[..., Array]
    platform: str
    dtypes: tuple[str, ...]
    head_sizes: range
    block_tokens: int


KERNELS = {
    # cuDNN's fused attention (`jax.nn.dot_product_attention`).
    "cudnn": Kernel(_cudnn, "gpu", ("bfloat16",), range(8, 129, 8), 64),
    # jax.experimental.pallas.ops.gpu.attention, through Triton.
    "pallas": Kernel(_pallas, "gpu", ("bfloat16",), range(16, 129, 8), 128),
    # jax.experimental.pallas.ops.tpu.splash_attention, through Mosaic.
    "splash": Kernel(_splash, "tpu", ("float32", "bfloat16"), range(1, 257), 128),
}


# What `config.model.attention = "auto"` prefers to XLA's.
_PREFERRED = {"gpu": "cudnn", "tpu": "splash"}


class Choice(NamedTuple):
    """An implementation of attention, and why it was chosen, for people."""

    implementation: str
    reason: str


def choose(config: Run, platform: str, tensor: int) -> Choice:
    """Resolve "auto" in `config.model.attention`.

    Args:
        config: a run's.
        platform: of its devices, "cpu", "gpu" or "tpu".
        tensor: over how many of them heads are split.

    Returns:
        What is configured, or what "auto" stands for.
    """
    model = config.model
    if model.attention != "auto":
        return Choice(model.attention, "as configured")
    name = _PREFERRED.get(platform)
    if name is None:
        return Choice("xla", f"on a {platform.upper()}")
    obstacle = _obstacle(name, config, tensor)
    if obstacle:
        return Choice("xla", f"not {name}: {obstacle}")
    return Choice(name, f"keeps no T x T scores, on a {platform.upper()}")


def resolve(config: Run) -> None:
    """Replace "auto" in `config.model.attention` by what it stands for on this machine's devices."""
    tensor = sharding.mesh_sizes(config.mesh, jax.device_count())[-1]
    config.model.attention = choose(config, jax.devices()[0].platform, tensor).implementation


def describe(config: Run, platform: str, tensor: int) -> str:
    """One line: the attention of a resolved config and the reason for it."""
    model = dataclasses.replace(config.model, attention="auto")
    choice = choose(dataclasses.replace(config, model=model), platform, tensor)
    used = config.model.attention
    reason = choice.reason if used == choice.implementation else "as configured"
    return f"attention: {used} ({reason})"


def check(config: Run, platform: str, tensor: int) -> None:
    """Refuse a config whose attention cannot train its model.

    Args:
        config: its `model.attention` is the one to check.
        platform: of the devices, "cpu", "gpu" or "tpu".
        tensor: over how many of them heads are split.

    Raises:
        UserError: says what the configured one needs.
    """
    name = config.model.attention
    if name in ("auto", "xla"):
        return
    needed = KERNELS[name].platform
    if platform != needed:
        fit = ["xla", *(other for other, k in KERNELS.items() if k.platform == platform)]
        raise UserError(
            f"config.model.attention={name!r} runs on a {needed} only, this is a {platform}: set it "
            f"to {' or '.join(map(repr, fit))}"
        )
    if obstacle := _obstacle(name, config, tensor):
        raise UserError(f"config.model.attention={name!r}: {obstacle}")


def _obstacle(name: str, config: Run, tensor: int) -> str:
    """Why a kernel cannot train a model, and what to change; "" if it can."""
    model, kernel = config.model, KERNELS[name]
    sizes, size = kernel.head_sizes, model.hidden // model.heads
    if model.attention_dropout:
        # None of them draws its bits from the seed and the step.
        return (
            f"config.model.attention_dropout is {model.attention_dropout}, and {name} has no "
            "dropout: set it to 0, or the attention to 'xla'"
        )
    if name == "cudnn" and config.deterministic:
        # With --xla_gpu_deterministic_ops=true JAX 0.11 fails to compile it (an IndexError).
        return (
            "config.deterministic is true, and cudnn does not compile with deterministic kernels: "
            "set the attention to 'xla', or config.deterministic to false"
        )
    if model.dtype not in kernel.dtypes:
        return (
            f"config.model.dtype is {model.dtype!r}, and {name} computes in "
            f"{' or '.join(map(repr, kernel.dtypes))} only"
        )
    if size not in sizes:
        return (
            f"config.model.hidden / heads is {size}, and {name} takes head sizes "
            f"{sizes[0]}, {sizes[1]}, … {sizes[-1]}"
        )
    if model.heads % tensor:
        return (
            f"config.mesh.tensor is {tensor}, which must divide config.model.heads={model.heads}: "
            f"{name} computes whole heads on a device"
        )
    return ""
