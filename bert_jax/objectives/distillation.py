"""Knowledge distillation: a student learns from the predictions and states of a frozen teacher.

The teacher's parameters are part of the training state, sharded like the student's, but not of its
parameters, its optimizer state or its checkpoints. The losses are:

- the Kullback-Leibler divergence from the teacher's predictions (Hinton et al., arXiv 1503.02531);
- the squared error of hidden states (TinyBERT: Jiao et al., arXiv 1909.10351, section 3.1);
- the divergence of relations between queries, keys and values (MiniLM: Wang et al., arXiv 2002.10957;
  MiniLMv2: arXiv 2012.15828, section 3).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from bert_jax.config.model import ModelConfig
from bert_jax.config.schema import DistillConfig, TrainConfig
from bert_jax.data import rows
from bert_jax.errors import UserError
from bert_jax.model.bert import Bert, Outputs, Params, draw_params
from bert_jax.model.encoder import query_key_value
from bert_jax.model.flops import flops_per_row
from bert_jax.model.layers import Dense, dense
from bert_jax.objectives.causal_lm import CausalLM
from bert_jax.objectives.losses import WeightedSum
from bert_jax.objectives.masked_lm import Inputs, MaskedLM
from bert_jax.objectives.warm_start import Teacher

LOGITS, HIDDEN, RELATIONS = (
    f"distillation_{name}_loss" for name in ("logits", "hidden", "relations")
)


def with_teacher(params: Params, teacher: Params | None) -> Params:
    """Return the parameters that `loss_terms` of a distillation objective takes."""
    return params if teacher is None else {**params, "teacher": teacher}


def logit_loss(
    student: Float[Array, "... C"],
    teacher: Float[Array, "... C"],
    weights: Float[Array, "..."],
    temperature: float,
) -> WeightedSum:
    """Return the divergence KL(teacher || student) of predictions, times the squared temperature."""
    with jax.named_scope("loss"):
        student = jax.nn.log_softmax(student / temperature)
        teacher = jax.nn.log_softmax(teacher / temperature)
        divergence = jnp.sum(jnp.exp(teacher) * (teacher - student), -1) * temperature**2
        return jnp.sum(divergence * weights), jnp.sum(weights)


def hidden_loss(
    student: Float[Array, "B T D"], teacher: Float[Array, "B T D"], weights: Float[Array, "B T"]
) -> WeightedSum:
    """Return the mean squared error of hidden states over tokens and units."""
    error = (student.astype(jnp.float32) - teacher.astype(jnp.float32)) ** 2
    return jnp.sum(jnp.mean(error, -1) * weights), jnp.sum(weights)


def relation_loss(
    student: Float[Array, "B T N1 K1"],
    teacher: Float[Array, "B T N2 K2"],
    segment_ids: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    heads: int,
) -> WeightedSum:
    """Return the divergence of the relations softmax(x x' / sqrt(K)) of two sets of vectors.

    Args:
        student, teacher: queries, keys or values of a layer.
        segment_ids: sequence of each token; relations are within sequences.
        weights: 0 for padding.
        heads: number of relation heads that the vectors of a token are split into.

    Returns:
        The sum over tokens of the mean over heads of KL(teacher || student), and the sum of weights.
    """
    same = segment_ids[:, :, None] == segment_ids[:, None, :]

    def log_relations(x: Array) -> Float[Array, "B heads T T"]:
        x = x.reshape(*x.shape[:2], heads, -1)
        scores = jnp.einsum("bqhk,bthk->bhqt", x, x, preferred_element_type=jnp.float32)
        scores = scores / np.sqrt(x.shape[-1])
        return jax.nn.log_softmax(jnp.where(same[:, None], scores, jnp.finfo(jnp.float32).min))

    log_student, log_teacher = log_relations(student), log_relations(teacher)
    divergence = jnp.sum(jnp.exp(log_teacher) * (log_teacher - log_student), -1).mean(1)
    return jnp.sum(divergence * weights), jnp.sum(weights)


class StateLosses:
    """Losses of a student's hidden states and relations against those of its teacher.

    Attributes:
        flops_per_row: FLOPs of a training step for the losses, without the models'.
        outputs: what the losses need of a call of student and teacher.
    """

    def __init__(
        self, distill: DistillConfig, student: ModelConfig, teacher: ModelConfig, tokens: int
    ):
        """Initialize for rows of `tokens` tokens and models that passed `check`."""
        self._weights = {HIDDEN: distill.hidden, RELATIONS: distill.relations}
        self._student, self._teacher = student, teacher
        self._heads = distill.relation_heads or student.heads
        self._teacher_layer = distill.relation_layer or teacher.layers
        self._is_projected = bool(distill.hidden) and student.hidden != teacher.hidden
        self.outputs = ("states",) if self.names else ()
        self.flops_per_row = 0.0
        if distill.relations:  # of queries, keys and values
            self.flops_per_row += 3 * 2 * tokens**2 * (3 * student.hidden + teacher.hidden)
        if self._is_projected:
            product = 2 * tokens * student.hidden * teacher.hidden
            self.flops_per_row += 3 * product * (student.layers + 1)

    @property
    def names(self) -> list[str]:
        """Names of the losses."""
        return [name for name, weight in self._weights.items() if weight]

    def init(self, key: Key[Array, ""]) -> Params:
        """Return the parameters of a dense layer from the student's hidden size to the teacher's.

        There are none if the sizes are the same or no hidden states are compared.
        """
        if not self._is_projected:
            return {}
        layer = self._projection.init(key, jnp.zeros((1, self._student.hidden)))
        return draw_params(self._student, {"teacher_projection": layer["params"]}, key)

    @property
    def _projection(self) -> Dense:
        return dense(self._student, self._teacher.hidden)

    def __call__(
        self, params: Params, student: Outputs, teacher: Outputs, layout: rows.Layout
    ) -> dict[str, WeightedSum]:
        """Return the losses.

        Args:
            params: parameters of the student, with the teacher's as "teacher".
            student, teacher: what calls of both models return, with `outputs`.
            layout: layout of the rows.
        """
        weights, terms = rows.is_real(layout).astype(jnp.float32), {}
        states, teacher_states = student.states or [], teacher.states or []
        if self._weights[RELATIONS]:
            last, i = self._student.layers - 1, self._teacher_layer - 1
            ours = query_key_value(self._student, params, states[last], layout, last)
            theirs = query_key_value(self._teacher, params["teacher"], teacher_states[i], layout, i)
            terms[RELATIONS] = _sum(
                relation_loss(x, y, layout.segment_ids, weights, self._heads)
                for x, y in zip(ours, theirs, strict=True)
            )
        if self._weights[HIDDEN]:
            if self._is_projected:
                variables = {"params": params["teacher_projection"]}
                states = [self._projection.apply(variables, x) for x in states]
            every = self._teacher.layers // self._student.layers
            terms[HIDDEN] = _sum(
                hidden_loss(x, y, weights)
                for x, y in zip(states, teacher_states[::every], strict=True)
            )
        return terms


class Distilled(MaskedLM):
    """Masked LM, and next-sentence prediction, with losses against a teacher.

    Attributes:
        teacher: the teacher's parameters, which the training state holds; `loss_terms` finds them as
            "teacher" in its parameters.
        loss_scales: weights of the losses that do not have weight 1.
    """

    def __init__(self, distill: DistillConfig, teacher: Teacher, *args: Any):
        """Initialize for rows of one format.

        Args:
            distill: weights and settings of the losses.
            teacher: the teacher.
            *args: arguments of `MaskedLM`, with the student's config.
        """
        super().__init__(*args)
        student, self._distill, self.teacher = self.model.config, distill, teacher.params
        self._teacher_model = Bert(teacher.model)
        if distill.logits and not teacher.model.masked_lm:
            raise UserError(
                f"the teacher {distill.teacher} has no masked-LM head: set --config.distill.logits=0, "
                "with weights of distill.hidden or distill.relations"
            )
        check(distill, student, teacher.model, self._tokens)
        self._states = StateLosses(distill, student, teacher.model, self._tokens)
        self.loss_scales = loss_scales(distill, self.best_metric.name)
        args_of_flops = (self._tokens, self.masker.sequences, self.masker.predictions)
        self.flops_per_row += flops_per_row(teacher.model, *args_of_flops) / 3  # forward only
        self.flops_per_row += self._states.flops_per_row

    def init(self, key: Key[Array, ""]) -> Params:
        """Return random parameters, independent of the format of the rows."""
        return super().init(key) | self._states.init(key)

    def normalizers(self, inputs: Inputs) -> dict[str, Float[Array, ""]]:
        """Return the normalizer of each loss for a whole batch, before it is split into parts."""
        normalizers = super().normalizers(inputs)
        if self._distill.logits:
            normalizers[LOGITS] = jnp.sum(inputs.masked.weights)
        real_tokens = jnp.sum(rows.is_real(inputs.layout))
        return normalizers | dict.fromkeys(self._states.names, real_tokens)

    def loss_terms(
        self, params: Params, inputs: Inputs, key: Key[Array, ""] | None
    ) -> dict[str, WeightedSum]:
        """Return losses and metrics as (sum, weight); the student's dropout is on if `key` is given."""
        masked, layout = inputs.masked, inputs.layout
        args = (masked.tokens, layout, masked.positions)
        names = ("masked_lm", *self._states.outputs)
        student: Any = self.model.apply(
            {"params": params}, *args, key, outputs=("next_sentence", *names)
        )
        teacher: Any = self._teacher_model.apply(
            {"params": params["teacher"]}, *args, outputs=names
        )
        loss_terms = self.logit_terms(inputs, student)
        if self._distill.logits:
            vocab = self.model.config.vocab_size  # without the padding
            student_logits, teacher_logits = (x.masked_lm[..., :vocab] for x in (student, teacher))
            loss_terms[LOGITS] = logit_loss(
                student_logits, teacher_logits, masked.weights, self._distill.temperature
            )
        return loss_terms | self._states(params, student, teacher, layout)

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        """Add the weighted sum of the losses, and the perplexity: exp of the token loss."""
        names = (
            self.best_metric.name, "next_sentence_loss", "z_loss", LOGITS, HIDDEN, RELATIONS,
        )  # fmt: skip
        present = {name: means[name] for name in names if name in means}
        loss = sum(self.loss_scales.get(name, 1) * value for name, value in present.items())
        return {**super().summarize(means), "loss": loss}


class DistilledCausalLM(Distilled, CausalLM):
    """Next-token prediction with losses against a teacher."""


def objective(config: TrainConfig, teacher: Teacher) -> Callable[..., Distilled]:
    """Return what makes the objective of a pretraining run with a teacher."""
    kind = DistilledCausalLM if config.model.causal else Distilled
    return functools.partial(kind, config.distill, teacher)


def loss_scales(distill: DistillConfig, task_loss: str) -> dict[str, float]:
    """Return the weights of the losses by name; `task_loss` is the name of the task's own."""
    return {
        task_loss: distill.labels,
        LOGITS: distill.logits,
        HIDDEN: distill.hidden,
        RELATIONS: distill.relations,
    }


def check(distill: DistillConfig, student: ModelConfig, teacher: ModelConfig, tokens: int) -> None:
    """Check that a teacher fits a student and sequences of up to `tokens` tokens."""
    source = distill.teacher
    if teacher.causal != student.causal:
        raise UserError(
            f"the teacher {source} has causal={teacher.causal}, unlike config.model.causal"
        )
    if teacher.positions < tokens:
        raise UserError(
            f"the teacher {source} has {teacher.positions} positions, too few for sequences of "
            f"{tokens} tokens"
        )
    if distill.hidden and teacher.layers % student.layers:
        raise UserError(
            f"config.distill.hidden is {distill.hidden}: the teacher's {teacher.layers} layers must be a "
            f"multiple of the student's {student.layers}"
        )
    if distill.relation_layer > teacher.layers:
        raise UserError(
            f"config.distill.relation_layer is {distill.relation_layer}: the teacher has "
            f"{teacher.layers} layers"
        )
    heads = distill.relation_heads or student.heads
    if distill.relations and (student.hidden % heads or teacher.hidden % heads):
        raise UserError(
            f"config.distill.relation_heads: {heads} heads must divide the hidden sizes, "
            f"{student.hidden} of the student and {teacher.hidden} of the teacher"
        )


def _sum(terms: Any) -> WeightedSum:
    """Return the sum of losses with equal weights."""
    sums, weights = zip(*terms, strict=True)
    return jnp.sum(jnp.stack(sums)), weights[0]
