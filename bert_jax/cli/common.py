"""Parser and arguments that verbs share."""

import argparse
from collections.abc import Callable
from typing import Any, NoReturn

from bert_jax.errors import UserError


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors escape and shorten their text like `UserError`."""

    def error(self, message: str) -> NoReturn:
        super().error(str(UserError(message)))


class Verbs:
    """The subcommands of a parser."""

    def __init__(self, parser: argparse.ArgumentParser):
        self._verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def add(
        self,
        name: str,
        run: Callable[[Any], int | None],
        summary: str,
        example: str,
        takes_config: bool = False,
    ) -> argparse.ArgumentParser:
        """Add a verb and return its parser; `run` is called with the parsed arguments."""
        sub = self._verbs.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            epilog=f"example:\n{example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(run=run, takes_config=takes_config)
        return sub


def add_config(sub: argparse.ArgumentParser) -> None:
    """Add --config to the help; it is removed from the command line before argparse sees it."""
    group = sub.add_argument_group("config")
    group.add_argument("--config", metavar="FILE[:ARG]", help="a Python file with get_config")
    group.add_argument(
        "--config.KEY",
        metavar="VALUE",
        dest="_",
        help="override a setting (see bert_jax/config.py)",
    )


def add_model(sub: argparse.ArgumentParser) -> None:
    """Add --init, alias --workdir: a model of any origin."""
    sub.add_argument(
        "--init",
        "--workdir",
        required=True,
        metavar="DIR",
        dest="init",
        help="a run, an imported checkpoint, or a Hugging Face folder or name",
    )
    add_which(sub)


def add_which(sub: argparse.ArgumentParser) -> None:
    """Add --checkpoint."""
    sub.add_argument(
        "--checkpoint",
        default="best",
        help="best (default), latest, or a step number",
        metavar="WHICH",
    )


def add_case(sub: argparse.ArgumentParser) -> None:
    """Add --cased and --uncased."""
    text = "case of the vocabulary (default: detected)"
    case = sub.add_mutually_exclusive_group()
    case.add_argument("--cased", action="store_const", const=False, dest="lowercase", help=text)
    case.add_argument("--uncased", action="store_const", const=True, dest="lowercase", help=text)


def take_rows(config, folders: list[str]) -> None:
    """Set the rows of each phase of a config from `--rows`."""
    if folders and len(folders) != len(config.phases):
        raise UserError(
            f"{len(folders)} --rows for the config's {len(config.phases)} phases "
            f"({', '.join(f'T={p.tokens or chr(63)}' for p in config.phases)}): pass one per "
            "phase, or choose a config with one phase, such as configs/pretrain.py:base,128"
        )
    for phase, rows in zip(config.phases, folders, strict=bool(folders)):
        phase.rows = rows
