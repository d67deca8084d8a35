"""Settings of a run: typed dataclasses with their defaults and constraints.

A config file (`configs/*.py`) returns a `Config`; the command line overrides single fields
(`--config.optim.learning_rate=2e-4`), see `config_flags`. Defaults are defined only here, and the
constraints of single fields beside them; those of several fields are in `config_checks`.
"""

import copy
import dataclasses
import functools
import math
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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


def _one_of(default: str, *others: str) -> Any:
    """A field with a fixed set of values."""
    choices = (default, *others)
    requirement = "one of " + ", ".join(map(repr, choices))
    return _constrained(default, requirement, lambda value: value in choices)


def _positive(default: int | float, limit: int | float = math.inf) -> Any:
    requirement = "above 0" if limit == math.inf else f"1 to {limit:,}"
    return _constrained(default, requirement, lambda value: 0 < value <= limit)


def _not_negative(default: int | float, limit: int | float = math.inf) -> Any:
    requirement = "0 or more" if limit == math.inf else f"0 to {limit:,}"
    return _constrained(default, requirement, lambda value: 0 <= value <= limit)


def _below_one(default: int | float) -> Any:
    return _constrained(default, "in [0, 1)", lambda value: 0 <= value < 1)


def _fraction(default: float) -> Any:
    return _constrained(default, "in (0, 1]", lambda value: 0 < value <= 1)


def _constrained(default: Any, requirement: str, holds: Callable[[Any], bool]) -> Any:
    metadata = {"requirement": requirement, "holds": holds}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass
class LoraConfig:
    """Low-rank adapters of dense layers (LoRA, Hu et al., arXiv 2106.09685), for fine-tuning.

    A layer with the kernel W computes x W + alpha / rank * x A B. A and B are trained, and so is what
    is above the encoder (pooler, LSTM, head); embeddings and encoder are frozen.
    """

    # Columns of A and rows of B; 0 disables adapters.
    rank: int = _not_negative(0, 1_000_000)
    alpha: float = _positive(16.0)
    # Dropout on the input of A.
    dropout: float = _below_one(0.0)
    # Layers with adapters: "query", "key", "value", "intermediate" (the first of the feed-forward
    # network) and "output" (of attention and feed-forward network).
    targets: tuple[str, ...] = ("query", "value")


LORA_TARGETS = ("query", "key", "value", "intermediate", "output")


@dataclasses.dataclass
class LocalAttentionConfig:
    """Attention to neighboring tokens in some of the layers, as in ModernBERT."""

    # Each token attends to the window // 2 tokens on either side of it in its sequence, except in the
    # first layer and every global_every layers after it, where it attends to the whole sequence. 0: all
    # layers do.
    window: int = _constrained(0, "0, or 2 or more", lambda value: value == 0 or value >= 2)
    global_every: int = _positive(3)
    # Base of the wavelengths of "rope" in layers with local attention; 0 takes model.rope_theta.
    rope_theta: float = _not_negative(0.0)


@dataclasses.dataclass
class NormConfig:
    """The norms of the model, and where they are."""

    # "layer_norm", "layer_norm_no_bias" or "rms_norm" (Zhang and Sennrich, arXiv 1910.07467).
    kind: str = _one_of("layer_norm", "layer_norm_no_bias", "rms_norm")
    epsilon: float = _positive(1e-12)
    # "post": after each residual connection, as in BERT. "pre": on the input of attention and of the
    # feed-forward layer, inside the residual connections; use `final` with it. The attention of the
    # first layer has none if `embeddings` has normalized its input.
    position: str = _one_of("post", "pre")
    # A norm on the sum of the embeddings.
    embeddings: bool = True
    # A norm after the last layer. BERT's layers already end in one.
    final: bool = False
    # Normalize queries and keys over the head size, before "rope".
    qk: bool = False


@dataclasses.dataclass
class MupConfig:
    """Maximal update parametrization (Yang et al., arXiv 2203.03466)."""

    # The hidden size for which initializer_stddev and optim.learning_rate were chosen. Initial values
    # and learning rates of matrices are scaled to `hidden`. For models with attention heads of one size,
    # and the optimizers "adam" and "adamw". A tied decoder needs transform, and embedding_size must be
    # 0. 0 disables it.
    base_hidden: int = _not_negative(0)


@dataclasses.dataclass
class ElectraConfig:
    """ELECTRA's discriminator and generator (Clark et al., arXiv 2003.10555, section 3)."""

    # The discriminator's head: whether each token was replaced.
    replaced_token: bool = False
    # Hidden size of a generator, a masked LM whose predictions replace the masked tokens. It shares the
    # embeddings and has as many layers, heads of the same size and feed-forward layers of the same
    # ratio. 0: no generator.
    generator_hidden: int = _not_negative(0, 1_000_000)
    # Weight of the discriminator's loss, that of the generator being 1.
    loss_weight: float = _positive(50.0)


@dataclasses.dataclass
class HeadConfig:
    """The head of a fine-tuned model (Devlin et al., section 4), and what is between it and the encoder."""

    # A dense layer after dropout: "sequence" (on the pooled [CLS]), "choice" (one score from the pooled
    # [CLS]), "token" (on every token), "span" (start and end scores for every token) or "" for none.
    kind: str = _one_of(*HEADS)
    # Names of the head's outputs, in order.
    labels: tuple[str, ...] = ()
    # What transformers' class of a "sequence" head predicts. An import keeps it for the export;
    # fine-tuning replaces it according to task.objective.
    problem_type: str = _one_of(
        "", "single_label_classification", "multi_label_classification", "regression"
    )
    # Hidden layer below the head. "pooler": dense + tanh, for heads on a sequence only. "transform":
    # dense + activation + norm, for all heads, as in ModernBERT; it starts from that of the masked-LM
    # head.
    layer: str = _one_of("pooler", "transform")
    # What a head on a sequence reads: "cls" (of causal models, the last token) or "mean" (over the
    # sequence's tokens, [CLS] and [SEP] included).
    pooling: str = _one_of("cls", "mean")
    # Layers of a randomly initialized bidirectional LSTM below the head, `hidden` units in each direction
    # (sections 5.1 and 5.3). Its state is reset at every sequence.
    lstm_layers: int = _not_negative(0, 1_000)
    # Input of the head, or of the LSTM (section 5.3, table 7). "" is the last layer, and the encoder is
    # trained. The others are hidden states of a frozen encoder: "embeddings", "second-to-last", "last",
    # "last4" (concatenated), "weighted-last4" and "weighted-all" (sums with learned weights as in ELMo,
    # over the last four or all layers).
    features: str = _one_of(*FEATURES)

    @property
    def reads_encoder(self) -> bool:
        """Whether the head reads the encoder's last layer, not an LSTM or frozen hidden states."""
        return not (self.lstm_layers or self.features)


@dataclasses.dataclass
class ModelConfig:
    """The encoder and its heads. The defaults are BERT-base (Devlin et al., section 3)."""

    # Architecture of transformers (its model_type) that an export is written for. An import sets
    # it, together with the options that differ; it does not change the computation.
    family: str = _one_of(
        "bert", "roberta", "xlm-roberta", "camembert", "distilbert", "electra", "modernbert"
    )
    layers: int = _positive(12, 1_000)
    hidden: int = _positive(768, 1_000_000)
    heads: int = _positive(12, 1_000_000)
    feed_forward: int = _positive(3072, 10_000_000)
    # 0: the size of the vocabulary that the rows were tokenized with.
    vocab_size: int = _not_negative(0, 100_000_000)
    # Pad the embedding table with unused entries to a multiple of this, for alignment and sharding.
    # Results do not change, except with "adafactor", whose statistics include the padding.
    vocab_multiple: int = _positive(1, 1_000_000)
    # Size of the embeddings, projected to `hidden` before the first layer; 0 is `hidden` (ELECTRA,
    # section 3.2).
    embedding_size: int = _not_negative(0, 1_000_000)
    positions: int = _positive(512, 10_000_000)
    # Number of segment (token type) embeddings: 2 in BERT, 1 in RoBERTa (the same for all tokens),
    # 0 for none.
    segments: int = _not_negative(2, 1_000_000)
    # "gelu" (exact, erf), "gelu_tanh" (the approximation in Google's code), "relu" or "silu".
    activation: str = _one_of("gelu", "gelu_tanh", "relu", "silu")
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
    position_kind: str = _one_of("learned", "rope", "alibi")
    # Base of the wavelengths of "rope", in layers with global attention.
    rope_theta: float = _positive(10_000.0)
    local: LocalAttentionConfig = dataclasses.field(default_factory=LocalAttentionConfig)
    norm: NormConfig = dataclasses.field(default_factory=NormConfig)
    dropout: float = _below_one(0.1)
    attention_dropout: float = _below_one(0.1)
    # Source of dropout's random bits, always a function of seed and step: "hash" (a counter-based
    # hash, almost free), "threefry" (JAX's default, slow on CPU) or "rbg" (the accelerator's
    # generator; its bits depend on the kind of device and on the mesh).
    dropout_generator: str = _one_of("hash", "threefry", "rbg")
    # Attention implementation for training: "xla" (any device), "cudnn" or "pallas" (GPU) or
    # "splash" (TPU). All but "xla" need attention_dropout=0; their other requirements are checked
    # at startup. "auto" selects "splash" on TPU and "cudnn" on GPU where they are supported
    # ("cudnn" only with config.deterministic=false), else "xla". Inference always uses "xla".
    attention: str = _one_of("auto", "xla", "cudnn", "pallas", "splash")
    initializer_stddev: float = _not_negative(0.02)
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
    z_loss: float = _not_negative(0.0)
    # The pooler and the next-sentence head, on the [CLS] of every sequence.
    next_sentence: bool = True
    # The span-boundary head of SpanBERT (arXiv 1907.10529, section 3.2): predicts each token of a
    # masked span from the two tokens beside it and its position in the span, up to the 20th. Its
    # loss is added to that of masked LM; it is meant for config.masking.span=10.
    span_boundary: bool = False
    # Keep the pooler even if no head needs it.
    pooler: bool = False
    # Activation of the pooler: "tanh" (BERT), "relu" (DistilBERT) or "gelu" (ELECTRA).
    pooler_activation: str = _one_of("tanh", "relu", "gelu")
    electra: ElectraConfig = dataclasses.field(default_factory=ElectraConfig)
    # The fine-tuned head.
    head: HeadConfig = dataclasses.field(default_factory=HeadConfig)
    # Adapters that the parameters contain, from config.lora. Loading a checkpoint merges them.
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    # Compute dtype of activations. Parameters and optimizer state stay float32.
    dtype: str = _one_of("float32", "bfloat16")
    # "unrolled" compiles every layer (faster steps), "scanned" compiles one (faster compilation).
    # Parameters and checkpoints are the same.
    layer_loop: str = _one_of("unrolled", "scanned")
    # Rematerialization in the backward pass: "none", "dots" (keep only results of matrix products)
    # or "full" (keep only each layer's input).
    remat: str = _one_of("none", "dots", "full")

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


@dataclasses.dataclass
class MaskingConfig:
    """Masked-LM corruption (Devlin et al., section 3.1 and table 8)."""

    # Fraction of each sequence's n tokens, special ones included: round(rate * n), at least 1.
    rate: float = 0.15
    # Change the rate linearly over the run, from `rate` at step 0 to this at the end (Ankner et al.
    # 2023, arXiv 2305.15096: 0.3 to 0.15). Held-out rows always have the final rate, and the larger
    # one determines the shapes. 0 keeps `rate`.
    final_rate: float = _below_one(0.0)
    # Maximum per sequence. 0 takes BERT's: 20 at T=128, 76 at T=512 for a rate of 0.15, otherwise
    # ceil(rate * T).
    max_predictions_per_sequence: int = _not_negative(0)
    # Replacement of a selected token: [MASK], itself, or a random token of the vocabulary.
    mask_fraction: float = 0.8
    same_fraction: float = 0.1
    random_fraction: float = 0.1
    # Select whole words (all of their word pieces) instead of single word pieces.
    whole_word: bool = False
    # Select spans of at most this many word pieces (words if whole_word), as SpanBERT, which has 10
    # words (Joshi et al., arXiv 1907.10529). Whether tokens become [MASK], are kept or become random
    # is then decided for a span, and neighboring spans count as one. 0 selects no spans.
    span: int = _not_negative(0)
    # Lengths of spans are geometric with this parameter, given the maximum: 3.8 on average.
    span_p: float = _constrained(0.2, "in (0, 1)", lambda value: 0 < value < 1)

    def rate_at(self, step: int, steps: int) -> float:
        """Return the rate at a step of a run of `steps` steps, whose end is step `steps`."""
        if not self.final_rate:
            return self.rate
        return self.rate + (self.final_rate - self.rate) * step / steps


@dataclasses.dataclass
class OptimConfig:
    """The optimizer and its schedule. The defaults are BERT's (section A.2)."""

    # "adam" (BERT's: decoupled weight decay, no bias correction), "adamw" (with bias correction),
    # "lamb" (You et al., arXiv 1904.00962), "adafactor" (Shazeer and Stern, arXiv 1804.04235: factored
    # second moments with a decay of its own, no first ones) or "muon": the encoder's matrices move
    # along their orthogonalized momentum, scaled to AdamW's usual length (Liu et al., arXiv
    # 2502.16982), all other parameters by AdamW.
    optimizer: str = _one_of("adam", "adamw", "lamb", "adafactor", "muon")
    learning_rate: float = _positive(1e-4)
    warmup_steps: int = _not_negative(10_000)
    # Decay to end_fraction of the peak at the last step: "linear", "polynomial" (with `power`) and
    # "cosine" are counted from step 0, as in BERT, "linear_from_warmup" from the end of warm-up, as
    # in transformers. "wsd" (warm-up, stable, decay) stays at the peak and decays linearly in the
    # last decay_fraction of the steps. "inverse_sqrt" is the peak times sqrt(warmup_steps / step),
    # and "constant" the peak.
    schedule: str = _one_of(
        "linear", "polynomial", "cosine", "linear_from_warmup", "wsd", "inverse_sqrt", "constant"
    )
    power: float = _positive(0.5)
    end_fraction: float = _not_negative(0.0)
    decay_fraction: float = _fraction(0.1)
    beta1: float = _below_one(0.9)
    beta2: float = _below_one(0.999)
    epsilon: float = _positive(1e-6)
    # Momentum of "muon".
    muon_momentum: float = _below_one(0.95)
    # Not applied to biases and LayerNorm.
    weight_decay: float = _not_negative(0.01)
    # Clip gradients to this global norm; 0 disables clipping.
    clip_norm: float = _not_negative(1.0)
    # Learning rate of each layer relative to the layer above it; heads use the full rate.
    layer_decay: float = _positive(1.0)
    # Exponential moving average of the parameters: average = decay * average + (1 - decay) *
    # parameters, after every step. Held-out metrics and checkpoints are then those of the average.
    # 0 disables it.
    average_decay: float = _below_one(0.0)


@dataclasses.dataclass
class PhaseConfig:
    """A part of the run with its own rows: BERT trains on T=128 first, then T=512."""

    # Folder written by `bert-jax prepare`.
    rows: str = ""
    # T that the rows must have; 0 accepts any.
    tokens: int = _not_negative(0)
    # Fraction of config.steps.
    fraction: float = _positive(1.0)
    # Global number of rows per step, over all devices and hosts. 0 takes config.batch_size.
    batch_size: int = _not_negative(0)
    # Gradient accumulation: split a batch into this many parts, computed in turn. 0 takes
    # config.accumulation.
    accumulation: int = _not_negative(0)


@dataclasses.dataclass
class MeshConfig:
    """The device mesh. One axis may be -1: all remaining devices."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1


@dataclasses.dataclass
class CheckpointConfig:
    """When checkpoints are saved and which are kept."""

    # 0 saves after every evaluation (fine-tuning only).
    every_steps: int = _not_negative(1_000)
    keep_last: int = _positive(2)
    # Number of best checkpoints kept besides the last ones: by held-out masked-LM (or next-token)
    # loss, or by the metric of the fine-tuning task.
    keep_best: int = _not_negative(1)
    # Also save and keep for ever the checkpoints of every so many steps, step 0 included, for studies
    # of training dynamics. 0 keeps none.
    keep_every_steps: int = _not_negative(0)


@dataclasses.dataclass
class GuardConfig:
    """How a run reacts to non-finite values and loss spikes (`bert_jax.training.guard`)."""

    # Non-finite loss or gradient: "stop" before the update, or "skip" the batch.
    nonfinite: str = _one_of("stop", "skip")
    # Loss or gradient norm more than `sigmas` standard deviations above the mean of the last 128
    # steps: "stop" or "skip" as above, or "off" (train on).
    spike: str = _one_of("off", "stop", "skip")
    sigmas: float = _positive(10.0)
    # The run stops instead of skipping more than this many batches.
    max_skipped: int = _not_negative(100)


@dataclasses.dataclass
class EmbedConfig:
    """How `bert-jax embed` computes vectors; imported sentence encoders set these themselves.

    Fine-tuning on pairs trains these vectors. There, settings at their defaults are those of the
    checkpoint.
    """

    # "mean" (over a text's tokens, [CLS] and [SEP] included), "cls" or "none" (one vector per
    # token).
    pooling: str = _one_of("mean", "cls", "none")
    # "last", "second-to-last", "last4", "all", "embeddings" or layer numbers: 0 is the embeddings,
    # -1 the last layer, "-4,-1" two layers.
    layers: str = "last"
    # Scale every vector to unit length.
    normalize: bool = False
    # Truncate texts to this many tokens; 0 takes model.positions.
    tokens: int = _not_negative(0)
    # What `embed` puts before every text; fine-tuning uses no prompt.
    prompt: str = ""
    # Whether the vectors count the tokens of the prompt and the [CLS] before it. If not, "cls" takes
    # the first token after them.
    include_prompt: bool = True
    # Keep this many leading values of the vector of a text, after scaling to unit length; 0 keeps all.
    truncate_dim: int = _not_negative(0)


TRACKERS = ("wandb", "mlflow")


@dataclasses.dataclass
class DistillConfig:
    """Distillation of a frozen teacher with the same vocabulary; each loss has a weight."""

    # The teacher: a run, an imported checkpoint, or a Hugging Face folder or name (`--teacher`). In
    # fine-tuning, a run on the same task. "" disables distillation.
    teacher: str = ""
    # Weight of the task's own loss: masked LM (next token if causal), or the loss of the labels.
    labels: float = _not_negative(1.0)
    # Weight of the Kullback-Leibler divergence from the teacher's predictions at this temperature,
    # times its square (Hinton et al., arXiv 1503.02531). In regression, the squared difference.
    logits: float = _not_negative(1.0)
    temperature: float = _positive(1.0)
    # Weight of the squared error of the hidden states of the embeddings and of each
    # layer, summed over layers (TinyBERT: Jiao et al., arXiv 1909.10351). The teacher must have a
    # multiple of the student's layers. Different hidden sizes are compared after a learned dense
    # layer.
    hidden: float = _not_negative(0.0)
    # Weight of the divergence of relations between the queries, keys and values of
    # the student's last layer and those of a layer of the teacher, 1 to L, 0 for the last (MiniLMv2:
    # Wang et al., arXiv 2012.15828). Queries, keys and values are split into this many heads, 0 for
    # the number of the student's heads.
    relations: float = _not_negative(0.0)
    relation_layer: int = _not_negative(0)
    relation_heads: int = _not_negative(0)


@dataclasses.dataclass
class TrainConfig:
    """Settings common to pretraining and fine-tuning."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    guard: GuardConfig = dataclasses.field(default_factory=GuardConfig)
    embed: EmbedConfig = dataclasses.field(default_factory=EmbedConfig)
    distill: DistillConfig = dataclasses.field(default_factory=DistillConfig)
    # Initial weights, data order, masking and dropout are functions of the seed and the step.
    seed: int = _not_negative(0)
    steps: int = _positive(1_000_000)
    # Global number of rows per step, over all devices and hosts. Fine-tuning: number of examples.
    batch_size: int = _positive(256)
    accumulation: int = _positive(1)
    # Held-out evaluation; 0 evaluates only at the end (fine-tuning: once per epoch).
    evaluate_every_steps: int = _not_negative(1_000)
    # Logged metrics are averages over this many steps.
    log_every_steps: int = _positive(50)
    # First step and the one after the last, for example (100, 110) for the ten steps after the first
    # hundred: write a profiler trace and a table of time by operation (`bert_jax.tools.profile`) to the
    # workdir's profile/. Results do not change. () disables profiling.
    profile_steps: tuple[int, ...] = ()
    # Where metrics are sent, besides the workdir: "wandb", "mlflow".
    trackers: tuple[str, ...] = _constrained(
        (), "'wandb', 'mlflow' or both", lambda value: {*value} <= {*TRACKERS}
    )
    # Require this platform: "cpu", "gpu" or "tpu". "" takes the best one available.
    platform: str = _one_of("", "cpu", "gpu", "tpu")
    # Make runs on GPU bitwise reproducible: XLA avoids atomic additions and autotuning. CPUs and
    # TPUs are deterministic either way.
    deterministic: bool = True


@dataclasses.dataclass
class Config(TrainConfig):
    """A pretraining run."""

    masking: MaskingConfig = dataclasses.field(default_factory=MaskingConfig)
    # With --init and more model.positions than its source has: the new position embeddings repeat
    # the source's ("copied": the first ones are unchanged; Beltagy et al., arXiv 2004.05150), or all
    # are stretched linearly ("interpolated").
    new_positions: str = _one_of("copied", "interpolated")
    phases: tuple[PhaseConfig, ...] = (PhaseConfig(),)
    # Warm-up as a fraction of the steps; 0 takes optim.warmup_steps.
    warmup_fraction: float = _below_one(0.0)
    # Rows that fail their checksum: "stop" with an error that names the first, or "skip": warn
    # about each and replace it with a row of padding of weight 0, so that all other rows keep their
    # positions.
    damaged_rows: str = _one_of("stop", "skip")
    # Number of held-out rows per evaluation; 0 takes all.
    evaluate_rows: int = _not_negative(2_048)
    # Texts with [MASK], which are filled in at every evaluation, for `bert-jax report` to show.
    sample_texts: tuple[str, ...] = ()


@dataclasses.dataclass
class TaskConfig:
    """The task and its data."""

    # "classification" (texts or pairs of texts), "choice" (multiple choice), "tagging" (one label
    # per word), "squad" (extractive question answering) or "pairs" (vectors of texts, trained so that
    # those of a pair are similar).
    kind: str = _one_of("classification", "choice", "tagging", "squad", "pairs")
    # Benchmark: "cola", "sst2", "mrpc", "qqp", "stsb", "mnli", "qnli", "rte", "wnli", "squad1",
    # "squad2", "swag"; "" for your own files.
    name: str = ""
    # Folder with the benchmark's files, or "tfds".
    data: str = ""
    # Your own files: .tsv, .csv, .jsonl or .parquet; CoNLL columns; SQuAD's JSON.
    train: str = ""
    dev: str = ""
    test: str = ""
    # Columns: the text or pair of texts, the target, and the choices of "choice".
    text_a: str = "text"
    text_b: str = ""
    label: str = "label"
    choices: tuple[str, ...] = ()
    # Pairs: `text_a` is the anchor and `text_b` the text that it should be similar to; "" takes the
    # same text with other dropout (SimCSE, Gao et al., arXiv 2104.08821). Columns of texts that the
    # anchor should not be similar to, besides the other texts of the batch.
    negatives: tuple[str, ...] = ()
    # Pairs: columns of two texts and a number, their similarity. A dev or test file that has them is
    # scored by correlation, others by retrieval, as are folders in BEIR's layout.
    similarity: tuple[str, ...] = ("sentence1", "sentence2", "score")
    # Pairs: factor of the cosines, which are the logits of the softmax: 1 / temperature.
    scale: float = _positive(20.0)
    # "class" (one label), "classes" (multilabel) or "number" (regression).
    objective: str = _one_of("class", "classes", "number")
    # A file with one label per line, or comma-separated names; "" takes the training data's labels.
    labels: str = ""
    # Maximum length. Longer sequences are truncated (classification, choice, pairs) or split
    # (tagging, squad).
    tokens: int = 128
    # SQuAD: stride between windows of a context, maximum tokens of a question and of an answer, and
    # number of start and end candidates that are combined into answers.
    stride_tokens: int = _positive(128)
    question_tokens: int = _positive(64)
    answer_tokens: int = _positive(30)
    n_best: int = _positive(20)
    # Tagging: add neighboring sentences of the document as context (Devlin et al., section 5.3).
    document_context: bool = False


@dataclasses.dataclass
class FinetuneConfig(TrainConfig):
    """A fine-tuning run (Devlin et al., section 4). `steps` is computed from `epochs`."""

    task: TaskConfig = dataclasses.field(default_factory=TaskConfig)
    epochs: float = _positive(3.0)
    # Fraction of the steps; sets optim.warmup_steps.
    warmup_fraction: float = _below_one(0.1)
    # Stop after this many evaluations without improvement; 0 disables early stopping.
    patience: int = _not_negative(0)
    # Freeze the embeddings and this many layers above them; 0 trains everything.
    frozen_layers: int = _not_negative(0)
    # Reinitialize this many layers from the top instead of loading them from the checkpoint.
    reset_layers: int = _not_negative(0)
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    # Do not pack: one sequence per row. Slower; for comparison.
    one_a_row: bool = False
    batch_size: int = _positive(32)
    steps: int = _not_negative(0)
    evaluate_every_steps: int = _not_negative(0)
    log_every_steps: int = _positive(20)
    # Bias correction stabilizes training on small datasets (Mosbach et al., arXiv 2006.04884);
    # BERT's "adam" has none.
    optim: OptimConfig = dataclasses.field(
        default_factory=lambda: OptimConfig(optimizer="adamw", learning_rate=3e-5)
    )
    checkpoint: CheckpointConfig = dataclasses.field(
        default_factory=lambda: CheckpointConfig(every_steps=0, keep_last=1)
    )


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


def take_rows(config: Config, folders: Sequence[str]) -> None:
    """Set the rows of each phase.

    Args:
        config: the config, which is changed.
        folders: folders of rows, one per phase; () to keep those of the config.
    """
    if folders and len(folders) != len(config.phases):
        raise UserError(
            f"{len(folders)} --rows for the config's {len(config.phases)} phases "
            f"({', '.join(f'T={p.tokens or chr(63)}' for p in config.phases)}): pass one per "
            "phase, or choose a config with one phase, such as configs/pretrain.py:base,128"
        )
    for phase, rows in zip(config.phases, folders, strict=bool(folders)):
        phase.rows = rows


def batch_size_key(config: TrainConfig, i: int) -> str:
    """Return the key that sets the batch size of phase `i`."""
    is_of_phase = isinstance(config, Config) and config.phases[i].batch_size
    return f"phases[{i}].batch_size" if is_of_phase else "batch_size"


def phase_ends(config: Config) -> list[int]:
    """Return the step at which each phase ends; the last is `config.steps`."""
    ends, share = [], 0.0
    for phase in config.phases:
        share += phase.fraction
        ends.append(round(share * config.steps))
    ends[-1:] = [config.steps]  # the fractions sum to 1 up to rounding
    return ends


def profiled_steps(config: TrainConfig) -> range:
    """Return the steps of `config.profile_steps`, counted from 0; empty if it is ()."""
    steps = config.profile_steps
    if not steps:
        return range(0)
    problem = ""
    if len(steps) != 2 or not 0 <= steps[0] < steps[1]:
        problem = "it must be FIRST,END, e.g. 100,110 for the ten steps after the first hundred"
    elif config.steps and steps[1] > config.steps:
        problem = f"the run has only {config.steps:,} steps"
    elif isinstance(config, Config):
        for end in phase_ends(config):
            if steps[0] < end < steps[1]:
                problem = f"a phase ends at step {end:,}; choose steps within one phase"
    if problem:
        raise UserError(f"config.profile_steps is {steps!r}: {problem}")
    return range(*steps)


def with_fields(config: Any, changes: Mapping[str, Any]) -> Any:
    """Return a copy of a config with fields changed by their dotted path, as `{"head.kind": "token"}`."""
    config = copy.deepcopy(config)
    for path, value in changes.items():
        *groups, name = path.split(".")
        group = functools.reduce(getattr, groups, config)
        getattr(group, name)  # raises for an unknown field
        setattr(group, name, value)
    return config


def flatten(config: Any) -> dict[str, Any]:
    """Return the leaves by dotted path: `optim.learning_rate`, `phases[0].rows`."""
    return {path: value for path, _, value in leaves(config)}


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field, Any]]:
    """Yield the dotted path, field and value of every leaf."""
    for field in dataclasses.fields(config):
        value, path = getattr(config, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{path}.")
        elif isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
            for i, item in enumerate(value):
                yield from leaves(item, f"{path}[{i}].")
        else:
            yield path, field, value


def to_dict(config: TrainConfig) -> dict[str, Any]:
    """Return nested plain values, as stored in config.json."""
    return dataclasses.asdict(config)


def from_dict(values: Any) -> TrainConfig:
    """Invert `to_dict`: a `FinetuneConfig` if there is a task, else a `Config`."""
    try:
        if not isinstance(values, Mapping) or not values.keys() & {"task", "phases"}:
            raise ValueError("it has neither task nor phases")
        return build(FinetuneConfig if "task" in values else Config, values, "config")
    except ValueError as error:
        raise UserError(f"not a config of this version of bert_jax: {error}") from None


def build(kind: Any, value: Any, where: str) -> Any:
    """Invert `dataclasses.asdict`, also after a round trip through JSON.

    Args:
        kind: a dataclass or the type of a field: a plain type, `tuple[kind, ...]` or `Any`.
        value: plain values.
        where: what to call the value in error messages.

    Raises:
        ValueError: a value has the wrong type, or a field is missing or unknown; names the field.
    """
    if kind is Any:
        return value
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        fields = {field.name: field.type for field in dataclasses.fields(kind)}
        for name in {**value, **fields}:
            if name not in fields:
                raise ValueError(f"{where} has an unknown field {name!r}")
            if name not in value:
                raise ValueError(f"{where} has no field {name!r}")
        return kind(
            **{name: build(fields[name], v, f"{where}.{name}") for name, v in value.items()}
        )
    if typing.get_origin(kind) is tuple and isinstance(value, list | tuple):
        item = typing.get_args(kind)[0]
        return tuple(build(item, v, f"{where}[{i}]") for i, v in enumerate(value))
    if kind is float and type(value) is int and abs(value) < 1 << 53:
        return float(value)
    fits = isinstance(value, typing.get_origin(kind) or kind)
    if not fits or (isinstance(value, bool) and kind is not bool):
        raise ValueError(
            f"{where} is {str(value)[:80]!r}: it must be {_KINDS.get(kind, 'a group')}"
        )
    return value


_KINDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
