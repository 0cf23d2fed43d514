"""An engine setting that could never work is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from engine.settings import EngineSettings


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"block_size": 0}, "block_size is 0; it must be at least 1"),
        ({"max_batch": -1}, "max_batch is -1"),
        ({"max_waiting": 0}, "max_waiting is 0"),
        ({"max_batch": 4097, "max_step_tokens": 8192}, "max_batch is 4097; it must be at most 4096"),
        ({"overlap": "yes"}, "overlap is 'yes'; it must be auto, on or off"),
        (
            {"max_batch": 64, "max_step_tokens": 64},
            r"max_step_tokens is 64; it must be more than max_batch \(64\)",
        ),
        ({"short_prompt_share": 1.0}, "short_prompt_share is 1.0; it must be between 0 and 0.9"),
    ],
)
def test_an_impossible_setting_names_itself(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineSettings(**values)
