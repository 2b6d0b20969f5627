"""Stage 10: quantization, weights and caches in fewer bytes.

`numpy_quant.py` has the arithmetic on one page, and `matrix.py` the matrix of whole numbers that
all of this stage exchanges: quantizers and readers of files make it, layers and kernels multiply by
it.
"""

from shared import openmp
from stage01_forward.offer import Offer

QUESTION: str = "A decode step waits for the weights: how few bytes do they need, and what is lost?"
FIRST_FILE: str = "numpy_quant.py"
WEIGHTS = "float32", "bfloat16", "int8", "int8-g32", "int4"
OFFER = Offer(
    __name__,
    formats="files",
    values={"weights": dict.fromkeys(WEIGHTS, "stored"), "kv_dtype": {"int8": "cache"}},
)

openmp.choose()  # before PyTorch is loaded
