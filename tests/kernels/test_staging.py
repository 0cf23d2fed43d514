"""What is packed comes out as it went in, aligned, also when steps follow each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.staging import Staging, offsets

ARRAYS = (
    np.arange(3, dtype=np.int64),
    np.asarray([[1, 2], [3, 4]], dtype=np.int32),
    np.zeros((0, 5), dtype=np.int32),
    np.asarray([1.5], dtype=np.float32),
)


def test_arrays_begin_where_a_wide_load_may() -> None:
    assert offsets(ARRAYS) == ([0, 32, 48, 48], 64)


def test_uploads_keep_shape_type_and_values(device: torch.device) -> None:
    staging = Staging(device)
    kept = []
    for step in range(5):
        arrays = [array + array.dtype.type(step) for array in ARRAYS]
        kept += list(zip(staging.upload(*arrays), arrays, strict=True))
    for tensor, array in kept:
        assert tensor.device.type == device.type
        assert np.array_equal(tensor.cpu().numpy(), array)
        assert tensor.cpu().numpy().dtype == array.dtype


def test_a_buffer_that_stays_is_filled_in_place(device: torch.device) -> None:
    buffer = torch.zeros(80, dtype=torch.uint8, device=device)
    Staging(device).into(buffer, *ARRAYS)
    assert buffer[:24].view(torch.int64).tolist() == [0, 1, 2]
    assert buffer[32:48].view(torch.int32).tolist() == [1, 2, 3, 4]
    assert buffer[48:52].view(torch.float32).tolist() == [1.5]
    with pytest.raises(ValueError, match="64 bytes into 63"):
        Staging(device).into(buffer[:63], *ARRAYS)
