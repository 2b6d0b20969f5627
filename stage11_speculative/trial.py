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


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal is for the parent
    with suppress(ImportError, OSError, ValueError):  # no such limit on this system
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    tokenizer = llguidance.LLTokenizer("byte")
    limits = llguidance.LLParserLimits(**json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        matcher = llguidance.LLMatcher(tokenizer, json.loads(line), log_level=0, limits=limits)
        matcher.compute_bitmask()  # finds what compiling does not
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps(matcher.get_error()), flush=True)


if __name__ == "__main__":
    main()
