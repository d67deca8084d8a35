"""Sweeps: searches."""

import pathlib

import pytest

from bert_jax.errors import UserError
from tests.helpers.sweeps import go


class Objective:
    """A stand-in for a sweep file that defines a search."""

    OBJECTIVE = "score"

    def __init__(self, make):
        self._make = make

    def get_trial(self, args, trial):
        length = trial.suggest_int("length", 1, 9)
        return self._make("n" * length, trial.number)


def test_search_reports_the_best_trial_and_resumes(bench, tmp_path, capsys):
    module = Objective(bench)
    status, results = go([], tmp_path, jobs=2, module=module, trials=5)
    assert status == 0
    best = max(line["metrics"]["score"] for line in results)
    assert f"best of 5: {best:g} with {{'length': {best:.0f}}}" in capsys.readouterr().out
    assert [line["facts"]["trial"] for line in results] != []
    assert (tmp_path / "experiment" / "study.journal").exists()
    go([], tmp_path, module=module, trials=5)
    assert len(bench.calls()) == 5
    go([], tmp_path, module=module, trials=7)
    assert len(bench.calls()) == 7


def test_study_is_searched_by_one_process_at_a_time(bench, tmp_path):
    class SearchedTwice(Objective):
        def get_trial(self, args, trial):
            with pytest.raises(UserError, match=r"experiment/\.study-\w+ is in use by another"):
                go([], tmp_path, module=Objective(bench), trials=1)
            return super().get_trial(args, trial)

    for trials in (1, 2):  # the first search leaves no lock behind
        status, results = go([], tmp_path, module=SearchedTwice(bench), trials=trials)
        assert (status, len(results), len(study_of(tmp_path).trials)) == (0, trials, trials)


def study_of(tmp_path):
    """Open the only study of a search."""
    import optuna

    backend = optuna.storages.journal.JournalFileBackend(
        str(tmp_path / "experiment" / "study.journal")
    )
    storage = optuna.storages.JournalStorage(backend)
    (name,) = optuna.get_all_study_names(storage)
    return optuna.load_study(study_name=name, storage=storage)


class SampledLength(Objective):
    """A trial's command contains only the sampled value."""

    def get_trial(self, args, trial):
        return self._make("x", str(trial.suggest_float("length", 0.0, 1.0)))


def test_resumed_search_samples_new_values(bench, tmp_path):
    for trials in (2, 4):
        status, results = go([], tmp_path, module=SampledLength(bench), trials=trials)
        assert status == 0
    assert len({line["facts"]["length"] for line in results}) == 4


class TwoPoints(Objective):
    """A trial depends on another point, whose command may contain the sampled value."""

    def __init__(self, make, is_shared):
        super().__init__(make)
        self._is_shared = is_shared

    def get_trial(self, args, trial):
        rate = str(trial.suggest_float("rate", 0.0, 1.0))
        return self._make("x", rate, self._make("model", "" if self._is_shared else rate))


@pytest.mark.parametrize(
    "other",
    [
        *({"args": args} for args in ({"init": "b"}, {"seeds": 2}, {"data": pathlib.Path("b")})),
        {"runs": "others"},
    ],
)
def test_search_with_other_arguments_is_another_study(bench, tmp_path, other):
    module = SampledLength(bench)
    module.get_trial = lambda args, trial: bench("x", args, trial.suggest_int("length", 1, 9))
    for options, num_trials in (({}, 1), (other, 2), ({}, 2)):
        go([], tmp_path, module=module, trials=1, **options)
        assert len(bench.calls()) == num_trials


def test_trials_share_a_dependency(bench, tmp_path):
    status, _ = go([], tmp_path, module=TwoPoints(bench, True), trials=2)
    assert status == 0
    assert bench.calls() == ["model", "x", "x"]


def test_dependencies_that_differ_between_trials_need_different_names(bench, tmp_path):
    with pytest.raises(UserError, match=r"get_trial: two different points have the name 'model'"):
        go([], tmp_path, module=TwoPoints(bench, False), trials=2)
    assert bench.calls() == ["model", "x"]


def test_get_trial_error_names_the_function(bench, tmp_path):
    import optuna

    module = Objective(bench)
    module.get_trial = lambda args, trial: 1 / 0
    with pytest.raises(UserError, match="get_trial: ZeroDivisionError: division by zero"):
        go([], tmp_path, module=module, trials=1)
    (trial,) = study_of(tmp_path).trials
    assert trial.state == optuna.trial.TrialState.FAIL


def test_trial_of_a_killed_search_is_retried(bench, tmp_path):
    module = Objective(bench)
    go([], tmp_path, module=module, trials=1)
    killed = study_of(tmp_path).ask()
    length = killed.suggest_int("length", 1, 9)
    _, results = go([], tmp_path, module=module, trials=2)
    assert [line["facts"]["length"] for line in results][1:] == [length]


def test_search_without_get_trial_is_rejected(bench, tmp_path):
    with pytest.raises(UserError, match="defines no search: it must have get_trial"):
        go([], tmp_path, trials=1)
