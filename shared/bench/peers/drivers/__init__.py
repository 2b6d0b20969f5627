"""How each engine is asked for greedy tokens, one module an engine, run by `drive.py`.

`load(folder, dtype, threads, *options)` returns `answer(prompts, count, emit)`, which continues
prompts (token ids, all of one length) by `count` tokens each, and calls `emit` with the new pairs
(row, token) of each step. A checkpoint is converted at the first load, beside itself.
"""

# The same room for every engine: tokens of all sequences, sequences, tokens of one pass.
TOKENS, SEQUENCES, BUDGET = 16_384, 64, 4096
