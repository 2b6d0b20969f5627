"""The tour of all stages: `python -m shared.tour`.

The one door from the ground floor of `shared` to the floor above, so that the first command of the
README stays short. Nothing else on the ground floor imports `course`, `bench` or a stage.
"""

from . import cli
from .course.tour import main

if __name__ == "__main__":
    cli.run(main)
