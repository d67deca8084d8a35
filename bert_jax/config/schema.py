"""Settings of a run: typed dataclasses with their defaults and constraints.

A config file (`configs/*.py`) returns a `Config`; the command line overrides single fields
(`--config.optim.learning_rate=2e-4`), see `flags`. Defaults are defined only here and in `model`, and the
constraints of single fields beside them; those of several fields are in `checks`.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from bert_jax.config.fields import (
    below_one,
    build,
    constrained,
    fraction,
    not_negative,
    one_of,
    positive,
)
from bert_jax.config.model import LoraConfig, ModelConfig
from bert_jax.errors import UserError, counted


@dataclasses.dataclass
class MaskingConfig:
    """Masked-LM corruption (Devlin et al., section 3.1 and table 8)."""

    # Fraction of each sequence's n tokens, special ones included: round(rate * n), at least 1.
    rate: float = 0.15
    # Change the rate linearly over the run, from `rate` at step 0 to this at the end (Ankner et al.
    # 2023, arXiv 2305.15096: 0.3 to 0.15). Held-out rows always have the final rate, and the larger
    # one determines the shapes. 0 keeps `rate`.
    final_rate: float = below_one(0.0)
    # Maximum per sequence. 0 takes BERT's: 20 at T=128, 76 at T=512 for a rate of 0.15, otherwise
    # ceil(rate * T).
    max_predictions_per_sequence: int = not_negative(0)
    # Replacement of a selected token: [MASK], itself, or a random token of the vocabulary.
    mask_fraction: float = 0.8
    same_fraction: float = 0.1
    random_fraction: float = 0.1
    # Select whole words (all of their word pieces) instead of single word pieces.
    whole_word: bool = False
    # Select spans of at most this many word pieces (words if whole_word), as SpanBERT, which has 10
    # words (Joshi et al., arXiv 1907.10529). Whether tokens become [MASK], are kept or become random
    # is then decided for a span, and neighboring spans count as one. 0 selects no spans.
    span: int = not_negative(0)
    # Lengths of spans are geometric with this parameter, given the maximum: 3.8 on average.
    span_p: float = constrained(0.2, "in (0, 1)", lambda value: 0 < value < 1)

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
    optimizer: str = one_of("adam", "adamw", "lamb", "adafactor", "muon")
    # The peak, after warm-up.
    learning_rate: float = positive(1e-4)
    # Steps in which the learning rate rises linearly from 0.
    warmup_steps: int = not_negative(10_000)
    # Decay to end_fraction of the peak at the last step: "linear", "polynomial" (with `power`) and
    # "cosine" are counted from step 0, as in BERT, "linear_from_warmup" from the end of warm-up, as
    # in transformers. "wsd" (warm-up, stable, decay) stays at the peak and decays linearly in the
    # last decay_fraction of the steps. "inverse_sqrt" is the peak times sqrt(warmup_steps / step),
    # and "constant" the peak.
    schedule: str = one_of(
        "linear", "polynomial", "cosine", "linear_from_warmup", "wsd", "inverse_sqrt", "constant"
    )
    power: float = positive(0.5)
    end_fraction: float = not_negative(0.0)
    decay_fraction: float = fraction(0.1)
    beta1: float = below_one(0.9)
    beta2: float = below_one(0.999)
    epsilon: float = positive(1e-6)
    # Momentum of "muon".
    muon_momentum: float = below_one(0.95)
    # Not applied to biases and LayerNorm.
    weight_decay: float = not_negative(0.01)
    # Clip gradients to this global norm; 0 disables clipping.
    clip_norm: float = not_negative(1.0)
    # Learning rate of each layer relative to the layer above it; heads use the full rate.
    layer_decay: float = positive(1.0)
    # Exponential moving average of the parameters: average = decay * average + (1 - decay) *
    # parameters, after every step. Held-out metrics and checkpoints are then those of the average.
    # 0 disables it.
    average_decay: float = below_one(0.0)


@dataclasses.dataclass
class SourceConfig:
    """A folder of rows that a phase mixes with others."""

    # Folder written by `bert-jax prepare`.
    rows: str = ""
    # Share of the tokens, relative to the other folders.
    weight: float = positive(1.0)


@dataclasses.dataclass
class PhaseConfig:
    """A part of the run with its own rows: BERT trains on T=128 first, then T=512."""

    # Folder written by `bert-jax prepare`.
    rows: str = ""
    # Folders to mix, in place of `rows`. --rows A=0.7,B=0.3 sets them.
    mixture: tuple[SourceConfig, ...] = ()
    # T that the rows must have; 0 accepts any.
    tokens: int = not_negative(0)
    # Fraction of config.steps.
    fraction: float = positive(1.0)
    # Global number of rows per step, over all devices and hosts. 0 takes config.batch_size.
    batch_size: int = not_negative(0)
    # As config.accumulation, which 0 takes.
    accumulation: int = not_negative(0)
    # Base of "rope" in layers with global attention during this phase; 0 takes model.rope_theta, which
    # the last phase always has. ModernBERT (Warner et al., arXiv 2412.13663) has 10,000 at T=1024, then
    # 160,000 at T=8192.
    rope_theta: float = not_negative(0.0)

    @property
    def folders(self) -> list[str]:
        """The folders of rows; [] if none is set."""
        return [source.rows for source in self.mixture] or [self.rows] * bool(self.rows)


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
    every_steps: int = not_negative(1_000)
    keep_last: int = positive(2)
    # Number of best checkpoints kept besides the last ones: by held-out masked-LM (or next-token)
    # loss, or by the metric of the fine-tuning task.
    keep_best: int = not_negative(1)
    # Also save and keep for ever the checkpoints of every so many steps, step 0 included, for studies
    # of training dynamics. 0 keeps none.
    keep_every_steps: int = not_negative(0)


@dataclasses.dataclass
class GuardConfig:
    """How a run reacts to non-finite values and loss spikes (`bert_jax.training.guard`)."""

    # Non-finite loss or gradient: "stop" before the update, or "skip" the batch.
    nonfinite: str = one_of("stop", "skip")
    # Loss or gradient norm more than `sigmas` standard deviations above the mean of the last 128
    # steps: "stop" or "skip" as above, or "off" (train on).
    spike: str = one_of("off", "stop", "skip")
    sigmas: float = positive(10.0)
    # The run stops instead of skipping more than this many batches.
    max_skipped: int = not_negative(100)


@dataclasses.dataclass
class EmbedConfig:
    """How `bert-jax embed` computes vectors; imported sentence encoders set these themselves.

    Fine-tuning on pairs trains these vectors. There, settings at their defaults are those of the
    checkpoint.
    """

    # "mean" (over a text's tokens, [CLS] and [SEP] included), "cls" or "none" (one vector per
    # token).
    pooling: str = one_of("mean", "cls", "none")
    # "last", "second-to-last", "last4", "all", "embeddings" or layer numbers: 0 is the embeddings,
    # -1 the last layer, "-4,-1" two layers.
    layers: str = "last"
    # Scale every vector to unit length.
    normalize: bool = False
    # Truncate texts to this many tokens; 0 takes model.positions.
    tokens: int = not_negative(0)
    # What `embed` puts before every text; fine-tuning uses no prompt.
    prompt: str = ""
    # Whether the vectors count the tokens of the prompt and the [CLS] before it. If not, "cls" takes
    # the first token after them.
    include_prompt: bool = True
    # Keep this many leading values of the vector of a text, after scaling to unit length; 0 keeps all.
    truncate_dim: int = not_negative(0)


TRACKERS = ("wandb", "mlflow", "trackio")


@dataclasses.dataclass
class DistillConfig:
    """Distillation of a frozen teacher with the same vocabulary; each loss has a weight."""

    # The teacher: a run, an imported checkpoint, or a Hugging Face folder or name (`--teacher`). In
    # fine-tuning, a run on the same task. "" disables distillation.
    teacher: str = ""
    # Weight of the task's own loss: masked LM (next token if causal), or the loss of the labels.
    labels: float = not_negative(1.0)
    # Weight of the Kullback-Leibler divergence from the teacher's predictions at this temperature,
    # times its square (Hinton et al., arXiv 1503.02531). In regression, the squared difference.
    logits: float = not_negative(1.0)
    temperature: float = positive(1.0)
    # Weight of the squared error of the hidden states of the embeddings and of each
    # layer, summed over layers (TinyBERT: Jiao et al., arXiv 1909.10351). The teacher must have a
    # multiple of the student's layers. Different hidden sizes are compared after a learned dense
    # layer.
    hidden: float = not_negative(0.0)
    # Weight of the divergence of relations between the queries, keys and values of
    # the student's last layer and those of a layer of the teacher, 1 to L, 0 for the last (MiniLMv2:
    # Wang et al., arXiv 2012.15828). Queries, keys and values are split into this many heads, 0 for
    # the number of the student's heads.
    relations: float = not_negative(0.0)
    relation_layer: int = not_negative(0)
    relation_heads: int = not_negative(0)


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
    seed: int = not_negative(0)
    # Length of the run, in updates of the parameters.
    steps: int = positive(1_000_000)
    # Global number of rows per step, over all devices and hosts. Fine-tuning: number of examples.
    batch_size: int = positive(256)
    # Gradient accumulation: split a batch into this many parts, computed in turn.
    accumulation: int = positive(1)
    # Held-out evaluation; 0 evaluates only at the end (fine-tuning: once per epoch).
    evaluate_every_steps: int = not_negative(1_000)
    # Logged metrics are averages over this many steps.
    log_every_steps: int = positive(50)
    # First step and the one after the last, for example (100, 110) for the ten steps after the first
    # hundred: write a profiler trace and a table of time by operation (`bert_jax.tools.profile`) to the
    # workdir's profile/. Results do not change. () disables profiling.
    profile_steps: tuple[int, ...] = ()
    # Where metrics are sent, besides the workdir: "wandb", "mlflow", "trackio".
    trackers: tuple[str, ...] = constrained(
        (),
        "'wandb', 'mlflow', 'trackio' or several: --config.trackers=\"'wandb','mlflow'\"",
        lambda value: {*value} <= {*TRACKERS},
    )
    # Require this platform: "cpu", "gpu" or "tpu". "" takes the best one available.
    platform: str = one_of("", "cpu", "gpu", "tpu")
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
    new_positions: str = one_of("copied", "interpolated")
    # With --init and a larger model than its source: how the copies of its parameters fill layers, hidden,
    # heads and feed_forward of config.model. "stack": wider layers compute the same, and the stack of layers
    # is repeated (bert2BERT, StackBERT); "tile": as ModernBERT-large (`objectives.growth`). "": the sizes are
    # the source's.
    init_scheme: str = one_of("", "stack", "tile")
    phases: tuple[PhaseConfig, ...] = (PhaseConfig(),)
    # Multiply the weights of a mixture by n ** (1 / mixture_temperature), n being the tokens of a folder:
    # 1 is in proportion to them, higher values raise the share of small folders (multilingual BERT has
    # 1.43, XLM 2: Lample and Conneau, arXiv 1901.07291, section 3.1). 0 takes the weights alone.
    mixture_temperature: float = not_negative(0.0)
    # Read the folders of a mixture again and again. If false, those that have no rows left are left out,
    # and the others share their tokens; only the last one left is repeated.
    mixture_repeats: bool = True
    # Warm-up as a fraction of the steps; 0 takes optim.warmup_steps.
    warmup_fraction: float = below_one(0.0)
    # Rows that fail their checksum: "stop" with an error that names the first, or "skip": warn
    # about each and replace it with a row of padding of weight 0, so that all other rows keep their
    # positions.
    damaged_rows: str = one_of("stop", "skip")
    # Number of held-out rows per evaluation; 0 takes all.
    evaluate_rows: int = not_negative(2_048)
    # Texts with [MASK], which are filled in at every evaluation, for `bert-jax report` to show.
    sample_texts: tuple[str, ...] = ()


@dataclasses.dataclass
class TaskConfig:
    """The task and its data."""

    # "classification" (texts or pairs of texts), "choice" (multiple choice), "tagging" (one label
    # per word), "squad" (extractive question answering) or "pairs" (vectors of texts, trained so that
    # those of a pair are similar).
    kind: str = one_of("classification", "choice", "tagging", "squad", "pairs")
    # Benchmark: "cola", "sst2", "mrpc", "qqp", "stsb", "mnli", "qnli", "rte", "wnli", "squad1",
    # "squad2", "swag"; "" for your own files.
    name: str = ""
    # Folder with the benchmark's files, or "tfds".
    data: str = ""
    # Your own files: .tsv, .csv, .jsonl or .parquet; CoNLL columns; SQuAD's JSON.
    train: str = ""
    dev: str = ""
    test: str = ""
    # Column of the text, or of the first text of a pair.
    text_a: str = "text"
    # Column of the second text; "" for single texts.
    text_b: str = ""
    # Column of the target.
    label: str = "label"
    # Columns of the choices of "choice".
    choices: tuple[str, ...] = ()
    # Pairs: `text_a` is the anchor and `text_b` the text that it should be similar to; "" takes the
    # same text with other dropout (SimCSE, Gao et al., arXiv 2104.08821). Columns of texts that the
    # anchor should not be similar to, besides the other texts of the batch.
    negatives: tuple[str, ...] = ()
    # Pairs: columns of two texts and a number, their similarity. A dev or test file that has them is
    # scored by correlation, others by retrieval, as are folders in BEIR's layout.
    similarity: tuple[str, ...] = ("sentence1", "sentence2", "score")
    # Pairs: factor of the cosines, which are the logits of the softmax: 1 / temperature.
    scale: float = positive(20.0)
    # Pairs: numbers of leading values of the vectors that are trained to be vectors of their own, such as
    # (64, 128, 384) (Matryoshka, Kusupati et al., arXiv 2205.13147): the loss is the sum of theirs. Name
    # the full size too. (): the full vectors only.
    dimensions: tuple[int, ...] = ()
    # "class" (one label), "classes" (multilabel), "number" (regression) or "relevance" (from 0 to 1, of a
    # document to a query: a cross-encoder with a single logit, Nogueira and Cho, arXiv 1901.04085). Files
    # of "relevance" for dev and test may be folders in BEIR's layout.
    objective: str = one_of("class", "classes", "number", "relevance")
    # A file with one label per line, or comma-separated names; "" takes the training data's labels.
    labels: str = ""
    # Maximum length. Longer sequences are truncated (classification, choice, pairs) or split
    # (tagging, squad).
    tokens: int = 128
    # SQuAD: stride between windows of a context, maximum tokens of a question and of an answer, and
    # number of start and end candidates that are combined into answers.
    stride_tokens: int = positive(128)
    question_tokens: int = positive(64)
    answer_tokens: int = positive(30)
    n_best: int = positive(20)
    # Tagging: add neighboring sentences of the document as context (Devlin et al., section 5.3).
    document_context: bool = False


@dataclasses.dataclass
class FinetuneConfig(TrainConfig):
    """A fine-tuning run (Devlin et al., section 4)."""

    task: TaskConfig = dataclasses.field(default_factory=TaskConfig)
    # Passes over the training data.
    epochs: float = positive(3.0)
    # Fraction of the steps; sets optim.warmup_steps.
    warmup_fraction: float = below_one(0.1)
    # Stop after this many evaluations without improvement; 0 disables early stopping.
    patience: int = not_negative(0)
    # Freeze the embeddings and this many layers above them; 0 trains everything.
    frozen_layers: int = not_negative(0)
    # Reinitialize this many layers from the top instead of loading them from the checkpoint.
    reset_layers: int = not_negative(0)
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    # Do not pack: one sequence per row. Slower; for comparison.
    one_a_row: bool = False
    batch_size: int = positive(32)
    # Length of the run; 0 computes it from epochs.
    steps: int = not_negative(0)
    evaluate_every_steps: int = not_negative(0)
    log_every_steps: int = positive(20)
    # Bias correction stabilizes training on small datasets (Mosbach et al., arXiv 2006.04884);
    # BERT's "adam" has none.
    optim: OptimConfig = dataclasses.field(
        default_factory=lambda: OptimConfig(optimizer="adamw", learning_rate=3e-5)
    )
    checkpoint: CheckpointConfig = dataclasses.field(
        default_factory=lambda: CheckpointConfig(every_steps=0, keep_last=1)
    )


def take_rows(config: Config, folders: Sequence[str]) -> None:
    """Set the rows of each phase.

    Args:
        config: the config, which is changed.
        folders: folders of rows, one per phase; () to keep those of the config. "A=0.7,B=0.3" is a
            mixture; with a single phase, the parts of one may also be given apart.
    """
    if len(config.phases) == 1 and len(folders) > 1 and _mixture(joined := ",".join(folders)):
        folders = [joined]
    if folders and len(folders) != len(config.phases):
        raise UserError(
            f"--rows: {counted(len(folders), 'folder')} for {counted(len(config.phases), 'phase')} "
            f"({', '.join(f'T={p.tokens or chr(63)}' for p in config.phases)}) of the config: pass one "
            "per phase (A=0.7,B=0.3 mixes two), or choose a config with one phase, such as base,128"
        )
    for phase, rows in zip(config.phases, folders, strict=bool(folders)):
        phase.mixture = _mixture(rows)
        phase.rows = "" if phase.mixture else rows


def _mixture(text: str) -> tuple[SourceConfig, ...]:
    """Return the folders of FOLDER=WEIGHT,FOLDER=WEIGHT,…; () for anything else, a path."""
    parts = [re.fullmatch(r"(.+)=(\d+(?:\.\d*)?)", part) for part in text.split(",")]
    sources = [SourceConfig(part[1], float(part[2])) for part in parts if part]
    return tuple(sources) if len(sources) == len(parts) > 1 else ()


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


def model_at(config: TrainConfig, step: int) -> ModelConfig:
    """Return the model after `step` steps: that of the config, with the base of "rope" of the phase."""
    if not isinstance(config, Config):
        return config.model
    phases = zip(config.phases, phase_ends(config), strict=True)
    phase = next((phase for phase, end in phases if step <= end), config.phases[-1])
    return dataclasses.replace(config.model, rope_theta=phase.rope_theta or config.model.rope_theta)


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


def from_dict(values: Any) -> TrainConfig:
    """Invert `to_dict`: a `FinetuneConfig` if there is a task, else a `Config`."""
    try:
        if not isinstance(values, Mapping) or not values.keys() & {"task", "phases"}:
            raise ValueError("it has neither task nor phases")
        return build(FinetuneConfig if "task" in values else Config, values, "config")
    except ValueError as error:
        raise UserError(f"not a config of this version of bert_jax: {error}") from None
