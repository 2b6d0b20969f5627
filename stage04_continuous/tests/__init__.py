import pytest

for name in ("contract", "lives", "oracle", "traces"):
    pytest.register_assert_rewrite(f"stage04_continuous.tests.{name}")
