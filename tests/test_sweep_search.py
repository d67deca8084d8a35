"""Sweeps: searches."""

import pytest

from bert_jax.errors import UserError
from tests.helpers.sweeps import run_sweep


class Objective:
    """A stand-in for a sweep file that defines a search."""

    OBJECTIVE = "score"

    def __init__(self, make):
        self._make = make

    def get_trial(self, args, trial):
        length = trial.suggest_int("length", 1, 9)
        return self._make("n" * length, trial.number)


def test_search_reports_the_best_trial_and_resumes(make_point, tmp_path, capsys):
    module = Objective(make_point)
    status, results = run_sweep([], tmp_path, jobs=2, module=module, trials=5)
    assert status == 0
    best = max(line["metrics"]["score"] for line in results)
    assert f"best of 5: {best:g} with {{'length': {best:.0f}}}" in capsys.readouterr().out
    assert sorted(line["facts"]["trial"] for line in results) == [0, 1, 2, 3, 4]
    for trials in (5, 7):
        run_sweep([], tmp_path, module=module, trials=trials)
        assert len(make_point.calls()) == trials


def test_study_is_searched_by_one_process_at_a_time(make_point, tmp_path):
    class SearchedTwice(Objective):
        def get_trial(self, args, trial):
            with pytest.raises(UserError, match=r"experiment/\.study-\w+ is in use"):
                run_sweep([], tmp_path, module=Objective(make_point), trials=1)
            return super().get_trial(args, trial)

    for trials in (1, 2):  # the first search leaves no lock behind
        status, results = run_sweep([], tmp_path, module=SearchedTwice(make_point), trials=trials)
        assert (status, len(results), len(study_of(tmp_path).trials)) == (0, trials, trials)


def test_link_in_place_of_the_lock_of_a_study_is_refused(make_point, tmp_path):
    run_sweep([], tmp_path, module=Objective(make_point), trials=1)
    (lock,) = (tmp_path / "experiment").glob(".study-*")
    lock = lock.rename(tmp_path / "elsewhere").parent / lock.relative_to(tmp_path)
    lock.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=f"{lock} is a symbolic link"):
        run_sweep([], tmp_path, module=Objective(make_point), trials=2)


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


def test_resumed_search_samples_new_values(make_point, tmp_path):
    for trials in (2, 4):
        status, results = run_sweep([], tmp_path, module=SampledLength(make_point), trials=trials)
        assert status == 0
    assert len({line["facts"]["length"] for line in results}) == 4


@pytest.mark.parametrize("other", [{"args": {"seeds": 2}}, {"runs": "others"}])
def test_search_with_other_arguments_is_another_study(make_point, tmp_path, other):
    module = SampledLength(make_point)
    module.get_trial = lambda args, trial: make_point("x", args, trial.suggest_int("length", 1, 9))
    for options, num_trials in (({}, 1), (other, 2), ({}, 2)):
        run_sweep([], tmp_path, module=module, trials=1, **options)
        assert len(make_point.calls()) == num_trials


@pytest.mark.parametrize("is_shared", [True, False])
def test_dependencies_that_differ_between_trials_need_different_names(
    make_point, tmp_path, is_shared
):
    module = Objective(make_point)

    def get_trial(args, trial):
        rate = str(trial.suggest_float("rate", 0.0, 1.0))
        return make_point("x", rate, make_point("model", "" if is_shared else rate))

    module.get_trial = get_trial
    if is_shared:
        assert run_sweep([], tmp_path, module=module, trials=2)[0] == 0
        assert make_point.calls() == ["model", "x", "x"]
        return
    with pytest.raises(UserError, match=r"get_trial: .*'model'"):
        run_sweep([], tmp_path, module=module, trials=2)
    assert make_point.calls() == ["model", "x"]


def test_get_trial_error_names_the_function(make_point, tmp_path):
    import optuna

    module = Objective(make_point)
    module.get_trial = lambda args, trial: 1 / 0
    with pytest.raises(UserError, match="get_trial: ZeroDivisionError"):
        run_sweep([], tmp_path, module=module, trials=1)
    (trial,) = study_of(tmp_path).trials
    assert trial.state == optuna.trial.TrialState.FAIL


def test_trial_of_a_killed_search_is_retried(make_point, tmp_path):
    module = Objective(make_point)
    run_sweep([], tmp_path, module=module, trials=1)
    killed = study_of(tmp_path).ask()
    length = killed.suggest_int("length", 1, 9)
    _, results = run_sweep([], tmp_path, module=module, trials=2)
    assert [line["facts"]["length"] for line in results][1:] == [length]


def test_torn_line_of_a_study_is_cut_off_and_a_damaged_one_refused(make_point, tmp_path):
    journal = tmp_path / "experiment" / "study.journal"
    for trials in (1, 2):
        status, results = run_sweep([], tmp_path, module=Objective(make_point), trials=trials)
        assert (status, len(results)) == (0, trials)
        with journal.open("ab") as file:
            file.write(b'{"op_code":')
    with journal.open("ab") as file:
        file.write(b"\n")
    number = journal.read_bytes().count(b"\n")
    with pytest.raises(UserError, match=f"study.journal, line {number} "):
        run_sweep([], tmp_path, module=Objective(make_point), trials=3)


def test_interrupted_trials_do_not_end_a_search(make_point, tmp_path):
    module = Objective(make_point)
    for _ in range(3):
        run_sweep([], tmp_path, module=module, trials=1)
        for _ in range(5):
            study_of(tmp_path).ask().suggest_int("length", 1, 9)
    _, results = run_sweep([], tmp_path, module=module, trials=2)
    assert len(results) == 2


def test_search_ends_after_three_failed_trials_for_each_one_asked_for(make_point, tmp_path):
    module = Objective(lambda name, *more: make_point(name, *more, "fails"))
    status, results = run_sweep([], tmp_path, module=module, trials=1)
    assert status != 0
    assert results == []
    assert len(make_point.calls()) == len(study_of(tmp_path).trials) == 3


def test_search_without_get_trial_is_rejected(make_point, tmp_path):
    with pytest.raises(UserError, match="get_trial"):
        run_sweep([], tmp_path, trials=1)
