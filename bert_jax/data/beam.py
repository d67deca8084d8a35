"""Work units as Apache Beam pipelines, on any Beam runner (extra `beam`).

Beam distributes only the numbers of work units; workers read text and write files themselves. So
they need bert_jax installed (`--beam environment_config=IMAGE`, `sdk_container_image=IMAGE`) and a
file system shared with the launching process, with the same absolute paths for sources and output.
A unit may be executed twice, even concurrently; its file is atomic and has the same bytes.
"""

import contextlib
import io
import logging
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from bert_jax.errors import UserError, did_you_mean, missing
from bert_jax.storage import files


def options(arguments: Sequence[str]) -> Any:
    """Return Beam's `PipelineOptions` for arguments NAME=VALUE or NAME."""
    try:
        import apache_beam  # noqa: F401
    except ImportError:
        raise missing("the Beam runner needs Apache Beam", "beam") from None
    from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions

    parsed = PipelineOptions([f"--{option}" for option in arguments])
    logger = logging.getLogger(PipelineOptions.__module__)
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr), contextlib.ExitStack() as stack:
            stack.callback(setattr, logger, "disabled", logger.disabled)
            logger.disabled = True
            known = parsed.get_all_options()
            unknown = set(parsed.get_all_options(retain_unknown_options=True)) - set(known)
            runner = parsed.view_as(StandardOptions).runner or StandardOptions.DEFAULT_RUNNER
    except SystemExit:  # argparse has printed its usage, then the error
        line = stderr.getvalue().strip().splitlines()[-1]
        raise UserError(f"Apache Beam: {line.partition('error: ')[2]}") from None
    # Other runners query a server for their options.
    if unknown and runner in StandardOptions.LOCAL_RUNNERS:
        name = min(unknown)
        hint = did_you_mean(name, known)
        raise UserError(f"Apache Beam: {runner} has no option {name}{hint}")
    return parsed


class Pipelines:
    """Executor of work units, with one pipeline per kind of unit.

    Args:
        call: executes a unit, given its method and arguments; all three are pickled.
        error: path to which a worker writes the message of a `UserError` for the launching process.
            Beam's runners would wrap it in tracebacks, most of them after four attempts.
        arguments: pipeline options, as for `options`.
    """

    def __init__(
        self, call: Callable[[str, tuple], None], error: pathlib.Path, arguments: Sequence[str]
    ):
        self._call, self._error, self._options = call, error, options(arguments)

    def __enter__(self) -> "Pipelines":
        return self

    def __exit__(self, *error) -> None:
        pass

    def run(self, method: str, tasks: Iterable[tuple[Any, tuple]]) -> Iterator[tuple[Any, None]]:
        """Call a method for every (tag, arguments); yield (tag, None) for each when all are done."""
        import apache_beam as beam

        tags, work = [], []
        for tag, arguments in tasks:
            tags.append(tag)
            work.append((method, arguments))
        if not work:
            return
        self._error.unlink(missing_ok=True)
        try:
            pipeline = beam.Pipeline(options=self._options)
            _ = (
                pipeline
                | "pieces" >> beam.Create(work)
                | "spread" >> beam.Reshuffle()
                | method >> beam.Map(_execute, self._call, self._error)
            )
            pipeline.run().wait_until_finish()
        except Exception as failure:  # the runner, its server or the network may raise anything
            text = str(failure).strip() or type(failure).__name__
            if match := re.search(r"UserError: (.*?)(?: \[while running|\n|$)", text):
                raise UserError(match[1]) from None
            raise UserError(f"Apache Beam: {text.splitlines()[-1]}") from failure
        if self._error.exists():
            raise UserError(self._error.read_text())
        yield from ((tag, None) for tag in tags)


def _execute(
    unit: tuple[str, tuple], call: Callable[[str, tuple], None], error: pathlib.Path
) -> None:
    if error.exists():  # the run has failed already
        return
    try:
        call(*unit)
    except UserError as user_error:
        try:
            files.write(error, str(user_error))
        except OSError:  # such as a full disk: report it through Beam
            raise user_error from None
