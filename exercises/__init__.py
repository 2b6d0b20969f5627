"""The course's tool: tasks to start, check, grade and prove, and the museum of planted bugs.

It imports `shared` alone and reads the stages as text, so that no import of a stage can fail it.
"""
