"""Attention over packed rows, and its implementations.

"xla" runs on any platform, in any float dtype. The others are fused kernels for one platform each
(`KERNELS`), which do not materialize the T² scores; of them "packed" alone, which is `kernels.attention`,
has dropout.

Shapes: B rows, T tokens a row, N heads, K head size.
"""

import dataclasses
import functools
import math
import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from bert_jax.config.schema import TrainConfig
from bert_jax.errors import UserError
from bert_jax.model import kernels
from bert_jax.model.dropout import dropout
from bert_jax.runtime import device, sharding


def attention(
    query: Float[Array, "B T N K"],
    key: Float[Array, "B T N K"],
    value: Float[Array, "B T N K"],
    segment_ids: Int[Array, "B T"],
    dropout_rate: float,
    dropout_key: Key[Array, ""] | None,
    implementation: str,
    interpret: bool = False,
    causal: bool = False,
    reach: int = 0,
    alibi: bool = False,
) -> Float[Array, "B T N K"]:
    """Compute scaled dot-product attention within each sequence of a row.

    Padding forms a sequence of its own, so other tokens do not attend to it and no row of the
    softmax is empty.

    Args:
        query, key, value: projections of the hidden states.
        segment_ids: index of each token's sequence in its row (`rows.Layout.segment_ids`), from 0.
        dropout_rate: dropout of the attention probabilities.
        dropout_key: None disables dropout.
        implementation: "xla" (or unresolved "auto"), "cudnn" or "splash", if it passed `check`.
        interpret: run Pallas kernels in the Pallas interpreter, on any platform.
        causal: a token attends only to itself and earlier tokens of its sequence.
        reach: a token attends only to tokens at most this far away; 0 for no limit.
        alibi: add `alibi_slopes` times the distance, negated, to the scores.
    """
    if implementation in ("auto", "xla"):
        # Heads before tokens, as the products take them.
        query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))
        settings = dropout_rate, causal, reach, alibi
        output: Any = _xla(settings, query, key, value, segment_ids, dropout_key)
        return output.swapaxes(1, 2)
    if dropout_rate and dropout_key is not None:
        raise ValueError(f"attention {implementation!r} has no dropout")
    if alibi:
        raise ValueError(f"attention {implementation!r} has no ALiBi")
    kernel, block = {"cudnn": (_cudnn, 64), "splash": (_splash, 128)}[implementation]
    tokens = query.shape[1]
    padding = -tokens % block

    def run(query, key, value, segment_ids):
        return kernel(query, key, value, segment_ids, interpret, causal, reach)

    if padding:
        pad_width = [(0, 0), (0, padding), (0, 0), (0, 0)]
        query, key, value = (jnp.pad(x, pad_width) for x in (query, key, value))
        segment_ids = jnp.pad(segment_ids, pad_width[:2], constant_values=-1)  # a separate sequence
    return sharding.shard_attention(run)(query, key, value, segment_ids)[:, :tokens]


def _mask(segment_ids: Int[Array, "B T"], causal: bool, reach: int) -> Bool[Array, "B 1 T T"]:
    """Return whether each token (axis 2) attends to each (axis 3)."""
    mask = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    # Sequences are contiguous in a row, so order and distance within them are those in the row.
    mask = jnp.tril(mask) if causal else mask
    return mask & (_distances(segment_ids.shape[1]) <= reach) if reach else mask


def _distances(tokens: int) -> Int[Array, "T T"]:
    """Return the distance of each token (axis 0) of a row from each (axis 1)."""
    index = jnp.arange(tokens)
    return jnp.abs(index[:, None] - index)


def alibi_slopes(heads: int) -> list[float]:
    """Return the slope of each head's penalty on distance (Press et al., arXiv 2108.12409).

    For N a power of two they are 2^(-8/N), 2^(-16/N), … 2^-8. Other numbers of heads take the slopes
    of the power of two below, then every second slope of the one above, as in the paper's code.
    """
    power = 1 << math.floor(math.log2(heads))
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    return slopes + [2 ** (-4 * i / power) for i in range(1, 2 * (heads - power), 2)]


def probabilities(
    query: Float[Array, "B T N K"],
    key: Float[Array, "B T N K"],
    segment_ids: Int[Array, "B T"],
    causal: bool = False,
    reach: int = 0,
    alibi: bool = False,
) -> Float[Array, "B N T T"]:
    """Return attention probabilities from each token (axis 2) to each (axis 3) in float32.

    They are computed as by "xla". Each row sums to 1 and is 0 outside the token's sequence. See
    `attention` for the arguments.
    """
    query, key = (x.swapaxes(1, 2) for x in (query, key))
    exponentials, total = _softmax_parts(query, key, segment_ids, causal, reach, alibi)
    return exponentials / total


def _softmax_parts(
    query: Float[Array, "B N T K"],
    key: Float[Array, "B N T K"],
    segment_ids: Int[Array, "B T"],
    causal: bool,
    reach: int,
    alibi: bool,
) -> tuple[Float[Array, "B N T T"], Float[Array, "B N T 1"]]:
    """Return the numerator and denominator of the softmax in float32."""
    scores = jnp.einsum("bntk,bnuk->bntu", query * query.shape[-1] ** -0.5, key)
    # Compute the softmax in float32: a sum over hundreds of tokens is too inaccurate in bfloat16.
    masked_score = jnp.finfo(jnp.float32).min
    mask, scores = _mask(segment_ids, causal, reach), scores.astype(jnp.float32)
    if alibi:
        slopes = jnp.array(alibi_slopes(query.shape[1]), jnp.float32)
        scores -= slopes[:, None, None] * _distances(query.shape[2])
    scores = jnp.where(mask, scores, masked_score)
    max_score = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    exponentials = jnp.exp(scores - max_score)
    return exponentials, exponentials.sum(-1, keepdims=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _xla(
    settings: tuple[float, bool, int, bool],
    query: Float[Array, "B N T K"],
    key: Float[Array, "B N T K"],
    value: Float[Array, "B N T K"],
    segment_ids: Int[Array, "B T"],
    dropout_key: Key[Array, ""] | None,
) -> Float[Array, "B N T K"]:
    """Compute attention; `settings` are `dropout_rate`, `causal`, `reach` and `alibi` of `attention`.

    The backward pass keeps the T² exponentials in the dtype of the values; with dropout, also those
    after dropout and the mask.
    """
    return _xla_forward(settings, query, key, value, segment_ids, dropout_key)[0]


def _xla_forward(settings, query, key, value, segment_ids, dropout_key):
    rate, *pattern = settings
    # Scale the smaller operand, and divide by the softmax's denominator after multiplying with the
    # values: twice as fast on CPU as the textbook order.
    exponentials, total = _softmax_parts(query, key, segment_ids, *pattern)
    exponentials = exponentials.astype(value.dtype)
    weights, drop = jax.vjp(lambda x: dropout(x, rate, dropout_key), exponentials)
    weighted_sum = jnp.einsum("bntu,bnuk->bntk", weights, value)
    output = (weighted_sum.astype(total.dtype) / total).astype(value.dtype)
    return output, (query, key, value, exponentials, total, drop, output, weights)


def _xla_backward(settings, residuals, cotangent):
    query, key, value, exponentials, total, drop, output, weights = residuals
    scale = query.shape[-1] ** -0.5
    grad = cotangent.astype(total.dtype) / total
    # The gradient of the softmax's denominator.
    of_total = jnp.sum(grad * output.astype(total.dtype), -1, keepdims=True)
    grad = grad.astype(value.dtype)
    # Dropout multiplies, so its gradient is itself.
    (of_weights,) = drop(jnp.einsum("bntk,bnuk->bntu", grad, value))
    of_scores = exponentials.astype(total.dtype) * (of_weights.astype(total.dtype) - of_total)
    of_scores = of_scores.astype(query.dtype)
    return (
        jnp.einsum("bntu,bnuk->bntk", of_scores, key) * scale,
        jnp.einsum("bntu,bntk->bnuk", of_scores, query * scale),
        jnp.einsum("bntu,bntk->bnuk", weights, grad),
        None,
        None,
    )


_xla.defvjp(_xla_forward, _xla_backward)


def _cudnn(query, key, value, segment_ids, interpret, causal, reach):
    # The mask is shared by all heads. Before JAX 0.12, the backward pass also computes an unused
    # gradient of the mask.
    mask = _mask(segment_ids, causal, reach)
    return jax.nn.dot_product_attention(query, key, value, mask=mask, implementation="cudnn")


def _splash(query, key, value, segment_ids, interpret, causal, reach):
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    heads, tokens = query.shape[2], query.shape[1]
    block = next(size for size in (512, 256, 128) if tokens % size == 0)
    shape = (tokens, tokens)
    if reach:  # blocks outside the window are not computed
        mask = splash.LocalMask(shape, (reach, 0 if causal else reach), offset=0)
    else:
        mask = splash.CausalMask(shape) if causal else splash.FullMask(shape)
    run = splash.make_splash_mha(
        splash.MultiHeadMask([mask] * heads),
        # With tokens on the lanes a head of 64 features needs no padding to 128. The fused backward kernel
        # rounds a gradient of the queries for each block, so it takes rows of one block.
        block_sizes=splash.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_q_dq=None if tokens == block else block,
            block_kv_dq=None if tokens == block else block,
            use_fused_bwd_kernel=tokens == block,
            q_layout=splash.QKVLayout.SEQ_MINOR,
            k_layout=splash.QKVLayout.SEQ_MINOR,
            v_layout=splash.QKVLayout.SEQ_MINOR,
        ),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    query = query * query.shape[-1] ** -0.5
    query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))
    segments = splash.SegmentIds(segment_ids, segment_ids)
    output: Any = jax.vmap(run)(query, key, value, segments)
    return jnp.swapaxes(output, 1, 2)


class Kernel(NamedTuple):
    """A fused attention kernel for one platform.

    Attributes:
        platform: "gpu" or "tpu".
        dtypes: supported dtypes of queries, keys and values.
        head_sizes: supported head sizes K.
        has_dropout: whether it supports dropout, with the generator "hash".
        tokens: "auto" chooses it for rows of these T.
        evidence: what is known of its speed.
    """

    platform: str
    dtypes: tuple[str, ...]
    head_sizes: Sequence[int]
    has_dropout: bool
    tokens: range
    evidence: str


KERNELS = {
    # cuDNN's fused attention (`jax.nn.dot_product_attention`).
    "cudnn": Kernel(
        "gpu", ("bfloat16",), range(8, 129, 8), False, range(128, 1 << 30), "timed on an H100"
    ),
    # `kernels.attention`, which the encoder calls by itself.
    "packed": Kernel(
        "gpu", ("bfloat16",), (16, 32, 64), True, range(513), "compiled for an H100, never timed"
    ),
    # jax.experimental.pallas.ops.tpu.splash_attention, through Mosaic.
    "splash": Kernel(
        "tpu",
        ("float32", "bfloat16"),
        range(1, 257),
        False,
        range(256, 1 << 30),
        "compiled for a TPU v5e, never timed",
    ),
}


NONE_KEPT: Mapping[int, str] = types.MappingProxyType({})


class Choice(NamedTuple):
    """An implementation of attention and the reason for choosing it, to be printed."""

    implementation: str
    reason: str


def choose(
    config: TrainConfig,
    platform: str,
    tensor: int,
    tokens: int,
    kept: Mapping[int, str] = NONE_KEPT,
) -> Choice:
    """Resolve "auto" in `config.model.attention`.

    Args:
        config: config of the run.
        platform: platform of its devices: "cpu", "gpu" or "tpu".
        tensor: number of devices that heads are split over.
        tokens: T.
        kept: what the run that is resumed used, by T (`workdir.last_attention`).

    Returns:
        The configured implementation, or the one that "auto" resolves to.
    """
    model = config.model
    if model.attention != "auto":
        return Choice(model.attention, "as configured")
    name = kept.get(tokens, "")
    if name == "xla" or (
        name in KERNELS
        and KERNELS[name].platform == platform
        and not _unsupported_reason(name, config, tensor)
    ):
        return Choice(name, "as at the last start of the run")
    reasons = []
    for name in _preferred(config, platform):
        kernel = KERNELS[name]
        if unsupported := _unsupported_reason(name, config, tensor):
            reasons.append(f"not {name}: {unsupported}")
        elif tokens in kernel.tokens:
            kind = f"fused kernel for {platform.upper()}, no T x T scores in memory"
            return Choice(name, f"{kind}; {kernel.evidence}")
        else:
            least, end = kernel.tokens.start, kernel.tokens.stop
            limit = f"from T={least}" if tokens < least else f"up to T={end - 1}"
            reasons.append(f"{name} is chosen {limit}: {kernel.evidence}")
    return Choice("xla", "; ".join(reasons) or f"no kernel for {platform.upper()}")


def _preferred(config: TrainConfig, platform: str) -> list[str]:
    """Return the kernels that "auto" may choose, the best first."""
    if platform == "gpu":
        return ["packed", "cudnn"] if config.model.kernels == "pallas" else ["cudnn"]
    return ["splash"] if platform == "tpu" else []


def resolve(config: TrainConfig, tokens: int, kept: Mapping[int, str] = NONE_KEPT) -> str:
    """Return the implementation for rows of T tokens on the local devices (see `choose`)."""
    tensor = config.mesh.tensor
    if tensor == -1:
        tensor = sharding.mesh_sizes(config.mesh, jax.device_count())[-1]
    return choose(config, jax.devices()[0].platform, tensor, tokens, kept).implementation


def attention_line(
    config: TrainConfig,
    platform: str,
    tensor: int,
    tokens: Sequence[int],
    kept: Mapping[int, str] = NONE_KEPT,
) -> str:
    """Return a line with the attention of a run for each T, on GPUs also its kernels, and why.

    The config may be that of fine-tuning, in which "auto" was replaced.
    """
    auto = dataclasses.replace(config, model=dataclasses.replace(config.model, attention="auto"))
    sizes: dict[Choice, list[str]] = {}
    for t in dict.fromkeys(tokens):
        choice = choose(auto, platform, tensor, t, kept)
        if config.model.attention not in ("auto", choice.implementation):
            choice = choose(config, platform, tensor, t)
        sizes.setdefault(choice, []).append(str(t))
    line = "attention: " + "; ".join(
        f"{name}{' at T=' + ', '.join(of) if len(sizes) > 1 else ''} ({reason})"
        for (name, reason), of in sizes.items()
    )
    return line + kernels.line_part(config, platform)


def check(config: TrainConfig, platform: str, tensor: int) -> None:
    """Check that the configured attention can train the model.

    Args:
        config: config of the run, whose `model.attention` is checked.
        platform: platform of the devices: "cpu", "gpu" or "tpu".
        tensor: number of devices that heads are split over.
    """
    name = config.model.attention
    if name in ("auto", "xla"):
        return
    required = KERNELS[name].platform
    if platform != required:
        choices = ["xla", *(other for other, k in KERNELS.items() if k.platform == platform)]
        raise UserError(
            f"config.model.attention={name!r} runs on a {required} only, this is a {platform}: "
            f"set it to {' or '.join(map(repr, choices))}"
        )
    if reason := _unsupported_reason(name, config, tensor):
        raise UserError(f"config.model.attention={name!r}: {reason}")


def _unsupported_reason(name: str, config: TrainConfig, tensor: int) -> str:
    """Return why a kernel cannot train the model and what to change; "" if it can."""
    model, kernel = config.model, KERNELS[name]
    sizes, parts = kernel.head_sizes, [model]
    if model.electra.generator_hidden:
        parts.append(model.generator())
    if model.attention_dropout and not kernel.has_dropout:
        # jax.nn's cuDNN API takes no per-step seed.
        return (
            f"config.model.attention_dropout is {model.attention_dropout}, but {name} has no "
            "dropout: set it to 0, or config.model.attention to 'xla'"
        )
    if model.attention_dropout and model.dropout_generator != "hash":
        return (
            f"config.model.dropout_generator is {model.dropout_generator!r}, but {name} supports only "
            "'hash': set it to that, or config.model.attention to 'xla'"
        )
    if name == "cudnn" and config.deterministic:
        # With --xla_gpu_deterministic_ops=true, compilation fails in JAX 0.11 (IndexError).
        return (
            "config.deterministic is true, but cudnn does not compile with deterministic kernels: "
            "set config.model.attention to 'xla', or config.deterministic to false"
        )
    if name == "cudnn" and device.has_deterministic_kernels():
        return (
            "cudnn does not compile with the deterministic kernels of $XLA_FLAGS: start Python with "
            "XLA_FLAGS=--xla_gpu_deterministic_ops=false"
        )
    if model.position_kind == "alibi":
        return (
            f"config.model.position_kind is 'alibi', which {name} does not support: "
            "set config.model.attention to 'xla'"
        )
    if model.compute_dtype not in kernel.dtypes:
        return (
            f"config.model.dtype is {model.dtype!r}, but {name} supports only "
            f"{' or '.join(map(repr, kernel.dtypes))}"
        )
    for part, where in zip(parts, ("", " in the generator"), strict=False):
        if part.hidden // part.heads not in sizes:
            return (
                f"config.model.hidden / heads is {part.hidden // part.heads}{where}, but {name} supports "
                f"head sizes {', '.join(map(str, sizes[:3]))}"
                f"{f', … {sizes[-1]}' if len(sizes) > 3 else ''}"
            )
    if model.heads % tensor:
        return (
            f"config.mesh.tensor is {tensor}, but must divide config.model.heads={model.heads}: "
            f"{name} computes whole heads on each device"
        )
    return ""
