"""Kernels run on a GPU where there is one, else in Triton's interpreter; `--full` is the whole matrix."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="all shapes of the kernels: for a GPU, by hand")


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--full", default=False))


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def near() -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Equal to within the rounding of the type: by the norm of the whole, and nowhere far off."""

    def check(found: torch.Tensor, wanted: torch.Tensor) -> None:
        assert found.shape == wanted.shape
        assert found.dtype == wanted.dtype
        # A bfloat16 has 8 bits, and the interpreter cuts where a device rounds.
        share = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[found.dtype]
        a, b = found.double(), wanted.double()
        assert torch.isfinite(a).all()
        size = b.norm().item() / max(1, b.numel()) ** 0.5
        assert (a - b).norm().item() <= share * b.norm().item() + 1e-9
        assert (a - b).abs().max().item() <= 20 * share * max(size, b.abs().max().item() / 4) + 1e-9

    return check
