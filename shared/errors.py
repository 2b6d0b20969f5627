"""The one error that the user can fix, and what the user probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Collection


class UserError(Exception):
    """One sentence that says what is wrong and what to do about it.

    Command lines print it as `error: ...` and exit with status 2, without a traceback; a server
    answers 400 with it.
    """


def advised(advice: str, word: str, known: Collection[str]) -> str:
    """`advice`, after the known word that `word` is near to, if there is one."""
    for near in difflib.get_close_matches(word, known, n=1):
        return f"did you mean {near}? {advice[:1].upper()}{advice[1:]}"
    return advice
