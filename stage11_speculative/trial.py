"""Compiles grammars in a process of its own, which grammar.py starts: some take hours or gigabytes,
and neither llguidance's limits nor a thread can stop them. A timer and the system end a process.

A line of JSON is a grammar, and the answer is another: what is wrong with it, or "".
"""

from __future__ import annotations

import faulthandler
import json
import signal
import sys
from contextlib import suppress

import llguidance

SECONDS = 1.0
BYTES = 2**30  # of address space
MOST_IDS = 2**18


class Vocabulary:
    """Bytes, the end of a text, and tokens without text: a grammar may name a model's by its id."""

    bos_token_id, eos_token_id = None, 256
    tokens = [bytes([byte]) for byte in range(256)] + [b""] * (MOST_IDS - 256)
    special_token_ids = [256]

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal is for the parent
    with suppress(ImportError, OSError, ValueError):  # no such limit on this system
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    wrapper = llguidance.TokenizerWrapper(Vocabulary())
    tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=MOST_IDS, eos_token=[256])
    limits = llguidance.LLParserLimits(**json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        matcher = llguidance.LLMatcher(tokenizer, json.loads(line), log_level=0, limits=limits)
        matcher.compute_bitmask()  # finds what compiling does not
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps(matcher.get_error()), flush=True)


if __name__ == "__main__":
    main()
