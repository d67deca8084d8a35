"""Every setting of a run: typed dataclasses, their defaults, and what makes sense together.

A config file (`configs/*.py`) returns a `Config`; the command line changes single fields of it
(`--config.optim.learning_rate=2e-4`). No other module holds a default. L/H/A is the users' language:
`base`, `L6-H768-A3`.
"""

import dataclasses
import difflib
import math
import os
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any

from bert_jax.errors import UserError

HEADS = ("", "sequence", "choice", "token", "span")
POOLED_HEADS = ("sequence", "choice")
FEATURES = ("", "embeddings", "second-to-last", "last", "weighted-last4", "last4", "weighted-all")


@dataclasses.dataclass
class ModelConfig:
    """The encoder and its heads. The defaults are BERT-base (Devlin et al., section 3)."""

    layers: int = 12
    hidden: int = 768
    heads: int = 12
    feed_forward: int = 3072
    # 0 takes the size of the vocabulary that the rows were made with.
    vocab_size: int = 0
    # The embedding table is padded with unused rows to a multiple of this, for hardware and
    # sharding. It changes no result.
    vocab_multiple: int = 1
    positions: int = 512
    # 2 segment (token type) embeddings in BERT, 0 for none.
    segments: int = 2
    # "gelu" is exact (erf), "gelu_tanh" what Google's code computes, or "relu".
    activation: str = "gelu"
    dropout: float = 0.1
    attention_dropout: float = 0.1
    # Where dropout's random bits come from, a function of seed and step whichever: "hash" (a
    # counter-based hash, nearly free), "threefry" (JAX's own, dear on CPU) or "rbg" (the
    # accelerator's own; its bits differ between kinds of devices and meshes).
    dropout_generator: str = "hash"
    # What computes attention while training: "xla" anywhere, "cudnn" or "pallas" on GPUs, "splash"
    # on TPUs; the last three need attention_dropout=0, and other needs are checked at the start.
    # "auto" is "splash" on TPUs and "cudnn" on GPUs where they can be used ("cudnn" only without
    # config.deterministic), else "xla". Inference always uses "xla".
    attention: str = "auto"
    layer_norm_epsilon: float = 1e-12
    initializer_stddev: float = 0.02
    # A LayerNorm after the last layer; BERT's layers end in one already.
    final_norm: bool = False
    # A left-to-right model ("LTR", section 5.1): a token sees itself and what is before it in its
    # sequence, and pretraining predicts every next token instead of masked ones. [CLS] then sees
    # nothing: next_sentence must be false, what is pooled is each sequence's last token ([SEP]), and
    # SQuAD 2.0's score of no answer, which is [CLS]'s, is the same for all questions.
    causal: bool = False
    # The masked-LM head (a causal model's for the next token): dense + activation + LayerNorm before
    # the decoder, and the decoder is the embedding table.
    masked_lm: bool = True
    transform: bool = True
    tied_decoder: bool = True
    # The pooler and the next-sentence head on every sequence's [CLS].
    next_sentence: bool = True
    # The pooler also where no head needs it.
    pooler: bool = False
    # A fine-tuned head, a dense layer on dropped out hidden states (section 4): "sequence" on the
    # pooled [CLS], "choice" one score on it, "token" on every token, "span" start and end scores of
    # every token; "" for none.
    head: str = ""
    # What its outputs are called, in order.
    labels: tuple[str, ...] = ()
    # Fine-tuning: so many layers of a bidirectional LSTM from random weights below the head, `hidden`
    # wide in each direction (sections 5.1 and 5.3). It begins anew with every sequence.
    lstm_layers: int = 0
    # Fine-tuning: what the head (or the LSTM) stands on (section 5.3, table 7). "" is the last layer,
    # all of the encoder being trained. The others are hidden states of an encoder that stays as it
    # is: "embeddings", "second-to-last", "last", "last4" (concatenated), "weighted-last4" and
    # "weighted-all" (of all layers; sums with learned weights, as ELMo's).
    features: str = ""
    # What activations are computed in; parameters and the optimizer stay float32.
    dtype: str = "float32"
    # "unrolled" compiles every layer (faster steps), "scanned" one (faster compilation). Same
    # parameters, same checkpoints.
    layer_loop: str = "unrolled"
    # What the backward pass recomputes instead of keeping: "none", "dots" (keep the results of
    # matrix products only) or "full" (keep each layer's input only).
    remat: str = "none"

    @property
    def has_pooler(self) -> bool:
        """Whether there is a pooler, for itself or for a head.

        It is of the encoder's last layer: a head on an LSTM or on features takes their vectors as
        they are.
        """
        pools = self.head in POOLED_HEADS and not (self.lstm_layers or self.features)
        return self.pooler or self.next_sentence or pools

    @property
    def feature_layers(self) -> list[int]:
        """Which hidden states `features` are made of, as `layer_numbers` numbers them.

        Raises:
            UserError: the model has too few layers.
        """
        name = self.features.removeprefix("weighted-")
        return layer_numbers(name, self.layers, "config.model.features")


@dataclasses.dataclass
class MaskingConfig:
    """Masked-LM corruption (Devlin et al., section 3.1 and table 8)."""

    # Of every sequence's tokens, special ones counted: round(rate * n), at least 1.
    rate: float = 0.15
    # At most this many a sequence. 0 is BERT's: 20 at T=128, 76 at T=512, else ceil(rate * T).
    most_predictions: int = 0
    # What becomes of a chosen token: [MASK], itself, or a random token of the vocabulary.
    mask_fraction: float = 0.8
    same_fraction: float = 0.1
    random_fraction: float = 0.1
    # Choose whole words (all pieces of one) instead of word pieces.
    whole_word: bool = False


@dataclasses.dataclass
class OptimConfig:
    """The optimizer and its schedule. The defaults are BERT's (section A.2)."""

    # "adam": BERT's, with decoupled weight decay and no bias correction. "adamw": with bias
    # correction. "lamb": You et al., arXiv 1904.00962.
    optimizer: str = "adam"
    learning_rate: float = 1e-4
    warmup_steps: int = 10_000
    # "linear", "polynomial" (power below) or "cosine", down to end_fraction of the peak at the
    # last step. Decay is counted from step 0, as in BERT, not from the end of the warm-up.
    schedule: str = "linear"
    power: float = 0.5
    end_fraction: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-6
    # Not applied to biases and LayerNorm.
    weight_decay: float = 0.01
    # Gradients are scaled down to this global norm; 0 leaves them alone.
    clip_norm: float = 1.0
    # Each layer learns at this times the rate of the one above it; heads at the full rate.
    layer_decay: float = 1.0


@dataclasses.dataclass
class Phase:
    """A stretch of the run with its own rows: BERT trains on T=128 first, then T=512."""

    # The folder that `bert-jax prepare` wrote.
    rows: str = ""
    # T the rows must have; 0 takes any.
    tokens: int = 0
    # This phase's share of config.steps.
    fraction: float = 1.0
    # Rows a step in all, over all devices and hosts. 0 takes config.batch_size.
    batch_size: int = 0
    # Splits a batch into this many parts computed one after the other. 0 takes
    # config.accumulation.
    accumulation: int = 0


@dataclasses.dataclass
class MeshConfig:
    """How devices are arranged. One axis may be -1: all devices that are left."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1


@dataclasses.dataclass
class CheckpointConfig:
    """What is kept of a run."""

    # Fine-tuning: 0 saves after every evaluation.
    every_steps: int = 1_000
    keep_last: int = 2
    # Besides the last ones, the best checkpoints: lowest held-out loss on words (masked or next
    # ones), or the fine-tuned task's own metric.
    keep_best: int = 1


@dataclasses.dataclass
class GuardConfig:
    """What a run does when its numbers go wrong (`bert_jax.guard`)."""

    # A loss or gradient that is not finite: "stop" before the step, "skip" (go on without its
    # batch) or "rollback" (go on from the checkpoint before, without its batch and those of
    # rollback_steps steps before it).
    nonfinite: str = "stop"
    # A loss or gradient norm that is `sigmas` standard deviations above the mean of the last 128
    # steps: the same, or "report" (say so and go on), or "off".
    spike: str = "report"
    sigmas: float = 10.0
    rollback_steps: int = 16
    # More than so many steps that went wrong end the run; of spikes that are only reported, no more
    # than so many are written down.
    most_incidents: int = 100
    # Every so many steps the step is computed twice; results that differ, by faulty hardware or a
    # race, end the run. 0 never.
    probe_every_steps: int = 0


@dataclasses.dataclass
class EmbedConfig:
    """How `bert-jax embed` makes vectors of texts; an imported sentence encoder brings its own."""

    # "mean" of a text's tokens, [CLS] and [SEP] among them, "cls", or "none": a vector a token.
    pooling: str = "mean"
    # "last", "second-to-last", "last4", "all", "embeddings", or numbers: 0 are the embeddings,
    # -1 is the last layer, "-4,-1" are two.
    layers: str = "last"
    # Scale every vector to length 1.
    normalize: bool = False
    # Longer texts are cut; 0 takes model.positions.
    tokens: int = 0


@dataclasses.dataclass
class Run:
    """What every run has."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    guard: GuardConfig = dataclasses.field(default_factory=GuardConfig)
    embed: EmbedConfig = dataclasses.field(default_factory=EmbedConfig)
    # Everything random (initial weights, order, masks, dropout) is a function of this and the step.
    seed: int = 0
    steps: int = 1_000_000
    # Rows a step in all, over all devices and hosts; fine-tuning: examples.
    batch_size: int = 256
    accumulation: int = 1
    # Held-out evaluation; 0 evaluates at the end only (fine-tuning: once an epoch).
    evaluate_every_steps: int = 1_000
    # Metrics are means over this many steps.
    log_every_steps: int = 50
    # "100:110" traces the ten steps after the first hundred into the workdir's profile/, with a table
    # of where their time went (`bert_jax.profile`); "" none. What is computed stays the same.
    profile_steps: str = ""
    # "cpu", "gpu" or "tpu" refuses to run on anything else; "" takes the best there is.
    platform: str = ""
    # Two identical runs end with the same bits on a GPU too, where XLA then avoids atomic additions
    # and autotuning; CPUs and TPUs are deterministic either way.
    deterministic: bool = True


@dataclasses.dataclass
class Config(Run):
    """A pretraining run."""

    masking: MaskingConfig = dataclasses.field(default_factory=MaskingConfig)
    phases: tuple[Phase, ...] = (Phase(),)
    # Records of the rows that fail their checksum: "stop" with an error that names the first, or
    # "skip": tell each and put a row of padding, which weighs nothing, in its place, so that all
    # other rows stay where they were.
    damaged_rows: str = "stop"
    # 0 takes all held-out rows.
    evaluate_rows: int = 2_048


@dataclasses.dataclass
class TaskConfig:
    """What to fine-tune on."""

    # "classification" (of texts or pairs), "choice" (of one text among several), "tagging" (of
    # words) or "squad" (answers in a text).
    kind: str = "classification"
    # A benchmark: "cola", "sst2", "mrpc", "qqp", "stsb", "mnli", "qnli", "rte", "wnli", "squad1",
    # "squad2", "swag"; "" for files of one's own.
    name: str = ""
    # The folder of a benchmark's files, or "tfds".
    data: str = ""
    # Files of one's own: .tsv, .csv, .jsonl, .parquet; CoNLL columns; SQuAD's JSON.
    train: str = ""
    dev: str = ""
    test: str = ""
    # Columns: the text or the pair, what is to be learned, and for "choice" the choices.
    text_a: str = "text"
    text_b: str = ""
    label: str = "label"
    choices: tuple[str, ...] = ()
    # "class" (one label), "classes" (several at a time) or "number".
    objective: str = "class"
    # A file with a label a line, or names with commas; "" takes those of the training data.
    labels: str = ""
    # Longer sequences are cut (classification, choice) or go over several (tagging, squad).
    tokens: int = 128
    # SQuAD: how far windows of a text lie apart, most tokens of a question and of an answer, and
    # how many starts and ends are combined to answers.
    stride_tokens: int = 128
    question_tokens: int = 64
    answer_tokens: int = 30
    n_best: int = 20
    # Tagging: sentences see their neighbors in the document (Devlin et al., section 5.3).
    document_context: bool = False


@dataclasses.dataclass
class FinetuneConfig(Run):
    """A fine-tuning run (Devlin et al., section 4). `steps` follows from `epochs`."""

    task: TaskConfig = dataclasses.field(default_factory=TaskConfig)
    epochs: float = 3.0
    # Of the steps; fills in optim.warmup_steps.
    warmup_fraction: float = 0.1
    # Stop after this many evaluations without a better one; 0 never.
    patience: int = 0
    # The embeddings and this many layers above them keep their weights; 0 trains everything.
    frozen_layers: int = 0
    # This many layers from the top start anew instead of from the checkpoint.
    reset_layers: int = 0
    # No packing: every sequence in a row of its own. Slower; for comparison.
    one_a_row: bool = False
    batch_size: int = 32
    steps: int = 0
    evaluate_every_steps: int = 0
    log_every_steps: int = 20
    # Bias correction makes small sets reliable (Mosbach et al., arXiv 2006.04884); BERT's own
    # "adam" goes without.
    optim: OptimConfig = dataclasses.field(
        default_factory=lambda: OptimConfig(optimizer="adamw", learning_rate=3e-5)
    )
    checkpoint: CheckpointConfig = dataclasses.field(
        default_factory=lambda: CheckpointConfig(every_steps=0, keep_last=1)
    )


SIZES = {  # Devlin et al., and Turc et al. (arXiv 1908.08962) for the small ones
    "tiny": (2, 128, 2),
    "mini": (4, 256, 4),
    "small": (4, 512, 8),
    "medium": (8, 512, 8),
    "base": (12, 768, 12),
    "large": (24, 1024, 16),
}


def model_size(name: str) -> ModelConfig:
    """The model of a name: one of `SIZES`, `teaching`, or any `L6-H768-A3`.

    Raises:
        UserError: no such size; the line lists those there are.
    """
    if name == "teaching":
        return ModelConfig(
            layers=3,
            hidden=192,
            heads=4,
            feed_forward=768,
            positions=64,
            segments=0,
            activation="relu",
            final_norm=True,
            transform=False,
            tied_decoder=False,
            next_sentence=False,
        )
    shape = re.fullmatch(r"L(\d+)[-_]H(\d+)[-_]A(\d+)", name)
    if shape:
        layers, hidden, heads = map(int, shape.groups())
    elif name in SIZES:
        layers, hidden, heads = SIZES[name]
    else:
        known = ", ".join(["teaching", *SIZES])
        raise UserError(f"no model size {name!r}: choose {known}, or any like L6-H768-A3")
    return ModelConfig(layers=layers, hidden=hidden, heads=heads, feed_forward=4 * hidden)


def layer_numbers(layers: str, count: int, key: str = "config.embed.layers") -> list[int]:
    """The hidden states that a setting names, of a model with `count` layers.

    Args:
        layers: as `EmbedConfig.layers` says.
        count: L.
        key: what the setting is called in an error.

    Returns:
        Numbers from 0 (the embeddings) to `count` (the last layer), in the order given. "all" are
        1 to `count`.

    Raises:
        UserError: no such layer.
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
                f"{key} is {layers!r}: the model has no layer {number}, only 0 (the embeddings) to "
                f"{count}, or {-count} to -1 from the end"
            )
    return [number + (count + 1) * (number < 0) for number in numbers]


_CHOICES = {
    "model.activation": ("gelu", "gelu_tanh", "relu"),
    "model.attention": ("auto", "xla", "cudnn", "pallas", "splash"),
    "model.dtype": ("float32", "bfloat16"),
    "model.features": FEATURES,
    "model.head": HEADS,
    "embed.pooling": ("mean", "cls", "none"),
    "damaged_rows": ("stop", "skip"),
    "guard.nonfinite": ("stop", "skip", "rollback"),
    "guard.spike": ("off", "report", "stop", "skip", "rollback"),
    "model.dropout_generator": ("hash", "threefry", "rbg"),
    "model.layer_loop": ("unrolled", "scanned"),
    "model.remat": ("none", "dots", "full"),
    "optim.optimizer": ("adam", "adamw", "lamb"),
    "optim.schedule": ("linear", "polynomial", "cosine"),
    "platform": ("", "cpu", "gpu", "tpu"),
    "task.kind": ("classification", "choice", "tagging", "squad"),
    "task.objective": ("class", "classes", "number"),
}
_POSITIVE = (
    "model.layers model.hidden model.heads model.feed_forward model.vocab_multiple model.positions "
    "model.layer_norm_epsilon optim.learning_rate optim.epsilon optim.power steps batch_size "
    "accumulation log_every_steps checkpoint.every_steps checkpoint.keep_last optim.layer_decay "
    "guard.sigmas epochs task.stride_tokens task.question_tokens task.answer_tokens task.n_best"
).split()
# The benchmarks of each kind of task; "" for data of one's own.
_GLUE = ("cola", "sst2", "mrpc", "qqp", "stsb", "mnli", "qnli", "rte", "wnli")
_NAMES = {
    "classification": ("", *_GLUE),
    "choice": ("", "swag"),
    "tagging": ("",),
    "squad": ("", "squad1", "squad2"),
}
# What follows from something else in fine-tuning, so that setting it would do nothing.
_FOLLOWS = {
    "optim.warmup_steps": "config.warmup_fraction",
    "model.vocab_size": "the vocabulary",
    **{
        f"model.{name}": "config.task"
        for name in ("head", "labels", "masked_lm", "next_sentence", "pooler")
    },
}
# What fine-tuning fills in where it is 0.
_FILLED_IN = ("steps", "checkpoint.every_steps")
_NOT_NEGATIVE = (
    "model.vocab_size model.segments model.initializer_stddev model.lstm_layers "
    "masking.most_predictions seed guard.rollback_steps guard.most_incidents guard.probe_every_steps "
    "optim.warmup_steps optim.weight_decay optim.clip_norm optim.end_fraction evaluate_every_steps "
    "evaluate_rows checkpoint.keep_best embed.tokens patience frozen_layers reset_layers"
).split()
_FRACTIONS = (
    "model.dropout model.attention_dropout optim.beta1 optim.beta2 warmup_fraction"
).split()  # below 1


def validate(config: Run) -> None:
    """Refuses a config whose fields cannot be or cannot go together.

    Raises:
        UserError: names the first such field, its value and what it may be.
    """
    flat = flatten(config)

    def require(holds: bool, key: str, may_be: str) -> None:
        if not holds:
            raise UserError(f"config.{key} is {flat[key]!r}: it must be {may_be}")

    for key, value in flat.items():
        if isinstance(value, float):
            require(math.isfinite(value), key, "finite")
        if isinstance(value, int) and key != "seed":  # steps and shapes are counted in int32
            require(abs(value) < 2**31, key, "below 2**31")
    for key, choices in _CHOICES.items():
        require(flat.get(key) in (None, *choices), key, "one of " + ", ".join(map(repr, choices)))
    may_be_0 = _FILLED_IN if isinstance(config, FinetuneConfig) else ()
    for key in flat.keys() & {*_POSITIVE}:
        require(flat[key] > 0 or (flat[key] == 0 and key in may_be_0), key, "above 0")
    for key in flat.keys() & {*_NOT_NEGATIVE}:
        require(flat[key] >= 0, key, "0 or more")
    for key in flat.keys() & {*_FRACTIONS}:
        require(0 <= flat[key] < 1, key, "in [0, 1)")
    require(config.seed < 2**32, "seed", "below 2**32")

    model = config.model
    require(model.hidden % model.heads == 0, "model.heads", f"a divisor of hidden={model.hidden}")
    outputs = {"": 0, "choice": 1, "span": 2}.get(model.head, max(len(model.labels), 1))
    require(len(model.labels) == outputs, "model.labels", f"{outputs} names for this head")
    axes = dataclasses.astuple(config.mesh)
    if min(axes) < -1 or 0 in axes or axes.count(-1) > 1:
        raise UserError(
            f"config.mesh (data, fsdp, tensor) is {axes}: sizes above 0, at most one of them -1"
        )
    if isinstance(config, Config):
        _validate_pretraining(config, require)
    if isinstance(config, FinetuneConfig):
        require(config.task.tokens >= 8, "task.tokens", "8 or more")
        names = _NAMES[config.task.kind]
        require(config.task.name in names, "task.name", "one of " + ", ".join(map(repr, names)))
        if model.features:
            stays = f"config.model.features={model.features!r} leaves the encoder as it is"
            for name in ("frozen_layers", "reset_layers"):
                require(getattr(config, name) == 0, name, f"0, for {stays}")
            require(config.optim.layer_decay == 1, "optim.layer_decay", f"1, for {stays}")
        if model.head:  # else a checkpoint is yet to say how large the model is
            most = model.positions
            require(config.task.tokens <= most, "task.tokens", f"8 to {most}")
            if model.features:
                _ = model.feature_layers  # raises where there are too few
            for name, most in (
                ("frozen_layers", model.layers),
                ("reset_layers", model.layers - config.frozen_layers),
            ):
                what = f"at most {most}, the model's layers"
                if name == "reset_layers" and config.frozen_layers:
                    what += " that are not frozen: what starts anew must learn"
                require(getattr(config, name) <= most, name, what)
    profiled_steps(config)


def _validate_pretraining(config: Config, require: Callable[[bool, str, str], None]) -> None:
    model, masking = config.model, config.masking
    for name, nothing in (("lstm_layers", 0), ("features", "")):
        what = f"{nothing!r} in pretraining, for it is of fine-tuned heads"
        require(getattr(model, name) == nothing, f"model.{name}", what)
    if model.causal:
        what = "false with config.model.causal=true, where [CLS] sees nothing but itself"
        require(not model.next_sentence, "model.next_sentence", what)
        for name, value in dataclasses.asdict(MaskingConfig()).items():
            what = f"{value!r}, as by default, with config.model.causal=true, which masks nothing"
            require(getattr(masking, name) == value, f"masking.{name}", what)
    require(0 < masking.rate < 1, "masking.rate", "in (0, 1)")
    split = (masking.mask_fraction, masking.same_fraction, masking.random_fraction)
    if min(split) < 0 or abs(sum(split) - 1) > 1e-6:
        raise UserError(
            f"config.masking: mask, same and random fractions are {split}: they must add up to 1"
        )
    if not config.phases:
        raise UserError("config.phases is empty: a run needs at least one")
    if abs(sum(phase.fraction for phase in config.phases) - 1) > 1e-6:
        raise UserError("config.phases: the fractions must add up to 1")
    for i, phase in enumerate(config.phases):
        key = f"phases[{i}]"
        require(phase.fraction > 0, f"{key}.fraction", "above 0")
        for name in ("tokens", "batch_size", "accumulation"):
            require(getattr(phase, name) >= 0, f"{key}.{name}", "0 or more")
        require(
            phase.tokens <= model.positions,
            f"{key}.tokens",
            f"at most {model.positions}, config.model.positions",
        )
        batch = phase.batch_size or config.batch_size
        parts = phase.accumulation or config.accumulation
        if batch % parts:
            raise UserError(
                f"config.batch_size {batch} is not divisible by accumulation {parts} (phase {i})"
            )


def phase_ends(config: Config) -> list[int]:
    """The step at which each phase ends; the last is `config.steps`."""
    ends, share = [], 0.0
    for phase in config.phases:
        share += phase.fraction
        ends.append(round(share * config.steps))
    return ends


def profiled_steps(config: Run) -> range:
    """The steps that `config.profile_steps` names, counted from 0; none where it is "".

    Raises:
        UserError: no such steps, in a config whose number of steps is known, or of several phases.
    """
    text = config.profile_steps
    if not text:
        return range(0)
    found = re.fullmatch(r"(\d+):(\d+)", text)
    first, end = map(int, found.groups()) if found else (0, 0)
    if first >= end:
        raise UserError(
            f"config.profile_steps is {text!r}: it must be FIRST:END, as 100:110 for the ten steps after "
            "the first hundred"
        )
    if config.steps and end > config.steps:
        raise UserError(
            f"config.profile_steps is {text!r}: the run has {config.steps:,} steps only"
        )
    for phase_end in phase_ends(config) if isinstance(config, Config) else []:
        if first < phase_end < end:
            raise UserError(
                f"config.profile_steps is {text!r}: a phase ends at step {phase_end:,}, and its steps and "
                "those of the next are different programs; name steps of one of them"
            )
    return range(first, end)


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves by dotted path: `optim.learning_rate`, `phases[0].rows`."""
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value, path = getattr(config, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            flat.update(flatten(value, f"{path}."))
        elif isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
            for i, item in enumerate(value):
                flat.update(flatten(item, f"{path}[{i}]."))
        else:
            flat[path] = value
    return flat


def to_dict(config: Run) -> dict[str, Any]:
    """Nested plain values, for config.json."""
    return dataclasses.asdict(config)


def from_dict(values: Any) -> Run:
    """The inverse of `to_dict`, a `FinetuneConfig` where there is a task, else a `Config`.

    Raises:
        UserError: a field that this version does not have, or of another type.
    """
    try:
        if not isinstance(values, Mapping) or not values.keys() & {"task", "phases"}:
            raise ValueError("it has neither task nor phases")
        return build(FinetuneConfig if "task" in values else Config, values, "config")
    except ValueError as error:
        raise UserError(f"not a config of this version of bert_jax: {error}") from None


def build(kind: Any, value: Any, where: str) -> Any:
    """The inverse of `dataclasses.asdict`, also for what has been JSON in between.

    Args:
        kind: a dataclass, or the type of one's field: plain ones, `tuple[kind, ...]`, `Any`.
        value: plain values.
        where: what to call it in an error.

    Raises:
        ValueError: a value of another type, a field that is missing or unknown; names it.
    """
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        fields = {field.name: field.type for field in dataclasses.fields(kind)}
        for name in value:
            if name not in fields:
                raise ValueError(f"{where} has an unknown field {name!r}")
        found = {name: build(fields[name], v, f"{where}.{name}") for name, v in value.items()}
        try:
            return kind(**found)
        except TypeError as error:  # which are missing
            raise ValueError(f"{where}: {error}") from None
    if typing.get_origin(kind) is tuple and isinstance(value, list | tuple):
        item = typing.get_args(kind)[0]
        return tuple(build(item, v, f"{where}[{i}]") for i, v in enumerate(value))
    if kind is float and type(value) is int and abs(value) < 1 << 53:
        return float(value)
    fits = isinstance(value, typing.get_origin(kind) or kind)
    if not fits or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{where} is {str(value)[:80]!r}, which is no {_KINDS.get(kind, 'group')}")
    return value


_KINDS = {int: "whole number", float: "number", str: "text", bool: "true or false"}


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """`--config FILE`, `--config.key=value` and `--config.key value` of a command line, and the rest."""
    config, rest, waiting = [], [], ""
    for argument in arguments:
        if waiting:
            config.append(f"{waiting}={argument}")
            waiting = ""
        elif argument == "--config" or argument.startswith(("--config=", "--config.")):
            if "=" in argument:
                config.append(argument)
            else:
                waiting = argument
        else:
            rest.append(argument)
    if waiting:
        rest.append(waiting)  # argparse will say that it lacks a value
    return config, rest


def load(arguments: list[str], kind: type = Config) -> Any:
    """The config of `--config FILE[:ARGUMENT]` and `--config.key=value` arguments, validated.

    Args:
        arguments: of the command line.
        kind: `Config` or `FinetuneConfig`, which the file must make.

    Raises:
        UserError: no such file, an unknown key (names the nearest), a value of the wrong type or
            fields that do not go together.
    """
    from absl import flags
    from ml_collections import config_flags

    values = flags.FlagValues()
    # One pass for the file alone, so that keys can be checked before anything is set.
    file = [a for a in arguments if a.startswith("--config=")]
    if not file:
        raise UserError(
            "no config: add --config FILE, for example --config configs/pretrain.py:mini"
        )
    path = file[0].removeprefix("--config=").partition(":")[0]
    if not os.path.exists(path):
        raise UserError(f"there is no config file {path} (from {os.getcwd()})")
    argv = ["bert-jax", *arguments]
    try:
        config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv[:1] + file)
        values(argv[:1] + file)
        config = values.config
        if not isinstance(config, kind):
            # A missing file gives a stand-in that raises on use.
            getattr(config, "steps", None)
            raise UserError(
                f"{file[0][9:]}: get_config must return a bert_jax.config.{kind.__name__} here"
            )
        for argument in arguments:
            if not argument.startswith("--"):
                raise UserError(f"cannot read {argument}: settings are written --config.KEY=VALUE")
            key = argument.partition("=")[0].removeprefix("--config.")
            if key != "--config":
                _check_key(key, config)
        values = flags.FlagValues()
        config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv)
        values(argv)
    except UserError:
        raise
    except flags.Error as error:
        if "Traceback" in str(error):  # a whole one is quoted where the file itself raised
            last = str(error).strip().splitlines()[-1]
            raise UserError(f"cannot load {file[0][9:]}: {last}") from None
        raise UserError(f"a config value of the wrong type: {error}") from None
    except Exception as error:  # a config file is a program: anything may come out of it
        text = " ".join(str(error).split())
        raise UserError(f"cannot load {file[0][9:]}: {type(error).__name__}: {text}") from error
    config = from_dict(to_dict(values.config))  # a config file may have put anything anywhere
    validate(config)
    return config


def _check_key(key: str, config: Run) -> None:
    flat = flatten(config)
    if isinstance(config, FinetuneConfig) and key in _FOLLOWS:
        raise UserError(f"config.{key} follows from {_FOLLOWS[key]} when fine-tuning: set that")
    if key in flat:
        return
    if any(name.startswith((f"{key}.", f"{key}[")) for name in flat):
        raise UserError(f"config.{key} is a group of settings: set one of them, config.{key}.…")
    nearest = difflib.get_close_matches(key, flat, 1, 0.5)
    # A right name in the wrong group is a likelier slip than a similar path.
    same_name = [name for name in flat if name.rpartition(".")[2] == key.rpartition(".")[2]]
    guess = (same_name or nearest or [""])[0]
    hint = f"; did you mean config.{guess}?" if guess else ""
    raise UserError(f"unknown config key config.{key}{hint}")
