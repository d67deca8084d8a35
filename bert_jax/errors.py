"""The exception for errors that the user can fix, and exit statuses."""

import difflib
import importlib.metadata
import pathlib
import re
import shlex
from collections.abc import Callable, Collection, Iterable
from typing import Any

EXIT_USER_ERROR = 2
# preflight: the run does not fit the hardware.
EXIT_NEGATIVE = 1
# EX_TEMPFAIL of BSD: stopped by a signal with all state saved; the same command resumes.
EXIT_INTERRUPTED = 75

_HALF_LENGTH = 1000  # characters


# Local paths that stand for others, which messages show instead (`bert_jax.storage`).
RENAMED: dict[str, str] = {}


def with_user_paths(text: str) -> str:
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
        message = with_user_paths(message)
        # Messages may quote files. Shorten them in the middle, since the advice is at the end, and
        # escape line breaks and terminal codes.
        if len(message) > 2 * _HALF_LENGTH:
            message = f"{message[:_HALF_LENGTH]} … {message[-_HALF_LENGTH:]}"
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in message))


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return the choice that a word misspells or shortens, or "".

    Initials and first words are short forms: `lr` of `learning_rate`, `warmup` of `warmup_steps`.
    So are parts: `layers` of `num_hidden_layers`, as other libraries call it.
    """
    choices = list(choices)
    plain = word.strip("-").lower()

    def is_short_for(choice: str) -> bool:
        words = re.split(r"[-_.]", choice.strip("-").lower())
        initials = "".join(part[:1] for part in words)
        if len(plain) > 1 and (plain == initials or words[0] == plain):
            return True
        return len(choice) > 3 and plain.endswith(("_" + choice, "-" + choice))

    plural = [choice for choice in choices if choice == word + "s"]
    short = [choice for choice in choices if is_short_for(choice)]
    return (plural or short or difflib.get_close_matches(word, choices, 1) or [""])[0]


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return "; did you mean CHOICE?" for the end of a message, or "" if no choice is near."""
    choice = nearest(word, choices)
    return f"; did you mean {choice}?" if choice else ""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: "1 row", "2,000 rows"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def shorten(names: Collection[str]) -> str:
    """Return a list of names for a message: up to eight of them, and how many more."""
    shown = ", ".join(list(names)[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"


class Unavailable(UserError):
    """Object storage that does not answer, after retries; the same command may succeed later."""


class InUse(UserError):
    """A folder whose lock another process holds."""


def missing(purpose: str, extra: str) -> UserError:
    """Return the error for a package that is not installed, given the extra that installs it."""
    return UserError(f"{purpose}: {install_command(extra)}")


def install_command(extra: str) -> str:
    """Return the command that installs an extra: in a checkout by its name, else the packages in it."""
    root = pathlib.Path(__file__).parents[1]
    if (root / "pyproject.toml").exists():
        return f"pip install -e '{'.' if root == pathlib.Path.cwd() else root}[{extra}]'"
    requirements = (text.partition(";") for text in importlib.metadata.requires("bert-jax") or ())
    of_extra = rf"extra.*\b{re.escape(extra)}\b"
    names = [name.strip() for name, _, marker in requirements if re.search(of_extra, marker)]
    return shlex.join(["pip", "install", *names])


class WrongColumn(UserError):
    """A column or field that a table lacks, with those that it has."""

    def __init__(self, problem: str, column: str, columns: Iterable[str], advice: str = ""):
        self.arguments = problem, column, tuple(columns)
        advice = advice or "name or rename one of these"
        super().__init__(f"{problem} {column!r} (it has: {', '.join(columns)[:200]}); {advice}")


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
