"""Local processes that execute work units (prepare_worker.py)."""

import concurrent.futures
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from typing import Any

from bert_jax.data.prepare_worker import Job, Worker
from bert_jax.errors import UserError


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Workers:
    """A pool of worker processes; a single worker is this process itself."""

    def __init__(self, job: Job, workers: int):
        self._job, self._workers = job, workers
        self._pool = None

    def __enter__(self) -> "Workers":
        if self._workers > 1:
            # Spawn, as forking a process with threads (JAX, tokenizers) can hang.
            self._pool = concurrent.futures.ProcessPoolExecutor(
                self._workers, multiprocessing.get_context("spawn"), _start_worker, (self._job,)
            )
        return self

    def __exit__(self, *error) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)

    def run(self, method: str, tasks: Iterable[tuple[Any, tuple]]) -> Iterator[tuple[Any, Any]]:
        """Call a `Worker` method for every (tag, arguments); yield (tag, result) as they finish.

        At most two tasks per worker are pending, which limits how far `tasks` is read ahead.
        """
        if not self._pool:
            worker = Worker(self._job)
            for tag, arguments in tasks:
                yield tag, worker.call(method, arguments)
            return
        pending: dict[concurrent.futures.Future, Any] = {}
        try:
            for tag, arguments in tasks:
                pending[self._pool.submit(_call_worker, method, arguments)] = tag
                if len(pending) >= 2 * self._workers:
                    yield from self._done(pending)
            while pending:
                yield from self._done(pending)
        except BrokenProcessPool:
            raise UserError(
                "a worker process died, probably out of memory; run the same command again, if "
                "necessary with fewer --workers; finished work is kept"
            ) from None

    @staticmethod
    def _done(pending: dict[concurrent.futures.Future, Any]) -> Iterator[tuple[Any, Any]]:
        done, _ = concurrent.futures.wait(pending, return_when=concurrent.futures.FIRST_COMPLETED)
        for future in done:
            yield pending.pop(future), future.result()


_worker: Worker  # of this worker process


def _start_worker(job: Job) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    parent = multiprocessing.parent_process()
    assert parent

    def die_with_parent() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=die_with_parent, daemon=True).start()
    _worker = Worker(job)


def _call_worker(method: str, arguments: tuple) -> Any:
    return _worker.call(method, arguments)
