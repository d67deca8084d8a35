"""Bidirectional LSTMs on packed rows, between the encoder and a head (sections 5.1 and 5.3)."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from bert_jax.config.model import ModelConfig
from bert_jax.model.layers import Dense


class LSTM(nn.Module):
    """Unidirectional LSTM of size `hidden` that resets its state where `begins` is true.

    Gates are in PyTorch's order: input, forget, cell, output. The forget gate's bias is initialized
    to 1 (Jozefowicz et al. 2015) and kernels to U(-1/sqrt(fan_in), 1/sqrt(fan_in)).
    """

    config: ModelConfig
    reverse: bool

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T n"], begins: Bool[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        c, d = self.config, self.config.hidden
        uniform = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")

        def forget_bias(key, shape, dtype):
            return jnp.zeros(shape, dtype).at[d : 2 * d].set(1)

        # Project the inputs of all tokens at once; only the recurrent product is sequential.
        project = Dense(
            (4 * d,), c.compute_dtype, kernel_init=uniform, bias_init=forget_bias, name="input"
        )
        projected = project(x).astype(jnp.float32).swapaxes(0, 1)
        recurrent = self.param("recurrent", uniform, (d, 4 * d), jnp.float32)

        def step(state, item):
            # Keep the state in float32: every token adds to it.
            projected, begins = item
            hidden, cell = (jnp.where(begins[:, None], 0, part) for part in state)
            # Cast the kernel here, so that its gradient is summed over the tokens in float32.
            gates = projected + jnp.einsum(
                "bd,dg->bg",
                hidden.astype(c.compute_dtype),
                recurrent.astype(c.compute_dtype),
                preferred_element_type=jnp.float32,
            )
            input_gate, forget_gate, candidate, output_gate = jnp.split(gates, 4, axis=1)
            cell = jax.nn.sigmoid(forget_gate) * cell + jax.nn.sigmoid(input_gate) * jnp.tanh(
                candidate
            )
            hidden = jax.nn.sigmoid(output_gate) * jnp.tanh(cell)
            return (hidden, cell), hidden

        zeros = jnp.zeros((len(x), d), jnp.float32)
        _, hidden = jax.lax.scan(step, (zeros, zeros), (projected, begins.T), reverse=self.reverse)
        return hidden.swapaxes(0, 1).astype(x.dtype)


class BiLSTMLayer(nn.Module):
    """Bidirectional LSTM layer: forward and backward outputs concatenated, per sequence."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T n"], segment_ids: Int[Array, "B T"]
    ) -> Float[Array, "B T m"]:
        boundary = segment_ids[:, 1:] != segment_ids[:, :-1]
        is_first = jnp.pad(boundary, ((0, 0), (1, 0)), constant_values=True)
        is_last = jnp.pad(boundary, ((0, 0), (0, 1)), constant_values=True)
        forward = LSTM(self.config, reverse=False, name="forward")(x, is_first)
        backward = LSTM(self.config, reverse=True, name="backward")(x, is_last)
        return jnp.concatenate([forward, backward], -1)


class BiLSTM(nn.Module):
    """Stack of bidirectional LSTM layers between encoder and head (sections 5.1 and 5.3)."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T n"], segment_ids: Int[Array, "B T"]
    ) -> Float[Array, "B T m"]:
        for i in range(self.config.head.lstm_layers):
            x = BiLSTMLayer(self.config, name=f"layer_{i}")(x, segment_ids)
        return x
