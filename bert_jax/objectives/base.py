"""The interfaces between training loop and objectives: `Objective`, and a phase of training."""

import abc
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Key

from bert_jax.data.loader import Batch
from bert_jax.errors import UserError
from bert_jax.model.bert import Params
from bert_jax.objectives.losses import WeightedSum


class Metric(NamedTuple):
    """The name of a metric, and whether higher values are better."""

    name: str
    higher_is_better: bool = True


class Objective(abc.ABC):
    """Inputs, losses and metrics for rows of one shape.

    A metric "real_fraction", the fraction of tokens that are not padding, makes the speed count these
    only; it is required if steps have different numbers of rows (`Phase.smaller_batch_sizes`).

    Attributes:
        best_metric: held-out metric that selects the best checkpoint.
        flops_per_row: FLOPs of a training step per row, for hardware utilization.
        additive: whether the loss of a batch is the sum of the losses of its rows. Otherwise a batch
            cannot be computed in parts, and gradient accumulation is refused.
        loss_scales: weights of losses by name; 1 for others.
        teacher: frozen parameters, which the training state holds and `loss_terms` finds as
            `params["teacher"]`; None without a teacher.
    """

    best_metric: Metric
    flops_per_row: float
    additive: bool = True
    loss_scales: Mapping[str, float] = MappingProxyType({})
    teacher: Params | None = None

    @abc.abstractmethod
    def init(self, key: Key[Array, ""]) -> Params:
        """Return random parameters, independent of the shape of the rows."""

    @abc.abstractmethod
    def make_inputs(self, batch: dict[str, Array], key: Key[Array, ""]) -> Any:
        """Convert rows to inputs on the device; rows are the first axis of every leaf."""

    @abc.abstractmethod
    def normalizers(self, inputs: Any) -> dict[str, Float[Array, ""]]:
        """Return the normalizer of each loss for a whole batch."""

    @abc.abstractmethod
    def loss_terms(
        self, params: Params, inputs: Any, key: Key[Array, ""] | None
    ) -> dict[str, WeightedSum]:
        """Return losses and metrics as (sum, weight); dropout is on if `key` is given."""

    def predict(self, params: Params, inputs: Any) -> dict[str, Array]:
        """Return what `score` needs of held-out rows; rows are the first axis of every array."""
        return {}

    def score(
        self, batches_and_outputs: Iterable[tuple[Batch, dict[str, np.ndarray]]]
    ) -> dict[str, float]:
        """Return held-out metrics that are not means, from all batches and their outputs.

        They are computed while they are iterated over, once, so that few are in memory.
        """
        return {}

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        """Add metrics derived from the means, for display."""
        return means

    @abc.abstractmethod
    def progress_text(self, summary: dict[str, float]) -> str:
        """Return a short text of a summary for the progress bar."""


class Source(NamedTuple):
    """A folder of a mixture: its share of the tokens, its epochs in the phase, its held-out batches."""

    share: float
    epochs: float
    heldout: Callable[[int, int], Iterator[Batch]]


@dataclasses.dataclass(frozen=True)
class Phase:
    """Steps from `first_step` up to `end_step` with one objective.

    Attributes:
        objective: what to train.
        tokens: tokens per row, T.
        batch_size: maximum rows per step over all devices and hosts.
        accumulation: number of parts in which a batch is computed.
        batch_shape: shapes and dtypes of a global batch of `batch_size` rows.
        first_step: the first step of this phase.
        end_step: the step after its last one.
        batches: (first, end, process, processes) to a process's batches of those steps, counted
            from the start of the phase.
        row_indices: step, counted likewise, to the indices in the data set of the rows of its global
            batch; in fine-tuning, of its examples.
        heldout: (process, processes) to a process's part of the held-out batches.
        sources: in a phase with a mixture, its folders by name, whose held-out batches replace `heldout`.
        smaller_batch_sizes: other row counts that steps can have, determined by the step number.
    """

    objective: Objective
    tokens: int
    batch_size: int
    accumulation: int
    batch_shape: dict[str, jax.ShapeDtypeStruct]
    first_step: int
    end_step: int
    batches: Callable[[int, int, int, int], Iterator[Batch]]
    row_indices: Callable[[int], list[int]]
    heldout: Callable[[int, int], Iterator[Batch]]
    smaller_batch_sizes: tuple[int, ...] = ()
    sources: Mapping[str, Source] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        """Check that the objective allows gradient accumulation."""
        if self.accumulation > 1 and not self.objective.additive:
            raise UserError(
                f"config.accumulation is {self.accumulation}: it must be 1 with a loss that compares "
                "all examples of a batch; to save memory, set config.model.remat=full or lower "
                "config.batch_size"
            )

    def with_rows(self, rows: int) -> "Phase":
        """Return this phase with `rows` rows in every batch, to compile its step for that shape."""
        shape = {
            name: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)
            for name, x in self.batch_shape.items()
        }
        return dataclasses.replace(self, batch_size=rows, batch_shape=shape, smaller_batch_sizes=())
