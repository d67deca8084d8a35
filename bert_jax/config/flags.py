"""Configs from the command line: `--config NAME[:ARGUMENT]` and `--config.key=value`.

NAME is a path, or a config of the package without `.py`: `pretrain:base,128`. `base,128` alone is a
size to pretrain, and `rte` a GLUE task to fine-tune on.
"""

import dataclasses
import os
import pathlib
import re
from collections.abc import Iterable
from typing import Any

from bert_jax.config.checks import GLUE, validate
from bert_jax.config.fields import flatten, to_dict
from bert_jax.config.model import LoraConfig
from bert_jax.config.schema import Config, FinetuneConfig, TrainConfig, from_dict
from bert_jax.config.sizes import ARCHITECTURES, SIZES, model_size
from bert_jax.errors import UserError, did_you_mean, nearest

# Keys that fine-tuning derives from other settings, so setting them would have no effect.
DERIVED = {
    "optim.warmup_steps": "config.warmup_fraction",
    "model.vocab_size": "the vocabulary",
    **{
        f"model.{name}": "config.task"
        for name in (
            *("head.kind", "head.labels", "head.problem_type"),
            *("masked_lm", "next_sentence", "span_boundary", "pooler"),
        )
    },
    **{f"model.lora.{field.name}": "config.lora" for field in dataclasses.fields(LoraConfig)},
}

# Options of transformers' and Google's programs: ours, keys of settings or verbs, of which the first that
# exists is meant.
_ELSEWHERE = {
    "output_dir": ("--workdir", "--out"),
    "model_name_or_path": ("--init",),
    "init_checkpoint": ("--init",),
    "input_file": ("--rows", "task.train"),
    "data_dir": ("--data", "--rows"),
    "train_file": ("task.train", "--rows"),
    "validation_file": ("task.dev", "--rows"),
    "test_file": ("task.test",),
    "do_train": ("to leave it out, as the verb trains",),
    "do_eval": ("`bert-jax evaluate`",),
    "do_predict": ("`bert-jax predict`",),
    "epochs": ("steps",),
    "num_train_epochs": ("epochs", "steps"),
    "max_seq_length": ("task.tokens", "phases[0].tokens"),
    "gradient_accumulation_steps": ("accumulation",),
    "lr": ("optim.learning_rate",),
    "max_grad_norm": ("optim.clip_norm",),
    "adam_epsilon": ("optim.epsilon",),
    "warmup_steps": ("warmup_fraction",),
    "num_warmup_steps": ("optim.warmup_steps", "warmup_fraction"),
    "warmup_ratio": ("warmup_fraction",),
    "lr_scheduler_type": ("optim.schedule",),
    "mlm_probability": ("masking.rate",),
    "masked_lm_prob": ("masking.rate",),
    "save_steps": ("checkpoint.every_steps",),
    "eval_steps": ("evaluate_every_steps",),
    "logging_steps": ("log_every_steps",),
    "report_to": ("trackers",),
    "bf16": ("model.dtype=bfloat16",),
    "fp16": ("model.dtype=bfloat16",),
}


# An installed package contains the configs; in a checkout they are at the top level.
_PACKAGE = pathlib.Path(__file__).parents[1]
_FOLDER = next(x for x in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if x.is_dir())
NAMES = sorted(path.stem for path in _FOLDER.glob("[!_]*.py"))


def find(value: str, kind: type) -> str:
    """Return FILE:ARGUMENT for a value of --config, NAME[:ARGUMENT].

    Args:
        value: a path or name and its argument, or an argument alone.
        kind: `Config` or `FinetuneConfig`, which decides whose argument it is; `TrainConfig`: either.
    """
    name, colon, argument = value.partition(":")
    if kind is TrainConfig and value in GLUE:
        kind = FinetuneConfig
    if is_path(value):
        return value
    # Documentation names configs by their path, which a wheel's user does not have.
    if packaged := re.fullmatch(r"configs/(\w+)\.py", name):
        name = packaged[1] if packaged[1] in NAMES else name
    sizes = (*SIZES, *ARCHITECTURES)
    default, arguments = ("glue", GLUE) if kind is FinetuneConfig else ("pretrain", sizes)
    if name in NAMES:
        return f"{_FOLDER / name}.py{colon}{argument}"
    if not colon and _is_argument(value, kind):
        return f"{_FOLDER / default}.py:{value}"
    if name.endswith(".py") or os.sep in name:
        raise UserError(f"config file {name} does not exist (working directory: {os.getcwd()})")
    known = [*NAMES, *arguments]
    raise UserError(
        f"--config {value!r}: no file or config of this name (configs: {', '.join(NAMES)}; "
        f"for {default}: {', '.join(arguments)}){did_you_mean(name.partition(',')[0], known)}"
    )


def is_path(value: str) -> bool:
    """Whether a value of --config is a path and its argument, not a name."""
    return os.path.isfile(value.partition(":")[0])


def _is_argument(value: str, kind: type) -> bool:
    """Whether a value is a size to pretrain, with or without lengths, or a GLUE task."""
    if kind is FinetuneConfig:
        return value in GLUE
    try:
        model_size(value.partition(",")[0])
    except UserError:
        return False
    return True


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split arguments into config ones (`--config FILE`, `--config.key[=]value`) and the rest."""
    config, rest, pending = [], [], ""
    for argument in arguments:
        if pending:
            if argument.startswith("--"):
                raise UserError(f"{pending} needs a value: write {pending}=VALUE")
            config.append(f"{pending}={argument}")
            pending = ""
        elif argument == "--config" or argument.startswith(("--config=", "--config.")):
            if "=" in argument:
                config.append(argument)
            else:
                pending = argument
        else:
            rest.append(argument)
    if pending:
        rest.append(pending)  # argparse reports the missing value
    return config, rest


def load(arguments: list[str], kind: type = Config) -> Any:
    """Load the config of `--config NAME[:ARGUMENT]` and `--config.key=value` and validate it.

    Args:
        arguments: command-line arguments.
        kind: `Config` or `FinetuneConfig`, which the file must return.
    """
    from absl import flags
    from ml_collections import config_flags

    values = flags.FlagValues()
    # Load the file alone first, so that keys can be checked before any is set.
    file = [a for a in arguments if a.startswith("--config=")]
    if len(file) > 1:
        raise UserError(f"{' '.join(file)}: choose one config; set keys with --config.KEY=VALUE")
    if not file:
        example = "glue:rte" if kind is FinetuneConfig else "mini,128"
        raise UserError(f"no config: add --config NAME, for example --config {example}")
    config_argument = "--config=" + find(file[0].removeprefix("--config="), kind)
    arguments = [config_argument if a == file[0] else a for a in arguments]
    file = [config_argument]
    argv = ["bert-jax", *arguments]
    try:
        config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv[:1] + file)
        values(argv[:1] + file)
        config = values.config
        if not isinstance(config, kind):
            # For a missing file this is a placeholder that raises when used.
            getattr(config, "steps", None)
            raise UserError(
                f"{file[0][9:]}: get_config must return a bert_jax.config.schema.{kind.__name__} here"
            )
        for argument in arguments:
            if not argument.startswith("--"):
                raise UserError(f"cannot parse {argument}: write settings as --config.KEY=VALUE")
        for key in keys(arguments):
            _check_key(key, config)
        values = flags.FlagValues()
        config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv)
        values(argv)
    except UserError:
        raise
    except flags.Error as error:
        if "Traceback" in str(error):  # raised by the file itself, with its traceback
            last = str(error).strip().splitlines()[-1]
            raise UserError(f"cannot load {file[0][9:]}: {last}") from None
        raise UserError(f"config value of the wrong type: {error}") from None
    except Exception as error:  # a config file is a program and can raise anything
        text = " ".join(str(error).split())
        raise UserError(f"cannot load {file[0][9:]}: {type(error).__name__}: {text}") from error
    config = from_dict(to_dict(values.config))  # a config file can assign values of any type
    set_steps = any(a.startswith("--config.optim.warmup_steps=") for a in arguments)
    if set_steps and isinstance(config, Config) and config.warmup_fraction:
        raise UserError(
            "config.optim.warmup_steps follows from config.warmup_fraction, "
            f"{config.warmup_fraction:.3g}: set that instead, or also --config.warmup_fraction=0"
        )
    validate(config)
    return config


def keys(arguments: Iterable[str]) -> list[str]:
    """Return the keys that arguments of `load` set one by one, as in `--config.KEY=VALUE`."""
    names = [argument.partition("=")[0] for argument in arguments]
    return [name.removeprefix("--config.") for name in names if name != "--config"]


def _check_key(key: str, config: TrainConfig) -> None:
    flat = flatten(config)
    if isinstance(config, FinetuneConfig) and key in DERIVED:
        raise UserError(
            f"config.{key} follows from {DERIVED[key]} when fine-tuning: set that instead"
        )
    if key in flat:
        return
    if any(name.startswith((f"{key}.", f"{key}[")) for name in flat):
        raise UserError(
            f"config.{key} is a group of settings: set one of its fields, config.{key}.…"
        )
    guess = _nearest_key(key, list(flat))
    hint = f"; did you mean config.{guess}?" if guess else ""
    raise UserError(f"config.{key}: unknown key{hint}")


def suggest(option: str, known: Iterable[str], kind: type[TrainConfig] | None) -> str:
    """Return the end of a message about an unknown option, such as "; did you mean --config.steps?".

    Args:
        option: what was given.
        known: the options of the verb.
        kind: type of its config, whose keys are options too; None if it takes none.
    """
    keys = [*flatten(kind())] if kind else []
    if kind is FinetuneConfig:
        keys = [key for key in keys if key not in DERIVED]
    choices = {key.rpartition(".")[2]: f"--config.{key}" for key in reversed(keys)}
    choices |= {key: f"--config.{key}" for key in keys} | {name: name for name in known}
    name = option.strip("-").replace("-", "_")
    for guess in (name, *_ELSEWHERE.get(name, ())):
        key, equals, value = guess.partition("=")
        if key in choices or " " in key:
            return f"; did you mean {choices.get(key, key)}{equals}{value}?"
    if keys and not nearest(option, known) and (key := _nearest_key(name, keys)):
        return f"; did you mean --config.{key}?"
    return did_you_mean(option, known)


def _nearest_key(key: str, keys: list[str]) -> str:
    group, _, field = key.rpartition(".")
    in_group = [name for name in keys if name.rpartition(".")[0] == group]
    # A correct name in the wrong group is a likelier mistake than a misspelled one.
    same_name = [name for name in keys if name.rpartition(".")[2] == field]
    for names in (same_name, in_group, keys):
        paths = {name.rpartition(".")[2]: name for name in reversed(names)}
        if guess := nearest(field, paths):
            return paths[guess]
    return nearest(key, keys)
