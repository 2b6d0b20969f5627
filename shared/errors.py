"""The one error that the user can fix."""


class UserError(Exception):
    """One sentence that says what is wrong and what to do about it.

    Command lines print it as `error: ...` and exit with status 2, without a traceback; a server
    answers 400 with it.
    """
