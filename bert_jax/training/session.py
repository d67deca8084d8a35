"""What a run has open while it trains: its workdir and checkpoints, its log, signal handlers."""

import contextlib
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from bert_jax import storage
from bert_jax.config.schema import TrainConfig, batch_size_key
from bert_jax.data.vocabulary import Vocabulary
from bert_jax.errors import counted, with_user_paths
from bert_jax.model import attention, kernels
from bert_jax.objectives.base import Metric, Phase
from bert_jax.runs import checkpoint, workdir
from bert_jax.runs.checkpoint import Checkpoints
from bert_jax.runtime import device, distributed, sharding
from bert_jax.runtime.progress import Progress
from bert_jax.runtime.signals import catch_signals
from bert_jax.storage import files
from bert_jax.training.log import EarlyStopping, Log
from bert_jax.training.state import State, checkpoint_parts
from bert_jax.training.step import Programs, compile_phase

# Steps dispatched before the loop waits: enough to keep a device busy, few enough to stop soon.
STEPS_AHEAD = 2


def check_devices(config: TrainConfig, phases: Sequence[Phase], mesh: sharding.Mesh) -> None:
    """Refuse a config that the devices cannot run."""
    for i, phase in enumerate(phases):
        key = batch_size_key(config, i)
        sharding.check_batch(mesh, phase.batch_size, phase.accumulation, key)
    hardware = (mesh.devices.flat[0].platform, mesh.shape["tensor"])
    attention.check(config, *hardware)
    kernels.check(config, hardware[0])
    device.check(config, hardware[0])


class Session(NamedTuple):
    """An open workdir."""

    folder: pathlib.Path  # the local folder
    checkpoints: Checkpoints
    early_stopping: EarlyStopping  # with the metrics so far
    step: int  # step of the newest checkpoint; 0 if there is none


@contextlib.contextmanager
def open_session(
    folder: str | pathlib.Path,
    config: TrainConfig,
    vocabulary: Vocabulary,
    data: list[dict[str, Any]],
    metric: Metric,
    force: bool,
) -> Iterator[Session]:
    """Open a workdir, or create it, on all processes of a run; `metric` ranks the checkpoints.

    The folder may be on object storage. For the other arguments see `workdir.write_or_check_config`.
    """
    best = {"best_by": metric.name, "highest": metric.higher_is_better}
    ranking: dict[str, Any] = best | {"since": workdir.comparable_since(config, data)}
    distributed.check_same_on_all_processes(workdir.identity(config, data))
    with contextlib.ExitStack() as stack:
        folder = _open_remote_workdir(folder, stack)

        def claim() -> None:
            stack.enter_context(files.lock_folder(folder))
            workdir.write_or_check_config(folder, config, data, best, force, vocabulary)
            checkpoint.move_damaged(folder)

        distributed.run_on_process_0("opening the workdir", claim)
        checkpoints = Checkpoints(
            folder / "checkpoints",
            config.checkpoint,
            **ranking,
            owner=_sync_workdir(folder),
            identity=workdir.read_identity(folder),
        )
        stack.callback(checkpoints.close)
        step = max(checkpoints.steps(), default=0)
        distributed.check_same_on_all_processes({"the newest checkpoint in the workdir": step})
        yield Session(folder, checkpoints, EarlyStopping(config, ranking, folder, step), step)


def _open_remote_workdir(folder: str | pathlib.Path, stack: contextlib.ExitStack) -> pathlib.Path:
    """Return the local folder of a workdir, which on object storage is owned until `stack` closes."""
    if not storage.is_remote(folder):
        return pathlib.Path(folder)
    mirror, local = storage.mirrored(folder, jax.process_index()), []
    distributed.run_on_process_0(
        "owning the workdir", lambda: local.append(stack.enter_context(mirror))
    )
    return local[0] if local else stack.enter_context(mirror)


def _sync_workdir(folder: pathlib.Path) -> str:
    """On object storage, give all processes what process 0 has written; return the lease's token."""
    if not storage.remote(folder):
        return ""
    token = distributed.run_on_process_0("sharing the workdir", lambda: storage.push(folder))
    if jax.process_index():
        storage.pull(folder)
    return token or ""


class Monitors(NamedTuple):
    """What shows, records and watches the steps of a run."""

    progress: Progress  # its lines are kept in the workdir's log.txt
    log: Log
    heartbeat: distributed.Heartbeat  # watches the other processes
    is_interrupted: Callable[[], bool]  # whether this process has received a signal
    stop_flag: distributed.StopFlag  # whether any process has


@contextlib.contextmanager
def open_monitors(
    session: Session,
    config: TrainConfig,
    mesh: sharding.Mesh,
    lines: Iterable[str],
    metric: Metric,
    save_on_signal: bool,
) -> Iterator[Monitors]:
    """Open the log of a run, say `lines`, and watch its processes and perhaps its signals."""
    folder, step = session.folder, session.step
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(Progress("train", config.steps, "steps", done=step))
        if not jax.process_index():
            progress.keep(folder / workdir.LOG)
        for line in lines:
            progress.say(line)
        is_interrupted = stack.enter_context(
            catch_signals(progress) if save_on_signal else contextlib.nullcontext(lambda: False)
        )
        heartbeat = stack.enter_context(distributed.Heartbeat())
        stop_flag = distributed.StopFlag(STEPS_AHEAD)
        log = stack.enter_context(Log(folder, step, config, mesh, progress, metric.name))
        yield Monitors(progress, log, heartbeat, is_interrupted, stop_flag)


def save_before(step: int, state: State, checkpoints: Checkpoints, log: Log) -> None:
    """Save the state of a run that was stopped by the step after `step`."""
    halted = jax.device_put(np.bool_(False), state.recent.halted.sharding)
    state = state._replace(recent=state.recent._replace(halted=halted))
    if step and step not in checkpoints.steps():
        checkpoints.save(step, *checkpoint_parts(state), metrics_checksum=log.sync())
    checkpoints.wait()


def describe_end(run: Session, step: int, seconds: float, metric: str) -> dict[str, Any]:
    """Return how a run ended, as the last line of `--json`.

    `seconds` is the duration of the last start, with compilation and evaluations, and `checkpoint` the
    folder of the best one that is kept by the held-out metric, or of the last if none has metrics.
    """
    run.checkpoints.wait()
    best_step, best = run.early_stopping.best
    return {
        "step": step,
        "seconds": round(seconds, 1),
        "metric": metric,
        "best_step": best_step,
        "best": best,
        **run.early_stopping.by_source.get(best_step or 0, {}),
        "checkpoint": with_user_paths(str(run.checkpoints.folder_of(run.checkpoints.best_step()))),
    }


def programs_of_phase(
    compiled: dict[int, Programs],
    config: TrainConfig,
    phases: Sequence[Phase],
    mesh: sharding.Mesh,
    shapes: State,
    progress: Progress,
    index: int,
) -> Programs:
    """Return the programs of a phase; compile them, and report how long it took, if they are new."""
    if index not in compiled:
        progress.status("compiling …")
        phase, start_time = phases[index], time.monotonic()
        compiled[index] = compile_phase(config, phase, mesh, shapes)
        row_counts = " and ".join(map(str, phase.smaller_batch_sizes))
        progress.say(
            f"compiled the step for {counted(phase.batch_size, 'row')} of T={phase.tokens} "
            f"in {time.monotonic() - start_time:.1f} s"
            + (f"; compiling it for {row_counts} rows in the background" if row_counts else "")
        )
    return compiled[index]
