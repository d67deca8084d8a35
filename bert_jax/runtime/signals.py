"""Signals that stop a run: SIGTERM and SIGINT."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator

from bert_jax.runtime.progress import Progress


class Interrupted(Exception):
    """Raised after SIGTERM or SIGINT, once the state is saved; the run can be resumed."""


@contextlib.contextmanager
def catch_signals(progress: Progress) -> Iterator[Callable[[], bool]]:
    """Catch SIGTERM and SIGINT in the block; yield a function that says whether one was received.

    A second signal exits at once with status 128 + signal number: unwinding would wait for a save.
    """
    received = []
    old_handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}

    def handle(number, frame):
        if received:
            progress.show_cursor()
            os._exit(128 + number)
        received.append(number)
        progress.say_in_handler(
            "stopping after this step; repeat the signal to stop without saving"
        )

    for number in old_handlers:
        signal.signal(number, handle)
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
