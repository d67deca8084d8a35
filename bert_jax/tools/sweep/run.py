"""A sweep or a search from its beginning, or wherever it stands, to its end."""

import contextlib
import os
import pathlib
import sys
import time

from bert_jax import files
from bert_jax.errors import UserError
from bert_jax.tools import launch
from bert_jax.tools.sweep.display import Display
from bert_jax.tools.sweep.points import Sweep
from bert_jax.tools.sweep.results import Results, lines_of
from bert_jax.tools.sweep.scheduler import Engine, Place, Scheduler
from bert_jax.tools.sweep.search import Search

_LOOK_SECONDS = 0.2


def run(
    sweep: Sweep,
    runs: str | os.PathLike,
    engine: Engine,
    *,
    resubmit: bool = False,
    trials: int = 0,
) -> int:
    """Runs all points of a sweep that are not done, or a search, and records what came of them.

    Args:
        sweep: as `load` gives it.
        runs: the folder of all sweeps' points.
        engine: what runs them.
        resubmit: queue jobs again that were handed over and have not ended.
        trials: of a search with the sweep's `get_trial(given, trial)`, in all.

    Returns:
        0; 1 if something failed; 75 if it was stopped by a signal.

    Raises:
        UserError: a search without get_trial; results.jsonl cannot be read or written.
    """
    runs, given = pathlib.Path(runs).absolute(), sweep.given
    results = Results(sweep.path.parent)

    def done(place: Place) -> None:
        try:
            lines = lines_of(place, given)
        except (UserError, OSError, ValueError, KeyError, IndexError) as error:
            raise UserError(
                f"cannot read what {place.point.name} has left in {place.out}: {error!r}; remove "
                f"{place.folder} to run it again"
            ) from error
        results.add(lines)

    scheduler = Scheduler(runs, given, engine, resubmit, done)
    with files.one_line_errors(f"cannot use the folder {runs}"):
        runs.mkdir(parents=True, exist_ok=True)
    search = Search(sweep, trials, engine.jobs) if trials else None
    if not search:
        scheduler.add(sweep.points)
    with contextlib.ExitStack() as stack:
        stack.callback(scheduler.stop)  # whatever comes, nothing of ours goes on unwatched
        received = stack.enter_context(launch.signals())
        display = stack.enter_context(Display(scheduler))
        told = 0
        while True:
            if search:
                search.look(scheduler)
            scheduler.look()
            display.show()
            if len(received) > told:
                told = len(received)
                scheduler.stop() if told == 1 else scheduler.kill()
            if scheduler.is_over and not (search and search.wants_more and not told):
                break
            time.sleep(_LOOK_SECONDS)
    return _conclude(scheduler, bool(received), search)


def _conclude(scheduler: Scheduler, interrupted: bool, search: Search | None) -> int:
    by = {
        state: [n for n, s in scheduler.state.items() if s == state]
        for state in ("done", "failed", "blocked")
    }
    for name in by["failed"]:
        place = scheduler.places[name]
        print(f"{name} failed: {place.last_words()} ({place.log})", file=sys.stderr)
    if by["blocked"]:
        print(f"not run because of that: {', '.join(by['blocked'])}", file=sys.stderr)
    print(f"{len(by['done'])} of {len(scheduler.state)} points done", file=sys.stderr)
    if search:
        print(search.describe())
    if interrupted:
        print("stopped; the same command goes on", file=sys.stderr)
        return launch.STOPPED
    return 1 if by["failed"] else 0
