"""The exception for errors that the user can fix, and exit statuses."""

from collections.abc import Callable
from typing import Any

EXIT_USER_ERROR = 2
# preflight: the run does not fit the hardware. replay: the results differ.
EXIT_NEGATIVE = 1
# EX_TEMPFAIL of BSD: stopped by a signal with all state saved; the same command resumes.
EXIT_INTERRUPTED = 75

_HALF_LENGTH = 1000  # characters


# Local paths that stand for others, which messages show instead (`bert_jax.storage`).
RENAMED: dict[str, str] = {}


def shown(text: str) -> str:
    """Return a message with the names of paths as the user gave them."""
    for path, name in RENAMED.items():
        text = text.replace(path, name)
    return text


class UserError(Exception):
    """An error outside the program, such as a wrong path, a full disk or a misspelled key.

    The message is one line that says what is wrong, where, and what to do about it. `bert-jax`
    prints it without a traceback and exits with status 2.
    """

    def __init__(self, message: str):
        message = shown(message)
        # Messages may quote files. Shorten them in the middle, since the advice is at the end, and
        # escape line breaks and terminal codes.
        if len(message) > 2 * _HALF_LENGTH:
            message = f"{message[:_HALF_LENGTH]} … {message[-_HALF_LENGTH:]}"
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in message))


class Unavailable(UserError):
    """Object storage that does not answer, after retries; the same command may succeed later."""


class Attempts:
    """Calls whose errors are collected, so that a user sees all of them at once."""

    def __init__(self):
        self._errors: list[str] = []

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a function returns, or None if it raises a `UserError`."""
        try:
            return function(*arguments)
        except UserError as error:
            self._errors.append(str(error))
            return None

    def check(self) -> None:
        """Raise a `UserError` with the messages of all errors, if there were any."""
        if self._errors:
            raise UserError("; also, ".join(self._errors))
