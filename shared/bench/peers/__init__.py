"""Other engines on this processor, beside ours: `python -m shared.bench.peers`."""
