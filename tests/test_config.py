"""Configs: validation errors, command-line overrides, and the files in configs/."""

import dataclasses
import json
import pathlib

import pytest

from bert_jax import cli
from bert_jax.config import fields, flags, listing
from bert_jax.config import schema as configs
from bert_jax.config.checks import validate
from bert_jax.config.model import HeadConfig, ModelConfig
from bert_jax.config.schema import Config, FinetuneConfig, MeshConfig, PhaseConfig, TaskConfig
from bert_jax.config.sizes import model_size
from bert_jax.errors import UserError
from bert_jax.objectives import pretraining
from bert_jax.runs import workdir
from bert_jax.runtime import sharding

FOLDER = pathlib.Path(__file__).parent.parent / "configs"
PRETRAIN = f"--config={FOLDER / 'pretrain.py'}"


def refusal(call, *arguments) -> str:
    with pytest.raises(UserError) as error:
        call(*arguments)
    return str(error.value)


def changed(config, settings):
    """Return the config with values of fields by key, such as "optim.beta2"."""
    for key, value in settings.items():
        name, _, rest = key.partition(".")
        part = changed(getattr(config, name), {rest: value}) if rest else value
        config = dataclasses.replace(config, **{name: part})
    return config


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("steps", 0),
        *(("seed", value) for value in (-1, 2**32)),
        ("platform", "gppu"),
        *(("model.dropout", value) for value in (1.0, float("nan"))),
        ("model.heads", 10),  # no divisor of 768
        ("model.local.window", 1),
        *(("model.head.lstm_layers", value) for value in (-1, 2)),
        *(("model.head.features", value) for value in ("first", "last")),
        *(("optim.learning_rate", value) for value in (0.0, float("inf"))),
        ("masking.rate", 0.0),
        ("phases", ()),
        ("phases", (PhaseConfig(fraction=0.5),)),
        *(("mesh.data", value) for value in (0, -2)),
    ],
)
def test_validate_names_the_invalid_setting(key, value):
    message = refusal(validate, changed(Config(), {key: value}))
    assert f"config.{key.removesuffix('.data')}" in message


CAUSAL = {"model.causal": True, "model.next_sentence": False}


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"model.causal": True}, "model.next_sentence is True"),
        ({**CAUSAL, "masking.whole_word": True}, "masking.whole_word is True"),
        ({"model.span_boundary": True, "model.embedding_size": 128}, "model.embedding_size is 128"),
        (
            {"model.mup.base_hidden": 256, "model.embedding_size": 128},
            "model.embedding_size is 128",
        ),
        ({"model.mup.base_hidden": 256, "model.transform": False}, "model.transform is False"),
        (
            {"model.embedding_size": 128, "model.transform": False, "model.tied_decoder": False},
            "model.transform is False",
        ),
        ({"model.position_kind": "rope", "model.hidden": 36}, "model.heads is 12"),  # odd size
        ({"masking.mask_fraction": 0.9}, "masking"),
        ({"masking.mask_fraction": 1.1, "masking.same_fraction": -0.2}, "masking"),
        ({"phases": (PhaseConfig(fraction=1.5), PhaseConfig(fraction=-0.5))}, "phases[1].fraction"),
        ({"phases": (PhaseConfig(tokens=1024),)}, "phases[0].tokens"),
        ({"phases": (PhaseConfig(batch_size=9, accumulation=2),)}, "phases[0].batch_size 9"),
        ({"mesh.data": -1, "mesh.fsdp": -1}, "mesh"),
    ],
)
def test_validate_names_settings_that_conflict(settings, key):
    assert f"config.{key}" in refusal(validate, changed(Config(), settings))


@pytest.mark.parametrize(
    ("argument", "key"),
    [
        ("--config.optim.lerning_rate=1", "config.optim.learning_rate?"),
        ("--config.phases[7].rows=x", "config.phases["),
        ("--optim.learning_rate=1", "config.optim.learning_rate?"),
        ("--config=base,128", "--config=base,128"),  # a second config
        ("steps=1", "steps=1"),
        ("--config.optim=adam", "config.optim is a group"),
        ("--config.steps=many", "steps"),
        # Names of other libraries.
        ("--config.model.num_hidden_layers=1", "config.model.layers?"),
        ("--config.optimizer.learning_rate=1", "config.optim.learning_rate?"),
    ],
)
def test_bad_argument_error_names_the_key(argument, key):
    assert key in refusal(flags.load, [f"{PRETRAIN}:mini", argument])


@pytest.mark.parametrize(
    ("file", "arguments", "key"),
    [
        ("table.py", ["optim.warmup_steps=5"], "config.warmup_fraction"),
        ("table.py", ["model.vocab_size=5"], "the vocabulary"),
        ("table.py", ["model.head.kind=token"], "config.task"),
        ("squad.py:3", [], "config.task.name is 'squad3'"),
        ("swag.py:sst2", [], "config.task.name is 'sst2'"),
        ("table.py", ["task.tokens=7"], "config.task.tokens is 7"),
        ("table.py", ["model.head.layer=transform", "model.head.features=last"], "head.layer"),
    ],
)
def test_finetune_rejects_derived_and_invalid_settings(file, arguments, key):
    arguments = [f"--config={FOLDER / file}", *(f"--config.{a}" for a in arguments)]
    assert key in refusal(flags.load, arguments, FinetuneConfig)


@pytest.mark.parametrize(
    ("key", "value"), [("frozen_layers", 1), ("reset_layers", 1), ("optim.layer_decay", 0.9)]
)
def test_frozen_features_reject_encoder_training_settings(key, value):
    validate(changed(FinetuneConfig(), {key: value}))
    frozen = changed(FinetuneConfig(), {"model.head.features": "weighted-last4"})
    validate(frozen)
    assert f"config.{key} is {value}" in refusal(validate, changed(frozen, {key: value}))


def test_features_need_as_many_layers():
    model = ModelConfig(layers=3, head=HeadConfig("sequence", ("a", "b"), features="last4"))
    message = refusal(validate, FinetuneConfig(model=model))
    assert "config.model.head.features is 'last4'" in message


def test_model_limits_are_checked_once_the_model_is_known():
    """A large checkpoint has more layers than the default model, so the check must wait for it."""
    changes = dict(frozen_layers=20, task=TaskConfig(tokens=1024))
    validate(FinetuneConfig(**changes))
    large = ModelConfig(layers=24, positions=1024, head=HeadConfig("sequence", ("a", "b")))
    validate(FinetuneConfig(model=large, reset_layers=4, **changes))
    message = refusal(validate, FinetuneConfig(model=large, reset_layers=5, **changes))
    assert "config.reset_layers is 5: it must be at most 4" in message
    message = refusal(validate, FinetuneConfig(model=large, frozen_layers=25))
    assert "config.frozen_layers is 25" in message


@pytest.mark.parametrize("option", ["--config", "--config.masking.whole_word"])
def test_option_is_no_value_of_a_setting(option):
    assert option in refusal(flags.split, [option, "--rows", "rows"])


def test_command_line_overrides_set_single_fields():
    expected = {
        "optim.learning_rate": 2e-4,
        "phases[1].rows": "long",
        "masking.whole_word": True,
        "steps": 77,
        "model.dropout": 0.0,
    }
    settings = [f"--config.{key}={value}" for key, value in expected.items()]
    plain = fields.flatten(flags.load([f"{PRETRAIN}:L4-H256-A4"]))
    config = fields.flatten(flags.load([f"{PRETRAIN}:L4-H256-A4", *settings]))
    assert config == plain | expected != plain


_UNKNOWN_FIELD = """
from bert_jax.config.schema import Config
def get_config():
    config = Config()
    config.model.layer = 3
    return config
"""


@pytest.mark.parametrize(
    ("content", "key"),
    [
        (None, "does not exist"),
        ("def get_config():\n    raise KeyError('gone')\n", "gone"),
        ("def get_config(:\n", "SyntaxError"),
        (_UNKNOWN_FIELD, "layer"),
        ("def get_config():\n    return 5\n", "bert_jax.config.schema.Config"),
        ("x = 1\n", "get_config"),
    ],
)
def test_bad_config_file_error_names_the_file(tmp_path, content, key):
    # A unique name per case, since an imported module keeps its definitions under that name.
    path = tmp_path / f"mine_{len(content or '')}.py"
    if content is not None:
        path.write_text(content)
    message = refusal(flags.load, [f"--config={path}"])
    assert key in message
    assert path.name in message


@pytest.mark.parametrize(
    "name",
    [
        *sorted(path.name for path in FOLDER.glob("[!_]*.py")),
        *(
            f"pretrain.py:{size}"
            for size in ("base,128", "mini,128,512", "micro", "teaching", "L6-H768-A3")
        ),
    ],
)
def test_every_config_file_loads_and_round_trips(name):
    kind = Config if name.startswith(("continued", "pretrain")) else FinetuneConfig
    config = flags.load([f"--config={FOLDER / name}"], kind)
    assert isinstance(config, kind)
    again = configs.from_dict(json.loads(json.dumps(fields.to_dict(config))))
    assert again == config
    assert fields.flatten(again) == fields.flatten(config)


@pytest.mark.parametrize("key", ["steps", "phases"])
def test_config_of_incompatible_version_is_rejected(key):
    values = fields.to_dict(Config())
    assert "color" in refusal(configs.from_dict, {**values, "color": 1})
    assert "speed" in refusal(configs.from_dict, {**values, "optim": {"speed": 1}})
    del values[key]
    assert key in refusal(configs.from_dict, values)


@pytest.mark.parametrize(
    ("key", "value"),
    [("layers", 100_000_000), ("positions", -1), ("hidden", 128 * 10**9), ("vocab_size", 2**30)],
)
def test_config_of_a_run_has_the_constraints_of_settings(tmp_path, key, value):
    values = fields.to_dict(Config())
    values["model"][key] = value
    (tmp_path / "config.json").write_text(json.dumps({"config": values}))
    message = refusal(workdir.read_config, tmp_path)
    assert f"{tmp_path}/config.json: config.model.{key} is {value}" in message


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("base", (12, 768, 12, 3072)),
        ("large", (24, 1024, 16, 4096)),
        ("L1_H8_A2", (1, 8, 2, 32)),
        ("neo-base", (28, 768, 12, 2048)),
    ],
)
def test_model_sizes(name, shape):
    model = model_size(name)
    assert (model.layers, model.hidden, model.heads, model.feed_forward) == shape


def test_config_lists_settings_with_values_and_help(capsys, monkeypatch):
    def listed(*arguments):
        assert cli.main(["config", *arguments, "--json"]) == 0
        lines = map(json.loads, capsys.readouterr().out.splitlines())
        return {line.pop("key"): line for line in lines}

    known = fields.flatten(Config()) | fields.flatten(FinetuneConfig())
    assert listed("--all").keys() == known.keys() > listing.USUAL
    mini = listed("mini,128")
    assert (mini["steps"]["value"], mini["steps"]["default"]) == (20_000, 1_000_000)
    assert mini["steps"]["help"]
    assert "mesh.data" not in mini
    assert "model.norm.kind" in listed("modern-base")  # because it differs
    rte = listed("rte", "--all")
    assert rte["task.name"]["value"] == "rte"
    assert rte["accumulation"]["help"] == mini["accumulation"]["help"]  # inherited
    assert not rte.keys() & flags.DERIVED.keys()
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["config", "--all"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_phase_ends():
    phases = (PhaseConfig(fraction=0.9), PhaseConfig(fraction=0.1))
    assert configs.phase_ends(Config(steps=1_000_000, phases=phases)) == [900_000, 1_000_000]
    thirds = (PhaseConfig(fraction=1 / 3),) * 3
    assert configs.phase_ends(Config(steps=10, phases=thirds)) == [3, 7, 10]
    sevenths = (PhaseConfig(fraction=0.142857),) * 7
    assert configs.phase_ends(Config(steps=1_000_000, phases=sevenths))[-1] == 1_000_000


def test_mesh_and_batch_size_must_fit_the_devices():
    assert dict(sharding.make_mesh(MeshConfig(fsdp=2)).shape) == {"data": 4, "fsdp": 2, "tensor": 1}
    message = refusal(sharding.make_mesh, MeshConfig(data=3))
    assert "8 devices" in message
    assert "config.mesh" in message
    mesh = sharding.make_mesh(MeshConfig(data=8))
    sharding.check_batch(mesh, 32, 2)
    assert "32 or 48" in refusal(sharding.check_batch, mesh, 40, 2)


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        ("base,128", Config, "pretrain.py:base,128"),
        ("configs/squad.py", FinetuneConfig, "squad.py"),
        ("L2-H16-A2,32", Config, "pretrain.py:L2-H16-A2,32"),
        ("rte", FinetuneConfig, "glue.py:rte"),
    ],
)
def test_configs_are_found_by_short_name(value, kind, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert flags.find(value, kind).endswith(f"configs/{expected}")
    assert isinstance(flags.load([f"--config={value}"], kind), kind)


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ([], "--config"),
        ([f"{PRETRAIN}:huge"], "'huge'"),
        (["--config=bsae"], "base?"),
        (["--config=configs/pretrian.py:base"], "configs/pretrian.py does not exist"),
    ],
)
def test_missing_and_misspelled_configs_are_rejected(arguments, key):
    assert key in refusal(flags.load, arguments)


def test_warmup_steps_conflict_with_warmup_fraction():
    steps = "--config.optim.warmup_steps=7"
    assert "config.warmup_fraction" in refusal(flags.load, [f"{PRETRAIN}:mini,128", steps])
    config = flags.load([f"{PRETRAIN}:mini,128", steps, "--config.warmup_fraction=0"])
    assert pretraining.abstract_phases(config, 1)[0].optim.warmup_steps == 7
