"""A conversation at the terminal: history, streaming, /reset."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from shared.chat_template import FolderTemplate
from shared.cli import Loaded, with_text
from shared.errors import UserError

HELP = "/reset forgets the conversation, Ctrl-C stops an answer, /quit ends"


class Chat:
    """A conversation with a model whose folder has a chat template.

    Every answer's prompt is the whole conversation; an engine with a prefix cache computes only the
    new part. One that has filled the context is refused until /reset."""

    def __init__(
        self, engine: Any, loaded: Loaded, template: FolderTemplate, sampling: Any
    ) -> None:
        self.engine, self.loaded, self.template = engine, loaded, template
        self.tokenizer: Any = loaded.tokenizer  # with control tokens, as every chat's
        self.sampling = sampling
        self.messages: list[dict[str, str]] = []

    def ask(self, text: str) -> Iterator[str]:
        """The answer to `text`, piece by piece. A stopped answer stays in the history as far as it
        came; a question without an answer does not. Raises UserError if the template or the engine
        refuses."""
        messages = [*self.messages, {"role": "user", "content": text}]
        ids: list[int] = self.tokenizer.encode_chat(self.template.render(messages))
        answer = ""
        try:
            for _, piece in with_text(self.engine.stream(ids, self.sampling), self.loaded):
                answer += piece
                yield piece
        finally:
            if answer:
                self.messages = [*messages, {"role": "assistant", "content": answer}]

    def run(self, read: Callable[[str], str] | None = None) -> int:
        """Read questions until the end of the input, /quit, or Ctrl-C at the prompt."""
        print(f"[{HELP}]", file=sys.stderr, flush=True)
        while True:
            try:
                line = (read or input)("> ").strip()
            except (EOFError, KeyboardInterrupt):
                line = "/quit"
            if line == "/quit":
                print()
                return 0
            if line == "/reset":
                self.messages.clear()
            elif line.startswith("/") and " " not in line:
                print(f"error: no command is called {line!r}: {HELP}", file=sys.stderr, flush=True)
            elif line:
                self._show(line)

    def _show(self, line: str) -> None:
        try:
            for piece in self.ask(line):
                print(piece, end="", flush=True)
            print()
        except KeyboardInterrupt:
            print(" [stopped]")
        except UserError as error:
            print(f"error: {error} [{HELP}]", file=sys.stderr, flush=True)
