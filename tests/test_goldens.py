"""Results of small runs are bitwise identical to those recorded in `tests/data/goldens.json`."""

import pytest

from tests import goldens
from tests.helpers import processes
from tests.helpers.runs import command

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def recorded():
    result = goldens.read().get(goldens.key())
    if result is None:
        pytest.skip(
            f"needs digests for {goldens.key()!r}: python tests/goldens.py, before the change"
        )
    return result


def test_pretraining_matches_recorded_digests(recorded, rows, tmp_path):
    """The run named "whole": two phases of packed rows, with accumulation."""
    argv = command(
        tmp_path,
        [rows(32, 3), rows(64, 4)],
        *goldens.PRETRAINING,
        size="L2-H32-A2",
        phases=",32,64",
    )
    processes.run(argv, env=goldens.ONE_DEVICE, check=True)
    assert goldens.digest(tmp_path) == recorded["pretrain, whole"]


# Other tests compare resumed runs with whole ones, and meshes up to rounding.
@pytest.mark.nightly
def test_resumed_pretraining_and_one_on_a_mesh_match_recorded_digests(recorded, tmp_path):
    cases = goldens.pretraining(tmp_path)
    assert {
        f"pretrain, {case}": result for case, result in cases.items()
    }.items() <= recorded.items()
    assert cases["whole"] == cases["resumed"]


# The other heads share all but their data and loss with "class".
@pytest.mark.parametrize(
    "head",
    [
        pytest.param(head, marks=[] if head == "class" else pytest.mark.nightly)
        for head in goldens.HEADS
    ],
)
def test_finetuning_matches_recorded_digests(recorded, tmp_path, head):
    assert goldens.finetuning(tmp_path, head) == recorded[f"finetune, {head}"]
