"""What this stage offers to the tools that drive every stage: an engine, and answers to many
prompts."""

from stage04_continuous.make import answer as answer

from .engine import make as make
