"""Compiles one grammar, in a process that grammar.py starts and ends: what is wrong with it, or "",
as JSON. A grammar may take hours or gigabytes."""

from __future__ import annotations

import json
import sys
from contextlib import suppress

import llguidance

BYTES, SECONDS = 2**30, 2  # of address space, and of a processor


class Bytes:
    """A vocabulary of bytes, and the end of a text."""

    bos_token_id, eos_token_id, special_token_ids = None, 256, [256]
    tokens = [*(bytes([byte]) for byte in range(256)), b""]

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


if __name__ == "__main__":
    with suppress(ImportError, OSError, ValueError):  # no such limit on this system
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    source, limits = json.load(sys.stdin)
    wrapper = llguidance.TokenizerWrapper(Bytes())
    tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=257, eos_token=[256])
    bounds = llguidance.LLParserLimits(**limits)
    matcher = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=bounds)
    matcher.compute_bitmask()  # finds what compiling does not
    print(json.dumps(matcher.get_error()))
