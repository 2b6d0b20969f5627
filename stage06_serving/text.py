"""From tokens to the text that a client may see: whole characters, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from shared.tokenizer import AnyTokenizer, IncrementalDecoder


class TextStream:
    """The text of one answer, given out piece by piece.

    A character may be spread over several tokens: it is held back until it is whole. A stop string may be, too: the last
    characters are held back as long as they may be the beginning of one. What `push` gave, with `flush` at the end, is the same
    text however the tokens came.

    eos_ids: the end-of-text tokens, which are no text. keep_stop: the stop string itself belongs to the text. min_tokens: what the
        tokens before that many say is no stop string, and none begins there.
    """

    def __init__(
        self,
        tokenizer: AnyTokenizer,
        eos_ids: Sequence[int],
        stops: Sequence[str] = (),
        keep_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._decoder = IncrementalDecoder(tokenizer)
        self._eos_ids, self._stops, self._keep_stop = eos_ids, list(stops), keep_stop
        self._early = min_tokens - 1  # so many tokens more are not looked at
        self._held = ""
        self.length = 0  # characters decoded so far, given out or held back
        self.stop: str | None = None  # the stop string that was found; nothing comes after it

    def push(self, token_id: int) -> str:
        """The text that may be shown once this token has come. Not to be called when `stop` is set."""
        new = "" if token_id in self._eos_ids else self._decoder.push(token_id)
        self.length += len(new)
        self._early -= 1
        return new if self._early >= 0 else self._release(new)

    def flush(self) -> str:
        """The rest, when no more tokens come."""
        new = self._decoder.flush()
        self.length += len(new)
        text = self._release(new)
        if self.stop is None:
            text, self._held = text + self._held, ""
        return text

    def _release(self, new: str) -> str:
        if self.stop is not None or not self._stops:
            return "" if self.stop is not None else new
        text = self._held + new
        found = [
            (text.index(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in text
        ]
        if found:
            end, _, self.stop = min(
                found
            )  # the one that is complete first; of several, the longest
            self._held = ""
            return text[: end if self._keep_stop else end - len(self.stop)]
        keep = max(overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` may be the beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
