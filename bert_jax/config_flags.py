"""Configs from the command line: `--config FILE[:ARGUMENT]` and `--config.key=value`."""

import difflib
import os
from typing import Any

from bert_jax.config import (
    RENAMED,
    Config,
    FinetuneConfig,
    TrainConfig,
    flatten,
    from_dict,
    to_dict,
    validate,
)
from bert_jax.errors import UserError

# Keys that fine-tuning derives from other settings, so setting them would have no effect.
_DERIVED = {
    "optim.warmup_steps": "config.warmup_fraction",
    "model.vocab_size": "the vocabulary",
    **{
        f"model.{name}": "config.task"
        for name in ("head", "labels", "masked_lm", "next_sentence", "pooler")
    },
}


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split arguments into config ones (`--config FILE`, `--config.key[=]value`) and the rest."""
    config, rest, pending = [], [], ""
    for argument in arguments:
        if pending:
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
    """Load the config of `--config FILE[:ARGUMENT]` and `--config.key=value` and validate it.

    Args:
        arguments: command-line arguments.
        kind: `Config` or `FinetuneConfig`, which the file must return.

    Raises:
        UserError: the file is missing, a key is unknown (the message names the nearest one), a
            value has the wrong type, or fields are incompatible.
    """
    from absl import flags
    from ml_collections import config_flags

    values = flags.FlagValues()
    # Load the file alone first, so that keys can be checked before any is set.
    file = [a for a in arguments if a.startswith("--config=")]
    if not file:
        raise UserError(
            "no config: add --config FILE, for example --config configs/pretrain.py:mini"
        )
    path = file[0].removeprefix("--config=").partition(":")[0]
    if not os.path.exists(path):
        raise UserError(f"config file {path} does not exist (working directory: {os.getcwd()})")
    argv = ["bert-jax", *arguments]
    try:
        config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv[:1] + file)
        values(argv[:1] + file)
        config = values.config
        if not isinstance(config, kind):
            # For a missing file this is a placeholder that raises when used.
            getattr(config, "steps", None)
            raise UserError(
                f"{file[0][9:]}: get_config must return a bert_jax.config.{kind.__name__} here"
            )
        for argument in arguments:
            if not argument.startswith("--"):
                raise UserError(f"cannot parse {argument}: write settings as --config.KEY=VALUE")
            key = argument.partition("=")[0].removeprefix("--config.")
            if key != "--config":
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
    validate(config)
    return config


def _check_key(key: str, config: TrainConfig) -> None:
    flat = flatten(config)
    if isinstance(config, FinetuneConfig) and key in _DERIVED:
        raise UserError(
            f"config.{key} follows from {_DERIVED[key]} when fine-tuning: set that instead"
        )
    if key in flat:
        return
    if any(name.startswith((f"{key}.", f"{key}[")) for name in flat):
        raise UserError(
            f"config.{key} is a group of settings: set one of its fields, config.{key}.…"
        )
    nearest = difflib.get_close_matches(key, flat, 1, 0.5)
    # A correct name in the wrong group is a likelier mistake than a similar path.
    field = RENAMED.get(key.rpartition(".")[2], key.rpartition(".")[2])
    same_name = [name for name in flat if name.rpartition(".")[2] == field]
    guess = (same_name or nearest or [""])[0]
    hint = f"; did you mean config.{guess}?" if guess else ""
    raise UserError(f"config.{key}: unknown key{hint}")
