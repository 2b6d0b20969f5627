"""Quantized checkpoints as other programs write them, and files that they open.

Each format becomes a `QuantizedMatrix`: whole numbers with a scale for each group. What is not read
is refused by name.
"""
