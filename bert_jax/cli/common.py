"""Parser and arguments that verbs share."""

import argparse
import contextlib
import itertools
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

import shtab

from bert_jax.errors import EXIT_USER_ERROR, UserError, did_you_mean
from bert_jax.progress import Progress


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, escaped and shortened like `UserError`.

    Attributes:
        verbs: parsers of the subcommands by name.
    """

    verbs: Mapping[str, "Parser"] = MappingProxyType({})

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        text = str(UserError(f"{self.prog}: {message} (see {self.prog} --help)"))
        self.exit(EXIT_USER_ERROR, text + "\n")

    def check_options(self, arguments: Iterable[str]) -> None:
        """Exit with an error for an unknown option, which argparse would report as others missing."""
        known = self._option_string_actions
        for argument in itertools.takewhile(lambda argument: argument != "--", arguments):
            option = argument.partition("=")[0]
            if option.startswith("--") and option not in known:
                self.error(f"{option}: unknown option{did_you_mean(option, known)}")


def split_command(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split arguments of launch or sweep at --, which the command to run follows."""
    if arguments[:1] in (["launch"], ["sweep"]) and "--" in arguments:
        index = arguments.index("--")
        return arguments[:index], arguments[index + 1 :]
    return arguments, []


class Verbs:
    """The subcommands of a parser."""

    def __init__(self, parser: Parser):
        self.parsers: dict[str, Parser] = {}
        self._verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def add(
        self,
        name: str,
        run: Callable[[Any], int | None],
        summary: str,
        example: str,
        takes_config: bool = False,
    ) -> Parser:
        """Add a verb and return its parser; `run` is called with the parsed arguments."""
        sub = self._verbs.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            epilog=f"example:\n{example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(run=run, takes_config=takes_config)
        sub.add_argument(
            "--quiet", action="store_true", help="print only results, warnings and errors"
        )
        self.parsers[name] = sub
        return sub


# How --help shows arguments that are paths; folders are shown as DIR.
_FILES = ("FILE", "SOURCE", "SWEEP", "DATA", "PREDICTIONS")


def paths(parser: Parser, options: argparse.Namespace) -> list[str]:
    """Return the values of those arguments of a verb that are paths."""
    values = [
        getattr(options, action.dest, None)
        for action in parser._actions
        if action.metavar in ("DIR", *_FILES)
    ]
    return [p for value in values for p in (value if isinstance(value, list) else [value or ""])]


def complete_paths(parser: Parser) -> None:
    """Let shells complete folders for arguments shown as DIR, and files for those shown as FILE."""
    for action in parser._actions:
        if action.metavar in ("NAME[:ARG]", *_FILES):
            action.complete = shtab.FILE  # pyright: ignore[reportAttributeAccessIssue]
        elif action.metavar == "DIR":
            action.complete = shtab.DIRECTORY  # pyright: ignore[reportAttributeAccessIssue]


def add_json(sub: argparse.ArgumentParser) -> None:
    """Add --json to a verb that trains."""
    sub.add_argument(
        "--json",
        action="store_true",
        help="print metrics as JSON lines to standard output, and all else to standard error",
    )


@contextlib.contextmanager
def machine_output(options: argparse.Namespace) -> Iterator[None]:
    """Keep standard output free of text during a run with --json or --quiet."""
    Progress.json_lines = sys.stdout if options.json else None
    with contextlib.ExitStack() as stack:
        if Progress.is_quiet:
            null = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(null))
        elif options.json:
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        try:
            yield
        finally:
            Progress.json_lines = None


def print_next(options: argparse.Namespace, command: Sequence[str]) -> None:
    """Print the next command to type after a run, unless a machine reads the output."""
    if Progress.shown and not options.json and not Progress.is_quiet:
        print(f"next: bert-jax {shlex.join(command)}")


def add_config(sub: argparse.ArgumentParser) -> None:
    """Add --config to the help; it is removed from the command line before argparse sees it."""
    group = sub.add_argument_group("config")
    group.add_argument(
        "--config",
        metavar="NAME[:ARG]",
        help="a config by name, such as base,128 or glue:rte, or a Python file with get_config",
    )
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


def add_start(sub: argparse.ArgumentParser) -> None:
    """Add --init and --checkpoint: weights that pretraining starts from (`open_start`)."""
    sub.add_argument(
        "--init",
        metavar="DIR",
        help="continue from these weights, with their architecture and vocabulary: a run, an imported "
        "checkpoint, a Hugging Face folder or name, or a TensorFlow 1 release (default: random weights)",
    )
    add_which(sub)


def open_start(config: Any, options: Any) -> tuple[Any, Any]:
    """Return the config with the model of --init, and its parameters; without --init, None."""
    if not options.init:
        if options.checkpoint != "best":
            raise UserError(
                f"--checkpoint {options.checkpoint}: it is one of --init, which is missing"
            )
        return config, None
    from bert_jax import config_flags
    from bert_jax.objectives import initial

    keys = config_flags.keys(options.config)
    return initial.open_start(config, options.init, options.checkpoint, keys)


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
