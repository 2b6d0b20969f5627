"""From tokens to the text that a client may see: whole characters, and no part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from shared.tokenizer import AnyTokenizer, IncrementalDecoder


class TextStream:
    """The text of one answer, released piece by piece.

    A character may span several tokens: it is held back until it is whole. So may a stop string:
    the last characters are held back as long as they may be the beginning of one. What `push` and
    the final `flush` return is the same text however the tokens arrive.

    eos_ids: end-of-text tokens, which have no text. min_tokens: no stop string can begin in the
        text of the tokens before this one.
    """

    def __init__(
        self,
        tokenizer: AnyTokenizer,
        eos_ids: Sequence[int],
        stops: Sequence[str] = (),
        min_tokens: int = 0,
    ) -> None:
        self._decoder = IncrementalDecoder(tokenizer)
        self._eos_ids, self._stops = eos_ids, list(stops)
        self._early = min_tokens - 1  # further tokens in which no stop string is sought
        self._held = ""
        self.stop: str | None = None  # the stop string that ended the text

    def push(self, token_id: int) -> str:
        """The text that may be shown once this token has arrived. Do not call it after `stop`."""
        new = "" if token_id in self._eos_ids else self._decoder.push(token_id)
        self._early -= 1
        return new if self._early >= 0 else self._release(new)

    def flush(self) -> str:
        """The rest, when no more tokens arrive."""
        text = self._release(self._decoder.flush())
        if self.stop is None:
            text, self._held = text + self._held, ""
        return text

    def _release(self, new: str) -> str:
        if self.stop is not None or not self._stops:
            return "" if self.stop is not None else new
        text = self._held + new
        matches = [
            (text.index(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in text
        ]
        if matches:
            end, _, self.stop = min(matches)  # the first to be complete; among equals, the longest
            self._held = ""
            return text[: end - len(self.stop)]
        keep = max(overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
