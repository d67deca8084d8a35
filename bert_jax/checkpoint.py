"""Orbax checkpoints of a run: saved while the next steps run, committed by a rename, kept by policy."""

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging
from orbax.checkpoint import checkpoint_managers as managers

from bert_jax import files, workdir
from bert_jax.config import CheckpointConfig, Run
from bert_jax.data import wordpiece
from bert_jax.data.wordpiece import Vocabulary
from bert_jax.errors import UserError
from bert_jax.model import Params, shapes

# The optimizer's copy of the parameters' size is kept apart, so that fine-tuning and prediction
# read the parameters alone.
PARAMS, TRAINING = "params", "training"


class Checkpoints:
    """The checkpoints of one workdir, by step.

    Args:
        folder: `WORKDIR/checkpoints`, created if need be.
        config: what to keep.
        best_by: the held-out metric of the best checkpoints.
        highest: whether they have the highest values of it, or the lowest.
        read_only: only look, neither create nor clean up.
    """

    def __init__(
        self,
        folder: str | pathlib.Path,
        config: CheckpointConfig,
        best_by: str = "",
        highest: bool = False,
        read_only: bool = False,
    ):
        # Orbax narrates every save, and a failed one at length before it raises what we report.
        logging.set_verbosity(logging.FATAL)
        self.folder = pathlib.Path(folder).absolute()
        self._best_by, self._sign = best_by, -1 if highest else 1
        keep: list[Any] = [managers.LatestN(config.keep_last)]
        if config.keep_best:
            keep.append(
                managers.BestN(
                    get_metric_fn=lambda metrics: metrics[best_by],
                    reverse=not highest,  # the last of the order are kept
                    n=config.keep_best,
                    keep_checkpoints_without_metrics=False,
                )
            )
        options = ocp.CheckpointManagerOptions(
            preservation_policy=managers.AnyPreservationPolicy(keep),
            cleanup_tmp_directories=not read_only,
            create=not read_only,
            read_only=read_only,
        )
        with self._errors("open"):
            self._manager = ocp.CheckpointManager(self.folder, options=options)

    def steps(self) -> list[int]:
        """The committed steps, oldest first."""
        return sorted(self._manager.all_steps())

    def save(
        self,
        step: int,
        params: Params,
        training: Any = None,
        heldout: dict[str, float] | None = None,
    ) -> None:
        """Starts saving a step; returns once the arrays are copied.

        Args:
            step: its number.
            params: the parameters.
            training: everything else that resuming needs; None for a model that has no run.
            heldout: held-out metrics at this step, None if it was not evaluated.

        Raises:
            UserError: this save or the one before it failed (a full disk).
        """
        items = {PARAMS: ocp.args.StandardSave(params)}
        if training is not None:
            items[TRAINING] = ocp.args.StandardSave(training)
        args = ocp.args.Composite(**items)
        with self._errors(f"save step {step} to"):
            self._manager.save(step, args=args, metrics=heldout, force=True)

    def wait(self) -> None:
        """Returns once every save has been committed.

        Raises:
            UserError: a save failed.
        """
        with self._errors("save to"):
            self._manager.wait_until_finished()

    def restore(self, step: int, params: Params, training: Any) -> tuple[Params, Any]:
        """Reads a step into arrays shaped and sharded as the arguments (`jax.ShapeDtypeStruct`)."""
        args = ocp.args.Composite(
            **{
                PARAMS: ocp.args.StandardRestore(params),
                TRAINING: ocp.args.StandardRestore(training),
            }
        )
        with self._errors(f"restore step {step} from"):
            restored = self._manager.restore(step, args=args)
        return restored[PARAMS], restored[TRAINING]

    def restore_params(self, step: int, params: Params) -> Params:
        """Reads the parameters of a step alone."""
        args = ocp.args.Composite(**{PARAMS: ocp.args.StandardRestore(params)})
        with self._errors(f"restore step {step} from"):
            return self._manager.restore(step, args=args)[PARAMS]

    def best_step(self) -> int:
        """The kept step with the best held-out metric, or the newest if none was evaluated."""
        scored = [
            (self._sign * self._manager.metrics(step)[self._best_by], step)
            for step in self.steps()
            if (self.folder / str(step) / "metrics").exists()
        ]
        return min(scored)[1] if scored else self.steps()[-1]

    def forget_after(self, step: int) -> int:
        """Deletes the steps after one, and returns the newest that is left; 0 for none."""
        self.wait()
        with self._errors("delete from"):
            for later in [s for s in self.steps() if s > step]:
                self._manager.delete(later)
        return max(self.steps(), default=0)

    def close(self) -> None:
        """Waits for saves and lets go of the folder's threads."""
        with self._errors("save to"):
            self._manager.close()

    @contextlib.contextmanager
    def _errors(self, action: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(f"cannot {action} {self.folder}: {files.describe(error)}") from error
        except Exception as error:
            # TensorStore reports the system's errors as text inside a ValueError.
            text = " ".join(str(error).split())
            if "No space left" in text or "RESOURCE_EXHAUSTED" in text:
                raise UserError(
                    f"cannot {action} {self.folder}: the disk is full; free some space and run the "
                    "same command again: it goes on from the newest complete checkpoint"
                ) from error
            raise UserError(f"cannot {action} {self.folder}: {text[:500]}") from error


def abstract(tree: Any, sharding: Any) -> Any:
    """Shapes of a tree (arrays or shapes) with shardings: one for all leaves, or a tree of them."""
    if isinstance(sharding, jax.sharding.Sharding):
        sharding = jax.tree.map(lambda _: sharding, tree)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, sharding
    )


def load_model(
    folder: str | pathlib.Path, which: str = "best"
) -> tuple[Run, Vocabulary, Params, int]:
    """The model of a workdir.

    Args:
        folder: the workdir.
        which: "best" (by the held-out metric of its task), "latest", or a step.

    Returns:
        Its config, with the attention that runs anywhere, vocabulary, parameters and step.

    Raises:
        UserError: no run there, or no such checkpoint.
    """
    config = workdir.read_config(folder)
    config.model.attention = "xla"
    checkpoints = Checkpoints(
        pathlib.Path(folder) / "checkpoints",
        config.checkpoint,
        **workdir.read_best_by(folder),
        read_only=True,
    )
    steps = checkpoints.steps()
    if not steps:
        raise UserError(f"{folder} has no checkpoint yet: let the run reach its first one")
    if which in ("best", "latest"):
        step = checkpoints.best_step() if which == "best" else steps[-1]
    elif which.isdigit() and int(which) in steps:
        step = int(which)
    else:
        kept = ", ".join(map(str, steps))
        raise UserError(f"{folder} has no checkpoint {which!r}: best, latest, or one of {kept}")
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    params = checkpoints.restore_params(step, abstract(shapes(config.model), here))
    checkpoints.close()
    return config, wordpiece.load(folder), params, step
