"""`bert-jax VERB`: arguments in, one function called. Imports wait until a verb needs them."""

import os
import sys
import threading

from bert_jax.cli import checkpoints, data, experiments, machines, models, training
from bert_jax.cli.common import EXIT_INTERRUPTED, EXIT_NO, EXIT_USER_ERROR, Parser, Verbs
from bert_jax.errors import UserError

__all__ = ["EXIT_INTERRUPTED", "EXIT_NO", "EXIT_USER_ERROR", "console", "main", "parser"]

# As --help lists them.
_VERBS = (
    data.add_vocab,
    data.add_prepare,
    training.add_pretrain,
    training.add_finetune,
    models.add_predict,
    models.add_score,
    models.add_glue_zip,
    training.add_evaluate,
    training.add_replay,
    models.add_fill_mask,
    models.add_attention,
    checkpoints.add_import,
    checkpoints.add_export,
    models.add_embed,
    machines.add_launch,
    machines.add_preflight,
    experiments.add_sweep,
    experiments.add_report,
)


def console() -> None:
    """The `bert-jax` command: `main`, then out, without what libraries say on their way."""
    _quieten()
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    if status == EXIT_USER_ERROR:
        if "bert_jax.distributed" in sys.modules:
            sys.modules["bert_jax.distributed"].leave()
        os._exit(status)  # exit handlers would try to write once more and print tracebacks
    sys.exit(status)


def _quieten() -> None:
    """Keeps libraries' threads from printing tracebacks about a full disk that `main` reports."""
    in_thread, anywhere, unraisable = threading.excepthook, sys.excepthook, sys.unraisablehook

    def late(kind, error) -> bool:
        """TensorStore's callbacks, when they come after the save that waited for them has failed."""
        return kind is RuntimeError and str(error) == "Event loop is closed"

    def quieter(hook, unimportant):
        return lambda failure: None if unimportant(failure) else hook(failure)

    threading.excepthook = quieter(in_thread, lambda f: issubclass(f.exc_type, OSError))
    # C++ reports them to one of these two, by TensorStore's version.
    sys.unraisablehook = quieter(unraisable, lambda f: late(f.exc_type, f.exc_value))
    sys.excepthook = lambda *failure: None if late(*failure[:2]) else anywhere(*failure)


def main(arguments: list[str] | None = None) -> int:
    """Runs a verb and returns the exit status: 0, 2 for a user's error, 75 for saved and stopped.

    1 is preflight's and replay's: it does not fit, it is not the same.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    command = []
    if arguments[:1] == ["launch"] and "--" in arguments:  # what follows is another command
        at = arguments.index("--")
        arguments, command = arguments[:at], arguments[at + 1 :]
    from bert_jax.config import split

    config, rest = split(arguments)
    for argument in rest:
        if argument.endswith("=--"):  # of which Python's argparse makes a list
            parser().error(f"{argument}: a value cannot be --")
    options = parser().parse_args(rest)
    if config and not getattr(options, "takes_config", False):
        parser().error(f"{options.verb} takes no --config")
    options.config = config
    if options.verb == "launch":
        options.command = command
    try:
        return options.run(options) or 0
    except UserError as error:
        print(f"bert-jax {options.verb}: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print(f"bert-jax {options.verb}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has seen enough
        sys.stderr.close()
        return 0


def parser() -> Parser:
    """Of the whole command line but --config."""
    whole = Parser(
        prog="bert-jax",
        description="BERT in JAX, end to end: text, vocabulary, rows, pretraining, fine-tuning, checkpoints.",
        epilog="`bert-jax VERB --help` explains a verb and shows an example.",
    )
    verbs = Verbs(whole)
    for add in _VERBS:
        add(verbs)
    return whole
