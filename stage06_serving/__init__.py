"""Stage 06: the engine behind HTTP, for OpenAI's clients, curl and a browser.

`async_engine.py` is what this stage teaches: the engine on a thread, and an event loop that never
waits for it. `protocol.py` describes what clients send, `service.py` and `text.py` turn bodies into
answers, `formats.py` writes them as JSON, and `app.py` has the endpoints.
"""

import shared  # noqa: F401  before PyTorch: it chooses how OpenMP's threads wait

QUESTION: str = "How does one engine loop serve many clients that are slow and may leave?"
FIRST_FILE: str = "async_engine.py"
