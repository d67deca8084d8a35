"""Hyperparameter search with Optuna."""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import statistics
from typing import Any

from bert_jax.errors import UserError, missing
from bert_jax.storage import files
from bert_jax.tools.sweep.points import Point, Sweep, call, ordered
from bert_jax.tools.sweep.results import is_json, lines_of
from bert_jax.tools.sweep.scheduler import PointRun, Scheduler

_RERUN_OF = "rerun_of"  # attribute of a trial: the number of the interrupted one


def _repair(path: pathlib.Path) -> None:
    """Cut off an incomplete last line of a journal, as a kill leaves it; Optuna would append to it."""
    content = path.read_bytes() if path.exists() else b""
    *lines, tail = content.split(b"\n")
    if tail:
        os.truncate(path, len(content) - len(tail))
    for i, line in enumerate(lines, 1):
        if not is_json(line):
            raise UserError(f"{path}, line {i} is damaged: remove it")


class Search:
    """Optuna's trials as points; the study is stored next to the sweep, in study.journal.

    Searches with other arguments or another folder of runs are other studies. `stack` holds the lock
    of the study until it closes.
    """

    def __init__(
        self,
        sweep: Sweep,
        runs: pathlib.Path,
        trials: int,
        jobs: int,
        stack: contextlib.ExitStack,
    ):
        get_trial, self._objective = (
            getattr(sweep.module, name, None) for name in ("get_trial", "OBJECTIVE")
        )
        if not get_trial or not self._objective:
            raise UserError(
                f"{sweep.path} defines no search: it must have get_trial(args, trial) and "
                'OBJECTIVE, such as "dev.accuracy" or "-loss" (to minimize)'
            )
        try:
            import optuna
            from optuna.storages import journal
        except ImportError:
            raise missing("--search needs Optuna", "search") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._get, self._sweep, self._trials, self._jobs = get_trial, sweep, trials, jobs
        self._states = optuna.trial.TrialState
        path = sweep.path.parent / "study.journal"
        _repair(path)
        storage = journal.JournalFileBackend(str(path))
        identity = json.dumps([*map(str, sweep.args), str(runs), self._objective])
        digest = hashlib.sha256(identity.encode()).hexdigest()[:10]
        # With the lock, trials that the study calls running are those of a killed search.
        lock = sweep.path.parent / f".study-{digest}"
        files.refuse_link(lock)
        stack.enter_context(files.lock_folder(lock))
        self._study = optuna.create_study(
            storage=optuna.storages.JournalStorage(storage),
            study_name=f"{sweep.path.parent.name}-{sweep.args.scale}-{digest}",
            direction="minimize" if self._objective.startswith("-") else "maximize",
            load_if_exists=True,
        )
        # Seed with the number of trials, so that a resumed search does not repeat its draws. The liar
        # keeps trials that run at the same time apart.
        self._study.sampler = optuna.samplers.TPESampler(
            seed=len(self._study.trials), constant_liar=jobs > 1
        )
        # Enqueue trials of a killed sweep again with the same values, so that their points resume.
        for trial in self._study.get_trials(states=(self._states.RUNNING,)):
            self._study.tell(trial.number, state=self._states.FAIL)
            self._study.enqueue_trial(trial.params, user_attrs={_RERUN_OF: trial.number})
        self._open: dict[str, Any] = {}

    @property
    def wants_more(self) -> bool:
        """Whether more trials are to be run."""
        complete, failed = self._count(self._states.COMPLETE), self._count(self._states.FAIL)
        # Interrupted trials are stored as failed ones, and run again.
        interrupted = sum(_RERUN_OF in trial.user_attrs for trial in self._study.trials)
        return complete < self._trials and complete + failed - interrupted < 3 * self._trials

    def _count(self, state: Any) -> int:
        return len(self._study.get_trials(states=(state,), deepcopy=False))

    def update(self, scheduler: Scheduler) -> None:
        """Report finished trials to the study and add new ones."""
        for name, trial in list(self._open.items()):
            state = scheduler.state[name]
            if state == "done":
                self._study.tell(trial, self._value(scheduler.point_runs[name]))
            elif state in ("failed", "blocked"):
                self._study.tell(trial, state=self._states.FAIL)
            else:
                continue
            del self._open[name]
        complete = self._count(self._states.COMPLETE)
        while len(self._open) < min(self._jobs, self._trials - complete) and self.wants_more:
            if scheduler.is_stopping:
                return
            trial = self._study.ask()
            try:
                points = self._points(trial, scheduler.point_runs)
            except UserError:
                self._study.tell(trial, state=self._states.FAIL)
                raise
            scheduler.add(p for p in points if p.name not in scheduler.point_runs)
            self._open[points[-1].name] = trial

    def _points(self, trial: Any, point_runs: dict[str, PointRun]) -> list[Point]:
        """Return the point of a trial after its dependencies, which may be among `point_runs`."""
        path, args = self._sweep.path, self._sweep.args
        point = call(path, lambda: self._get(args, trial), "get_trial")
        point = dataclasses.replace(point, name=f"trial_{trial.number}")
        point.facts.update(trial=trial.number, **trial.params)
        points = ordered(path, [point], args.data)
        for p in points:
            if p.name in point_runs and point_runs[p.name].digest != p.digest(args.data):
                raise UserError(
                    f"{path}: get_trial: two different points have the name {p.name!r}; "
                    "add trial.number to the name"
                )
        return points

    def _value(self, point_run: PointRun) -> float:
        metrics = [line["metrics"] for line in lines_of(point_run, self._sweep.args)]
        name = str(self._objective).removeprefix("-")
        if name not in metrics[0]:
            raise UserError(
                f"OBJECTIVE {name!r} is not a metric; choose from {', '.join(metrics[0])}"
            )
        return statistics.fmean(values[name] for values in metrics)

    def best_trial_line(self) -> str:
        """Return a line on the best trial so far."""
        if not self._count(self._states.COMPLETE):
            return "no trial is complete"
        best = self._study.best_trial
        return f"best of {len(self._study.trials)}: {best.value:.4g} with {best.params}"
