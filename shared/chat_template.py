"""The chat template of a checkpoint folder, rendered as transformers does, for one prompt.

A template is a program that came with the weights, so a process of its own runs it
(template_process.py), on plain data, within SECONDS and MOST_CHARACTERS. It never comes from a
request. What users write stays text: control tokens in a message (or in the name of a role) are
marked before rendering and never become tokens.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

from .errors import UserError
from .files import read_json, read_text

SECONDS = 1.0
MOST_CHARACTERS = 2**20
RENDERER = Path(__file__).with_name("template_process.py")
# Each control token has two marks, put before and after it in a user's text. The marks are private
# characters from here on, which are removed from the text first.
FIRST_MARK = 0xF0000

Parts = list[tuple[str, bool]]  # text, and whether it is the template's own


class Renderer:
    """A process that renders one template; it is started again after it had to be ended."""

    def __init__(self, source: str, today: date) -> None:
        """Raises UserError if the template is invalid."""
        limits = {"seconds": SECONDS, "most": MOST_CHARACTERS}
        self._first = {"source": source, "today": today.isoformat(), **limits}
        self._lock = threading.Lock()
        self._start()

    def _start(self) -> None:
        # -P: the modules beside that file do not hide the standard library's
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(RENDERER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._end = weakref.finalize(self, _end, self._process)
        answer = self._ask(self._first)
        if answer is None or "error" in answer:
            why = f"it took over {SECONDS:g} s" if answer is None else answer["error"]
            raise UserError(
                f"The model's chat template is invalid ({why}): choose another with "
                "--chat-template."
            )

    def _ask(self, fields: Mapping[str, Any]) -> dict[str, str] | None:
        """The process's answer; None if it has ended."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        answer: dict[str, str] | None = None
        try:
            with suppress(OSError):
                stdin.write(json.dumps(fields).encode() + b"\n")
                stdin.flush()
                if line := stdout.readline():
                    answer = json.loads(line)
        finally:
            if answer is None:  # after Ctrl-C, it would be taken for the next one
                self._end()
        return answer

    def render(self, fields: Mapping[str, Any]) -> str:
        """Raises UserError if the template refuses the fields, fails, or exceeds a limit."""
        with self._lock:
            if not self._end.alive or self._process.poll() is not None:
                self._end()
                self._start()
            answer = self._ask(fields)
        if answer is None:
            answer = {"error": f"it took over {SECONDS:g} s"}
        if "error" in answer:
            raise UserError(
                f"The model's chat template does not accept these messages: {answer['error']}."
            )
        return answer["text"]


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(OSError), process:
        process.kill()


class FolderTemplate:
    """A template, ready to render. `today`: the date that a template may print; it is fixed when
    the template is loaded, so that prompts keep their common prefix."""

    def __init__(
        self,
        source: str,
        control: Collection[str] = (),
        tokens: Mapping[str, str] | None = None,
        today: date | None = None,
    ) -> None:
        """control: the control tokens. tokens: bos_token and others, for the template to print.
        Raises UserError if the template is invalid."""
        self._renderer = Renderer(source, today or date.today())
        self._tokens = dict(tokens or {})
        ordered = sorted(control, key=len, reverse=True)  # "|" takes the first match
        places = range(FIRST_MARK, FIRST_MARK + 2 * len(ordered), 2)
        self._marks = {
            word: (chr(place), chr(place + 1)) for word, place in zip(ordered, places, strict=True)
        }
        self._mark = re.compile(f"[{chr(FIRST_MARK)}-{chr(places.stop)}]")
        self._control = re.compile("|".join(map(re.escape, ordered)) or "(?!)")
        self._either = re.compile(f"{self._mark.pattern}|{self._control.pattern}")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        start: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Parts:
        """The prompt for `messages`, each with a role and a content, in pieces.

        start: add the beginning of the assistant's answer. tools: functions that the model may
        call, described as OpenAI's API does. Raises UserError if the template refuses
        the messages, fails, or exceeds its time or its size.
        """
        safe = [
            {key: self._marked(value) for key, value in message.items()} for message in messages
        ]
        described = None if tools is None else self._marked(tools)
        fields = {"messages": safe, "add_generation_prompt": start, "tools": described}
        text = self._renderer.render(fields | self._tokens)
        parts, done = [], 0
        for match in self._either.finditer(text):
            before, after = self._marks.get(match[0], ("", ""))  # a template may have cut one off
            users = text.endswith(before, 0, match.start()) or text.startswith(after, match.end())
            if users:  # or a mark
                token = match[0] if before else ""
                parts += [(text[done : match.start()], True), (token, False)]
                done = match.end()
        return [part for part in (*parts, (text[done:], True)) if part[0]]

    def _quoted(self, match: re.Match[str]) -> str:
        before, after = self._marks[match[0]]
        return f"{before}{match[0]}{after}"

    def _marked(self, value: Any) -> Any:
        """Plain data with every control token in it marked as text."""
        if isinstance(value, str):
            clean = self._mark.sub("", value)
            return self._control.sub(self._quoted, clean)
        if isinstance(value, Mapping):
            return {str(key): self._marked(inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._marked(inner) for inner in value]
        return value


def load(folder: Path | None, control: Collection[str] = ()) -> FolderTemplate | None:
    """The template of a folder: chat_template.jinja, or the one in tokenizer_config.json; None
    without either. Raises UserError for a template that cannot be used."""
    if folder is None:
        return None
    path, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    fields = read_json(config) if config.exists() else {}
    source = fields.get("chat_template")
    if isinstance(source, list):  # several, by name
        entries = [entry for entry in source if isinstance(entry, dict)]
        named = {entry.get("name"): entry.get("template") for entry in entries}
        source = named.get("default")
    if path.exists():
        try:
            source = read_text(path)
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read as text ({error}): copy it again.") from None
    if not isinstance(source, str):
        return None
    tokens = {}
    for name, value in fields.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return FolderTemplate(source, control, tokens)
