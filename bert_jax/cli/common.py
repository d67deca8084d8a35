"""What verbs have in common: their parser, arguments, exit statuses."""

import argparse
from collections.abc import Callable
from typing import Any, NoReturn

from bert_jax.errors import UserError

EXIT_USER_ERROR = 2
# preflight: the run does not fit the hardware. replay: the step came out differently.
EXIT_NO = 1
# BSD's EX_TEMPFAIL: stopped by a signal with everything saved; run the same command again.
EXIT_INTERRUPTED = 75


class Parser(argparse.ArgumentParser):
    """Its errors quote what was given as ours do."""

    def error(self, message: str) -> NoReturn:
        super().error(str(UserError(message)))


class Verbs:
    """The verbs of a parser, added one by one."""

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
        """The parser of one, whose arguments `run` is called with."""
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
    """--config, which is taken out of the command line before argparse sees it; here for the help."""
    group = sub.add_argument_group("config")
    group.add_argument("--config", metavar="FILE[:ARG]", help="a Python file with get_config")
    group.add_argument(
        "--config.KEY", metavar="VALUE", dest="_", help="changes a setting (bert_jax/config.py)"
    )


def add_model(sub: argparse.ArgumentParser) -> None:
    """--init or --workdir: a model of any origin."""
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
    """--checkpoint."""
    sub.add_argument(
        "--checkpoint", default="best", help="best (default), latest, or a step", metavar="WHICH"
    )


def add_case(sub: argparse.ArgumentParser) -> None:
    """--cased and --uncased."""
    text = "case of the vocabulary (default: detected from it)"
    case = sub.add_mutually_exclusive_group()
    case.add_argument("--cased", action="store_const", const=False, dest="lowercase", help=text)
    case.add_argument("--uncased", action="store_const", const=True, dest="lowercase", help=text)


def take_rows(config, folders: list[str]) -> None:
    """`--rows`, once a phase, into the config."""
    if folders and len(folders) != len(config.phases):
        raise UserError(
            f"{len(folders)} --rows for the config's {len(config.phases)} phases "
            f"({', '.join(f'T={p.tokens or chr(63)}' for p in config.phases)}): give one a phase, or "
            "choose a config of one phase, such as configs/pretrain.py:base,128"
        )
    for phase, rows in zip(config.phases, folders, strict=bool(folders)):
        phase.rows = rows
