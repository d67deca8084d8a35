"""Write the metrics of a run to files, TensorBoard and the terminal."""

import contextlib
import json
import math
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from bert_jax.config import fields as fields_lib
from bert_jax.config.schema import TrainConfig
from bert_jax.errors import UserError
from bert_jax.objectives.base import Phase
from bert_jax.runs import workdir
from bert_jax.runtime import chips, sharding
from bert_jax.runtime.progress import Progress
from bert_jax.storage import files
from bert_jax.training import guard, optim, trackers
from bert_jax.training.evaluate import means

_SYNC_SECONDS = 60  # TensorBoard shows events when they are flushed


class Log:
    """Writer of metrics.jsonl, speed.jsonl, TensorBoard events and the progress bar's note.

    Only process 0 writes. Lines of an earlier start after `step`, the current step, are dropped.
    TensorBoard's HPARAMS tab compares runs by the held-out `metric`.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        step: int,
        config: TrainConfig,
        mesh: sharding.Mesh,
        progress: Progress,
        metric: str,
    ):
        self._config, self._progress = config, progress
        self._devices, device = mesh.size, mesh.devices.flat[0]
        self._chip = chips.find(device.device_kind)
        if self._chip is None and device.platform != "cpu":
            progress.say(f"no data sheet of {device.device_kind}: its utilization is not logged")
        # Precompute the learning rates to log: computing one later would wait on the device for the
        # steps dispatched ahead.
        ends = np.append(np.arange(0, config.steps, config.log_every_steps)[1:], config.steps)
        rates = np.asarray(optim.schedule(config.optim, config.steps)(ends - 1))
        self._rates = np.broadcast_to(rates, ends.shape)
        self._writes = jax.process_index() == 0
        self._trackers: dict[str, trackers.Tracker] = {}
        self._files: list[Any] = []
        if not self._writes:
            return
        devices, run = f"{mesh.size} {device.device_kind}", workdir.first_start(folder)
        self._trackers = trackers.open_trackers(config, folder, run, devices)
        self._metrics = workdir.JsonlFile(folder / "metrics.jsonl", step)
        self._speed = workdir.JsonlFile(folder / "speed.jsonl", step)
        self._board = _Board(folder / "tensorboard", step)
        self._board.add_hyperparameters(config, f"heldout/{metric}")
        self._files = [self._metrics, self._speed, self._board]
        if getattr(config, "sample_texts", ()):
            self._samples = workdir.JsonlFile(folder / workdir.SAMPLES, step)
            self._files.append(self._samples)

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error) -> None:
        with contextlib.ExitStack() as stack:
            # On a full disk closing fails too, which must not hide the error that ended the run.
            if kind:
                stack.enter_context(contextlib.suppress(UserError))
            for file in self._files:  # closes all of them, whatever fails
                stack.callback(file.close)
        self._track(lambda tracker: tracker.close(failed=kind is not None))

    def begin(self, phase: Phase, step: int) -> None:
        """Log the steps after `step` as those of `phase`."""
        if step and step == phase.first_step:
            self._progress.say(
                f"step {step:,}: rows of T={phase.tokens} from here on; losses are not comparable with earlier ones"
            )
        self._phase, self._clock = phase, (step, time.monotonic())

    def training(self, step: int, sums: dict[str, Any]) -> None:
        """Write the means of the window that ends with `step`, which must be finished.

        Nothing is written if all its steps were skipped.
        """
        sums = jax.device_get(sums)
        if not any(weight for _, weight in sums.values()) or not self._writes:
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

        All dispatched steps must be finished. The evaluation does not count as training time.
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
        text = self._phase.objective.progress_text(summary) + sources_text(summary)
        self._progress.say(f"step {step:,}: held-out {text}")
        return summary

    def samples(self, step: int, lines: list[dict[str, Any]]) -> None:
        """Write how the masks of the sample texts are filled."""
        for line in lines if self._writes else ():
            self._samples.append({"step": step, **line})

    def sync(self) -> str | None:
        """Sync all lines written so far to disk; return the checksum of metrics.jsonl, if it is ours."""
        if not self._writes:
            return None
        for file in self._files:
            file.sync()
        return self._metrics.checksum

    def _log_speed(self, step: int, summary: dict[str, float], rows_per_step: float) -> str:
        now = time.monotonic()
        (last_step, last_time), self._clock = self._clock, (step, now)
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
        note = f" {speed['real_tokens_per_second'] / 1000:,.1f}k tok/s"
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
        self._board.add(named, step)
        self._track(lambda tracker: tracker.log(step, named))
        print_json({**values, "step": step, "split": split})

    def _track(self, call: Callable[[trackers.Tracker], None]) -> None:
        """Call all trackers; drop one that raises an error, so that the run continues."""
        for name, tracker in list(self._trackers.items()):
            try:
                call(tracker)
            except Exception as error:  # packages of others raise what they like
                del self._trackers[name]
                text = " ".join(str(error).split())[:200]
                self._progress.say(
                    f"warning: config.trackers: {name} failed ({text}) and gets no more metrics until the "
                    "run resumes; metrics.jsonl has all"
                )


def sources_text(metrics: dict[str, Any]) -> str:
    """Return a text of the losses of a mixture's folders, which are metrics with a "/"; "" without any."""
    losses = {key.partition("/")[2]: value for key, value in metrics.items() if "/" in key}
    texts = ", ".join(f"{name} {value:.3f}" for name, value in losses.items())
    return f" ({texts})" if texts else ""


def print_json(line: dict[str, Any]) -> None:
    """Print a line for the reader of `--json`, if there is one."""
    if Progress.shown and Progress.json_lines:
        print(json.dumps(line), file=Progress.json_lines, flush=True)


def _finite(number: float) -> float | None:
    """Return a number, or None if it is not finite, which JSON cannot express."""
    return number if math.isfinite(number) else None


class EarlyStopping:
    """Early stopping after `config.patience` evaluations without improvement.

    The decision depends only on the metrics so far, which a restart reads again from the workdir.
    """

    def __init__(self, config: TrainConfig, best: dict[str, Any], folder: pathlib.Path, step: int):
        self.patience = getattr(config, "patience", 0)
        self._metric, self._sign = best["best_by"], 1 if best["highest"] else -1
        self._since = best["since"]
        self.by_source: dict[int, dict[str, float]] = {}  # by step, of a mixture's folders
        self._values: list[tuple[float, int]] = []  # and their steps
        for line in workdir.read_steps(folder / "metrics.jsonl"):
            if line.get("split") == "heldout" and line["step"] <= step:
                self.add(line)

    def add(self, metrics: dict[str, Any]) -> None:
        """Add the metrics of an evaluation; those on other rows than the last phase's do not count."""
        if self._metric in metrics and metrics["step"] >= self._since:
            self._values.append((self._sign * metrics[self._metric], metrics["step"]))
            self.by_source[metrics["step"]] = {k: x for k, x in metrics.items() if "/" in k}

    @property
    def best(self) -> tuple[int | None, float | None]:
        """Step and value of the best evaluation, the last if tied; None before the first."""
        if not self._values:
            return None, None
        value, step = max(self._values)
        return step, value * self._sign

    @property
    def is_over(self) -> bool:
        """Whether to stop."""
        values = [value for value, _ in self._values] or [0.0]
        return 0 < self.patience < len(values) - values.index(max(values))


class _Board:
    """TensorBoard events of a run, written by the calling thread.

    The thread of tensorboardX's `SummaryWriter` drops errors, and blocks the run once it has died.
    TensorBoard discards events of an earlier start after `step`, the current step.
    """

    _errors = files.one_line_errors("cannot write TensorBoard events")

    def __init__(self, folder: pathlib.Path, step: int):
        self._library, self._synced = _tensorboardx(), time.monotonic()
        with files.one_line_errors(f"cannot write {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            self._events = self._library.event_file_writer.EventsWriter(str(folder / "events"))
            session = self._library.proto.event_pb2.SessionLog
            self._write(step=step + 1, session_log=session(status=session.START))

    def _write(self, **fields: Any) -> None:
        event = self._library.proto.event_pb2.Event(wall_time=time.time(), **fields)
        self._events.write_event(event)

    @_errors
    def add(self, values: dict[str, float], step: int) -> None:
        """Write scalars."""
        for name, value in values.items():
            self._write(step=step, summary=self._library.summary.scalar(name, value))
        if time.monotonic() - self._synced > _SYNC_SECONDS:
            self.sync()

    @_errors
    def add_hyperparameters(self, config: TrainConfig, metric: str) -> None:
        """Write the settings for TensorBoard's HPARAMS tab, which compares runs by `metric`."""
        defaults, model = fields_lib.flatten(type(config)()), config.model
        values: dict[str, Any] = {
            "model": f"L{model.layers}-H{model.hidden}-A{model.heads}",
            "batch_size": config.batch_size,
            "optim.learning_rate": config.optim.learning_rate,
        }
        for key, value in fields_lib.flatten(config).items():
            if value != defaults.get(key) and not key.endswith(".rows"):
                values[key] = value if isinstance(value, bool | int | float) else str(value)
        for summary in self._library.summary.hparams(values, {metric: 0.0}):
            self._write(summary=summary)

    @_errors
    def sync(self) -> None:
        """Sync the events to disk."""
        self._events.flush()
        self._synced = time.monotonic()

    @_errors
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
