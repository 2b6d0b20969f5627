"""Tests may be coroutines, and servers share a process, as in stage 06."""

from stage06_serving.tests.conftest import house, pytest_pyfunc_call, slowly

__all__ = ["house", "pytest_pyfunc_call", "slowly"]
