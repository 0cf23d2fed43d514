"""Norm, rotary positions, activations and KV writes equal plain torch, over shapes, types and strides."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.kernels import reference
from engine.kernels.cache import gather_blocks, scatter_blocks, write_kv
from engine.kernels.ops import TritonOps
from engine.kernels.rows import geglu, rms_norm, rotary, swiglu
from engine.ops import TorchOps

Near = Callable[[Tensor, Tensor], None]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
"""The interpreter's numpy warns of infinities; a device does not."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def random(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [1, 40, 576])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(dim: int, dtype: torch.dtype, offset: float, device: torch.device, near: Near) -> None:
    x, residual = (
        random(device, 5, dim, dtype=dtype),
        random(device, 5, 2 * dim, dtype=dtype, seed=1)[:, :dim],
    )
    weight = random(device, dim, dtype=dtype, seed=2)
    near(rms_norm(x, weight, 1e-5, None, offset), reference.rms_norm(x, weight, 1e-5, None, offset))
    stream = residual.clone()
    near(rms_norm(x, weight, 1e-5, residual, offset), reference.rms_norm(x, weight, 1e-5, stream, offset))
    near(residual, stream)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_of_heads_inside_wider_rows(dtype: torch.dtype, device: torch.device, near: Near) -> None:
    heads = random(device, 4, 7, 24, dtype=dtype)[:, 2:5]
    weight = random(device, 24, dtype=dtype, seed=1)
    near(rms_norm(heads, weight, 1e-6), reference.rms_norm(heads, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dim", "turned"), [(16, 16), (24, 24), (64, 32), (6, 2)])
def test_rotary(dim: int, turned: int, dtype: torch.dtype, device: torch.device, near: Near) -> None:
    rows = random(device, 5, 9, dim, dtype=dtype)
    angles = random(device, 5, turned // 2, seed=1)
    cosine, sine = torch.cat((angles.cos(), angles.sin()), dim=1).chunk(2, dim=-1)
    found, wanted = rows.clone(), rows.clone()
    rotary(found[:, 1:7], cosine, sine)
    reference.rotary(wanted[:, 1:7], cosine, sine)
    near(found, wanted)
    assert torch.equal(found[:, 0], rows[:, 0]), "heads beside it"
    assert torch.equal(found[..., turned:], rows[..., turned:]), "what is not turned"
    with pytest.raises(ValueError, match="do not fit heads"):
        rotary(found, cosine[:3], sine[:3])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inner", [1, 48, 1100])
def test_gated_activations(inner: int, dtype: torch.dtype, device: torch.device, near: Near) -> None:
    gate_up = 3 * random(device, 3, 2 * inner + 5, dtype=dtype)[:, : 2 * inner]
    near(swiglu(gate_up), reference.swiglu(gate_up))
    near(geglu(gate_up), reference.geglu(gate_up))


def test_large_gates_do_not_overflow(device: torch.device) -> None:
    gate_up = torch.tensor([[-200.0, 200.0, 1.0, 1.0]], device=device)
    for function in (swiglu, geglu):
        assert function(gate_up).tolist() == [[0.0, 200.0]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kv_heads", "block_size", "dim"), [(2, 16, 8), (1, 5, 24), (3, 1, 16)])
def test_write_kv(kv_heads: int, block_size: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    pool = torch.zeros(7, 2, 2, kv_heads, block_size, dim, dtype=dtype, device=device)
    given = random(device, 6, 3 + 2 * kv_heads, dim, dtype=dtype)[:, 3:]
    slots = torch.tensor([0, 3, 2 * block_size, -1, 7 * block_size - 1, 4 * block_size], device=device)
    wanted = pool.clone()
    write_kv(pool, 1, given, slots)
    reference.write_kv(wanted, 1, given, slots)
    assert torch.equal(pool, wanted)
    assert not pool[:, 0].any()
    with pytest.raises(ValueError, match=r"wanted \[rows, "):
        write_kv(pool, 1, given[:, 1:], slots)


@pytest.mark.parametrize("size", [48, 100, 7, 5000])
def test_blocks_move_whole(size: int, device: torch.device) -> None:
    chance = torch.Generator().manual_seed(size)
    memory = torch.randint(0, 256, (9, size), dtype=torch.uint8, generator=chance).to(device)
    blocks = torch.tensor([4, 8, 0], dtype=torch.int32, device=device)
    out = torch.zeros(3, size, dtype=torch.uint8, device=device)
    gather_blocks(memory, blocks, out)
    assert torch.equal(out, memory[[4, 8, 0]])
    wanted = memory.clone()
    reference.scatter_blocks(wanted, blocks, 255 - out)
    scatter_blocks(memory, blocks, 255 - out)
    assert torch.equal(memory, wanted)
    with pytest.raises(ValueError, match=f"3 blocks of {size}"):
        gather_blocks(memory, blocks, out[:2])


def test_nothing_to_do_is_done_at_once(device: torch.device) -> None:
    empty = torch.zeros(0, 16, device=device)
    assert rms_norm(empty, torch.ones(16, device=device), 1e-5).shape == (0, 16)
    assert swiglu(empty).shape == (0, 8)


def test_both_kinds_of_ops_agree(device: torch.device, near: Near) -> None:
    x, weight, angles = random(device, 4, 32), random(device, 32, seed=1), random(device, 4, 8, seed=2)
    results = []
    for ops in (TritonOps(), TorchOps()):
        residual, heads = 2 * x, random(device, 4, 3, 16, seed=3)
        ops.rotary(heads, angles.cos(), angles.sin())
        results.append(
            [
                ops.rms_norm(x.clone(), weight, 1e-5),
                ops.rms_norm(x.clone(), weight, 1e-5, residual),
                residual,
                heads,
                ops.swiglu(x.clone()),
                ops.geglu(x.clone()),
            ]
        )
    for found, wanted in zip(*results, strict=True):
        near(found, wanted)
