"""Signals that stop a run: SIGTERM and SIGINT."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

from bert_jax.runtime.progress import Progress


class Interrupted(Exception):
    """Raised after SIGTERM or SIGINT, once the state is saved; the run can be resumed."""


@contextlib.contextmanager
def _handled_by(handle: Callable[[int, Any], None]) -> Iterator[None]:
    """Handle SIGTERM and SIGINT by a function in the block."""
    old_handlers = {s: signal.signal(s, handle) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def record_signals() -> Iterator[list[int]]:
    """Catch SIGTERM and SIGINT in the block; yield the list of those received so far."""
    received: list[int] = []
    with _handled_by(lambda number, frame: received.append(number)):
        yield received


@contextlib.contextmanager
def catch_signals(progress: Progress) -> Iterator[Callable[[], bool]]:
    """Catch SIGTERM and SIGINT in the block; yield a function that says whether one was received.

    A second signal exits at once with status 128 + signal number: unwinding would wait for a save.
    """
    received = []

    def handle(number, frame):
        if received:
            progress.show_cursor()
            os._exit(128 + number)
        received.append(number)
        progress.say_in_handler(
            "stopping after this step; repeat the signal to stop without saving"
        )

    with _handled_by(handle):
        yield lambda: bool(received)
