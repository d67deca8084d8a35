"""The one exception for what a person can mend."""

_HALF = 1000  # characters


class UserError(Exception):
    """A mistake or a circumstance outside the program: a wrong path, a full disk, a misspelt key.

    The message is one line that says what is wrong, where, and what to do about it.
    `bert-jax` prints it without a traceback and exits with status 2.
    """

    def __init__(self, message: str):
        # It may quote a file, whose line breaks and terminal codes are for nobody's terminal, at
        # any length; what to do stands at the end.
        if len(message) > 2 * _HALF:
            message = f"{message[:_HALF]} … {message[-_HALF:]}"
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in message))
