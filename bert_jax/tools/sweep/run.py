"""Run or resume a sweep."""

import contextlib
import os
import pathlib
import shlex
import sys
import time

from bert_jax.errors import EXIT_INTERRUPTED, UserError
from bert_jax.storage import files
from bert_jax.tools.launch.plan import signals
from bert_jax.tools.sweep.display import Display
from bert_jax.tools.sweep.points import Sweep
from bert_jax.tools.sweep.results import Results, lines_of
from bert_jax.tools.sweep.scheduler import Engine, PointRun, Scheduler

_POLL_SECONDS = 0.2


def run(sweep: Sweep, runs: str | os.PathLike, engine: Engine, *, resubmit: bool = False) -> int:
    """Run the points of a sweep that are not done, and record the results.

    Args:
        sweep: the loaded sweep.
        runs: folder of the points of all sweeps.
        engine: what runs the points.
        resubmit: submit jobs again that have not ended.

    Returns:
        The exit status: 0, 1 if a point failed, 75 if stopped by a signal.
    """
    runs, args = pathlib.Path(runs).absolute(), sweep.args
    results = Results(sweep.path.parent)

    def done(point_run: PointRun) -> None:
        try:
            lines = lines_of(point_run, args)
        except (UserError, OSError, ValueError, KeyError, IndexError) as error:
            raise UserError(
                f"cannot read the results of {point_run.point.name} in {point_run.out}: {error!r}; remove "
                f"{point_run.folder} to run it again"
            ) from error
        results.add(lines)

    with files.one_line_errors(f"cannot use the folder {runs}"):
        runs.mkdir(parents=True, exist_ok=True)
    scheduler = Scheduler(sweep.points, runs, args, engine, resubmit, done)
    with contextlib.ExitStack() as stack:
        stack.callback(scheduler.stop)  # on any error, stop what was started
        received = stack.enter_context(signals())
        display = stack.enter_context(Display(scheduler))
        handled = 0
        while True:
            scheduler.update()
            display.show()
            if len(received) > handled:
                handled = len(received)
                scheduler.stop() if handled == 1 else scheduler.kill()
            if scheduler.is_over:
                break
            time.sleep(_POLL_SECONDS)
    return _conclude(scheduler, bool(received))


def dry_run(sweep: Sweep, runs: pathlib.Path, engine: Engine) -> str:
    """Return a line per point: its command, or where its output is if it is done."""
    point_runs = {point.name: PointRun(point, runs, sweep.args.data) for point in sweep.points}
    lines, to_run = [], 0
    for name, point_run in point_runs.items():
        text = f"done, {point_run.folder}"
        if not point_run.is_done:
            to_run += 1
            text = shlex.join(engine.command(point_run.point, point_runs))
        lines.append(f"{name}: {text}")
    return "\n".join([*lines, f"{len(lines)} points, {to_run} to run"])


def _conclude(scheduler: Scheduler, interrupted: bool) -> int:
    state = scheduler.state
    failed, blocked, done = (
        [name for name in state if state[name] == kind] for kind in ("failed", "blocked", "done")
    )
    for name in failed:
        point_run = scheduler.point_runs[name]
        print(f"{name} failed: {point_run.last_log_line()} ({point_run.log})", file=sys.stderr)
    if blocked:
        print(f"not run because a dependency failed: {', '.join(blocked)}", file=sys.stderr)
    print(f"{len(done)} of {len(state)} points done", file=sys.stderr)
    if interrupted:
        print("stopped; run the same command to resume", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 1 if failed else 0
