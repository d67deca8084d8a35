"""Configs: validation errors, command-line overrides, and the files in configs/."""

import dataclasses
import json
import pathlib

import pytest

from bert_jax.config import flags
from bert_jax.config import schema as configs
from bert_jax.config.checks import validate
from bert_jax.config.schema import (
    Config,
    FinetuneConfig,
    MaskingConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    PhaseConfig,
    TaskConfig,
)
from bert_jax.config.sizes import model_size
from bert_jax.errors import UserError
from bert_jax.objectives import pretraining
from bert_jax.runtime import sharding

FOLDER = pathlib.Path(__file__).parent.parent / "configs"
PRETRAIN = f"--config={FOLDER / 'pretrain.py'}"


def refusal(call, *arguments) -> str:
    with pytest.raises(UserError) as error:
        call(*arguments)
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (Config(steps=0), "config.steps"),
        (Config(batch_size=-1), "config.batch_size"),
        (Config(seed=-1), "config.seed"),
        (Config(seed=2**32), "config.seed"),
        (Config(platform="gppu"), "config.platform"),
        (Config(evaluate_every_steps=-1), "config.evaluate_every_steps"),
        (Config(model=ModelConfig(hidden=100, heads=12)), "config.model.heads"),
        (Config(model=ModelConfig(activation="swish")), "config.model.activation"),
        (Config(model=ModelConfig(dropout=1.0)), "config.model.dropout"),
        (Config(model=ModelConfig(attention_dropout=-0.1)), "config.model.attention_dropout"),
        (Config(model=ModelConfig(dtype="float16")), "config.model.dtype"),
        (Config(model=ModelConfig(layers=0)), "config.model.layers"),
        (Config(model=ModelConfig(remat="some")), "config.model.remat"),
        (Config(model=ModelConfig(layer_loop="while")), "config.model.layer_loop"),
        (Config(model=ModelConfig(dropout=float("nan"))), "config.model.dropout"),
        (Config(optim=OptimConfig(optimizer="sgd")), "config.optim.optimizer"),
        (Config(optim=OptimConfig(learning_rate=0.0)), "config.optim.learning_rate"),
        (Config(optim=OptimConfig(learning_rate=float("inf"))), "config.optim.learning_rate"),
        (Config(optim=OptimConfig(beta2=1.0)), "config.optim.beta2"),
        (Config(optim=OptimConfig(warmup_steps=-1)), "config.optim.warmup_steps"),
        (Config(masking=MaskingConfig(rate=0.0)), "config.masking.rate"),
        (
            Config(model=ModelConfig(causal=True)),
            "config.model.next_sentence is True: it must be f",
        ),
        (
            Config(
                model=ModelConfig(causal=True, next_sentence=False),
                masking=MaskingConfig(whole_word=True),
            ),
            "config.masking.whole_word is True: it must be False, the default",
        ),
        (
            Config(model=ModelConfig(lstm_layers=2)),
            "config.model.lstm_layers is 2: it must be 0 in",
        ),
        (Config(model=ModelConfig(lstm_layers=-1)), "config.model.lstm_layers is -1"),
        (
            Config(model=ModelConfig(features="last")),
            "config.model.features is 'last': it must be ''",
        ),
        (Config(model=ModelConfig(features="first")), "config.model.features is 'first'"),
        (
            Config(model=ModelConfig(span_boundary=True, embedding_size=128)),
            "config.model.embedding_size is 128: it must be 0 or hidden=768 with",
        ),
        (
            Config(model=ModelConfig(base_hidden=256, embedding_size=128)),
            "config.model.embedding_size is 128: it must be 0 or hidden=768 with",
        ),
        (
            Config(model=ModelConfig(base_hidden=256, transform=False)),
            "config.model.transform is False: it must be true with",
        ),
        (
            Config(model=ModelConfig(embedding_size=128, transform=False, tied_decoder=False)),
            "config.model.transform is False: it must be true where the embeddings have another",
        ),
        (Config(masking=MaskingConfig(mask_fraction=0.9)), "config.masking"),
        (
            Config(masking=MaskingConfig(mask_fraction=1.1, same_fraction=-0.2)),
            "config.masking",
        ),
        (Config(phases=()), "config.phases"),
        (Config(phases=(PhaseConfig(fraction=0.5),)), "config.phases"),
        (
            Config(phases=(PhaseConfig(fraction=1.5), PhaseConfig(fraction=-0.5))),
            "config.phases[1].fraction",
        ),
        (Config(phases=(PhaseConfig(tokens=1024),)), "config.phases[0].tokens"),
        (Config(phases=(PhaseConfig(batch_size=-2),)), "config.phases[0].batch_size"),
        (Config(batch_size=10, accumulation=4), "config.batch_size"),
        (
            Config(phases=(PhaseConfig(batch_size=9, accumulation=2),)),
            "config.phases[0].batch_size 9",
        ),
        (Config(mesh=MeshConfig(data=0)), "config.mesh"),
        (Config(mesh=MeshConfig(data=-1, fsdp=-1)), "config.mesh"),
        (Config(mesh=MeshConfig(tensor=-2)), "config.mesh"),
    ],
)
def test_validate_names_the_invalid_setting(config, key):
    assert key in refusal(validate, config)


def test_defaults_are_valid_and_match_bert():
    validate(Config())
    assert dataclasses.astuple(Config().masking)[:1] == (0.15,)
    optim = Config().optim
    assert (optim.learning_rate, optim.warmup_steps, optim.beta2) == (1e-4, 10_000, 0.999)
    assert (optim.epsilon, optim.weight_decay, optim.clip_norm) == (1e-6, 0.01, 1.0)


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("--config.optim.lerning_rate=1", "did you mean config.optim.learning_rate?"),
        ("--config.learning_rate=1", "did you mean config.optim.learning_rate?"),
        ("--config.model.warmup_steps=1", "did you mean config.optim.warmup_steps?"),
        ("--config.optim.steps=1", "did you mean config.steps?"),
        ("--config.phases[7].rows=x", "did you mean config.phases["),
        ("--config.zzzzqqq=1", "config.zzzzqqq: unknown key"),
        ("--optim.learning_rate=1", "did you mean config.optim.learning_rate?"),
        ("--confg.steps=1", "did you mean config.steps?"),
        ("steps=1", "steps=1"),
        ("--config.optim=adam", "config.optim is a group of settings"),
        ("--config.phases=x", "config.phases is a group of settings"),
        ("--config.steps=many", "steps"),
        ("--config.steps=1.5", "steps"),
        ("--config.optim.learning_rate=fast", "learning_rate"),
        ("--config.masking.whole_word=perhaps", "whole_word"),
        ("--config.model.heads=7", "config.model.heads is 7"),
        ("--config.optim.optimizer=sgd", "config.optim.optimizer"),
    ],
)
def test_bad_argument_error_names_the_key(argument, says):
    assert says in refusal(flags.load, [f"{PRETRAIN}:mini", argument])


@pytest.mark.parametrize(
    ("file", "arguments", "says"),
    [
        ("table.py", ["optim.warmup_steps=5"], "follows from config.warmup_fraction"),
        ("table.py", ["model.vocab_size=5"], "follows from the vocabulary"),
        ("table.py", ["model.head=token"], "follows from config.task"),
        ("table.py", ["model.labels=('a','b')"], "follows from config.task"),
        ("squad.py:3", [], "config.task.name is 'squad3': it must be one of '', 'squad1'"),
        ("swag.py:sst2", [], "config.task.name is 'sst2': it must be one of '', 'swag'"),
        ("table.py", ["task.tokens=7"], "config.task.tokens is 7: it must be 8 or more"),
        ("table.py", ["frozen_layers=-1"], "config.frozen_layers is -1"),
        *(
            (
                "table.py",
                ["model.head_layer=transform", setting],
                "head_layer is 'transform': it mu",
            )
            for setting in ("model.features=last", "model.lstm_layers=1")
        ),
    ],
)
def test_finetune_rejects_derived_and_invalid_settings(file, arguments, says):
    results = [f"--config={FOLDER / file}", *(f"--config.{a}" for a in arguments)]
    assert says in refusal(flags.load, results, FinetuneConfig)


def test_frozen_features_reject_encoder_training_settings():
    model = ModelConfig(features="weighted-last4")
    validate(FinetuneConfig(model=model))
    for changes in (
        {"frozen_layers": 1},
        {"reset_layers": 1},
        {"optim": OptimConfig(layer_decay=0.9)},
    ):
        output = refusal(validate, FinetuneConfig(model=model, **changes))
        assert "config.model.features='weighted-last4' freezes the encoder" in output
        validate(FinetuneConfig(**changes))
    shallow = dataclasses.replace(model, layers=3, head="sequence", labels=("a", "b"))
    assert "config.model.features is 'last4': the model has no layer -4" in (
        refusal(validate, FinetuneConfig(model=shallow))
    )


def test_model_limits_are_checked_once_the_model_is_known():
    """A large checkpoint has more layers than the default model, so the check must wait for it."""
    changes = dict(frozen_layers=20, task=TaskConfig(tokens=1024))
    validate(FinetuneConfig(**changes))
    large = ModelConfig(layers=24, positions=1024, head="sequence", labels=("a", "b"))
    validate(FinetuneConfig(model=large, reset_layers=4, **changes))
    assert "config.reset_layers is 5: it must be at most 4, the number of layers that are not " in (
        refusal(validate, FinetuneConfig(model=large, reset_layers=5, **changes))
    )
    assert "config.frozen_layers is 25" in (
        refusal(validate, FinetuneConfig(model=large, frozen_layers=25))
    )


@pytest.mark.parametrize("option", ["--config", "--config.masking.whole_word"])
def test_option_is_no_value_of_a_setting(option):
    message = refusal(flags.split, [option, "--rows", "rows"])
    assert message == f"{option} needs a value: write {option}=VALUE"


def test_several_configs_are_refused():
    arguments = [f"{PRETRAIN}:mini", "--config=base,128"]
    assert "--config=base,128: choose one config" in refusal(flags.load, arguments)


def test_command_line_overrides_set_single_fields():
    config = flags.load(
        [
            f"{PRETRAIN}:L4-H256-A4",
            "--config.optim.learning_rate=2e-4",
            "--config.phases[1].rows=long",
            "--config.masking.whole_word=true",
            "--config.steps=77",
            "--config.model.dropout=0",
        ]
    )
    assert config.optim.learning_rate == 2e-4
    assert [phase.rows for phase in config.phases] == ["", "long"]
    assert config.masking.whole_word is True
    assert config.steps == 77
    assert config.model.dropout == 0
    plain = flags.load([f"{PRETRAIN}:L4-H256-A4"])
    assert plain.optim.learning_rate == 1e-4
    assert plain.phases[1].rows == ""


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "does not exist"),
        ("def get_config():\n    raise KeyError('gone')\n", "gone"),
        ("import no_such_module_anywhere\n", "no_such_module_anywhere"),
        ("def get_config(:\n", "SyntaxError"),
        (
            "def get_config():\n    return 5\n",
            "get_config must return a bert_jax.config.schema.Config",
        ),
        ("x = 1\n", "get_config"),
    ],
)
def test_bad_config_file_gives_one_line_error(tmp_path, content, says):
    # A unique name per case, since an imported module keeps its definitions under that name.
    path = tmp_path / f"mine_{len(content or '')}.py"
    if content is not None:
        path.write_text(content)
    message = refusal(flags.load, [f"--config={path}"])
    assert says in message
    assert path.name in message


def test_missing_config_and_unknown_size_are_rejected():
    assert "--config" in refusal(flags.load, [])
    message = refusal(flags.load, [f"{PRETRAIN}:huge"])
    assert "huge" in message
    assert "mini" in message


@pytest.mark.parametrize("argument", ["", ":base,128", ":mini,128,512", ":teaching", ":L6-H768-A3"])
def test_config_dict_round_trip(argument):
    config = flags.load([PRETRAIN + argument])
    again = configs.from_dict(json.loads(json.dumps(configs.to_dict(config))))
    assert again == config
    assert configs.flatten(again) == configs.flatten(config)


def test_config_of_incompatible_version_is_rejected():
    values = configs.to_dict(Config())
    assert "color" in refusal(configs.from_dict, {**values, "color": 1})
    assert "speed" in refusal(configs.from_dict, {**values, "optim": {"speed": 1}})
    assert "no field 'steps'" in refusal(
        configs.from_dict, {k: v for k, v in values.items() if k != "steps"}
    )
    del values["phases"]
    assert "phases" in refusal(configs.from_dict, values)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("tiny", (2, 128, 2, 512)),
        ("mini", (4, 256, 4, 1024)),
        ("small", (4, 512, 8, 2048)),
        ("medium", (8, 512, 8, 2048)),
        ("base", (12, 768, 12, 3072)),
        ("large", (24, 1024, 16, 4096)),
        ("L6-H768-A3", (6, 768, 3, 3072)),
        ("L1_H8_A2", (1, 8, 2, 32)),
        ("teaching", (3, 192, 4, 768)),
        ("neo-base", (28, 768, 12, 2048)),
    ],
)
def test_model_sizes(name, shape):
    model = model_size(name)
    assert (model.layers, model.hidden, model.heads, model.feed_forward) == shape


@pytest.mark.parametrize("name", ["huge", "L6-H768", "xL1-H8-A2", "L1-H8-A2x", ""])
def test_unknown_size_error_lists_valid_sizes(name):
    message = refusal(model_size, name)
    assert all(size in message for size in ("tiny", "base", "teaching", "L6-H768-A3"))


def test_phase_ends():
    phases = (PhaseConfig(fraction=0.9), PhaseConfig(fraction=0.1))
    assert configs.phase_ends(Config(steps=1_000_000, phases=phases)) == [900_000, 1_000_000]
    thirds = (PhaseConfig(fraction=1 / 3),) * 3
    assert configs.phase_ends(Config(steps=10, phases=thirds)) == [3, 7, 10]
    sevenths = (PhaseConfig(fraction=0.142857),) * 7
    assert configs.phase_ends(Config(steps=1_000_000, phases=sevenths))[-1] == 1_000_000


@pytest.mark.parametrize("path", sorted(FOLDER.glob("[!_]*.py")), ids=lambda path: path.stem)
def test_every_config_file_loads(path):
    kind = Config if path.stem in ("continued", "pretrain") else configs.FinetuneConfig
    assert isinstance(flags.load([f"--config={path}"], kind), kind)


def test_mesh_and_batch_size_must_fit_the_devices():
    assert dict(sharding.make_mesh(MeshConfig(fsdp=2)).shape) == {"data": 4, "fsdp": 2, "tensor": 1}
    message = refusal(sharding.make_mesh, MeshConfig(data=3))
    assert "8 devices" in message
    assert "config.mesh" in message
    mesh = sharding.make_mesh(MeshConfig(data=8))
    sharding.check_batch(mesh, 32, 2)
    assert "32 or 48" in refusal(sharding.check_batch, mesh, 40, 2)


def test_batch_size_error_names_the_key_that_is_set():
    phases = (PhaseConfig(fraction=0.5), PhaseConfig(fraction=0.5, batch_size=9))
    config = Config(phases=phases, accumulation=2)
    keys = [configs.batch_size_key(config, i) for i in range(2)]
    assert keys == ["batch_size", "phases[1].batch_size"]
    mesh = sharding.make_mesh(MeshConfig(data=8))
    message = refusal(sharding.check_batch, mesh, 9, 2, keys[1])
    assert message.startswith("config.phases[1].batch_size 9 is not divisible by 16")
    assert refusal(validate, config).startswith("config.phases[1].batch_size 9 is not divisible")


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        ("base,128", Config, "pretrain.py:base,128"),
        ("pretrain:base,128", Config, "pretrain.py:base,128"),
        ("L2-H16-A2,32", Config, "pretrain.py:L2-H16-A2,32"),
        ("rte", FinetuneConfig, "glue.py:rte"),
        ("squad", FinetuneConfig, "squad.py"),
    ],
)
def test_configs_are_found_by_short_name(value, kind, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert flags.find(value, kind).endswith(f"configs/{expected}")
    assert isinstance(flags.load([f"--config={value}"], kind), kind)


@pytest.mark.parametrize(
    ("value", "suggestion"), [("bsae", "base"), ("pretrian:base", "pretrain"), ("smal,64", "small")]
)
def test_misspelled_config_name_gets_a_suggestion(value, suggestion):
    message = refusal(flags.load, [f"--config={value}"])
    assert message.endswith(f"did you mean {suggestion}?")


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("optim.lr", "optim.learning_rate"),
        ("bs", "batch_size"),
        ("optim.warmup", "optim.warmup_steps"),
        ("model.num_hidden_layers", "model.layers"),
        ("hidden_size", "model.hidden"),
        ("optimizer.learning_rate", "optim.learning_rate"),
    ],
)
def test_keys_of_other_libraries_get_a_suggestion(key, suggestion):
    message = refusal(flags.load, ["--config=mini,128", f"--config.{key}=1"])
    assert message == f"config.{key}: unknown key; did you mean config.{suggestion}?"


@pytest.mark.parametrize("size", ["tiny", "mini", "small", "medium", "teaching"])
def test_small_model_recipes(size):
    """All phases have the same tokens per step, and warm-up scales with the number of steps."""
    config = flags.load([f"{PRETRAIN}:{size}", "--config.steps=600"])
    tokens = {p.tokens * (p.batch_size or config.batch_size) for p in config.phases}
    assert tokens == {1_024 if size == "teaching" else 2_048}
    assert pretraining.abstract_phases(config, 1)[0].optim.warmup_steps == 40


def test_warmup_steps_conflict_with_warmup_fraction():
    steps = "--config.optim.warmup_steps=7"
    assert "set that instead" in refusal(flags.load, [f"{PRETRAIN}:mini,128", steps])
    config = flags.load([f"{PRETRAIN}:mini,128", steps, "--config.warmup_fraction=0"])
    assert pretraining.abstract_phases(config, 1)[0].optim.warmup_steps == 7
