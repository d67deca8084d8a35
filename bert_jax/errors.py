"""The one exception for what a person can mend."""


class UserError(Exception):
    """A mistake or a circumstance outside the program: a wrong path, a full disk, a misspelt key.

    The message is one line that says what is wrong, where, and what to do about it.
    `bert-jax` prints it without a traceback and exits with status 2.
    """
