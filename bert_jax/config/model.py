"""Settings of a model: encoder, pretraining heads, and the groups of those that few models use."""

import dataclasses
from typing import NamedTuple

from bert_jax.config.fields import below_one, constrained, not_negative, one_of, positive
from bert_jax.errors import UserError


class Head(NamedTuple):
    """A fine-tuning head, a dense layer after dropout.

    Attributes:
        pooled: whether it reads the pooled [CLS], not every token.
        labels: names of its outputs; None if they are the data set's labels.
        huggingface_class: class of transformers with this head.
        huggingface_name: name of the layer in that class.
    """

    pooled: bool
    labels: tuple[str, ...] | None
    huggingface_class: str
    huggingface_name: str = "classifier"


# By the value of `config.model.head.kind`; "" is no head.
HEADS = {
    "": Head(False, (), "BertModel"),
    "sequence": Head(True, None, "BertForSequenceClassification"),
    "choice": Head(True, ("score",), "BertForMultipleChoice"),
    "token": Head(False, None, "BertForTokenClassification"),
    "span": Head(False, ("start", "end"), "BertForQuestionAnswering", "qa_outputs"),
}
FEATURES = ("", "embeddings", "second-to-last", "last", "weighted-last4", "last4", "weighted-all")


# Slots, so that a config file cannot set a field that does not exist.
@dataclasses.dataclass(slots=True)
class LoraConfig:
    """Low-rank adapters of dense layers (LoRA, Hu et al., arXiv 2106.09685), for fine-tuning.

    A layer with the kernel W computes x W + alpha / rank * x A B. A and B are trained, and so is what
    is above the encoder (pooler, LSTM, head); embeddings and encoder are frozen.
    """

    # Columns of A and rows of B; 0 disables adapters.
    rank: int = not_negative(0, 1_000_000)
    alpha: float = positive(16.0)
    # Dropout on the input of A.
    dropout: float = below_one(0.0)
    # Layers with adapters: "query", "key", "value", "intermediate" (the first of the feed-forward
    # network) and "output" (of attention and feed-forward network).
    targets: tuple[str, ...] = ("query", "value")


LORA_TARGETS = ("query", "key", "value", "intermediate", "output")


@dataclasses.dataclass(slots=True)
class LocalAttentionConfig:
    """Attention to neighboring tokens in some of the layers, as in ModernBERT."""

    # Each token attends to the window // 2 tokens on either side of it in its sequence, except in the
    # first layer and every global_every layers after it, where it attends to the whole sequence. 0: all
    # layers do.
    window: int = constrained(0, "0, or 2 or more", lambda value: value == 0 or value >= 2)
    global_every: int = positive(3)
    # Base of the wavelengths of "rope" in layers with local attention; 0 takes model.rope_theta.
    rope_theta: float = not_negative(0.0)


@dataclasses.dataclass(slots=True)
class NormConfig:
    """The norms of the model, and where they are."""

    # "layer_norm", "layer_norm_no_bias" or "rms_norm" (Zhang and Sennrich, arXiv 1910.07467).
    kind: str = one_of("layer_norm", "layer_norm_no_bias", "rms_norm")
    epsilon: float = positive(1e-12)
    # "post": after each residual connection, as in BERT. "pre": on the input of attention and of the
    # feed-forward layer, inside the residual connections; use `final` with it. The attention of the
    # first layer has none if `embeddings` has normalized its input.
    position: str = one_of("post", "pre")
    # A norm on the sum of the embeddings.
    embeddings: bool = True
    # A norm after the last layer. BERT's layers already end in one.
    final: bool = False
    # Normalize queries and keys over the head size, before "rope".
    qk: bool = False


@dataclasses.dataclass(slots=True)
class MupConfig:
    """Maximal update parametrization (Yang et al., arXiv 2203.03466)."""

    # The hidden size for which initializer_stddev and optim.learning_rate were chosen. Initial values
    # and learning rates of matrices are scaled to `hidden`. For models with attention heads of one size,
    # and the optimizers "adam" and "adamw". A tied decoder needs transform, and embedding_size must be
    # 0. 0 disables it.
    base_hidden: int = not_negative(0)


@dataclasses.dataclass(slots=True)
class ElectraConfig:
    """ELECTRA's discriminator and generator (Clark et al., arXiv 2003.10555, section 3)."""

    # The discriminator's head: whether each token was replaced.
    replaced_token: bool = False
    # Hidden size of a generator, a masked LM whose predictions replace the masked tokens. It shares the
    # embeddings and has as many layers, heads of the same size and feed-forward layers of the same
    # ratio. 0: no generator.
    generator_hidden: int = not_negative(0, 1_000_000)
    # Weight of the discriminator's loss, that of the generator being 1.
    loss_weight: float = positive(50.0)


@dataclasses.dataclass(slots=True)
class HeadConfig:
    """The head of a fine-tuned model (Devlin et al., section 4), and what is between it and the encoder."""

    # A dense layer after dropout: "sequence" (on the pooled [CLS]), "choice" (one score from the pooled
    # [CLS]), "token" (on every token), "span" (start and end scores for every token) or "" for none.
    kind: str = one_of(*HEADS)
    # Names of the head's outputs, in order.
    labels: tuple[str, ...] = ()
    # What transformers' class of a "sequence" head predicts. An import keeps it for the export;
    # fine-tuning replaces it according to task.objective.
    problem_type: str = one_of(
        "", "single_label_classification", "multi_label_classification", "regression"
    )
    # Hidden layer below the head. "pooler": dense + tanh, for heads on a sequence only. "transform":
    # dense + activation + norm, for all heads, as in ModernBERT; it starts from that of the masked-LM
    # head.
    layer: str = one_of("pooler", "transform")
    # What a head on a sequence reads: "cls" (of causal models, the last token) or "mean" (over the
    # sequence's tokens, [CLS] and [SEP] included).
    pooling: str = one_of("cls", "mean")
    # Layers of a randomly initialized bidirectional LSTM below the head, `hidden` units in each direction
    # (sections 5.1 and 5.3). Its state is reset at every sequence.
    lstm_layers: int = not_negative(0, 1_000)
    # Input of the head, or of the LSTM (section 5.3, table 7). "" is the last layer, and the encoder is
    # trained. The others are hidden states of a frozen encoder: "embeddings", "second-to-last", "last",
    # "last4" (concatenated), "weighted-last4" and "weighted-all" (sums with learned weights as in ELMo,
    # over the last four or all layers).
    features: str = one_of(*FEATURES)

    @property
    def reads_encoder(self) -> bool:
        """Whether the head reads the encoder's last layer, not an LSTM or frozen hidden states."""
        return not (self.lstm_layers or self.features)


@dataclasses.dataclass(slots=True)
class ModelConfig:
    """The encoder and its heads. The defaults are BERT-base (Devlin et al., section 3)."""

    # Architecture of transformers (its model_type) that an export is written for. An import sets
    # it, together with the options that differ; it does not change the computation.
    family: str = one_of(
        "bert", "roberta", "xlm-roberta", "camembert", "distilbert", "electra", "modernbert"
    )
    layers: int = positive(12, 1_000)
    # Size of the hidden states.
    hidden: int = positive(768, 1_000_000)
    # Attention heads, each of size hidden / heads.
    heads: int = positive(12, 1_000_000)
    # Hidden size of the feed-forward layers.
    feed_forward: int = positive(3072, 10_000_000)
    # 0: the size of the vocabulary that the rows were tokenized with.
    vocab_size: int = not_negative(0, 100_000_000)
    # Pad the embedding table with unused entries to a multiple of this, for alignment and sharding.
    # Results do not change, except with "adafactor", whose statistics include the padding.
    vocab_multiple: int = positive(1, 1_000_000)
    # Size of the embeddings, projected to `hidden` before the first layer; 0 is `hidden` (ELECTRA,
    # section 3.2).
    embedding_size: int = not_negative(0, 1_000_000)
    # Maximum number of tokens per row.
    positions: int = positive(512, 10_000_000)
    # Number of segment (token type) embeddings: 2 in BERT, 1 in RoBERTa (the same for all tokens),
    # 0 for none.
    segments: int = not_negative(2, 1_000_000)
    # "gelu" (exact, erf), "gelu_tanh" (the approximation in Google's code), "relu" or "silu".
    activation: str = one_of("gelu", "gelu_tanh", "relu", "silu")
    # Multiply the activations of the feed-forward layers by a second projection (Shazeer, arXiv
    # 2002.05202): with "gelu" this is GeGLU, with "silu" SwiGLU.
    gated_feed_forward: bool = False
    # Biases of the dense layers of the encoder, the pooler and the heads' hidden layers. Output
    # layers of heads always have them, the decoder by decoder_bias.
    bias: bool = True
    # Where the model gets positions from: "learned" (an embedding per position), "rope" (rotary
    # embeddings of queries and keys, Su et al., arXiv 2104.09864) or "alibi" (a penalty on scores
    # that is linear in the distance, Press et al., arXiv 2108.12409, the same in both directions).
    # `positions` is the maximum length for all of them.
    position_kind: str = one_of("learned", "rope", "alibi")
    # Base of the wavelengths of "rope", in layers with global attention.
    rope_theta: float = positive(10_000.0)
    local: LocalAttentionConfig = dataclasses.field(default_factory=LocalAttentionConfig)
    norm: NormConfig = dataclasses.field(default_factory=NormConfig)
    # Of embeddings and sublayers, and below fine-tuning heads.
    dropout: float = below_one(0.1)
    # Of attention probabilities.
    attention_dropout: float = below_one(0.1)
    # Source of dropout's random bits, always a function of seed and step: "hash" (a counter-based
    # hash, almost free), "threefry" (JAX's default, slow on CPU) or "rbg" (the accelerator's
    # generator; its bits depend on the kind of device and on the mesh).
    dropout_generator: str = one_of("hash", "threefry", "rbg")
    # Attention implementation for training: "xla" (any device), "cudnn" or "packed" (GPU) or
    # "splash" (TPU). "cudnn" and "splash" need attention_dropout=0; other requirements are checked
    # at startup. "auto" selects "splash" on TPU, "packed" on GPU with kernels=pallas and T up to 512,
    # else "cudnn" on GPU, where they are supported ("cudnn" only with config.deterministic=false),
    # else "xla". Inference always uses "xla".
    attention: str = one_of("auto", "xla", "cudnn", "packed", "splash")
    # Norms, with the dropout and the sum around them, the cross-entropy of pretraining, and what "auto"
    # selects for attention: "xla" (any device) or "pallas" (own kernels for GPUs, with dropout from "hash"
    # only; for the cross-entropy also vocab_multiple=128, up to 32,768 tokens, no z_loss, no mesh with
    # tensor). "auto" is "xla", as the kernels were never timed. Inference with the finished model uses
    # "xla".
    kernels: str = one_of("auto", "xla", "pallas")
    initializer_stddev: float = not_negative(0.02)
    mup: MupConfig = dataclasses.field(default_factory=MupConfig)
    # Left-to-right model ("LTR", section 5.1): each token attends to itself and earlier tokens of
    # its sequence, and pretraining predicts the next token instead of masked ones. [CLS] attends
    # only to itself, so next_sentence must be false, the pooler reads the last token of each
    # sequence ([SEP]), and the no-answer score of SQuAD 2.0, read at [CLS], is the same for all
    # questions.
    causal: bool = False
    # The masked-LM head (next-token head if causal). transform: dense + activation + LayerNorm
    # before the decoder. tied_decoder: the decoder shares the embedding table. decoder_bias: a bias
    # for every entry of the vocabulary.
    masked_lm: bool = True
    transform: bool = True
    tied_decoder: bool = True
    decoder_bias: bool = True
    # Weight of the z-loss in pretraining: the mean square of the logarithm of the softmax's
    # denominator over the vocabulary, which keeps logits small (Chowdhery et al., arXiv 2204.02311,
    # use 1e-4).
    z_loss: float = not_negative(0.0)
    # The pooler and the next-sentence head, on the [CLS] of every sequence.
    next_sentence: bool = True
    # The span-boundary head of SpanBERT (arXiv 1907.10529, section 3.2): predicts each token of a
    # masked span from the two tokens beside it and its position in the span, up to the 20th. Its
    # loss is added to that of masked LM; it is meant for config.masking.span=10.
    span_boundary: bool = False
    # Keep the pooler even if no head needs it.
    pooler: bool = False
    # Activation of the pooler: "tanh" (BERT), "relu" (DistilBERT) or "gelu" (ELECTRA).
    pooler_activation: str = one_of("tanh", "relu", "gelu")
    electra: ElectraConfig = dataclasses.field(default_factory=ElectraConfig)
    # The fine-tuned head.
    head: HeadConfig = dataclasses.field(default_factory=HeadConfig)
    # Adapters that the parameters contain, from config.lora. Loading a checkpoint merges them.
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    # Compute dtype of activations. Parameters and optimizer state stay float32. "auto" is bfloat16 on TPUs
    # and GPUs and float32 on CPUs; a run that is resumed keeps what it began with.
    dtype: str = one_of("auto", "float32", "bfloat16")
    # "unrolled" compiles every layer (faster steps), "scanned" compiles one (faster compilation).
    # Parameters and checkpoints are the same.
    layer_loop: str = one_of("unrolled", "scanned")
    # Rematerialization in the backward pass: "none", "dots" (keep only results of matrix products)
    # or "full" (keep only each layer's input).
    remat: str = one_of("none", "dots", "full")

    @property
    def has_pooler(self) -> bool:
        """Whether the model has a pooler, requested directly or needed by a head.

        The pooler reads the encoder's last layer; a head on an LSTM or on features uses their
        outputs unpooled.
        """
        head = self.head
        needed = HEADS[head.kind].pooled and head.layer == "pooler" and head.reads_encoder
        return self.pooler or self.next_sentence or needed

    @property
    def has_head_transform(self) -> bool:
        """Whether the fine-tuning head has the hidden layer "transform"."""
        head = self.head
        return bool(head.kind) and head.layer == "transform" and head.reads_encoder

    def is_local(self, layer: int) -> bool:
        """Return whether a layer, counted from 0, attends within `local.window`."""
        return bool(self.local.window) and layer % self.local.global_every != 0

    @property
    def compute_dtype(self) -> str:
        """Dtype of activations; "auto" is float32 in models that were not trained here."""
        return "float32" if self.dtype == "auto" else self.dtype

    @property
    def embedding_width(self) -> int:
        """Size of the embeddings."""
        return self.embedding_size or self.hidden

    def generator(self) -> "ModelConfig":
        """Return the config of the generator; `electra.generator_hidden` must be above 0."""
        size = self.electra.generator_hidden
        return dataclasses.replace(
            self,
            hidden=size,
            heads=size * self.heads // self.hidden,
            feed_forward=size * self.feed_forward // self.hidden,
            embedding_size=self.embedding_width,
            masked_lm=True,
            pooler=False,
            electra=ElectraConfig(),
        )

    @property
    def feature_layers(self) -> list[int]:
        """Indices of the hidden states in `head.features`, numbered as in `layer_numbers`."""
        name = self.head.features.removeprefix("weighted-")
        return layer_numbers(name, self.layers, "config.model.head.features")


def layer_numbers(layers: str, count: int, key: str = "config.embed.layers") -> list[int]:
    """Return the indices of the hidden states selected by a setting.

    Args:
        layers: a value of `EmbedConfig.layers`.
        count: number of layers of the model, L.
        key: name of the setting in error messages.

    Returns:
        Indices from 0 (the embeddings) to `count` (the last layer), in the given order. "all" is 1
        to `count`.
    """
    named = {
        "last": [-1],
        "second-to-last": [-2],
        "last4": [-4, -3, -2, -1],
        "all": list(range(1, count + 1)),
        "embeddings": [0],
    }
    try:
        numbers = named[layers] if layers in named else [int(x) for x in layers.split(",")]
    except ValueError:
        raise UserError(
            f"{key} is {layers!r}: it must be one of {', '.join(named)}, or numbers like -4,-1"
        ) from None
    for number in numbers:
        if not -count <= number <= count:
            raise UserError(
                f"{key} is {layers!r}: the model has no layer {number}; choose 0 (the embeddings) "
                f"to {count}, or {-count} to -1 from the end"
            )
    return [number + (count + 1) * (number < 0) for number in numbers]
