"""Searches: Optuna says what to try next."""

import dataclasses
import statistics
from typing import Any

from bert_jax.errors import UserError
from bert_jax.tools.sweep.points import Point, Sweep, call, ordered
from bert_jax.tools.sweep.results import lines_of
from bert_jax.tools.sweep.scheduler import Place, Scheduler


class Search:
    """Optuna's trials as points; the study is beside the sweep and outlives everything."""

    def __init__(self, sweep: Sweep, trials: int, at_a_time: int):
        get_trial, self._objective = (
            getattr(sweep.module, name, None) for name in ("get_trial", "OBJECTIVE")
        )
        if not get_trial or not self._objective:
            raise UserError(
                f"{sweep.path} has nothing to search: it needs get_trial(given, trial) and "
                'OBJECTIVE, such as "dev.accuracy" ("-heldout loss" is made small)'
            )
        try:
            import optuna
        except ImportError:
            raise UserError("--search needs optuna: pip install 'bert-jax[search]'") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._get, self._sweep, self._trials, self._most = get_trial, sweep, trials, at_a_time
        self._states = optuna.trial.TrialState
        storage = optuna.storages.journal.JournalFileBackend(
            str(sweep.path.parent / "study.journal")
        )
        self._study = optuna.create_study(
            storage=optuna.storages.JournalStorage(storage),
            study_name=f"{sweep.path.parent.name}-{sweep.given.scale}",
            direction="minimize" if self._objective.startswith("-") else "maximize",
            load_if_exists=True,
        )
        # Draws follow from how many trials there are: a search that goes on does not begin again.
        self._study.sampler = optuna.samplers.TPESampler(seed=len(self._study.trials))
        # Trials whose sweep was killed: asked again with the same values, so that their points go on.
        for trial in self._study.get_trials(states=(self._states.RUNNING,)):
            self._study.tell(trial.number, state=self._states.FAIL)
            self._study.enqueue_trial(trial.params)
        self._open: dict[str, Any] = {}

    @property
    def wants_more(self) -> bool:
        """Whether there are trials to come."""
        over = (self._states.COMPLETE, self._states.FAIL)
        ended = [t for t in self._study.get_trials(deepcopy=False) if t.state in over]
        return sum(t.state is self._states.COMPLETE for t in ended) < self._trials and len(ended) < 3 * self._trials  # fmt: skip

    def look(self, scheduler: Scheduler) -> None:
        """Tells the study what has ended and asks it for more."""
        for name, trial in list(self._open.items()):
            state = scheduler.state[name]
            if state == "done":
                self._study.tell(trial, self._value(scheduler.places[name]))
            elif state in ("failed", "blocked"):
                self._study.tell(trial, state=self._states.FAIL)
            else:
                continue
            del self._open[name]
        complete = len(self._study.get_trials(states=(self._states.COMPLETE,), deepcopy=False))
        while len(self._open) < min(self._most, self._trials - complete) and self.wants_more:
            if scheduler.is_stopping:
                return
            trial = self._study.ask()
            point = self._point(trial)
            point = dataclasses.replace(point, name=f"trial_{trial.number}")
            point.facts.update(trial=trial.number, **trial.params)
            scheduler.add(
                p
                for p in ordered(self._sweep.path, [point], self._sweep.given.data)
                if p.name not in scheduler.places
            )
            self._open[point.name] = trial

    def _point(self, trial: Any) -> Point:
        """What a trial runs."""
        path, given = self._sweep.path, self._sweep.given
        try:
            return call(path, lambda: self._get(given, trial), "get_trial")
        except UserError:
            self._study.tell(trial, state=self._states.FAIL)
            raise

    def _value(self, place: Place) -> float:
        found = [line["metrics"] for line in lines_of(place, self._sweep.given)]
        name = self._objective.removeprefix("-")
        if name not in found[0]:
            raise UserError(f"OBJECTIVE {name!r} is none of the metrics: {', '.join(found[0])}")
        return statistics.fmean(metrics[name] for metrics in found)

    def describe(self) -> str:
        """The best so far."""
        if not self._study.get_trials(states=(self._states.COMPLETE,)):
            return "no trial has come to its end"
        best = self._study.best_trial
        return f"best of {len(self._study.trials)}: {best.value:.4g} with {best.params}"
