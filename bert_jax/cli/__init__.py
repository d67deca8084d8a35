"""The command line, `bert-jax VERB`. Verbs import what they need lazily, so --help is fast."""

import argparse
import os
import sys
import threading
import traceback

import shtab

from bert_jax import storage
from bert_jax.cli import checkpoints, data, experiments, machines, models, training
from bert_jax.cli.common import Parser, Verbs, complete_paths, paths, split_command
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

# In the order of --help.
_VERBS = (
    data.add_vocab,
    data.add_prepare,
    data.add_rows,
    training.add_pretrain,
    training.add_finetune,
    models.add_predict,
    models.add_score,
    models.add_glue_zip,
    training.add_evaluate,
    models.add_fill_mask,
    models.add_score_sentences,
    models.add_minimal_pairs,
    models.add_attention,
    checkpoints.add_import,
    checkpoints.add_extend_vocab,
    checkpoints.add_export,
    models.add_embed,
    models.add_evaluate_embeddings,
    machines.add_launch,
    machines.add_preflight,
    experiments.add_sweep,
    experiments.add_report,
)


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

    def is_late_callback(kind, error) -> bool:
        """Whether a TensorStore callback ran after the save that awaited it had failed."""
        return kind is RuntimeError and str(error) == "Event loop is closed"

    def filtered(hook, ignore):
        return lambda *failure: None if ignore(*failure) else hook(*failure)

    def is_failed_save(failure) -> bool:
        """Whether a thread of Orbax failed to write."""
        frames = traceback.walk_tb(failure.exc_traceback)
        return issubclass(failure.exc_type, OSError) and any(
            frame.f_globals.get("__name__", "").startswith("orbax.") for frame, _ in frames
        )

    threading.excepthook = filtered(threading.excepthook, is_failed_save)
    # Depending on its version, TensorStore's C++ code reports callbacks to one of these two.
    sys.unraisablehook = filtered(
        sys.unraisablehook,
        lambda failure: is_late_callback(failure.exc_type, failure.exc_value),
    )
    sys.excepthook = filtered(sys.excepthook, lambda kind, error, _: is_late_callback(kind, error))


def main(arguments: list[str] | None = None) -> int:
    """Run a verb and return the exit status.

    0: success. 1: the run does not fit (preflight). 2: user error. 75: stopped by a signal, state
    saved, or object storage does not answer. 130: interrupted.
    """
    options = parse(sys.argv[1:] if arguments is None else arguments)
    verb = options.parser
    Progress.is_quiet = options.quiet
    try:
        storage.check([*options.config, *paths(verb, options)])
        if verb.platform is not None:
            from bert_jax.runtime import device

            device.start(verb.platform)
        return verb.run(options) or 0
    except UserError as error:
        print(f"bert-jax {options.verb}: {error}", file=sys.stderr)
        if not isinstance(error, Unavailable):
            return EXIT_USER_ERROR
        _abrupt.set()  # threads of Orbax would wait for the save that failed
        return EXIT_INTERRUPTED
    except Interrupted as interrupt:
        print(
            f"bert-jax {options.verb}: {interrupt}; run the same command to resume", file=sys.stderr
        )
        return EXIT_INTERRUPTED
    except OSError as error:
        if error.errno not in files.USER_ERRORS:
            raise
        path = f"{error.filename}: " if error.filename else ""
        print(f"bert-jax {options.verb}: {path}{files.format_error(error)}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print(f"bert-jax {options.verb}: interrupted", file=sys.stderr)
        return 130
    finally:
        Progress.is_quiet = False


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
    if config and not options.parser.takes_config:
        main_parser.error(f"{verb} does not take --config")
    options.config, options.arguments, options.command = config, arguments[1:], command
    return options


class _Version(argparse.Action):
    """Print the versions and the devices of JAX."""

    def __call__(self, parser, *_) -> None:
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
        print(f"bert_jax {__version__}, {', '.join(versions)}, {devices}")
        parser.exit()


def parser() -> Parser:
    """Return the parser of the command line without --config."""
    main_parser = Parser(
        prog="bert-jax",
        description="Pretrain, fine-tune and analyze BERT in JAX, from raw text to Hugging Face "
        "checkpoints.",
        epilog="`bert-jax VERB --help` describes a verb and shows examples.",
    )
    main_parser.add_argument(
        "--version",
        action=_Version,
        nargs=0,
        default=argparse.SUPPRESS,
        help="print the versions of bert_jax, JAX and Flax, and the devices",
    )
    shtab.add_argument_to(main_parser, help="print a script that completes commands in a shell")
    main_parser._actions[-1].default = argparse.SUPPRESS  # not an option of a verb
    verbs = Verbs(main_parser)
    for add in _VERBS:
        add(verbs)
    for sub in main_parser.verbs.values():
        complete_paths(sub)
    return main_parser
