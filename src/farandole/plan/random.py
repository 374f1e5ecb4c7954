"""Random numbers by name: each use has its own stream, keyed by what it is for."""

from __future__ import annotations

import enum
import hashlib
import struct

import numpy as np


class Stream(enum.IntEnum):
    """What a stream of random numbers is for. Values are part of the job's bits: never reuse."""

    SHARD_ORDER = 1
    WINDOW_ORDER = 2
    SLOT = 3
    EVALUATION = 4
    SOURCE = 7


def philox_key(seed: int, stream: Stream, *path: int) -> np.ndarray:
    """Return a 128-bit key (two uint64) for a stream, mixed from the seed and a path of numbers."""
    entropy = np.random.SeedSequence([seed, int(stream), *path])
    return entropy.generate_state(2, np.uint64)


def generator(seed: int, stream: Stream, *path: int) -> np.random.Generator:
    """Return a numpy generator for a stream (Philox-4x64, counter at zero)."""
    return np.random.Generator(np.random.Philox(key=philox_key(seed, stream, *path)))


def slot_seed(seed: int, step: int, slot: int) -> int:
    """Return the 63-bit seed of all randomness inside one slot of one step.

    The slot after the last one stands for what is done between two steps.
    """
    return _hashed(seed, Stream.SLOT, step, slot)


def evaluation_seed(seed: int, step: int, unit: int) -> int:
    """Return the 63-bit seed of all randomness inside one unit of an evaluation."""
    return _hashed(seed, Stream.EVALUATION, step, unit)


def source_seed(seed: int, source: int) -> int:
    """Return the 63-bit seed of the order of one of several data sets that are mixed."""
    return _hashed(seed, Stream.SOURCE, source)


def _hashed(seed: int, stream: Stream, *path: int) -> int:
    # On the path of every microstep, so it must be cheap: BLAKE2b takes a microsecond.
    data = struct.pack(f"<{2 + len(path)}Q", seed, stream, *path)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1
