"""The options of a request: what is refused, and by which name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from shared.errors import UserError
from stage01_forward.params import SamplingParams

BAD: dict[str, list[Any]] = {
    "max_tokens": [0, -5, 1.5, True],
    "temperature": [-0.1, 2.1, math.nan, math.inf, "warm"],
    **{"top_k": [-2, 2.0], "top_p": [0.0, 1.01, math.nan], "min_p": [-0.01, 1.01, None]},
    "repetition_penalty": [0.0, 1e6, math.nan],
    **{"presence_penalty": [2.5, -math.inf], "frequency_penalty": [-2.5, True]},
    "logit_bias": [[1, 2], {-1: 0.0}, {"1": 0.0}, {1: math.nan}, {1: 101}],
    **{"seed": [1.0, 2**63], "stop_token_ids": ["12", 5, (-1,), (1.0,)], "ignore_eos": [1]},
    "min_tokens": [-1, 65],  # 65 is more than max_tokens
    "logprobs": [-1, 1.0],
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_value_is_refused_by_name(name):
    for value in BAD[name]:
        with pytest.raises(UserError, match=rf"^(A token id in )?{name} .*\.$"):
            SamplingParams(**{name: value})


def test_ids_and_counts_must_fit_the_vocabulary():
    bad: Any = {"logit_bias": {100: 1.0}, "stop_token_ids": (3, 100), "top_k": 101, "logprobs": 101}
    for name, value in bad.items():
        params = SamplingParams(**{name: value})
        params.check_vocabulary(101)
        with pytest.raises(UserError, match=rf"{name} .* for this model.*\.$"):
            params.check_vocabulary(100)
    # min_tokens needs a token that does not end the text.
    params = SamplingParams(min_tokens=1, stop_token_ids=(0, 1))
    params.check_vocabulary(5, eos_ids=(2, 3))
    with pytest.raises(UserError, match="min_tokens must be 0"):
        params.check_vocabulary(5, eos_ids=(2, 3, 4))
