"""LoRA adapters: another pair of thin matrices for each row of a batch."""
