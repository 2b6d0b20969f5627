import pytest

pytest.register_assert_rewrite("stage05_paged.tests.engines")
