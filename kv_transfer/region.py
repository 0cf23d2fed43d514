"""A pool's memory: KV blocks in one memfd, so that peers of the same host can map it; and block checksums."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import xxhash

Bytes = npt.NDArray[np.uint8]

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Region:
    """`array` is uint8 `[blocks, block_bytes]`; pages come to be when first written.

    The memory lives as long as any view of it; `close` only lets go of the file descriptor.
    """

    def __init__(self, array: Bytes, fd: int) -> None:
        self.array = array
        self.fd = fd
        self.blocks, self.block_bytes = int(array.shape[0]), int(array.shape[1])

    @classmethod
    def allocate(cls, blocks: int, block_bytes: int) -> Region:
        """New zeroed memory. ValueError for sizes below 1; OSError when the system has none."""
        if blocks < 1 or block_bytes < 1:
            raise ValueError(f"a region needs blocks and bytes, not {blocks} × {block_bytes}")
        fd = os.memfd_create("pdfleet-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, blocks * block_bytes)
        # Without the seal a peer that maps it could be killed by SIGBUS.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        mapped = mmap.mmap(fd, blocks * block_bytes, mmap.MAP_SHARED)
        return cls(np.frombuffer(mapped, np.uint8).reshape(blocks, block_bytes), fd)

    @classmethod
    def attach(cls, fd: int, blocks: int, block_bytes: int) -> Region:
        """A peer's region, read-only. Takes over `fd`; ValueError when it is not what it is said to be."""
        try:
            size = os.fstat(fd).st_size
            if size != blocks * block_bytes or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise ValueError(
                    f"shared memory of {size} bytes, not {blocks} × {block_bytes}, or not sealed"
                )
            mapped = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
        except BaseException:
            os.close(fd)
            raise
        return cls(np.frombuffer(mapped, np.uint8).reshape(blocks, block_bytes), fd)

    def read_only(self) -> int:
        """A new descriptor of the same memory that cannot be written through; the caller closes it."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def checksum(block: Bytes) -> int:
    """xxh3_64 of a block's bytes; finds accidents, not malice."""
    return int(xxhash.xxh3_64_intdigest(block.data))


def checksums(array: Bytes, blocks: Iterable[int]) -> tuple[int, ...]:
    return tuple(checksum(array[block]) for block in blocks)
