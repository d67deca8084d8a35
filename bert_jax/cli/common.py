"""The verbs of the command line, and arguments that they share."""

import argparse
import contextlib
import inspect
import itertools
import os
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import shtab

from bert_jax.errors import EXIT_USER_ERROR, UserError
from bert_jax.runtime.progress import Progress

# Adds an argument, or several, to the parser of a verb.
Argument = Callable[[argparse.ArgumentParser], Any]


class Verb(NamedTuple):
    """A verb. Its help is the docstring of `run`: what it does in a sentence, and examples."""

    # Function of the parsed arguments, which returns the exit status.
    run: Callable[[Any], int | None]
    arguments: tuple[Argument, ...]
    # Platform on which it starts JAX (`device.start`); None if it does not need JAX, or starts it itself.
    platform: str | None

    @property
    def takes_config(self) -> bool:
        """Whether it takes --config."""
        return CONFIG[0] in self.arguments

    def parser(self, add_parser: Callable[..., "Parser"]) -> "Parser":
        """Return its parser, made by `add_parser` of argparse."""
        summary, _, example = inspect.cleandoc(self.run.__doc__ or "").partition("\n\n")
        parser = add_parser(
            self.run.__name__.strip("_").replace("_", "-"),
            help=summary[:1].lower() + summary[1:].rstrip("."),
            description=summary,
            epilog="example:\n" + textwrap.indent(example, "  "),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.set_defaults(parser=parser, verb_settings=self)
        for add in (*self.arguments, flag("--quiet", "print only results, warnings and errors")):
            add(parser)
        return parser


def verb(*arguments: Argument, platform: str | None = None) -> Callable[[Callable], Verb]:
    """Decorate the function of a verb, whose name and docstring are the verb's (see `Verb`)."""
    return lambda run: Verb(run, arguments, platform)


def argument(*names: str, **settings: Any) -> Argument:
    """Return an argument of a verb, with the settings of argparse; shells complete paths (`_FILES`)."""

    def add(parser: argparse.ArgumentParser) -> None:
        action: Any = parser.add_argument(*names, **settings)
        if action.metavar in ("DIR", "NAME[:ARG]", *_FILES):
            action.complete = shtab.DIRECTORY if action.metavar == "DIR" else shtab.FILE

    return add


def option(name: str, metavar: str, text: str, **settings: Any) -> Argument:
    """Return an argument with a value, which --help shows as `metavar`."""
    return argument(name, metavar=metavar, help=text, **settings)


def flag(name: str, text: str) -> Argument:
    """Return an option without a value."""
    return argument(name, action="store_true", help=text)


def number(name: str, default: int | float, text: str, least: int | None = None) -> Argument:
    """Return an option with a number of the type of its default, and perhaps a least value."""

    def parse(value: str) -> int | float:
        result = type(default)(value)
        if least is not None and result < least:
            raise argparse.ArgumentTypeError(f"{value}: it must be {least} or more")
        return result

    parse.__name__ = type(default).__name__  # for argparse's message about other text
    return option(name, "N", f"{text} (default {default})", type=parse, default=default)


def choice(name: str, choices: str, text: str) -> Argument:
    """Return an option with one of several words, of which the first is the default."""
    words = choices.split()
    return argument(name, choices=words, default=words[0], help=f"{text} (default {words[0]})")


def repeatable(name: str, metavar: str, text: str) -> Argument:
    """Return an option whose values are collected in a list."""
    return option(name, metavar, f"{text}; may be repeated", action="append", default=[])


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, escaped and shortened like `UserError`."""

    verbs: dict[str, "Parser"]  # by name

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        text = str(UserError(f"{self.prog}: {message} (see {self.prog} --help)"))
        self.exit(EXIT_USER_ERROR, text + "\n")

    def check_options(self, arguments: Iterable[str]) -> None:
        """Exit with an error for an unknown option, which argparse would report as others missing."""
        from bert_jax.config import flags

        known = self._option_string_actions
        for argument in itertools.takewhile(lambda argument: argument != "--", arguments):
            option = argument.partition("=")[0]
            if option.startswith("--") and option not in known:
                kind = _kind_of(self.get_default("verb_settings"))
                self.error(f"{option}: unknown option{flags.suggest(option, known, kind)}")


def split_command(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split arguments of launch or sweep at --, which the command to run follows."""
    if arguments[:1] in (["launch"], ["sweep"]) and "--" in arguments:
        index = arguments.index("--")
        return arguments[:index], arguments[index + 1 :]
    return arguments, []


# How --help shows arguments that are paths; folders are shown as DIR.
_FILES = ("FILE", "SOURCE", "SWEEP", "DATA", "PREDICTIONS")


def paths(options: argparse.Namespace) -> list[str]:
    """Return the values of those arguments of a verb that are paths."""
    values = [
        getattr(options, action.dest, None)
        for action in options.parser._actions
        if action.metavar in ("DIR", *_FILES)
    ]
    return [p for value in values for p in (value if isinstance(value, list) else [value or ""])]


@contextlib.contextmanager
def machine_output(options: argparse.Namespace) -> Iterator[None]:
    """Keep standard output free of text during a run with --json or --quiet."""
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, Progress, "json_lines", None)
        Progress.json_lines = sys.stdout if options.json else None
        if Progress.is_quiet:
            null = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(null))
        elif options.json:
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield


def print_next(options: argparse.Namespace, command: Sequence[str]) -> None:
    """Print the next command to type after a run, unless a machine reads the output."""
    if Progress.shown and not options.json and not Progress.is_quiet:
        print(f"next: bert-jax {shlex.join(command)}")


def _kind_of(verb: Verb) -> Any:
    """Return the type of the config that a verb takes, or None."""
    from bert_jax.config.schema import Config, FinetuneConfig

    if not verb.takes_config:
        return None
    return FinetuneConfig if verb.run.__name__ == "_finetune" else Config


def load_config(options: argparse.Namespace) -> Any:
    """Return the config of a parsed command that takes one, with its --teacher, --rows and --data."""
    from bert_jax.config import flags
    from bert_jax.config import schema as config_lib

    settings = list(options.config)
    if teacher := getattr(options, "teacher", None):
        settings.append(f"--config.distill.teacher={teacher}")
    config = flags.load(settings, _kind_of(options.verb_settings))
    if isinstance(config, config_lib.Config):
        config_lib.take_rows(config, options.rows)
    elif options.data:
        config.task.data = options.data
    return config


def open_start(config: Any, options: Any) -> tuple[Any, Any]:
    """Return the config with the model of --init, and its parameters; without --init, None."""
    if not options.init:
        if options.checkpoint != "best":
            raise UserError(f"--checkpoint {options.checkpoint}: it needs --init")
        if config.init_scheme:
            raise UserError(f"config.init_scheme={config.init_scheme}: it needs --init")
        return config, None
    from bert_jax.config import flags
    from bert_jax.objectives import warm_start

    keys = flags.keys(options.config)
    return warm_start.open_start(config, options.init, options.checkpoint, keys)


_WHICH = "best (default), latest, or a step number"
CHECKPOINT = option("--checkpoint", "WHICH", _WHICH, default="best")
# A model of any origin.
MODEL = (
    argument(
        "--init",
        "--workdir",
        required=True,
        metavar="DIR",
        dest="init",
        help="a run, an imported checkpoint, or a Hugging Face folder or name",
    ),
    CHECKPOINT,
)
# Weights that pretraining starts from (`open_start`).
START = (
    option(
        "--init",
        "DIR",
        "continue from these weights, with their architecture and vocabulary: a run, an imported "
        "checkpoint, a Hugging Face folder or name, or a TensorFlow 1 release (default: random weights)",
    ),
    CHECKPOINT,
)
# Removed from the command line before argparse sees it.
CONFIG = (
    option(
        "--config",
        "NAME[:ARG]",
        "a config by name (base,128 or glue:rte), or a Python file with get_config",
    ),
    option("--config.KEY", "VALUE", "override a setting (see bert_jax/config)", dest="_"),
)
WORKDIR = option("--workdir", "DIR", "folder of the run", required=True)


def add_case(sub: argparse.ArgumentParser) -> None:
    """Add --cased and --uncased."""
    text = "case of the vocabulary (default: detected)"
    case = sub.add_mutually_exclusive_group()
    case.add_argument("--cased", action="store_const", const=False, dest="lowercase", help=text)
    case.add_argument("--uncased", action="store_const", const=True, dest="lowercase", help=text)
