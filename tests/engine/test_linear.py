"""Matrices in every layout that this machine has give the product, whatever the number of rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.build import fingerprint, plan_pool, read_config
from engine.linear import Linears
from engine.settings import EngineSettings
from engine.torch_runner import TorchRunner
from fleet.errors import BadRequest
from fleet.request import Sampling

ROWS = [1, 2, 15, 16, 17, 31, 32, 33, 100, 513]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("out", "inner"), [(32, 32), (96, 64), (64, 576), (40, 24)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_any_number_of_rows(dtype: torch.dtype, out: int, inner: int, biased: bool) -> None:
    generator = torch.Generator().manual_seed(out * inner)
    weight = torch.randn(out, inner, generator=generator).to(dtype)
    bias = torch.randn(out, generator=generator).to(dtype) if biased else None
    limit = 1e-4 if dtype == torch.float32 else 0.02
    for weights, most in (("auto", limit), ("int8", 0.03)):
        linear = Linears(weights).make(weight, bias)
        for count in ROWS:
            rows = torch.randn(count, inner, generator=generator).to(dtype)
            expected = torch.nn.functional.linear(
                rows.double(), weight.double(), None if bias is None else bias.double()
            )
            found = linear(rows)
            assert found.shape == expected.shape
            assert found.dtype == dtype
            error = (found.double() - expected).norm() / expected.norm()
            assert error < most, (weights, count)


def test_int8_keeps_small_numbers_beside_a_large_one() -> None:
    """Rows of activations have outliers; what is small beside them must not be lost."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(64, 128, generator=generator).bfloat16()
    weight[:, 0] = 0
    rows = torch.randn(4, 128, generator=generator).bfloat16()
    rows[:, 0] = 200.0
    found = Linears("int8").make(weight)(rows).double()
    expected = rows.double() @ weight.double().T
    assert (found - expected).norm() / expected.norm() < 0.03


@pytest.mark.parametrize("weights", ["auto", "int8"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_a_number_is_not_hidden(weights: str, bad: float) -> None:
    linear = Linears(weights).make(torch.ones(64, 64, dtype=torch.bfloat16))
    rows = torch.ones(3, 64, dtype=torch.bfloat16)
    rows[1, 7] = bad
    found = linear(rows)
    assert torch.isfinite(found[[0, 2]]).all()
    assert not torch.isfinite(found[1]).any()


def test_unknown_weights_are_refused() -> None:
    with pytest.raises(BadRequest, match="weights 'int3' is not one of auto, int8"):
        Linears("int3")


def test_int8_weights_are_another_model(small_model: Callable[[str], Path]) -> None:
    folder = small_model("smollm")
    layout, _ = plan_pool(folder, EngineSettings(device="cpu", dtype="float32"))
    config = read_config(folder)
    plain, int8 = (fingerprint(folder, config, layout, weights) for weights in ("auto", "int8"))
    assert str(plain.mismatch(int8)).startswith("model: ")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_int8_answers_stay_near_the_wide_ones(
    dtype: str, small_runner: Callable[..., TorchRunner], drive: Any
) -> None:
    seen = Sampling(max_tokens=10, temperature=0, logprobs=160)
    found = []
    for settings in ({}, {"weights": "int8", "dtype": dtype}):
        driver = drive(small_runner("smollm", **settings))
        sequence = driver.add(range(3, 60), 1, seen)
        driver.run([sequence], 1, chunk=20)
        found.append(dict(sequence.logprobs[0].top))
    wide, narrow = found
    difference = [abs(wide[token] - narrow[token]) for token in wide]
    assert 0 < sum(difference) / len(difference) < 0.3


@pytest.mark.parametrize("weights", ["auto", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wide_products_are_float32(weights: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    linear = Linears(weights).make(torch.randn(64, 64, generator=generator).to(dtype))
    rows = torch.randn(20, 64, generator=generator).to(dtype)
    wide = linear(rows, wide=True)
    assert wide.dtype == torch.float32
    torch.testing.assert_close(wide, linear(rows).float(), atol=1e-5, rtol=0.01)
