"""The course's tool. It reads the stages as text, so that no import of a stage can fail it."""
