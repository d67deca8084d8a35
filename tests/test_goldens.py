"""Small runs compute what they computed when `tests/data/goldens.json` was recorded, to the bit."""

import pytest

from tests import goldens

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def recorded():
    result = goldens.read().get(goldens.key())
    if result is None:
        pytest.skip(
            f"needs digests for {goldens.key()!r}: python tests/goldens.py, before the change"
        )
    return result


def test_pretraining(recorded, tmp_path):
    cases = goldens.pretraining(tmp_path)
    assert {
        f"pretrain, {case}": result for case, result in cases.items()
    }.items() <= recorded.items()
    assert cases["whole"] == cases["resumed"]


@pytest.mark.parametrize("head", goldens.HEADS)
def test_finetuning(recorded, tmp_path, head):
    assert goldens.finetuning(tmp_path, head) == recorded[f"finetune, {head}"]
