"""Write a model as an ONNX graph (onnx.ai, operator set 20), which runs without JAX and PyTorch.

Inputs and outputs have the names and shapes of transformers' classes, so that Optimum and
sentence-transformers load the folder. Batch size and length are dynamic. A text starts at position 0, and
padding follows it.
"""

import functools
import logging
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.config.model import HEADS, ModelConfig
from bert_jax.data.rows import layout
from bert_jax.data.vocabulary import Vocabulary
from bert_jax.errors import counted, missing
from bert_jax.model.bert import Params, flatten
from bert_jax.model.encoder import LayerKind, attention_context, layer_kinds

try:
    import onnx
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper
    from onnxruntime import quantization
except ImportError as error:
    raise missing("ONNX files need the packages onnx and onnxruntime", "onnx") from error

MODEL, QUANTIZED = "model.onnx", "model_quantized.onnx"
# Of a protobuf file; larger models have their weights in a second file.
_MAX_BYTES = (1 << 31) - (1 << 24)
_SAMPLE = (
    "The river rises in the mountains and flows through three countries to the sea.",
    "In 1905 she moved to Paris, where she taught mathematics until her retirement.",
    "He said that the results were better than expected, but not good enough.",
    "What is the largest city in South America?",
)


def write(folder: pathlib.Path, config: ModelConfig, params: Params) -> None:
    """Write model.onnx to a folder.

    Args:
        folder: an existing folder.
        config: a model that transformers has a class for (`huggingface.huggingface_config`).
        params: its parameters.
    """
    graph = _Graph(config, params)
    graph.build()
    proto = helper.make_graph(graph.nodes, "model", graph.inputs, graph.outputs, graph.constants)
    # Versions of 2023, whose operators are the first with Gelu.
    model = helper.make_model(proto, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    is_large = sum(len(constant.raw_data) for constant in graph.constants) > _MAX_BYTES
    onnx.save(model, folder / MODEL, save_as_external_data=is_large, location=f"{MODEL}_data")


def quantize(folder: pathlib.Path, vocabulary: Vocabulary, max_tokens: int) -> str:
    """Write model_quantized.onnx next to model.onnx, and return a line about how its outputs differ.

    The weights of dense layers become int8, with a scale per output, and so do their inputs when it
    runs, with a scale per batch (ONNX Runtime's `quantize_dynamic`). Embeddings, and a decoder tied to
    them, stay float32. Both files are compared on a few English sentences.
    """
    logging.disable(logging.WARNING)  # advice for convolutions
    try:
        quantization.quantize_dynamic(
            folder / MODEL, folder / QUANTIZED, op_types_to_quantize=["MatMul"], per_channel=True
        )
    finally:
        logging.disable(logging.NOTSET)
    error, largest, equal, total = 0.0, 0.0, 0, 0
    sessions = [
        onnxruntime.InferenceSession(folder / name, providers=["CPUExecutionProvider"])
        for name in (MODEL, QUANTIZED)
    ]
    for text in _SAMPLE:
        ids = np.array([vocabulary.encode(text)[:max_tokens]])
        inputs = {"input_ids": ids, "attention_mask": ids * 0 + 1, "token_type_ids": ids * 0}
        inputs = {
            x.name: inputs[x.name].reshape((1,) * (len(x.shape) - 2) + ids.shape)
            for x in sessions[0].get_inputs()
        }
        exact, rounded = (session.run(None, inputs) for session in sessions)
        for x, y in zip(exact, rounded, strict=True):
            error, largest = max(error, np.abs(x - y).max()), max(largest, np.abs(x).max())
            equal += int(np.sum(x.argmax(-1) == y.argmax(-1)))
            total += x[..., 0].size
    return (
        f"{QUANTIZED}: outputs differ by up to {error:.3g} from those of {MODEL}, which are up to "
        f"{largest:.3g}; the largest of a vector is the same in {equal / total:.1%} of {counted(total, 'vector')}"
    )


class _Graph:
    """The graph of `Bert` for one sequence per row, without dropout.

    Its methods add operations, and return the names of the results, which are [B, T, D] unless they say
    otherwise.
    """

    def __init__(self, config: ModelConfig, params: Params):
        self.nodes, self.constants, self.inputs, self.outputs = [], [], [], []
        self._config, self._params = config, flatten(jax.device_get(params))

    def build(self) -> None:
        """Add all inputs, operations and outputs."""
        c, head = self._config, self._config.head
        ids, self._mask = self._input("input_ids"), self._input("attention_mask")
        words = self._constant(self._params["embeddings/word/embedding"][: c.vocab_size])
        x = self._encode(self._embed(ids, words))
        if head.kind:
            self._add_head(x)
        elif c.electra.replaced_token:
            x = self._activate(self._dense(x, "replaced_token/transform"), c.activation)
            logits = self._add("Squeeze", self._dense(x, "replaced_token/output"), [-1])
            self._output("logits", logits, "length")
        elif c.masked_lm or c.next_sentence:
            both = c.masked_lm and c.next_sentence
            if c.masked_lm:
                name = "prediction_logits" if both else "logits"
                self._output(name, self._decode(x, words), "length", c.vocab_size)
            if c.next_sentence:
                logits = self._dense(self._pool(x), "next_sentence")
                self._output("seq_relationship_logits" if both else "logits", logits, 2)
        else:
            self._output("last_hidden_state", x, "length", c.hidden)
            if c.has_pooler:
                self._output("pooler_output", self._pool(x), c.hidden)

    # --- Inputs, constants, outputs

    def _add(self, kind: str, *inputs: Any, name: str = "", **attributes: Any) -> str:
        """Add an operation on names of values, or on arrays, which become constants."""
        names = [x if isinstance(x, str) else self._constant(x) for x in inputs]
        name = name or f"{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, names, [name], **attributes))
        return name

    def _constant(self, value: Any) -> str:
        """Add an array, or numbers, which become int64 and float32."""
        value = np.asarray(value)
        value = value.astype(np.float32) if value.dtype == np.float64 else value
        name = f"constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value, order="C"), name))
        return name

    def _input(self, name: str) -> str:
        """Add an input, and return it as [B, T]; the choices of a question are texts of the batch."""
        is_choice = self._config.head.kind == "choice"
        axes = ["batch", *["choices"] * is_choice, "length"]
        self.inputs.append(helper.make_tensor_value_info(name, TensorProto.INT64, axes))
        return self._add("Flatten", name, axis=2) if is_choice else name

    def _output(self, name: str, value: str, *axes: int | str) -> None:
        self._add("Identity", value, name=name)
        kind = TensorProto.FLOAT
        self.outputs.append(helper.make_tensor_value_info(name, kind, ["batch", *axes]))

    # --- Layers

    def _dense(self, x: str, path: str) -> str:
        """Apply a dense layer, whose axes for heads are merged."""
        kernel, bias = self._params[f"{path}/kernel"], self._params.get(f"{path}/bias")
        merges_input = path.endswith("attention/output")
        kernel = kernel.reshape((-1, kernel.shape[-1]) if merges_input else (len(kernel), -1))
        y = self._add("MatMul", x, kernel)
        return y if bias is None else self._add("Add", y, bias.reshape(-1))

    def _norm(self, x: str, path: str) -> str:
        names = [name for name in ("scale", "bias") if f"{path}/{name}" in self._params]
        params = [self._params[f"{path}/{name}"] for name in names]
        epsilon = self._config.norm.epsilon
        return self._add("LayerNormalization", x, *params, axis=-1, epsilon=epsilon)

    def _activate(self, x: str, kind: str) -> str:
        if kind == "silu":
            return self._add("Mul", x, self._add("Sigmoid", x))
        if kind.startswith("gelu"):
            return self._add("Gelu", x, approximate="tanh" if kind == "gelu_tanh" else "none")
        return self._add({"relu": "Relu", "tanh": "Tanh"}[kind], x)

    @functools.cached_property
    def _length(self) -> str:
        """T, of shape [1]."""
        return self._add("Shape", self._mask, start=1)

    def _first(self, table: Any) -> str:
        """Return the first T entries of a table with an entry for each position."""
        return self._add("Slice", table, [0], self._length, [0])

    def _embed(self, ids: str, words: str) -> str:
        c, path = self._config, "embeddings"
        x = self._add("Gather", words, ids)
        if c.position_kind == "learned":
            x = self._add("Add", x, self._first(self._params[f"{path}/position/embedding"]))
        if c.segments:
            table = self._params[f"{path}/segment/embedding"]
            types = self._input("token_type_ids") if c.segments > 1 else [0]
            x = self._add("Add", x, self._add("Gather", table, types))
        x = self._norm(x, f"{path}/norm") if c.norm.embeddings else x
        return x if c.embedding_width == c.hidden else self._dense(x, f"{path}/project")

    def _encode(self, x: str) -> str:
        c = self._config
        is_pre = c.norm.position == "pre"
        for i, kind in enumerate(layer_kinds(c)):
            path = f"encoder/layer_{i}/attention"
            y = self._norm(x, f"{path}/norm") if is_pre and kind.has_attention_norm else x
            x = self._add("Add", x, self._attend(y, path, kind))
            x = x if is_pre else self._norm(x, f"{path}/norm")
            path = f"encoder/layer_{i}/feed_forward"
            y = self._norm(x, f"{path}/norm") if is_pre else x
            wide = self._activate(self._dense(y, f"{path}/intermediate"), c.activation)
            if c.gated_feed_forward:
                wide = self._add("Mul", wide, self._dense(y, f"{path}/gate"))
            x = self._add("Add", x, self._dense(wide, f"{path}/output"))
            x = x if is_pre else self._norm(x, f"{path}/norm")
        return self._norm(x, "encoder/norm") if c.norm.final else x

    def _attend(self, x: str, path: str, kind: LayerKind) -> str:
        c = self._config
        size = c.hidden // c.heads
        q, k, v = (
            self._add("Reshape", self._dense(x, f"{path}/{name}"), [0, 0, c.heads, size])
            for name in ("query", "key", "value")
        )
        if c.position_kind == "rope":
            q, k = self._rotate(q, kind), self._rotate(k, kind)
        q = self._add("Mul", self._add("Transpose", q, perm=[0, 2, 1, 3]), size**-0.5)
        k, v = (
            self._add("Transpose", k, perm=[0, 2, 3, 1]),
            self._add("Transpose", v, perm=[0, 2, 1, 3]),
        )
        scores = self._add("Add", self._add("MatMul", q, k), self._biases[kind.is_local])
        y = self._add("MatMul", self._add("Softmax", scores, axis=-1), v)
        y = self._add("Reshape", self._add("Transpose", y, perm=[0, 2, 1, 3]), [0, 0, c.hidden])
        return self._dense(y, f"{path}/output")

    @functools.cached_property
    def _biases(self) -> list[str]:
        """What is added to the scores of global, and local, attention: 0, or for masked tokens the lowest number."""
        c = self._config
        seen = self._add("Unsqueeze", self._add("Cast", self._mask, to=TensorProto.BOOL), [1, 2])
        index = self._first(np.arange(c.positions))
        distance = self._add("Sub", self._add("Unsqueeze", index, [1]), index)
        if c.causal:
            seen = self._add("And", seen, self._add("GreaterOrEqual", distance, 0))
        masks = [seen]
        if c.local.window:
            near = self._add("LessOrEqual", self._add("Abs", distance), c.local.window // 2)
            masks.append(self._add("And", seen, near))
        return [self._add("Where", mask, 0.0, np.finfo(np.float32).min) for mask in masks]

    @functools.cached_property
    def _rotations(self) -> list[list[str]]:
        """Cosine and sine of `encoder.Rotation` for global and local attention, [T, 1, K/2]."""
        c = self._config
        length = jnp.array([[c.positions]])
        rotations = attention_context(c, layout(length, length, c.positions)).rotations
        assert rotations is not None
        tables = [[np.asarray(x)[0, :, None] for x in rotation] for rotation in rotations]
        return [[self._first(x) for x in rotation] for rotation in tables]

    def _rotate(self, x: str, kind: LayerKind) -> str:
        """Apply `encoder.rotate` to queries or keys, [B, T, N, K]."""
        half = self._config.hidden // self._config.heads // 2
        first, second = (self._add("Slice", x, [i * half], [(i + 1) * half], [3]) for i in (0, 1))
        cos, sin = self._rotations[kind.is_local]

        def times(a: str, b: str) -> str:
            return self._add("Mul", a, b)

        low = self._add("Sub", times(first, cos), times(second, sin))
        high = self._add("Add", times(second, cos), times(first, sin))
        return self._add("Concat", low, high, axis=3)

    # --- Heads

    def _transform(self, x: str, path: str) -> str:
        x = self._activate(self._dense(x, f"{path}/transform"), self._config.activation)
        return self._norm(x, f"{path}/norm")

    def _decode(self, x: str, words: str) -> str:
        """Return the logits of the masked-LM head, [B, T, V]."""
        c = self._config
        x = self._transform(x, "masked_lm") if c.transform else x
        if c.tied_decoder:
            kernel = self._add("Transpose", words, perm=[1, 0])
        else:
            kernel = self._params["masked_lm/decoder"][:, : c.vocab_size]
        x = self._add("MatMul", x, kernel)
        return (
            self._add("Add", x, self._params["masked_lm/bias"][: c.vocab_size])
            if c.decoder_bias
            else x
        )

    def _pool(self, x: str) -> str:
        """Return the pooled [CLS], [B, D]."""
        x = self._add("Gather", x, 0, axis=1)
        return self._activate(self._dense(x, "pooler"), self._config.pooler_activation)

    def _add_head(self, x: str) -> None:
        """Add a fine-tuned head and its outputs."""
        c, head = self._config, self._config.head
        if HEADS[head.kind].pooled:
            if head.layer == "pooler":
                x = self._pool(x)
            elif head.pooling == "cls":
                x = self._add("Gather", x, 0, axis=1)
            else:
                weights = self._add("Cast", self._mask, to=TensorProto.FLOAT)
                total = self._add("ReduceSum", weights, [1], keepdims=1)
                weights = self._add("Unsqueeze", self._add("Div", weights, total), [1])
                x = self._add("Squeeze", self._add("MatMul", weights, x), [1])
        if c.has_head_transform:
            x = self._transform(x, "head")
        logits = self._dense(x, "classifier")
        if head.kind == "span":
            for i, name in enumerate(HEADS["span"].labels or ()):
                self._output(f"{name}_logits", self._add("Gather", logits, i, axis=2), "length")
        elif head.kind == "choice":
            choices = self._add("Shape", "input_ids", start=1, end=2)
            shape = self._add("Concat", [-1], choices, axis=0)
            self._output("logits", self._add("Reshape", logits, shape), "choices")
        else:
            axes = () if HEADS[head.kind].pooled else ("length",)
            self._output("logits", logits, *axes, len(head.labels))
