"""Cases that schemathesis derives from the OpenAPI page: what it describes is answered, the rest refused."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

EXAMPLES = 50
"""Cases for each operation and kind."""


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_cases_of_the_openapi_page(serve: Any, says: Any, model: str, mode: GenerationMode) -> None:
    def check(url: str) -> dict[str, int]:
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        seen: dict[str, int] = {}
        for found in schema.get_all_operations():
            operation = found.ok()
            cases = operation.as_strategy(generation_mode=mode)

            @settings(
                max_examples=EXAMPLES,
                database=None,
                derandomize=True,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=cases)
            def ask(case: Any) -> None:
                if mode is GenerationMode.POSITIVE and isinstance(case.body, dict) and "model" in case.body:
                    case.body["model"] = model  # any text is a name; few are of a model that is here
                response = case.call()
                seen[case.operation.label] = seen.get(case.operation.label, 0) + 1
                assert response.status_code == 200 or 400 <= response.status_code < 500, response.text
                if response.status_code != 200 and case.method != "HEAD":
                    assert set(response.json()["error"]) == {"message", "type", "param", "code"}

            # What takes no input cannot be given a wrong one.
            with suppress(Unsatisfiable) if mode is GenerationMode.NEGATIVE else nullcontext():
                ask()
        return seen

    async def main() -> None:
        async with serve(says("Hello there")) as site:
            seen = await asyncio.to_thread(check, f"http://127.0.0.1:{site.port}")
            assert {"POST /v1/chat/completions", "POST /v1/completions", "POST /v1/responses"} <= set(seen)
            assert (await site.chat()).status_code == 200

    asyncio.run(main())
