"""Parser and arguments that verbs share."""

import argparse
import contextlib
import itertools
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import shtab

from bert_jax import storage
from bert_jax.errors import EXIT_USER_ERROR, UserError, did_you_mean
from bert_jax.runtime.progress import Progress


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, escaped and shortened like `UserError`.

    Attributes:
        verbs: parsers of the subcommands by name.
        run: function of a verb, which is called with the parsed arguments and returns the exit status.
        takes_config: whether a verb takes --config.
        platform: platform on which a verb starts JAX (`device.start`); None for a verb that does not
            need JAX, or that starts it itself.
    """

    verbs: dict[str, "Parser"]
    run: Callable[[Any], int | None]
    takes_config: bool
    platform: str | None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        text = str(UserError(f"{self.prog}: {message} (see {self.prog} --help)"))
        self.exit(EXIT_USER_ERROR, text + "\n")

    def flag(self, name: str, text: str) -> None:
        """Add an option without a value."""
        self.add_argument(name, action="store_true", help=text)

    def number(self, name: str, default: int | float, text: str) -> None:
        """Add an option with a number of the type of its default."""
        text = f"{text} (default {default})"
        self.add_argument(name, type=type(default), default=default, metavar="N", help=text)

    def repeatable(self, name: str, metavar: str, text: str) -> None:
        """Add an option whose values are collected in a list."""
        self.add_argument(
            name, action="append", default=[], metavar=metavar, help=f"{text}; may be repeated"
        )

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
        self._verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
        parser.verbs = self._verbs.choices

    def add(
        self,
        name: str,
        run: Callable[[Any], int | None],
        summary: str,
        example: str,
        takes_config: bool = False,
        platform: str | None = None,
    ) -> Parser:
        """Add a verb and return its parser (see `Parser` for the settings)."""
        sub = self._verbs.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            epilog=f"example:\n{example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.run, sub.takes_config, sub.platform = run, takes_config, platform
        sub.set_defaults(parser=sub)
        sub.flag("--quiet", "print only results, warnings and errors")
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
        help="override a setting (see bert_jax/config/schema.py)",
    )


def load_config(options: argparse.Namespace) -> Any:
    """Return the config of a parsed command that takes one, with its --teacher, --rows and --data."""
    from bert_jax.config import flags
    from bert_jax.config import schema as config_lib

    is_finetuning = options.verb == "finetune"
    settings = list(options.config)
    if teacher := getattr(options, "teacher", None):
        settings.append(f"--config.distill.teacher={teacher}")
    kind = config_lib.FinetuneConfig if is_finetuning else config_lib.Config
    config = flags.load(settings, kind)
    if not is_finetuning:
        config_lib.take_rows(config, options.rows)
    elif options.data:
        config.task.data = options.data
    return config


def check_local(options: argparse.Namespace) -> None:
    """Check that the folders of a sweep are not on object storage."""
    for name in ("runs", "data"):
        if storage.is_remote(value := getattr(options, name)):
            raise UserError(
                f"--{name} {value}: a sweep needs a local folder, or one on a shared disk"
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
    add_checkpoint_option(sub)


def add_start(sub: argparse.ArgumentParser) -> None:
    """Add --init and --checkpoint: weights that pretraining starts from (`open_start`)."""
    sub.add_argument(
        "--init",
        metavar="DIR",
        help="continue from these weights, with their architecture and vocabulary: a run, an imported "
        "checkpoint, a Hugging Face folder or name, or a TensorFlow 1 release (default: random weights)",
    )
    add_checkpoint_option(sub)


def open_start(config: Any, options: Any) -> tuple[Any, Any]:
    """Return the config with the model of --init, and its parameters; without --init, None."""
    if not options.init:
        if options.checkpoint != "best":
            raise UserError(
                f"--checkpoint {options.checkpoint}: it is one of --init, which is missing"
            )
        return config, None
    from bert_jax.config import flags
    from bert_jax.objectives import warm_start

    keys = flags.keys(options.config)
    return warm_start.open_start(config, options.init, options.checkpoint, keys)


def add_checkpoint_option(sub: argparse.ArgumentParser) -> None:
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
