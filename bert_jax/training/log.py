"""Write the metrics of a run to files, TensorBoard and the terminal."""

import contextlib
import json
import math
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from bert_jax.config import schema as config_lib
from bert_jax.config.schema import TrainConfig
from bert_jax.errors import UserError
from bert_jax.objectives.base import Phase
from bert_jax.runs import workdir
from bert_jax.runtime import chips, sharding
from bert_jax.runtime.progress import Progress
from bert_jax.storage import files
from bert_jax.training import guard, optim, trackers
from bert_jax.training.evaluate import means

_CANNOT_WRITE_EVENTS = "cannot write TensorBoard events"
_FLUSH_SECONDS = 60  # TensorBoard shows events when they are flushed


class Log:
    """Writer of metrics.jsonl, speed.jsonl, TensorBoard events and the progress bar's note.

    Only process 0 writes.

    Args:
        folder: the workdir.
        step: current step; lines of an earlier start after this step are dropped.
        config: config of the run.
        mesh: device mesh.
        progress: progress bar.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        step: int,
        config: TrainConfig,
        mesh: sharding.Mesh,
        progress: Progress,
    ):
        self._config, self._progress = config, progress
        self._devices, device = mesh.size, mesh.devices.flat[0]
        self._chip = chips.find(device.device_kind)
        if self._chip is None and device.platform != "cpu":
            progress.say(f"no data sheet of {device.device_kind}: its utilization is not logged")
        # Precompute the learning rates to log: computing one later would wait on the device for the
        # steps dispatched ahead.
        ends = np.append(np.arange(0, config.steps, config.log_every_steps)[1:], config.steps)
        self._rates = np.asarray(optim.schedule(config.optim, config.steps)(ends - 1))
        self._clock = (step, time.monotonic())
        self._folder, self._writes = folder, jax.process_index() == 0
        self._trackers: dict[str, trackers.Tracker] = {}
        if self._writes and config.trackers:
            devices = f"{mesh.size} {device.device_kind}"
            run = workdir.first_start(folder)
            self._trackers = trackers.open_trackers(config, folder, run, devices)
        if self._writes:
            self._metrics = workdir.JsonlFile(folder / "metrics.jsonl", step)
            self._speed = workdir.JsonlFile(folder / "speed.jsonl", step)
            self._board = _Board(folder / "tensorboard", step)
            self._files = [self._metrics, self._speed]
            if getattr(config, "sample_texts", ()):
                self._samples = workdir.JsonlFile(folder / workdir.SAMPLES, step)
                self._files.append(self._samples)

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error) -> None:
        # On a full disk closing fails too; it must not hide the error that ended the run.
        with contextlib.suppress(UserError) if kind else contextlib.nullcontext():
            self._close()
        for name, tracker in list(self._trackers.items()):
            with self._dropped_if_failing(name):
                tracker.close(failed=kind is not None)

    def _close(self) -> None:
        if self._writes:
            with contextlib.ExitStack() as stack:  # closes all of them, whatever fails
                for file in self._files:
                    stack.callback(file.close)
                with files.one_line_errors(_CANNOT_WRITE_EVENTS):
                    self._board.close()

    def hyperparameters(self, metric: str) -> None:
        """Write the settings for TensorBoard's HPARAMS tab, which compares runs by `metric`."""
        if self._writes:
            _write_hyperparameters(self._board, self._config, f"heldout/{metric}")

    def begin(self, phase: Phase, step: int) -> None:
        """Log the steps after `step` as those of `phase`."""
        self._phase, self._clock = phase, (step, time.monotonic())

    def training(self, step: int, sums: dict[str, Any]) -> None:
        """Write the means of the window that ends with `step`, which must be finished.

        Nothing is written if all its steps were skipped.
        """
        sums = jax.device_get(sums)
        if not any(weight for _, weight in sums.values()):
            return
        summary = self._phase.objective.summarize(means(sums))
        # The learning rate of the window's last step.
        summary["learning_rate"] = float(self._rates[(step - 1) // self._config.log_every_steps])
        self._write(step, "train", summary)
        note = self._phase.objective.progress_text(summary)
        rows = float(self._phase.batch_size)
        if self._phase.smaller_batch_sizes:  # mean row count, from the tokens including padding
            steps = (step - 1) % self._config.log_every_steps + 1
            rows = float(sums["real_fraction"][1]) / self._phase.tokens / steps
        speed = self._log_speed(step, summary, rows)
        if self._progress.is_narrow:
            note = note.partition(" nsp ")[0]
        self._progress.note(f"{note} lr {summary['learning_rate']:.1g}{speed}")

    def log_first_step(self, step: int, sums: dict[str, Any]) -> None:
        """Show the metrics of the first step of this start, which must be finished and begin a window."""
        text = self._phase.objective.progress_text(self._phase.objective.summarize(means(sums)))
        self._progress.say(f"step {step:,}: {text}")

    def bad_step(self, bad_step: guard.BadStep) -> None:
        """Write a step that was skipped or stopped the run, with the indices of its batch's rows."""
        step = bad_step.step - 1 - self._phase.first_step
        line = {
            "step": bad_step.step,
            "split": "stopped" if bad_step.stops else "skipped",
            "loss": _finite(bad_step.loss),
            "gradient_norm": _finite(bad_step.gradient_norm),
            "gradient_norms": {k: _finite(x) for k, x in bad_step.gradient_norms.items()},
            "rows": self._phase.row_indices(step),
        }
        if self._writes:
            self._metrics.append(line)
            print_json(line)
        if not bad_step.stops:
            self._progress.say(f"{bad_step}; skipped its batch")

    def evaluate_and_log(
        self, step: int, evaluate: Callable[[], dict[str, float]]
    ) -> dict[str, float]:
        """Evaluate, write the held-out metrics and return them as the objective summarizes them.

        The time that `evaluate` takes does not count as training time. All dispatched steps must be
        finished.
        """
        start_time = time.monotonic()
        note = self._progress.note("evaluating …")
        metrics = evaluate()
        self._progress.note(note)
        self._clock = (self._clock[0], self._clock[1] + time.monotonic() - start_time)
        if not metrics:
            return {}
        summary = self._phase.objective.summarize(metrics)
        self._write(step, "heldout", summary)
        self._progress.say(
            f"step {step:,}: held-out {self._phase.objective.progress_text(summary)}"
        )
        return summary

    def samples(self, step: int, lines: list[dict[str, Any]]) -> None:
        """Write how the masks of the sample texts are filled."""
        for line in lines if self._writes else ():
            self._samples.append({"step": step, **line})

    def sync(self) -> str | None:
        """Sync all lines written so far to disk; return the checksum of metrics.jsonl, if it is ours."""
        if not self._writes:
            return None
        with files.one_line_errors(_CANNOT_WRITE_EVENTS):
            self._board.flush()
        for file in self._files:
            file.sync()
        return self._metrics.checksum

    def _log_speed(self, step: int, summary: dict[str, float], rows_per_step: float) -> str:
        now = time.monotonic()
        (last_step, last_time), self._clock = self._clock, (step, now)
        if not self._writes:
            return ""
        seconds = now - last_time
        rows = (step - last_step) * rows_per_step
        tokens = rows * self._phase.tokens / seconds
        speed = {
            "step": step,
            "seconds": seconds,
            "steps_per_second": (step - last_step) / seconds,
            "tokens_per_second": tokens,
            "real_tokens_per_second": tokens * summary.get("real_fraction", 1.0),
            "flops_per_second": rows * self._phase.objective.flops_per_row / seconds,
        }
        note = f" {_short(speed['real_tokens_per_second'])} tok/s"
        if self._chip:
            mfu = speed["flops_per_second"] / (self._chip.flops * self._devices)
            speed["model_flops_utilization"] = mfu
            note += f" {mfu:.0%} MFU"
        self._speed.append(speed)
        self._send(step, "speed", speed)
        return note

    def _write(self, step: int, split: str, summary: dict[str, float]) -> None:
        if not self._writes:
            return
        self._metrics.append({"step": step, "split": split, **summary})
        self._send(step, split, summary)

    def _send(self, step: int, split: str, values: dict[str, Any]) -> None:
        """Send values to what follows the run: TensorBoard, trackers, the reader of `--json`."""
        named = {f"{split}/{name}": value for name, value in values.items() if name != "step"}
        with files.one_line_errors(_CANNOT_WRITE_EVENTS):
            for name, value in named.items():
                self._board.add(name, value, step)
        for name, tracker in list(self._trackers.items()):
            with self._dropped_if_failing(name):
                tracker.log(step, named)
        print_json({**values, "step": step, "split": split})

    @contextlib.contextmanager
    def _dropped_if_failing(self, name: str) -> Iterator[None]:
        """Drop a tracker that raises an error, so that the run continues."""
        try:
            yield
        except Exception as error:  # packages of others raise what they like
            del self._trackers[name]
            self._progress.say(
                f"warning: config.trackers: {name} failed ({' '.join(str(error).split())[:200]}) and gets "
                f"no more metrics until the run resumes; {self._folder / 'metrics.jsonl'} has all"
            )


def print_json(line: dict[str, Any]) -> None:
    """Print a line for the reader of `--json`, if there is one."""
    if Progress.shown and Progress.json_lines:
        print(json.dumps(line), file=Progress.json_lines, flush=True)


def _finite(number: float) -> float | None:
    """Return a number, or None if it is not finite, which JSON cannot express."""
    return number if math.isfinite(number) else None


def _short(number: float) -> str:
    """Return a number in three or four characters: 950, 1.2k, 34k, 5.6M."""
    for scale, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= scale:
            number /= scale
            return f"{number:.1f}{unit}" if number < 10 else f"{number:.0f}{unit}"
    return f"{number:.0f}"


class EarlyStopping:
    """Early stopping after `config.patience` evaluations without improvement.

    The decision depends only on the metrics so far, which a restart reads again from the workdir.
    """

    def __init__(self, config: TrainConfig, best: dict[str, Any], folder: pathlib.Path, step: int):
        self._evaluations = getattr(config, "patience", 0)
        self._metric, self._sign = best["best_by"], 1 if best["highest"] else -1
        self._since = best["since"]
        self._values: list[float] = []
        self._steps: list[int] = []
        for line in workdir.read_steps(folder / "metrics.jsonl"):
            if line.get("split") == "heldout" and line["step"] <= step:
                self.add(line)

    def add(self, metrics: dict[str, Any]) -> None:
        """Add the metrics of an evaluation; those on other rows than the last phase's do not count."""
        if self._metric in metrics and metrics["step"] >= self._since:
            self._values.append(self._sign * metrics[self._metric])
            self._steps.append(metrics["step"])

    @property
    def best(self) -> tuple[int, float] | None:
        """Step and value of the best evaluation, the last if tied; None before the first."""
        if not self._values:
            return None
        value, step = max(zip(self._values, self._steps, strict=True))
        return step, value * self._sign

    @property
    def reason(self) -> str:
        """Why training stops, for a message."""
        return f"no improvement in {self._evaluations} evaluations"

    @property
    def is_over(self) -> bool:
        """Whether to stop."""
        since_best = (
            len(self._values) - 1 - self._values.index(max(self._values)) if self._values else 0
        )
        return 0 < self._evaluations <= since_best


class _Board:
    """TensorBoard events of a run, written by the calling thread.

    The thread of tensorboardX's `SummaryWriter` drops errors, and blocks the run once it has died.

    Args:
        folder: folder of the event files.
        step: current step; events of an earlier start after it are discarded.
    """

    def __init__(self, folder: pathlib.Path, step: int):
        self._library, self._flushed = _tensorboardx(), time.monotonic()
        with files.one_line_errors(f"cannot write {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            self._events = self._library.event_file_writer.EventsWriter(str(folder / "events"))
            session = self._library.proto.event_pb2.SessionLog
            self._write(step=step + 1, session_log=session(status=session.START))

    def _write(self, **fields: Any) -> None:
        event = self._library.proto.event_pb2.Event(wall_time=time.time(), **fields)
        self._events.write_event(event)
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self.flush()

    def add(self, name: str, value: float, step: int) -> None:
        """Write a scalar."""
        self._write(step=step, summary=self._library.summary.scalar(name, value))

    def add_hyperparameters(self, values: dict[str, Any], metrics: dict[str, float]) -> None:
        """Write what TensorBoard's HPARAMS tab shows."""
        for summary in self._library.summary.hparams(values, metrics):
            self._write(summary=summary)

    def flush(self) -> None:
        """Sync the events to disk."""
        self._events.flush()
        self._flushed = time.monotonic()

    def close(self) -> None:
        """Sync the events to disk and close the file."""
        self._events.close()


def _tensorboardx() -> Any:
    # If PyTorch is installed, tensorboardX imports it, which takes seconds and is not needed.
    torch = sys.modules.get("torch")
    sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]
    try:
        import tensorboardX.event_file_writer
        import tensorboardX.proto.event_pb2
        import tensorboardX.summary
    finally:
        del sys.modules["torch"]
        if torch is not None:
            sys.modules["torch"] = torch
    return tensorboardX


def _write_hyperparameters(board: _Board, config: TrainConfig, metric: str) -> None:
    defaults = config_lib.flatten(type(config)())
    model = config.model
    values: dict[str, Any] = {
        "model": f"L{model.layers}-H{model.hidden}-A{model.heads}",
        "batch_size": config.batch_size,
        "optim.learning_rate": config.optim.learning_rate,
    }
    for key, value in config_lib.flatten(config).items():
        if value != defaults.get(key) and not key.endswith(".rows"):
            values[key] = value if isinstance(value, bool | int | float) else str(value)
    board.add_hyperparameters(values, {metric: 0.0})
