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
import itertools
import pathlib
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax

from bert_jax import storage
from bert_jax.config.schema import FinetuneConfig, TrainConfig, model_at
from bert_jax.data.vocabulary import Vocabulary
from bert_jax.errors import UserError, with_user_paths
from bert_jax.inference.fill_mask import MaskProbe
from bert_jax.inference.predict import METRICS, evaluate_run, over_seeds
from bert_jax.model.bert import Params
from bert_jax.objectives import finetuning, warm_start
from bert_jax.objectives.base import Phase
from bert_jax.runs import workdir
from bert_jax.runtime import device, distributed, sharding
from bert_jax.runtime.sharding import shard_batch
from bert_jax.runtime.signals import Interrupted
from bert_jax.storage import files
from bert_jax.tasks.load import load_dataset
from bert_jax.training import guard, summary
from bert_jax.training.log import print_json
from bert_jax.training.session import (
    STEPS_AHEAD,
    Monitors,
    Session,
    check_devices,
    describe_end,
    open_monitors,
    open_session,
    programs_of_phase,
    save_before,
)
from bert_jax.training.state import (
    State,
    checkpoint_parts,
    evaluated_params,
    initial_state,
    place_seed,
    place_teacher,
    restore,
    with_params,
)
from bert_jax.training.step import Programs
from bert_jax.training.tracing import StepTracer, Summarize


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
        Interrupted: SIGTERM or SIGINT was received and the state is saved.
    """
    mesh = sharding.make_mesh(config.mesh)
    check_devices(config, phases, mesh)
    metric = phases[0].objective.best_metric
    init, shapes = initial_state(config, phases[0], mesh)
    texts = getattr(config, "sample_texts", ())
    models = [model_at(config, phase.end_step) for phase in phases]
    probes = {m.rope_theta: MaskProbe(m, vocabulary, texts, mesh) for m in models if texts}
    samplers = [probes.get(model.rope_theta) for model in models]
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(open_session(folder, config, vocabulary, data, metric, force))
        folder, step = run.folder, run.step
        if step >= config.steps or run.early_stopping.is_over:
            print(
                with_user_paths(
                    f"{folder}: training is complete (step {step:,} of {config.steps:,})"
                )
            )
            print_json({"split": "end", **describe_end(run, step, 0.0, metric.name)})
            return
        distributed.run_on_process_0(
            "writing starts.jsonl",
            lambda: workdir.record_start(folder, step, mesh, config, [p.tokens for p in phases]),
        )
        lines = itertools.chain(
            summary.start_lines(config, mesh, phases, data, shapes.params, folder),
            summary.warnings(config, phases, data),
            [f"resuming at step {step:,} of {config.steps:,}"] if step else [],
        )
        start_time = time.monotonic()
        monitors = stack.enter_context(
            open_monitors(run, config, mesh, lines, metric, save_on_signal)
        )
        compiled = {} if compiled is None else compiled
        programs = functools.partial(
            programs_of_phase, compiled, config, phases, mesh, shapes, monitors.progress
        )
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            # Compiling the step needs only shapes and takes longer than creating the state.
            index = next(i for i, phase in enumerate(phases) if step < phase.end_step)
            compiling = pool.submit(programs, index)
            if step:
                state = restore(run.checkpoints, step, shapes, config.seed)
            else:
                state = init(place_seed(config.seed, shapes))
                if start:
                    state = with_params(state, start, shapes.params)
            state = place_teacher(state, phases[0].objective, shapes)
            compiling.result()
            monitors.progress.restart()
        step = _run_steps(
            config, phases, mesh, run, monitors, programs, state, samplers, summarize_trace
        )
        end = describe_end(run, step, time.monotonic() - start_time, metric.name)
        for line in summary.end_lines(end):
            monitors.progress.say(line)
        print_json({"split": "end", **end})
        if monitors.is_interrupted():  # after the last step: the runs that follow must stop too
            raise Interrupted(_saved(step, config, folder))


def _run_steps(
    config: TrainConfig,
    phases: Sequence[Phase],
    mesh: sharding.Mesh,
    run: Session,
    monitors: Monitors,
    programs_of: Callable[[int], Programs],
    state: State,
    samplers: Sequence[MaskProbe | None],
    summarize_trace: Summarize | None,
) -> int:
    """Run the steps from that of `run` on; log, evaluate and save. Return the number of steps done."""
    step, (folder, checkpoints, early_stopping, first_step) = run.step, run
    log, keep_every_steps = monitors.log, config.checkpoint.keep_every_steps
    if keep_every_steps and step == 0 and 0 not in checkpoints.steps():
        checkpoints.save(0, *checkpoint_parts(state), metrics_checksum=log.sync())
    # Dispatched steps, whose statistics have not been read: (steps done, metric sums, stats).
    running: collections.deque[tuple[int, Any, guard.StepStats]] = collections.deque()
    for index, phase in enumerate(phases):
        if step >= phase.end_step or early_stopping.is_over:
            continue
        programs, sampler = programs_of(index), samplers[index]
        log.begin(phase, step)
        batches = phase.batches(
            step - phase.first_step,
            phase.end_step - phase.first_step,
            *sharding.process_row_shard(mesh),
        )
        steps, say = range(step, phase.end_step), monitors.progress.say
        with StepTracer(config, steps, folder, programs.largest, say, summarize_trace) as tracer:
            tracer.update(step)
            for batch in tracer.annotate(batches):
                state, sums, stats = programs.step(state, shard_batch(batch, mesh))
                step += 1
                running.append((step, sums, stats))
                monitors.heartbeat.step = step
                monitors.progress.advance()

                is_last = step == config.steps
                should_stop = monitors.stop_flag(monitors.is_interrupted())
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
                        save_before(bad_step.step - 1, state, checkpoints, log)
                        log.bad_step(bad_step)
                        raise guard.stop_error(config.guard, bad_step)
                    if bad_step:
                        log.bad_step(bad_step)
                    # Within a window, the sums are not those of the step alone.
                    elif done == first_step + 1 and due(first_step, config.log_every_steps):
                        log.log_first_step(done, sums)
                    if due(done, config.log_every_steps) or done == config.steps:
                        log.training(done, sums)
                tracer.update(step)
                metrics = None
                if should_evaluate:
                    metrics = log.evaluate_and_log(
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
                    monitors.progress.say(
                        f"stopping early: no improvement in {early_stopping.patience} evaluations"
                    )
                    break
    return step


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
        init, which, vocab: as in `warm_start.open_init`.
        folder: the workdir; with several seeds, each has a workdir inside it.
        seeds: number of seeds, from `config.seed` on.
        force, summarize_trace, save_on_signal: as in `train`.
        keys: as in `warm_start.with_head`.

    Returns:
        The content of metrics.json.

    Raises:
        Interrupted: stopped after saving.
    """
    if jax.process_count() > 1:
        raise UserError(
            "fine-tuning runs in one process, on all devices of one machine: start it once, without "
            "BERT_JAX_COORDINATOR"
        )
    folder = pathlib.Path(folder)
    workdir.require_same_kind(folder, seeds)
    config, start = warm_start.open_init(config, init, which, vocab)
    dataset = load_dataset(config.task, start.vocabulary)
    config = warm_start.with_head(config, start, dataset, keys)
    first = folder / f"seed_{config.seed}" if seeds > 1 else folder
    config.model.dtype = workdir.dtype_at(config, first)
    all_seeds = range(config.seed, config.seed + seeds)
    shards = sharding.num_row_shards(sharding.make_mesh(config.mesh))
    config, data, plan, phase = finetuning.make_phase(
        config, dataset, all_seeds, shards, start.vocabulary
    )
    params, new = warm_start.select_params(config, start.config.model, start.params)
    data[0]["start"] = warm_start.params_digest(params)
    print(*finetuning.run_lines(config, dataset, phase, init, new), sep="\n", flush=True)

    options = (force, params, {}, summarize_trace, save_on_signal)
    results = []
    for seed in all_seeds:
        seed_config = dataclasses.replace(copy.deepcopy(config), seed=seed)
        seed_folder = folder / f"seed_{seed}" if seeds > 1 else folder
        seed_phase = dataclasses.replace(
            phase,
            batches=functools.partial(plan.batches, seed),
            row_indices=functools.partial(plan.members, seed=seed),
        )
        if seeds > 1:
            print(f"seed {seed}", flush=True)
        train(seed_config, start.vocabulary, data, [seed_phase], seed_folder, *options)
        results.append(evaluate_run(seed_folder, dataset))
    if seeds == 1:
        return results[0]
    summary = over_seeds(results)
    files.write_json(folder / METRICS, summary)
    return summary


def due(step: int, every: int) -> bool:
    """Whether something that happens every `every` steps (0: never) happens at this one."""
    return bool(every) and step % every == 0


def _saved(step: int, config: TrainConfig, folder: pathlib.Path) -> str:
    return with_user_paths(f"saved step {step:,} of {config.steps:,} in {folder}")
