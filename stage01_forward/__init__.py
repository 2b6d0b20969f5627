"""Stage 01, the forward pass: GPT-2 on one page and in PyTorch, a sampler, and a naive engine.

Read README.md first, then `FIRST_FILE`. Every later stage takes the model and the sampler from
here, and its tokens must match this engine's.
"""

import shared  # noqa: F401  before PyTorch: it chooses how OpenMP's threads wait

QUESTION = "How does a language model make one token, and what does the next one cost?"
FIRST_FILE = "numpy_gpt2.py"
