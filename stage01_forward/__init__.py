"""Stage 01, the forward pass: GPT-2 on one page, in PyTorch, a sampler, an engine without memory.

Read README.md first, then `FIRST_FILE`. Every later stage takes the model and the sampler from here
and is judged by this engine.
"""

from shared import openmp

QUESTION = "How does a language model make one token, and what does the next one cost?"
FIRST_FILE = "numpy_gpt2.py"

openmp.choose()  # before PyTorch is loaded
