"""Stage 11: several tokens from one reading of the weights, and answers in a given form.

`engine.py` is stage 04's engine with another end of a step: drafts were computed beside the newest
token, and as many as the sampler agrees with are kept. `drafts.py` puts them into the plan, and
`proposers.py` makes them.
"""

import shared  # noqa: F401  before PyTorch: it chooses how OpenMP's threads wait

QUESTION: str = (
    "A pass reads all weights for one token of a request: why not verify several at once?"
)
FIRST_FILE: str = "engine.py"
