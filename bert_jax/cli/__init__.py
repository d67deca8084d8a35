"""The command line, `bert-jax VERB`. Verbs import what they need lazily, so --help is fast."""

import argparse
import os
import sys
import threading
import traceback

import shtab

from bert_jax import storage
from bert_jax.cli import checkpoints, data, experiments, machines, models, training
from bert_jax.cli.common import Parser, Verb, paths, split_command
from bert_jax.errors import (
    EXIT_INTERRUPTED,
    EXIT_NEGATIVE,
    EXIT_USER_ERROR,
    Unavailable,
    UserError,
    did_you_mean,
)
from bert_jax.runtime.progress import Progress
from bert_jax.runtime.signals import Interrupted
from bert_jax.storage import files

__all__ = ["EXIT_INTERRUPTED", "EXIT_NEGATIVE", "EXIT_USER_ERROR", "console", "main", "parser"]

_MODULES = (data, training, models, checkpoints, machines, experiments)  # in the order of --help

_abrupt = threading.Event()  # whether `console` leaves threads and exit handlers behind


def console() -> None:
    """Run `main` as the `bert-jax` command and exit without output of libraries' exit handlers."""
    _install_hooks()
    status = 0
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.stderr.flush()
    if status == EXIT_USER_ERROR or _abrupt.is_set():
        if "bert_jax.runtime.distributed" in sys.modules:
            sys.modules["bert_jax.runtime.distributed"].leave()
        os._exit(status)  # exit handlers would retry failed writes and print tracebacks
    sys.exit(status)


def _install_hooks() -> None:
    """Suppress tracebacks from libraries' threads about a full disk, which `main` reports."""

    def is_late_callback(failure) -> bool:
        """Whether a TensorStore callback ran after the save that awaited it had failed."""
        return failure[0] is RuntimeError and str(failure[1]) == "Event loop is closed"

    def is_failed_save(failure) -> bool:
        """Whether a thread of Orbax failed to write."""
        frames = traceback.walk_tb(failure[2])
        return issubclass(failure[0], OSError) and any(
            frame.f_globals.get("__name__", "").startswith("orbax.") for frame, _ in frames
        )

    def filtered(hook, ignore):
        # Hooks get type, error and traceback, or one object that begins with them.
        return lambda *args: None if ignore(args[0] if len(args) == 1 else args) else hook(*args)

    threading.excepthook = filtered(threading.excepthook, is_failed_save)
    # Depending on its version, TensorStore's C++ code reports callbacks to one of these two.
    sys.unraisablehook = filtered(sys.unraisablehook, is_late_callback)
    sys.excepthook = filtered(sys.excepthook, is_late_callback)


def main(arguments: list[str] | None = None) -> int:
    """Run a verb and return the exit status.

    0: success. 1: the run does not fit (preflight). 2: user error. 75: stopped by a signal, state
    saved, or object storage does not answer. 130: interrupted.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["--version"]:
        print(_versions())
        return 0
    options = parse(arguments)
    verb = options.verb_settings
    Progress.is_quiet = options.quiet
    try:
        storage.check([*options.config, *paths(options)])
        if verb.platform is not None:
            from bert_jax.runtime import device

            device.start(verb.platform)
        return verb.run(options) or 0
    except Unavailable as error:
        _abrupt.set()  # threads of Orbax would wait for the save that failed
        text, status = error, EXIT_INTERRUPTED
    except UserError as error:
        text, status = error, EXIT_USER_ERROR
    except Interrupted as interrupt:
        text, status = f"{interrupt}; run the same command to resume", EXIT_INTERRUPTED
    except OSError as error:
        if error.errno not in files.USER_ERRORS:
            raise
        path = f"{error.filename}: " if error.filename else ""
        text, status = f"{path}{files.format_error(error)}", EXIT_USER_ERROR
    except KeyboardInterrupt:
        text, status = "interrupted", 130
    finally:
        Progress.is_quiet = False
    print(f"bert-jax {options.verb}: {text}", file=sys.stderr)
    return status


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse a command line, or exit with an error of one line.

    The result also has the arguments about the config (`config`), those before -- (`arguments`), and
    those after it (`command`).
    """
    from bert_jax.config.flags import split

    main_parser = parser()
    arguments, command = split_command(arguments)
    try:
        config, rest = split(arguments)
    except UserError as error:
        main_parser.error(str(error))
    verb = rest[0] if rest else ""
    if verb in main_parser.verbs:
        main_parser.verbs[verb].check_options(rest[1:])
    elif verb and not verb.startswith("-"):
        main_parser.error(f"{verb}: unknown verb{did_you_mean(verb, main_parser.verbs)}")
    for argument in rest:
        if argument.endswith("=--"):  # argparse would parse the value as a list
            main_parser.error(f"{argument}: the value cannot be --")
    options = main_parser.parse_args(rest)
    if config and not options.verb_settings.takes_config:
        main_parser.error(f"{verb} does not take --config")
    options.config, options.arguments, options.command = config, arguments[1:], command
    return options


def _versions() -> str:
    """Return the versions, and the devices of JAX."""
    import importlib.metadata

    import jax

    from bert_jax import __version__
    from bert_jax.runtime import device

    try:
        device.start("")
        devices = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    except Exception as error:  # a driver can raise anything
        devices = f"no device ({str(error).splitlines()[0]})"
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("jax", "flax")]
    return ", ".join([f"bert_jax {__version__}", *versions, devices])


def parser() -> Parser:
    """Return the parser of the command line without --config."""
    main_parser = Parser(
        prog="bert-jax",
        description="Pretrain, fine-tune and analyze BERT in JAX, from raw text to Hugging Face "
        "checkpoints.",
        epilog="`bert-jax VERB --help` describes a verb and shows examples.",
    )
    text = "print the versions of bert_jax, JAX and Flax, and the devices"
    main_parser.add_argument("--version", action="store_true", default=argparse.SUPPRESS, help=text)
    shtab.add_argument_to(main_parser, help="print a script that completes commands in a shell")
    main_parser._actions[-1].default = argparse.SUPPRESS  # not an option of a verb
    verbs = main_parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    main_parser.verbs = verbs.choices
    for verb in (v for module in _MODULES for v in vars(module).values() if isinstance(v, Verb)):
        verb.parser(verbs.add_parser)
    return main_parser
