"""Stage 10: quantization, weights and caches in fewer bytes.

`numpy_quant.py` has the arithmetic on one page, and `matrix.py` the matrix of whole numbers that
all of this stage exchanges: quantizers and readers of files make it, layers and kernels multiply by
it.
"""

import shared  # noqa: F401  before PyTorch: it chooses how OpenMP's threads wait

QUESTION: str = "A decode step waits for the weights: how few bytes do they need, and what is lost?"
FIRST_FILE: str = "numpy_quant.py"
OPTION = "quantization_config"  # of a folder's config.json


class Unfit(Exception):
    """Why a file or folder is not read."""
