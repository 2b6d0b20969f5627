"""Tests may be coroutines, as in stage 06."""

from stage06_serving.tests.conftest import pytest_pyfunc_call

__all__ = ["pytest_pyfunc_call"]
