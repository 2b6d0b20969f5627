"""Stage 01, the forward pass: GPT-2 on one page, the same in PyTorch, a sampler, and an engine that keeps nothing.

Read README.md first, then `FIRST_FILE`. Every later stage takes the model and the sampler from here and is judged by this engine.
"""

QUESTION = "How does a language model make one token, and what does the next one cost?"
FIRST_FILE = "numpy_gpt2.py"
