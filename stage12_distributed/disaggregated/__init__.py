"""Prefill and decode in two processes, over one pool of blocks."""
