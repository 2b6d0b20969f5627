"""A chat template by hand: ChatML, the layout that Qwen and SmolLM2 use.

A model reads a conversation as one text in which control tokens mark where a turn begins and ends.
A folder's template is a program that writes that text (shared/chat_template.py runs it). This file
does in Python what the shortest template does. It must keep track of which parts are the
template's: a user who writes <|im_end|> has written ten characters and ended no turn.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby

START, END = "<|im_start|>", "<|im_end|>"


def render(
    messages: Sequence[Mapping[str, str]], control: Collection[str], start: bool = True
) -> list[tuple[str, bool]]:
    """The prompt for `messages`, each with a role and a content, as pieces for
    `JsonTokenizer.encode_chat`: a text, and whether words of `control` in it are tokens.

    start: whether to add the beginning of the assistant's answer.
    """
    words = "|".join(map(re.escape, sorted(control, key=len, reverse=True)))
    pieces: list[tuple[str, bool]] = []

    def quote(text: str) -> None:
        """Add what a user wrote: every second part is a control token, and stays text."""
        for place, part in enumerate(re.split(f"({words})", text)):
            pieces.append((part, place % 2 == 0))

    for message in messages:
        pieces.append((START, True))
        quote(message["role"])
        pieces.append(("\n", True))
        quote(message["content"].strip())
        pieces.append((f"{END}\n", True))
    if start:
        pieces.append((f"{START}assistant\n", True))
    # Adjacent pieces of one kind are joined: a tokenizer may merge across their border.
    kinds = groupby(filter(lambda piece: piece[0], pieces), key=lambda piece: piece[1])
    return [("".join(text for text, _ in group), kind) for kind, group in kinds]
