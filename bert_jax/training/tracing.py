"""Traces of training steps by the JAX profiler, as `config.profile_steps` requests.

WORKDIR/profile/steps_FIRST_END/plugins/profile holds the trace, which XProf displays
(`xprof --logdir WORKDIR/profile/steps_…`), as does TensorBoard with its profile plugin.
`bert_jax.tools.profile` adds a table of where the time of a step goes.
"""

import contextlib
import pathlib
import shutil
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from bert_jax.config.schema import TrainConfig, profiled_steps
from bert_jax.storage import files

FOLDER = "profile"
# Names of the loop's own spans in a trace.
STEPS, WAITS = "bert_jax steps", "bert_jax input wait"

# (folder of the trace, compiled program, number of steps, dtype) -> text to print.
Summarize = Callable[[pathlib.Path, Any, int, str], str]


@contextlib.contextmanager
def record(
    folder: pathlib.Path,
    program: Any,
    steps: int,
    dtype: str,
    print_line: Callable[[str], None],
    summarize: Summarize | None,
) -> Iterator[None]:
    """Trace the block into a new folder, replacing an earlier trace. Nothing remains on an error.

    The block executes `program`, which computes in `dtype`, `steps` times; the device must be idle before
    the first and after the last. `summarize` is called with the finished trace and may add files to it.
    """
    shutil.rmtree(folder, ignore_errors=True)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # every call of a Python function would be a span
    with files.new_folder(folder) as temporary:
        trace = jax.profiler.trace(temporary, profiler_options=options)
        with trace, jax.profiler.TraceAnnotation(STEPS):
            yield
        summary = (
            summarize(temporary, program, steps, dtype) if summarize else f"traced {steps} steps "
        )
    print_line(f"{summary}in {folder}")


class StepTracer:
    """Traces the configured steps among those of a loop that runs one program.

    Use it as a context manager around the loop, whose end discards an unfinished trace. A loop that
    begins among the configured steps traces the rest of them. `span` are the steps of the loop.
    """

    def __init__(
        self,
        config: TrainConfig,
        span: range,
        folder: pathlib.Path,
        program: Any,
        print_line: Callable[[str], None],
        summarize: Summarize | None = None,
    ):
        requested = profiled_steps(config)
        self._first, self._end = max(requested.start, span.start), min(requested.stop, span.stop)
        self._trace = contextlib.ExitStack()
        self._arguments = (
            folder / FOLDER / f"steps_{requested.start}_{requested.stop}",
            program,
            self._end - self._first,
            config.model.compute_dtype,
            print_line,
            summarize,
        )

    def __enter__(self) -> "StepTracer":
        return self

    def __exit__(self, *_: Any) -> None:
        self._trace.__exit__(Exception, Exception(), None)  # `record` keeps nothing on an error

    def is_boundary(self, step: int) -> bool:
        """Whether a trace starts or ends before this step; the device must then be idle."""
        return self._first < self._end and step in (self._first, self._end)

    def update(self, step: int) -> None:
        """Start or end the trace if `step`, the next one, is a boundary."""
        if self.is_boundary(step) and not jax.process_index():
            if step == self._first:
                self._trace.enter_context(record(*self._arguments))
            else:
                self._trace.close()

    def annotate(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches, and mark the time spent waiting for them in the trace."""
        iterator = iter(batches)
        while True:
            with jax.profiler.TraceAnnotation(WAITS):
                batch = next(iterator, None)
            if batch is None:
                return
            yield batch
