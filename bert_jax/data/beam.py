"""Pieces of work as Apache Beam pipelines, on whatever runs those (extra `beam`).

Beam hands out numbers of pieces and nothing else: workers read text and write files themselves. So
they need bert_jax installed (`--beam environment_config=IMAGE`, `sdk_container_image=IMAGE`) and a
file system shared with the process that waits, where sources and output have the same absolute
paths everywhere. A piece may be done twice, also at once: its file appears whole, with the same bytes.
"""

import contextlib
import difflib
import io
import logging
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from bert_jax import files
from bert_jax.errors import UserError


def options(given: Sequence[str]) -> Any:
    """Beam's `PipelineOptions` of NAME=VALUE or NAME alone, as `--NAME=VALUE` or `--NAME`.

    Raises:
        UserError: Beam is not installed, knows no such option or refuses its value.
    """
    try:
        import apache_beam  # noqa: F401
    except ImportError:
        raise UserError("the Beam runner needs Apache Beam: pip install 'bert-jax[beam]'") from None
    from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions

    parsed = PipelineOptions([f"--{option}" for option in given])
    logger = logging.getLogger(PipelineOptions.__module__)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), _silent(logger):
            known = parsed.get_all_options()
            unknown = set(parsed.get_all_options(retain_unknown_options=True)) - set(known)
            runner = parsed.view_as(StandardOptions).runner or StandardOptions.DEFAULT_RUNNER
    except SystemExit:  # argparse has printed its usage, and last what is wrong
        line = said.getvalue().strip().splitlines()[-1]
        raise UserError(f"Apache Beam's options: {line.partition('error: ')[2]}") from None
    # Others ask a server which options there are.
    if unknown and runner in StandardOptions.LOCAL_RUNNERS:
        name = min(unknown)
        near = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(f"Apache Beam's {runner} has no option {name!r}{hint}")
    return parsed


@contextlib.contextmanager
def _silent(logger: logging.Logger) -> Iterator[None]:
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


class Pipelines:
    """Does pieces of work, each kind in a pipeline of its own.

    Args:
        call: does a piece, given its method and arguments; is pickled, as they are.
        error: where a worker leaves the line of a `UserError`, for the process that waits. Beam's
            runners would each wrap it in tracebacks of their own, most after trying it four times.
        given: as `options` takes them.
    """

    def __init__(
        self, call: Callable[[str, tuple], None], error: pathlib.Path, given: Sequence[str]
    ):
        self._call, self._error, self._options = call, error, options(given)

    def __enter__(self) -> "Pipelines":
        return self

    def __exit__(self, *error) -> None:
        pass

    def run(self, method: str, tasks: Iterable[tuple[Any, tuple]]) -> Iterator[tuple[Any, None]]:
        """Calls a method for every (tag, arguments); when all are done, yields (tag, None) of each.

        Raises:
            UserError: what a worker raised, or the line in which Beam says why it failed.
        """
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
                | method >> beam.Map(_do, self._call, self._error)
            )
            pipeline.run().wait_until_finish()
        except Exception as failure:  # whatever the runner, its server or the network do
            text = str(failure).strip() or type(failure).__name__
            if mistake := re.search(r"UserError: (.*?)(?: \[while running|\n|$)", text):
                raise UserError(mistake[1]) from None
            raise UserError(f"Apache Beam: {text.splitlines()[-1]}") from failure
        if self._error.exists():
            raise UserError(self._error.read_text())
        yield from ((tag, None) for tag in tags)


def _do(piece: tuple[str, tuple], call: Callable[[str, tuple], None], error: pathlib.Path) -> None:
    if error.exists():  # all is in vain
        return
    try:
        call(*piece)
    except UserError as mistake:
        try:
            files.write(error, str(mistake))
        except OSError:  # a full disk: by way of Beam, then
            raise mistake from None
