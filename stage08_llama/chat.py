"""A conversation at the terminal: history, streaming, /reset.

A conversation that no longer fits into the context loses its oldest turns, each as a whole.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from shared.chat_template import FolderTemplate
from shared.cli import Loaded, with_text
from shared.errors import UserError

ROOM = 0.25  # share of the context that is kept free for an answer
HELP = "/reset forgets the conversation, Ctrl-C stops an answer, /quit ends"


class Chat:
    """A conversation with a model whose folder has a chat template.

    Every answer's prompt is the whole conversation; an engine with a prefix cache computes only the
    new part. `ask` raises UserError if the template or the engine refuses."""

    def __init__(
        self, engine: Any, loaded: Loaded, template: FolderTemplate, sampling: Any
    ) -> None:
        self.engine, self.loaded, self.template = engine, loaded, template
        self.tokenizer: Any = loaded.tokenizer  # with control tokens, as every chat's
        self.sampling = sampling
        self.messages: list[dict[str, str]] = []

    def ask(self, text: str) -> Iterator[str]:
        """The answer to `text`, piece by piece. A stopped answer stays in the history as far as it
        came."""
        question = {"role": "user", "content": text}
        self.messages.append(question)
        try:
            tokens = self.engine.stream(self._prompt(), self.sampling)
            answer = {"role": "assistant", "content": ""}
            for _, piece in with_text(tokens, self.loaded):
                if answer is not self.messages[-1]:
                    self.messages.append(answer)
                answer["content"] += piece
                yield piece
        except UserError:
            while self.messages.pop() is not question:
                continue
            raise

    def _prompt(self) -> list[int]:
        """The token ids of the conversation, without the oldest turns if they leave no room."""
        context = self.loaded.config.n_positions
        room = min(self.sampling.max_tokens, int(ROOM * context))
        turns = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        for start in turns:
            rendered = self.template.render(self.messages[start:])
            ids: list[int] = self.tokenizer.encode_chat(rendered)
            if len(ids) + room <= context or start == turns[-1]:
                break
        if start:
            del self.messages[:start]
            note = "[the context is full: the oldest turns are left out; /reset begins anew]"
            print(note, file=sys.stderr, flush=True)
        return ids

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
            print(f"error: {error}", file=sys.stderr, flush=True)
