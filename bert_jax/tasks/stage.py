"""What the loop needs of a task: a stretch of steps over rows of one length."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Array, Float, Key

from bert_jax.data.loader import Batch
from bert_jax.losses import Pair
from bert_jax.model import Params


@runtime_checkable
class Task(Protocol):
    """Inputs, objectives and metrics on rows of one shape."""

    # The held-out metric that decides which checkpoint is best, the highest or the lowest.
    best_by: str
    best_is_highest: bool
    # Of a training step, for the utilization of the device.
    flops_per_row: float

    def init(self, key: Key[Array, ""]) -> Params:
        """Random parameters, the same whatever the shape of the rows."""

    def inputs(self, batch: dict[str, Array], key: Key[Array, ""]) -> Any:
        """Rows to inputs, on the device; every leaf has the rows on its first axis."""

    def weights(self, inputs: Any) -> dict[str, Float[Array, ""]]:
        """The objectives, and what each is divided by for a whole batch."""

    def pairs(self, params: Params, inputs: Any, key: Key[Array, ""] | None) -> dict[str, Pair]:
        """Objectives and metrics as (sum, weight); a `key` switches dropout on."""

    def outputs(self, params: Params, inputs: Any) -> dict[str, Array]:
        """What `score` needs of held-out rows, which are on each array's first axis."""

    def score(self, found: list[tuple[Batch, dict[str, np.ndarray]]]) -> dict[str, float]:
        """Held-out metrics that are no means, from all batches and their outputs."""

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        """Means for people: adds what follows from them."""

    def describe(self, summary: dict[str, float]) -> str:
        """A few words of a summary for the progress bar."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """Steps from `first_step` up to `end_step` on one task.

    Attributes:
        task: what to learn.
        tokens: T.
        batch_size: rows a step over all devices and hosts, at most.
        accumulation: parts a batch is computed in.
        batch_shape: shapes and types of a global batch of `batch_size` rows.
        first_step: the first step of this stage.
        end_step: the first step that is no longer of this stage.
        batches: (first, end, process, processes) to a process's batches of those steps, counted
            from the start of the stage.
        heldout: (process, processes) to a process's part of the held-out batches.
        smaller_batches: the other row counts that steps have; they follow from the step alone.
    """

    task: Task
    tokens: int
    batch_size: int
    accumulation: int
    batch_shape: dict[str, jax.ShapeDtypeStruct]
    first_step: int
    end_step: int
    batches: Callable[[int, int, int, int], Iterator[Batch]]
    heldout: Callable[[int, int], Iterator[Batch]]
    smaller_batches: tuple[int, ...] = ()

    def with_rows(self, rows: int) -> "Stage":
        """Return this stage with all batches of one row count, to compile its step for."""
        shape = {
            name: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)
            for name, x in self.batch_shape.items()
        }
        return dataclasses.replace(self, batch_size=rows, batch_shape=shape, smaller_batches=())
