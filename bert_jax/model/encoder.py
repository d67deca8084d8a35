"""The encoder: attention with RoPE, feed-forward networks, and the stack of layers."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float, Int, Key

from bert_jax.config.model import ModelConfig
from bert_jax.data.rows import Layout
from bert_jax.model.attention import attention, probabilities
from bert_jax.model.dropout import dropout
from bert_jax.model.layers import (
    DENSE,
    Dense,
    Norm,
    dense,
    feed_forward_activation,
    fold_in,
    hidden_norm,
    norm_layer,
    stacked_heads,
)
from bert_jax.runtime import sharding

REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.save_only_these_names(DENSE),
    "full": jax.checkpoint_policies.nothing_saveable,
}


class AttentionContext(NamedTuple):
    """What attention needs to know of the tokens besides their hidden states.

    Attributes:
        segment_ids: index of each token's sequence in its row.
        rotations: `rotation` for layers with global and with local attention; None without RoPE.
    """

    segment_ids: Int[Array, "B T"]
    rotations: tuple["Rotation", "Rotation"] | None


class Rotation(NamedTuple):
    """Cosine and sine of the angles by which RoPE rotates the tokens' queries and keys."""

    cos: Float[Array, "B T K/2"]
    sin: Float[Array, "B T K/2"]


def rotation(position_ids: Int[Array, "B T"], head_size: int, theta: float) -> Rotation:
    """Return RoPE's rotation of each position, in float32 (Su et al., arXiv 2104.09864)."""
    frequencies = 1 / theta ** (np.arange(0, head_size, 2, dtype=np.float32) / head_size)
    angles = position_ids[..., None].astype(jnp.float32) * frequencies
    return Rotation(jnp.cos(angles), jnp.sin(angles))


def rotate(x: Float[Array, "B T N K"], by: Rotation) -> Float[Array, "B T N K"]:
    """Rotate the pairs (i, i + K/2) of every head's features, as in GPT-NeoX and transformers."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = by.cos[:, :, None], by.sin[:, :, None]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    return rotated.astype(x.dtype)


def attention_context(config: ModelConfig, layout: Layout) -> AttentionContext:
    """Return what the attention of all layers needs to know of packed rows."""
    if config.position_kind != "rope":
        return AttentionContext(layout.segment_ids, None)
    head_size, theta = config.hidden // config.heads, config.rope_theta
    global_rotation, local_rotation = (
        rotation(layout.position_ids, head_size, base)
        for base in (theta, config.local.rope_theta or theta)
    )
    return AttentionContext(layout.segment_ids, (global_rotation, local_rotation))


class LayerKind(NamedTuple):
    """How a layer differs from others of the model.

    Attributes:
        is_local: whether attention is local.
        has_attention_norm: whether attention has a norm; see `config.norm.position`.
    """

    is_local: bool
    has_attention_norm: bool


def layer_kinds(config: ModelConfig) -> list[LayerKind]:
    """Return the kind of every layer."""
    is_normed = config.norm.position == "pre" and config.norm.embeddings
    return [LayerKind(config.is_local(i), not (is_normed and i == 0)) for i in range(config.layers)]


class Attention(nn.Module):
    """Multi-head self-attention with output projection, residual connection and norm."""

    config: ModelConfig
    kind: LayerKind

    def setup(self):
        c = self.config
        heads = (c.heads, c.hidden // c.heads)
        self.query, self.key, self.value = (
            dense(c, heads, target=name) for name in ("query", "key", "value")
        )
        self.output = dense(c, c.hidden, num_axes=2, target="output")
        if self.kind.has_attention_norm:
            self.norm = hidden_norm(c)
        if c.norm.qk:
            self.query_norm, self.key_norm = norm_layer(c), norm_layer(c)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        context: AttentionContext,
        key: Key[Array, ""] | None,
    ) -> tuple[Any, ...]:
        """Return (output,), or (x, *added) whose sum the norm of `FeedForward` computes."""
        c = self.config
        y, x = self._input(x, returns_sum=True)
        # Initialization traces one token, where only the shapes of parameters matter.
        implementation = "xla" if self.is_initializing() else c.attention
        settings = context.segment_ids, c.attention_dropout, fold_in(key, 0)
        if implementation == "packed":
            y = self._attend_packed(y, context, settings)
        else:
            qkv = *self._queries_and_keys(y, context), self.value(y)
            with jax.named_scope("attend"):
                y = attention(*qkv, *settings, implementation, **self._pattern)
        key = fold_in(key, 1)
        if c.norm.position == "post":
            return (_add(c, x, self.output, y, key, self.norm),)
        if c.kernels == "pallas":
            return x, c.dropout, key, *self.output(y, add_bias=False)
        return (_add(c, x, self.output, y, key, None),)

    def query_key_value(
        self, x: Float[Array, "B T D"], context: AttentionContext
    ) -> tuple[Float[Array, "B T N K"], ...]:
        """Return the queries, keys and values, as attention takes them."""
        y = self._input(x)
        return *self._queries_and_keys(y, context), self.value(y)

    def probabilities(
        self, x: Float[Array, "B T D"], context: AttentionContext
    ) -> Float[Array, "B N T T"]:
        """Return the attention probabilities, independently of `config.attention`."""
        q, k = self._queries_and_keys(self._input(x), context)
        return probabilities(q, k, context.segment_ids, **self._pattern)

    def _input(self, x, returns_sum=False) -> Any:
        is_normed = self.config.norm.position == "pre" and self.kind.has_attention_norm
        if is_normed:
            return self.norm(x, returns_sum=returns_sum)
        return (x, x) if returns_sum else x

    def _attend_packed(self, x, context, settings):
        """Attend by the kernel of `kernels.attention`, after one product for queries, keys and values."""
        from bert_jax.model.kernels.attention import attend  # imports Pallas' compiler

        c, layers = self.config, (self.query, self.key, self.value)
        is_adjusted = c.norm.qk or context.rotations is not None
        if any(layer.lora for layer in layers):
            qkv, bias = jnp.stack([layer(x) for layer in layers], 3), None
        else:
            qkv, bias = stacked_heads(x, layers, has_bias_gradient=is_adjusted)
        if is_adjusted:
            q, k, v = jnp.moveaxis(qkv, 3, 0)
            qkv, bias = jnp.stack([*self._adjust(q, k, context), v], 3), None
        with jax.named_scope("attend"):
            causal, reach = (self._pattern[k] for k in ("causal", "reach"))
            return attend(qkv, bias, *settings, causal=causal, reach=reach)

    def _queries_and_keys(self, x, context):
        return self._adjust(self.query(x), self.key(x), context)

    def _adjust(self, q, k, context):
        """Apply the norms and rotations that the config asks for."""
        if self.config.norm.qk:
            q, k = self.query_norm(q), self.key_norm(k)
        if context.rotations is not None:
            by = context.rotations[self.kind.is_local]
            q, k = rotate(q, by), rotate(k, by)
        return q, k

    @property
    def _pattern(self) -> dict[str, Any]:
        c = self.config
        reach = c.local.window // 2 if self.kind.is_local else 0
        return {"causal": c.causal, "reach": reach, "alibi": c.position_kind == "alibi"}


class FeedForward(nn.Module):
    """Position-wise feed-forward network with residual connection and norm."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], key: Key[Array, ""] | None, *added: Any
    ) -> Float[Array, "B T D"]:
        """Return the output for x, or for the sum of x and `added`: arguments of the norm's kernel."""
        c, norm = self.config, hidden_norm(self.config, "norm")
        pre = c.norm.position == "pre"
        y, x = norm(x, *added, returns_sum=True) if pre else (x, x)
        wide = feed_forward_activation(c)(
            dense(c, c.feed_forward, "intermediate", target="intermediate")(y)
        )
        if c.gated_feed_forward:
            wide *= dense(c, c.feed_forward, "gate")(y)
        output = dense(c, c.hidden, "output", target="output")
        return _add(c, x, output, wide, key, None if pre else norm)


def _add(
    config: ModelConfig,
    x: Float[Array, "B T D"],
    layer: Dense,
    y: Float[Array, "B T ..."],
    key: Key[Array, ""] | None,
    norm: Norm | None,
) -> Float[Array, "B T D"]:
    """Return x + dropout(layer(y)), normalized if there is a norm."""
    if norm and norm.is_fused:
        return norm(x, config.dropout, key, *layer(y, add_bias=False))
    x = sharding.keep_rows(x + dropout(layer(y), config.dropout, key))
    return norm(x) if norm else x


class Layer(nn.Module):
    """Transformer layer: attention, then the feed-forward network."""

    config: ModelConfig
    kind: LayerKind

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        context: AttentionContext,
        key: Key[Array, ""] | None,
    ) -> Float[Array, "B T D"]:
        x, *added = Attention(self.config, self.kind, name="attention")(x, context, fold_in(key, 0))
        return FeedForward(self.config, name="feed_forward")(x, fold_in(key, 1), *added)


class Encoder(nn.Module):
    """Stack of Transformer layers, unrolled or scanned, with optional rematerialization."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        layout: Layout,
        key: Key[Array, ""] | None,
        all_layers: bool = False,
    ) -> list[Float[Array, "B T D"]]:
        """Return the output of the last layer, or of all layers if `all_layers` is true."""
        c, context = self.config, attention_context(self.config, layout)
        if self.is_initializing():
            states = []
            for i, kind in enumerate(layer_kinds(c)):
                x = Layer(c, kind, name=f"layer_{i}")(x, context, None)
                states.append(x)
        else:
            states = self._run(x, context, key, all_layers)
        if c.norm.final:
            states[-1] = hidden_norm(c, "norm")(states[-1])
        return states

    def _run(self, x, context, key, all_layers):
        # Parameters are stored per layer and passed to a pure function, so checkpoints, LAMB's
        # norms and dropout bits do not depend on `layer_loop`.
        c, kinds = self.config, layer_kinds(self.config)
        layers = [self.variables["params"][f"layer_{i}"] for i in range(c.layers)]

        def layer_function(kind) -> Any:
            def layer(x, params, i):
                layer_key = fold_in(key, i)
                has_rng = key is not None and c.lora.dropout
                rngs: Any = {"lora": fold_in(layer_key, 2)} if has_rng else None
                module = Layer(c, kind, parent=None)
                return module.apply({"params": params}, x, context, layer_key, rngs=rngs)

            if c.remat != "none":
                layer = jax.checkpoint(layer, policy=REMAT_POLICIES[c.remat])
            # JAX traces each kind of layer once; XLA still sees every copy.
            return jax.jit(layer) if c.layer_loop == "unrolled" else layer

        functions = {kind: layer_function(kind) for kind in dict.fromkeys(kinds)}
        run = [functions[kind] for kind in kinds]
        states = []

        def unrolled(x, indices):
            for i in indices:
                x = run[i](x, layers[i], i)
                states.append(x)
            return x

        # A scan repeats groups of `period` layers, whose kinds are static. The first layer is not in
        # them if it lacks a norm, and the last ones are not if they do not fill a group.
        period = c.local.global_every if c.local.window else 1
        first = int(not kinds[0].has_attention_norm)
        groups = (c.layers - first) // period if c.layer_loop == "scanned" else 0
        if groups == 0:
            x = unrolled(x, range(c.layers))
            return states if all_layers else [x]
        end = first + groups * period

        def scanned(x, items):
            outputs = []
            for offset, item in enumerate(items):
                x = run[first + offset](x, *item)
                outputs.append(x)
            return x, outputs if all_layers else None

        items = []
        for start in range(first, first + period):
            indices = range(start, end, period)
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(layers[i] for i in indices))
            items.append((stacked, jnp.arange(c.layers)[start:end:period]))
        x = unrolled(x, range(first))
        carry_and_outputs: Any = jax.lax.scan(scanned, x, items)
        x, outputs = carry_and_outputs
        if all_layers:
            states += [state for group in zip(*map(list, outputs), strict=True) for state in group]
        x = unrolled(x, range(end, c.layers))
        return states if all_layers else [x]


def query_key_value(
    config: ModelConfig, params: Any, x: Float[Array, "B T D"], layout: Layout, i: int
) -> tuple[Float[Array, "B T N K"], ...]:
    """Return the queries, keys and values of layer i (from 0), given its input.

    Args:
        config: config of the model.
        params: parameters of the model.
        x: hidden states.
        layout: layout of the rows.
        i: index of the layer.
    """
    return _apply_attention(config, params, x, layout, i, "query_key_value")


def attention_probabilities(
    config: ModelConfig, params: Any, states: list[Float[Array, "B T D"]], layout: Layout
) -> Float[Array, "L B N T T"]:
    """Return attention from each token (axis 3) to each (axis 4) in float32, without dropout.

    Args:
        config: config of the model.
        params: parameters of the model.
        states: each layer's input, as in `Outputs.states`.
        layout: layout of the rows.
    """
    maps = (
        _apply_attention(config, params, states[i], layout, i, "probabilities")
        for i in range(config.layers)
    )
    return jnp.stack(list(maps))


def _apply_attention(config, params, x, layout, i, method) -> Any:
    module = Attention(config, layer_kinds(config)[i], parent=None)
    variables = {"params": params["encoder"][f"layer_{i}"]["attention"]}
    return module.apply(variables, x, attention_context(config, layout), method=method)
