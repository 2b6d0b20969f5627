"""Other engines on this processor, beside ours: `python -m reports.peers`."""
