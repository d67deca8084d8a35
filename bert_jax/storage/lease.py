"""Ownership of a folder on object storage, which has no locks."""

import contextlib
import json
import os
import socket
import sys
import threading
import time
import uuid
from typing import Any

from bert_jax.errors import UserError
from bert_jax.storage import objects

HEARTBEAT_SECONDS, EXPIRY_SECONDS = 10.0, 45.0
_tokens: set[str] = set()  # of this process


class Lease:
    """The right to write to a folder, held by one process at a time.

    The lease is an object `lease/N`, which its owner creates (the storage refuses a second creation)
    and renews in a thread. A process that finds one waits to see whether it is renewed. If it is not,
    or if its owner ran on this machine and is dead, it creates `lease/N+1`; the owner of `lease/N`,
    should it come back, sees that and stops. `token` tells a lease from all others.
    """

    def __init__(self, url: str):
        self._root, self._folder = url, f"{url}/lease"
        self.token, self._beats = uuid.uuid4().hex[:8], 0
        self._owner = this_process()
        _tokens.add(self.token)
        self._lock, self._released = threading.Lock(), threading.Event()

    def __enter__(self) -> "Lease":
        number = self._wait()
        self._url = f"{self._folder}/{number:06}"
        # A retried request, whose first answer was lost, fails because its object exists.
        if not objects.create(self._url, self._content()) and not self.is_ours():
            raise UserError(f"{self._folder} was taken by another process just now; wait for it")
        older = [name for name in objects.listing(self._folder) if int(name) < number]
        objects.delete([f"{self._folder}/{name}" for name in older])
        threading.Thread(target=self._heartbeat_loop, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._released.set()
        with self._lock, contextlib.suppress(UserError):
            if self.is_ours():
                objects.delete([self._url])

    def _heartbeat_loop(self) -> None:
        while not self._released.wait(HEARTBEAT_SECONDS):
            with contextlib.suppress(UserError):  # the storage may answer again
                self.renew()

    def renew(self) -> None:
        """Update the heartbeat."""
        with self._lock:
            if not self._released.is_set() and self.is_ours():
                self._beats += 1
                objects.write(self._url, self._content())

    def is_ours(self) -> bool:
        """Whether no other process has taken the lease."""
        newest = max(objects.listing(self._folder), default="")
        # Numbers begin at 1 again after a release, so the newest may have our number but be another's.
        return newest == self._url.rpartition("/")[2] and (
            self.token.encode() in objects.read(self._url)
        )

    def check(self) -> None:
        """Raise a `UserError` if another process has taken the lease."""
        if not self.is_ours():
            raise UserError(f"{self._root} was taken over by another process: this one stops")

    def _content(self) -> bytes:
        owner = {"token": self.token, "beats": self._beats, **self._owner}
        return json.dumps(owner).encode()

    def _wait(self) -> int:
        """Wait until the newest lease has expired, and return the number of the next one."""
        first, since = None, 0.0
        while names := sorted(objects.listing(self._folder)):
            url = f"{self._folder}/{names[-1]}"
            try:
                owner = json.loads(objects.read(url))
            except ValueError:
                owner = {}
            except UserError:
                if names[-1] in objects.listing(self._folder):
                    raise
                continue  # released just now
            if _is_dead(owner):
                return int(names[-1]) + 1
            process = f"pid {owner.get('pid')} on {owner.get('host')}"
            if first is None:
                wait = f"waiting up to {EXPIRY_SECONDS:.0f} s to see whether {process}"
                print(f"{wait} still writes to {self._root}", file=sys.stderr, flush=True)
            if first is None or owner.get("token") != first.get("token"):
                first, since = owner, time.monotonic()
            if owner.get("beats") != first.get("beats"):
                use = f"{self._root} is in use by another process ({process})"
                raise UserError(f"{use}; wait for it, stop it, or choose another folder")
            if time.monotonic() - since > EXPIRY_SECONDS:
                return int(names[-1]) + 1
            time.sleep(HEARTBEAT_SECONDS / 10)
        return 1


def this_process() -> dict[str, Any]:
    """Return pid, host and pid namespace of this process; a pid means nothing in another namespace."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return {"pid": os.getpid(), "host": socket.gethostname(), "namespace": namespace}


def is_running(pid: Any) -> bool:
    """Whether a process of this host and pid namespace may be running."""
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError):
        pass
    return True


def _is_dead(owner: dict[str, Any]) -> bool:
    """Whether the owner of a lease ran on this machine and is dead."""
    here = this_process()
    if any(owner.get(name) != here[name] for name in ("host", "namespace")):
        return False
    is_earlier = owner["pid"] == here["pid"] and owner.get("token") not in _tokens
    return is_earlier or not is_running(owner["pid"])
