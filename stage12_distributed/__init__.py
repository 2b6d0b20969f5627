"""Stage 12: when one machine is not enough.

`routing.py` is what this stage teaches: which replica gets a request. `router.py` is an HTTP server
that applies this policy to stage 06's servers, and `serve.py` runs those on Ray.
"""

import shared  # noqa: F401  before PyTorch: it chooses how OpenMP's threads wait

QUESTION: str = "Many replicas: which one gets a request, and what is lost when one dies?"
FIRST_FILE: str = "routing.py"
