"""Run or resume a sweep."""

import contextlib
import hashlib
import os
import shlex
import time
from collections.abc import Callable, Sequence

from bert_jax.errors import EXIT_INTERRUPTED, UserError
from bert_jax.runtime.signals import record_signals
from bert_jax.storage import files
from bert_jax.tools.launch import jobs
from bert_jax.tools.launch.engines.base import state_folder
from bert_jax.tools.launch.request import job_name
from bert_jax.tools.sweep.display import display
from bert_jax.tools.sweep.folders import PointRun, Runs
from bert_jax.tools.sweep.points import Point, Sweep
from bert_jax.tools.sweep.results import Results, lines_of
from bert_jax.tools.sweep.scheduler import Engine, Scheduler, say

_POLL_SECONDS = 0.2


def run(sweep: Sweep, runs: str | os.PathLike, engine: Engine) -> int:
    """Run the points of a sweep that are not done, and record the results.

    `runs` is the folder of the points of all sweeps, which may be on object storage. Return the exit status: 0, 1
    if a point failed, 75 if stopped by a signal.
    """
    folders, args = Runs(runs), sweep.args
    results = Results(sweep.path.parent)
    key = hashlib.sha256(f"{sweep.path.absolute()} {runs}".encode()).hexdigest()[:6]

    def done(point_run: PointRun) -> None:
        try:
            lines = lines_of(point_run, args)
        except (UserError, OSError, ValueError, KeyError, IndexError) as error:
            what = f"the results of {point_run.point.name} in {point_run.out}: {error!r}"
            advice = f"remove {point_run.folder} to run it again"
            raise UserError(f"cannot read {what}; {advice}") from error
        results.add(lines)

    with files.one_line_errors(f"cannot use the folder {folders.folder}"):
        folders.folder.mkdir(parents=True, exist_ok=True)
    name = f"{job_name(sweep.path.absolute().parent.name, 28)}-{key}"
    with contextlib.ExitStack() as stack:
        if engine.on == "tpu-vm":  # two sweeps would use each other's slices
            stack.callback(_list_slices, name)
            stack.enter_context(files.lock_folder(state_folder(name)))
        scheduler = Scheduler(sweep.points, folders, args, engine, done, name)
        stack.callback(scheduler.stop)  # on any error, stop what was started
        received = stack.enter_context(record_signals())
        show = stack.enter_context(display(scheduler))
        handled = 0
        while True:
            scheduler.update()
            show()
            if len(received) > handled:
                handled = len(received)
                scheduler.stop() if handled == 1 else scheduler.kill()
            if scheduler.is_over:
                break
            time.sleep(_POLL_SECONDS)
    return _conclude(scheduler, bool(received))


def dry_run(
    sweep: Sweep,
    runs: str | os.PathLike,
    engine: Engine,
    estimate: Callable[[Sequence[Point]], tuple[dict[str, str], list[str]]],
) -> str:
    """Return a line per point: its command, or where its output is if it is done; and what they cost.

    `estimate` returns the costs of points by name, and lines about all (`cost.estimate`).
    """
    folders = Runs(runs)
    try:
        folders.pull()
    except UserError as error:  # a dry run needs no account
        say(f"warning: points that are done are unknown: {error}")
    point_runs = {point.name: PointRun(point, folders, sweep.args.data) for point in sweep.points}
    to_run = [each.point for each in point_runs.values() if not each.is_done]
    costs, summary = estimate(to_run)
    lines = []
    for name, point_run in point_runs.items():
        text = f"done, {point_run.folder}"
        if point_run.point in to_run:
            text = shlex.join(engine.command(point_run.point, point_runs))
        lines += [f"{name}: {text}", *([f"  {costs[name]}"] if name in costs else [])]
    return "\n".join([*lines, f"{len(point_runs)} points, {len(to_run)} to run", *summary])


def _conclude(scheduler: Scheduler, interrupted: bool) -> int:
    names: dict[str, list[str]] = {}
    for name, state in scheduler.state.items():
        names.setdefault(state, []).append(name)
    for name in names.get("failed", ()):
        point_run = scheduler.point_runs[name]
        say(f"{name} failed: {point_run.last_log_line()} ({point_run.log})")
    if blocked := names.get("blocked"):
        say(f"not run, as points they need are not done: {', '.join(blocked)}")
    if (stopped := names.get("stopped")) and not interrupted:
        say(f"stopped by `bert-jax launch stop`: {', '.join(stopped)}")
    num_done, num_points = len(names.get("done", ())), len(scheduler.state)
    say(f"{num_done} of {num_points} points done")
    if interrupted:
        say("stopped; run the same command to resume")
        return EXIT_INTERRUPTED
    return 0 if num_done == num_points else 1


def _list_slices(name: str) -> None:
    if names := jobs.with_machines(f"{name}-"):
        say(f"slices that cost money remain: {', '.join(names)}. The same sweep uses them again;")
        say("`bert-jax launch stop NAME` stops a run, `launch delete NAME` deletes a slice")
