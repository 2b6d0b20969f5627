"""The museum: every bug fits, shows, is caught by its tests, and costs no work of the student's."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from typing import Any

import pytest

from shared import paths
from shared.course import mine
from shared.course.museum import planting, trials
from shared.course.museum.__main__ import for_student, main
from shared.course.museum.exhibits import EXHIBITS, Exhibit, find
from shared.course.museum.show import show
from shared.errors import UserError
from stage09_kernels.library import compilers

NAMES = [exhibit.name for exhibit in EXHIBITS]
NEEDS: dict[str, Any] = {"stage09_kernels": compilers(), "stage13_gpu": find_spec("triton")}
