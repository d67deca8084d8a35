"""The training loop, for every objective.

A step is a function of the state and of (seed, step), which determine the batch, masking and
dropout. A run that is killed and restarted with the same command resumes from its newest checkpoint
and ends with the same bits as an uninterrupted run.
"""

import collections
import concurrent.futures
import contextlib
import copy
import dataclasses
import functools
import pathlib
import time
from collections.abc import Collection
from typing import Any

import jax
import numpy as np

from bert_jax import storage
from bert_jax.config.schema import FinetuneConfig, MeshConfig, TrainConfig, batch_size_key
from bert_jax.data.wordpiece import Vocabulary
from bert_jax.errors import shown
from bert_jax.inference.fill_mask import MaskSampler
from bert_jax.inference.predict import METRICS, evaluate_run, over_seeds
from bert_jax.model import attention
from bert_jax.model.bert import Params, flatten, unflatten
from bert_jax.objectives import finetuning
from bert_jax.objectives.base import Phase
from bert_jax.runs import checkpoint, workdir
from bert_jax.runs.checkpoint import Checkpoints
from bert_jax.runtime import device, distributed, sharding
from bert_jax.runtime.progress import Progress
from bert_jax.runtime.sharding import shard_batch
from bert_jax.runtime.signals import Interrupted, catch_signals
from bert_jax.storage import files
from bert_jax.training import guard, summary
from bert_jax.training.log import EarlyStopping, Log, print_json
from bert_jax.training.step import (
    Programs,
    State,
    checkpoint_parts,
    compile_phase,
    evaluated_params,
    initial_state,
    place_seed,
    place_teacher,
    restore,
    with_params,
)
from bert_jax.training.tracing import StepTracer, Summarize

# Steps dispatched before the loop waits: enough to keep a device busy, few enough to stop soon.
STEPS_AHEAD = 2


@device.one_line_memory_errors()
def train(
    config: TrainConfig,
    vocabulary: Vocabulary,
    data: list[dict[str, Any]],
    phases: list[Phase],
    folder: str | pathlib.Path,
    force: bool = False,
    start: Params | None = None,
    compiled: dict[int, Programs] | None = None,
    summarize_trace: Summarize | None = None,
    save_on_signal: bool = False,
) -> None:
    """Train `config` in `folder` to the end, resuming from the newest checkpoint if there is one.

    Args:
        config: validated, with the vocabulary size filled in.
        vocabulary: saved with the run.
        data: description of the rows of each phase (see `workdir.write_or_check_config`).
        phases: phases to train on, in order.
        folder: the workdir, which may be on object storage.
        force: resume in a workdir that holds a run with another config.
        start: parameters that replace the random ones at step 0; may be a subset of the model's.
        compiled: cache of `compile_phase` results by phase index, which the caller may share
            between runs that differ only in their seeds.
        summarize_trace: see `tracing.StepTracer`.
        save_on_signal: handle SIGTERM and SIGINT, in the main thread: save, and raise `Interrupted`.

    Raises:
        UserError: an error that the user can fix; no progress is lost.
        Interrupted: SIGTERM or SIGINT was received and the state is saved.
    """
    # ---- Devices ---------------------------------------------------------------------------------
    compiled = {} if compiled is None else compiled
    mesh = sharding.make_mesh(config.mesh)
    for i, phase in enumerate(phases):
        key = batch_size_key(config, i)
        sharding.check_batch(mesh, phase.batch_size, phase.accumulation, key)
    hardware = (mesh.devices.flat[0].platform, mesh.shape["tensor"])
    attention.check(config, *hardware)
    device.check(config, hardware[0])
    process_part = sharding.process_row_shard(mesh)
    init, shapes = initial_state(config, phases[0], mesh)
    metric = phases[0].objective.best_metric
    texts = [text for text in getattr(config, "sample_texts", "").split("|") if text.strip()]
    sampler = MaskSampler(config.model, vocabulary, texts, mesh) if texts else None
    best = {"best_by": metric.name, "highest": metric.higher_is_better}
    ranking: dict[str, Any] = best | {"since": workdir.comparable_since(config, data)}

    with contextlib.ExitStack() as stack:
        # ---- Workdir -----------------------------------------------------------------------------
        distributed.check_same_on_all_processes(workdir.identity(config, data))
        folder = _own(folder, stack)

        def claim() -> None:
            stack.enter_context(files.lock_folder(folder))
            workdir.write_or_check_config(folder, config, data, best, force, vocabulary)

        distributed.first("opening the workdir", claim)
        distributed.first("checking the checkpoints", lambda: checkpoint.move_damaged(folder))
        owner = _share(folder)
        run = workdir.read_identity(folder)
        checkpoints = Checkpoints(
            folder / "checkpoints", config.checkpoint, **ranking, identity=run, owner=owner
        )
        stack.callback(checkpoints.close)
        step = max(checkpoints.steps(), default=0)
        distributed.check_same_on_all_processes({"the newest checkpoint in the workdir": step})
        early_stopping = EarlyStopping(config, ranking, folder, step)
        if step >= config.steps or early_stopping.is_over:
            print(shown(f"{folder}: training is complete (step {step:,} of {config.steps:,})"))
            end = _end(step, 0.0, metric.name, early_stopping, checkpoints, folder)
            print_json({"split": "end", **end._asdict()})
            return
        distributed.first(
            "writing starts.jsonl", lambda: workdir.record_start(folder, step, mesh, config)
        )
        progress = stack.enter_context(Progress("train", config.steps, "steps", done=step))
        if not jax.process_index():
            progress.keep(folder / workdir.LOG)
        for line in summary.start_lines(config, mesh, phases, data, shapes.params, folder):
            progress.say(line)
        for line in summary.warnings(config, phases, data):
            progress.say(line)
        start_time, first_step = time.monotonic(), step
        interrupted = stack.enter_context(
            catch_signals(progress) if save_on_signal else contextlib.nullcontext(lambda: False)
        )
        heartbeat = stack.enter_context(distributed.Heartbeat())
        stop_flag = distributed.StopFlag(STEPS_AHEAD)
        log = stack.enter_context(Log(folder, step, config, mesh, progress))
        log.hyperparameters(metric.name)

        # ---- State -------------------------------------------------------------------------------
        def programs_of(index: int) -> Programs:
            if index not in compiled:
                compiled[index] = _compile(config, phases[index], mesh, shapes, progress)
            return compiled[index]

        if step:
            progress.say(f"resuming at step {step:,} of {config.steps:,}")
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            # Compiling the step needs only shapes and takes longer than creating the state.
            index = next(i for i, phase in enumerate(phases) if step < phase.end_step)
            compiling = pool.submit(programs_of, index)
            if step:
                state = restore(checkpoints, step, shapes, config.seed)
            else:
                state = init(place_seed(config.seed, shapes))
                if start:
                    state = with_params(state, _start_from(state.params, start, shapes.params))
            state = place_teacher(state, phases[0].objective, shapes)
            compiling.result()
            progress.restart()
        keep_every_steps = config.checkpoint.keep_every_steps
        if keep_every_steps and step == 0 and 0 not in checkpoints.steps():
            checkpoints.save(0, *checkpoint_parts(state), metrics_checksum=log.sync())

        # ---- Loop --------------------------------------------------------------------------------
        # Dispatched steps, whose statistics have not been read: (steps done, metric sums, stats).
        running: collections.deque[tuple[int, Any, guard.StepStats]] = collections.deque()
        for index, phase in enumerate(phases):
            if step >= phase.end_step or early_stopping.is_over:
                continue
            programs = programs_of(index)
            log.begin(phase, step)
            batches = phase.batches(
                step - phase.first_step, phase.end_step - phase.first_step, *process_part
            )
            with StepTracer(
                config,
                range(step, phase.end_step),
                folder,
                programs.step,
                progress.say,
                summarize_trace,
            ) as tracer:
                tracer.update(step)
                for batch in tracer.annotate(batches):
                    state, sums, stats = programs.step(state, shard_batch(batch, mesh))
                    step += 1
                    running.append((step, sums, stats))
                    heartbeat.step = step
                    progress.advance()

                    is_last = step == config.steps
                    should_stop = stop_flag(interrupted())
                    should_evaluate = is_last or due(step, config.evaluate_every_steps)
                    should_save = (
                        is_last
                        or should_stop
                        or due(step, config.checkpoint.every_steps)
                        or due(step, keep_every_steps)
                    )
                    # Check all dispatched steps before their state is evaluated or saved.
                    must_finish = (
                        should_evaluate
                        or should_save
                        or step == phase.end_step
                        or tracer.is_boundary(step)
                    )
                    while len(running) > (0 if must_finish else STEPS_AHEAD):
                        done, sums, stats = running.popleft()
                        bad_step = guard.read_stats(done, stats)  # waits for the step
                        if bad_step and bad_step.stops:
                            # First the checkpoint, whose checksum is of the metrics up to its step.
                            _save_before(bad_step.step - 1, state, checkpoints, log)
                            log.bad_step(bad_step)
                            raise guard.stop_error(config.guard, bad_step)
                        if bad_step:
                            log.bad_step(bad_step)
                        # Within a window, the sums are not those of the step alone.
                        elif done == first_step + 1 and due(first_step, config.log_every_steps):
                            log.first(done, sums)
                        if due(done, config.log_every_steps) or done == config.steps:
                            log.training(done, sums)
                    tracer.update(step)
                    metrics = None
                    if should_evaluate:
                        metrics = log.heldout(
                            step, functools.partial(programs.evaluate, evaluated_params(state))
                        )
                        early_stopping.add({"step": step, **metrics})
                        if sampler:
                            log.samples(step, sampler(evaluated_params(state)))
                    if should_save or early_stopping.is_over:
                        # Metrics must be on disk before the checkpoint that a restart resumes from.
                        checksum = log.sync()
                        checkpoints.save(step, *checkpoint_parts(state), metrics or None, checksum)
                    if should_stop:
                        checkpoints.wait()
                        raise Interrupted(_saved(step, config, folder))
                    if early_stopping.is_over:
                        progress.say(f"stopping early: {early_stopping.reason}")
                        break

        seconds = time.monotonic() - start_time
        end = _end(step, seconds, metric.name, early_stopping, checkpoints, folder)
        for line in end.lines():
            progress.say(line)
        print_json({"split": "end", **end._asdict()})
        if interrupted():  # a signal after the last step must still stop the runs that follow
            raise Interrupted(_saved(step, config, folder))


@storage.mirrors("folder")
def finetune(
    config: FinetuneConfig,
    init: str,
    folder: str | pathlib.Path,
    *,
    seeds: int = 1,
    vocab: str = "",
    which: str = "best",
    force: bool = False,
    summarize_trace: Summarize | None = None,
    keys: Collection[str] = (),
    save_on_signal: bool = False,
) -> dict[str, Any]:
    """Fine-tune, evaluate the best checkpoint on every split and write its predictions.

    Args:
        config: validated config.
        init, seeds, vocab, which, keys: as in `finetuning.prepare_run`.
        folder: the workdir; with several seeds, each has a workdir inside it.
        force, summarize_trace, save_on_signal: as in `train`.

    Returns:
        The content of metrics.json.

    Raises:
        Interrupted: stopped after saving.
    """
    folder = pathlib.Path(folder)
    workdir.require_same_kind(folder, seeds)
    run = finetuning.prepare_run(config, init, seeds, vocab, which, keys)
    compiled: dict[int, Any] = {}
    results = []
    for seed in range(config.seed, config.seed + seeds):
        seed_config = dataclasses.replace(copy.deepcopy(run.config), seed=seed)
        seed_folder = folder / f"seed_{seed}" if seeds > 1 else folder
        if seeds > 1:
            print(f"seed {seed}", flush=True)
        train(
            seed_config,
            run.vocabulary,
            run.data,
            [run.phase(seed)],
            seed_folder,
            force,
            run.params,
            compiled,
            summarize_trace,
            save_on_signal,
        )
        results.append(evaluate_run(seed_folder, run.dataset, MeshConfig()))
    summary = results[0] if seeds == 1 else over_seeds(results)
    if seeds > 1:
        files.write_json(folder / METRICS, summary)
    return summary


def _save_before(step: int, state: State, checkpoints: Checkpoints, log: Log) -> None:
    """Save the state of a run that was stopped by the step after `step`."""
    halted = jax.device_put(np.bool_(False), state.recent.halted.sharding)
    state = state._replace(recent=state.recent._replace(halted=halted))
    if step and step not in checkpoints.steps():
        checkpoints.save(step, *checkpoint_parts(state), metrics_checksum=log.sync())
    checkpoints.wait()


def _end(
    step: int,
    seconds: float,
    metric: str,
    early_stopping: EarlyStopping,
    checkpoints: Checkpoints,
    folder: pathlib.Path,
) -> summary.End:
    """Describe a finished run."""
    best_step, best_value = early_stopping.best or (None, None)
    checkpoints.wait()
    kept = shown(str(checkpoints.folder_of(checkpoints.best_step())))
    return summary.End(step, round(seconds, 1), metric, best_step, best_value, kept)


def _own(folder: str | pathlib.Path, stack: contextlib.ExitStack) -> pathlib.Path:
    """Return the local folder of a workdir, which on object storage is owned until `stack` closes."""
    if not storage.is_remote(folder):
        return pathlib.Path(folder)
    mirror, local = storage.mirrored(folder, jax.process_index()), []
    distributed.first("owning the workdir", lambda: local.append(stack.enter_context(mirror)))
    return local[0] if local else stack.enter_context(mirror)


def _share(folder: pathlib.Path) -> str:
    """On object storage, give all processes the files of the workdir that process 0 has written.

    Returns:
        The token of the lease; "" for a local workdir.
    """
    if not storage.remote(folder):
        return ""
    token = [""]
    distributed.first("sharing the workdir", lambda: token.append(storage.push(folder)))
    if jax.process_index():
        storage.pull(folder)
    return distributed.gather("sharing the lease", token[-1])[0]


def due(step: int, every: int) -> bool:
    """Whether something that happens every `every` steps (0: never) happens at this one."""
    return bool(every) and step % every == 0


def _saved(step: int, config: TrainConfig, folder: pathlib.Path) -> str:
    return shown(f"saved step {step:,} of {config.steps:,} in {folder}")


def _compile(
    config: TrainConfig, phase: Phase, mesh: sharding.Mesh, shapes: State, progress: Progress
) -> Programs:
    """Compile a phase and report how long it took."""
    program = repr((config.model, config.optim, phase.batch_shape, mesh.shape, mesh.devices.flat[0].device_kind))  # fmt: skip
    progress.status(f"compiling (about {device.compile_seconds(program):.0f} s) …")
    start_time = time.monotonic()
    compiled = compile_phase(config, phase, mesh, shapes)
    device.record_compile_seconds(program, time.monotonic() - start_time)
    row_counts = " and ".join(map(str, phase.smaller_batch_sizes))
    progress.say(
        f"compiled the step for {phase.batch_size} rows of T={phase.tokens} "
        f"in {time.monotonic() - start_time:.1f} s"
        + (f"; compiling it for {row_counts} rows in the background" if row_counts else "")
    )
    return compiled


def _start_from(params: Params, start: Params, shapes: Params) -> Params:
    """Return `params` with the values of `start` in place of the random ones."""
    start, shapes, params = flatten(start), flatten(shapes), flatten(params)
    placed = {k: jax.device_put(v, shapes[k].sharding) for k, v in start.items()}
    return unflatten({**params, **placed})
