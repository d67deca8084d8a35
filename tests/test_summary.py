"""Messages at the start and end of a run, and warnings about likely mistakes in settings."""

import dataclasses
import json

import jax
import pytest

from bert_jax.config.schema import Config, FinetuneConfig, MeshConfig, OptimConfig, PhaseConfig
from bert_jax.config.sizes import model_size
from bert_jax.objectives import pretraining
from bert_jax.objectives.base import Phase
from bert_jax.runtime import sharding
from bert_jax.training import summary


def phases(config: Config) -> list[Phase]:
    return pretraining.abstract_phases(config, 1)[1]


def rows(train: int = 800, heldout_tokens: int = 100_000) -> dict:
    return {
        "digest": "",
        "pairs": "nsp",
        "train": {"rows": train, "real_tokens": 32 * train},
        "heldout": {"rows": 2_000, "real_tokens": heldout_tokens},
    }


def config(steps: int = 1_000, warmup: int = 60, lengths: int = 1, **changes) -> Config:
    return Config(
        model=dataclasses.replace(model_size("L2-H16-A2"), **changes),
        steps=steps,
        batch_size=8,
        optim=OptimConfig(warmup_steps=warmup),
        phases=(PhaseConfig(tokens=32, fraction=1 / lengths),) * lengths,
    )


def test_sensible_settings_have_no_warning():
    for settings in (config(), config(lengths=2)):
        given = phases(settings)
        assert not list(summary.warnings(settings, given, [rows()] * len(given)))
    causal = config(causal=True, next_sentence=False)  # predicts all held-out tokens
    single = rows(heldout_tokens=3_000) | {"pairs": "none"}
    assert not list(summary.warnings(causal, phases(causal), [single]))
    tuned = FinetuneConfig(steps=100, optim=OptimConfig(warmup_steps=10))
    assert not list(summary.warnings(tuned, phases(config(100)), [{"digest": ""}]))


@pytest.mark.parametrize(
    ("settings", "data", "key"),
    [
        (config(400, 400), rows(), "config.optim.warmup_steps=25"),
        (config(99), rows(), "99%"),
        (config(10_100), rows(), "101 times"),
        (config(), rows(heldout_tokens=3_000), "450 tokens"),
        (config(next_sentence=False), rows(), "--pairs none"),
        (dataclasses.replace(config(), evaluate_rows=40), rows(), "300 tokens"),
    ],
)
def test_likely_mistakes_give_a_warning(settings, data, key):
    (line,) = summary.warnings(settings, phases(settings), [data])
    assert line.startswith("warning: ")
    assert key in line


def test_rows_of_several_phases_count_once(tmp_path):
    settings, mesh = config(lengths=2), sharding.make_mesh(MeshConfig(), jax.devices()[:1])
    lines = summary.start_lines(settings, mesh, phases(settings), [rows()] * 2, {}, tmp_path)
    assert any("800 rows with 25,600 real tokens, 10 epochs" in line for line in lines)


def test_resuming_with_other_versions_or_devices_gives_a_warning(tmp_path):
    settings, mesh = config(), sharding.make_mesh(MeshConfig(), jax.devices()[:1])
    given = phases(settings)
    before = {"step": 0, "versions": {"jax": "1"}, "devices": "1 cpu"}
    before |= {"attention": "xla at T=128", "kernels": "auto"}
    for now, expected in (
        ({"step": 5}, ""),
        ({"versions": {"jax": "2"}}, ""),  # from the beginning
        ({"step": 5, "versions": {"jax": "2"}}, "jax 1, now 2"),
        ({"step": 5, "devices": "1 NVIDIA H100"}, "devices 1 cpu, now 1 NVIDIA H100"),
        ({"step": 5, "attention": "packed at T=128"}, "attention xla at T=128, now packed"),
    ):
        lines = [json.dumps(start) + "\n" for start in (before, before | now)]
        (tmp_path / "starts.jsonl").write_text("".join(lines))
        shown = summary.start_lines(settings, mesh, given, [rows()], {}, tmp_path)
        warned = "".join(line for line in shown if line.startswith("warning: "))
        assert bool(warned) == bool(expected)
        assert expected in warned


def test_end_message_names_best_evaluation_and_checkpoint():
    end = {
        "step": 60,
        "seconds": 49.2,
        "metric": "masked_lm_loss",
        "best_step": 40,
        "best": 5.21964,
    }
    end["checkpoint"] = "run/checkpoints/40"
    text = "\n".join(summary.end_lines(end))
    for part in ("60 ", "49 s", "masked_lm_loss 5.2196 at step 40", "run/checkpoints/40"):
        assert part in text
    assert "run/checkpoints/40" in "\n".join(summary.end_lines({**end, "best": None}))


def test_durations():
    durations = {45.0: "45 s", 99.6: "100 s", 804.0: "13.4 min", 9_000.0: "2.5 h"}
    assert {seconds: summary.duration(seconds) for seconds in durations} == durations
