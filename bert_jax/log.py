"""Metrics of a run on their way to files, TensorBoard and the terminal."""

import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from bert_jax import device, files, optim, workdir
from bert_jax.config import Run
from bert_jax.evaluate import means
from bert_jax.progress import Progress
from bert_jax.tasks.stage import Stage


class Log:
    """Writes metrics.jsonl and speed.jsonl, TensorBoard events and the progress bar's note.

    Only the first process writes.

    Args:
        folder: the workdir.
        step: the step the run stands at; later lines of an earlier start are dropped.
        config: for the schedule.
        mesh: for the number of devices.
        progress: the bar.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        step: int,
        config: Run,
        mesh: jax.sharding.Mesh,
        progress: Progress,
    ):
        self._config, self._progress = config, progress
        self._devices = mesh.size
        # Of each line's last step, all at once: a rate that is computed when it is needed waits on the
        # device for the steps ahead.
        ends = np.append(np.arange(0, config.steps, config.log_every_steps)[1:], config.steps)
        self._rates = np.asarray(optim.schedule(config.optim, config.steps)(ends - 1))
        self._clock = (step, time.monotonic())
        self._writes = jax.process_index() == 0
        if self._writes:
            self._metrics = workdir.Lines(folder / "metrics.jsonl", step)
            self._speed = workdir.Lines(folder / "speed.jsonl", step)
            self._board = _board(folder / "tensorboard", step)

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *error) -> None:
        if self._writes:
            with files.one_line_errors("cannot write TensorBoard events"):
                self._board.close()

    def begin(self, stage: Stage, step: int) -> None:
        """From here on, `step`, the steps are of this stage."""
        self._stage, self._clock = stage, (step, time.monotonic())

    def training(self, step: int, sums: dict[str, Any]) -> None:
        """Writes the means of the window that ends with `step`, which the device has finished."""
        summary = self._stage.task.summarize(means(sums))
        # The rate that the window's last step was taken with.
        summary["learning_rate"] = float(self._rates[(step - 1) // self._config.log_every_steps])
        self._write(step, "train", summary)
        note = self._stage.task.describe(summary)
        rows = float(self._stage.batch_size)
        if self._stage.smaller_batches:  # the window's mean, from its tokens with padding
            steps = (step - 1) % self._config.log_every_steps + 1
            rows = float(sums["real_fraction"][1]) / self._stage.tokens / steps
        self._progress.note(note + self._measure(step, summary, rows))

    def heldout(self, step: int, measure: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Writes held-out means and returns them with what the task adds to them.

        The time that `measure` takes is no step's; the steps so far must be done.
        """
        begun = time.monotonic()
        found = measure()
        self._clock = (self._clock[0], self._clock[1] + time.monotonic() - begun)
        if not found:
            return {}
        summary = self._stage.task.summarize(found)
        self._write(step, "heldout", summary)
        self._progress.say(f"step {step:,}: held-out {self._stage.task.describe(summary)}")
        return summary

    def sync(self) -> None:
        """Makes everything so far survive a power failure."""
        if self._writes:
            self._metrics.sync()
            self._board.flush()

    def _measure(self, step: int, summary: dict[str, float], rows_a_step: float) -> str:
        now = time.monotonic()
        before, self._clock = self._clock, (step, now)
        if not self._writes:
            return ""
        seconds = now - before[1]
        rows = (step - before[0]) * rows_a_step
        tokens = rows * self._stage.tokens / seconds
        speed = {
            "step": step,
            "seconds": seconds,
            "steps_per_second": (step - before[0]) / seconds,
            "tokens_per_second": tokens,
            "real_tokens_per_second": tokens * summary["real_fraction"],
            "flops_per_second": rows * self._stage.task.flops_per_row / seconds,
        }
        note = f" {tokens * summary['real_fraction']:,.0f} real tok/s {summary['real_fraction']:.0%} real"
        peak = device.peak_flops()
        if peak:
            used = speed["flops_per_second"] / (peak * self._devices)
            speed["model_flops_utilization"] = used
            note += f" {speed['model_flops_utilization']:.0%} MFU"
        self._speed.append(speed)
        for name, value in speed.items():
            if name != "step":
                self._board.add_scalar(f"speed/{name}", value, step)
        return note

    def _write(self, step: int, split: str, summary: dict[str, float]) -> None:
        if not self._writes:
            return
        self._metrics.append({"step": step, "split": split, **summary})
        for name, value in summary.items():
            self._board.add_scalar(f"{split}/{name}", value, step)


def _board(folder: pathlib.Path, step: int) -> Any:
    """A TensorBoard writer in which events after `step` of an earlier start count no more."""
    # tensorboardX imports PyTorch where it is installed: seconds for nothing we use.
    torch = sys.modules.get("torch")
    sys.modules["torch"] = None
    try:
        from tensorboardX import SummaryWriter
    finally:
        del sys.modules["torch"]
        if torch is not None:
            sys.modules["torch"] = torch
    return SummaryWriter(str(folder), purge_step=step + 1)
