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
    TRANSFORM = 8
    ROWS = 9
    REWRITE_ORDER = 14


def _entropy(seed: int, stream: Stream, *path: int) -> np.random.SeedSequence:
    return np.random.SeedSequence([seed, int(stream), *path])


def philox_key(seed: int, stream: Stream, *path: int) -> np.ndarray:
    """Return a 128-bit key (two uint64) for a stream, mixed from the seed and a path of numbers."""
    return _entropy(seed, stream, *path).generate_state(2, np.uint64)


def generator(seed: int, stream: Stream, *path: int) -> np.random.Generator:
    """Return a numpy generator for a stream (Philox-4x64, counter at zero)."""
    # The same as with key=philox_key(...), for which numpy would also ask the system for a seed.
    return np.random.Generator(np.random.Philox(_entropy(seed, stream, *path)))


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


def row_uniforms(seed: int, epoch: int, row_ids: np.ndarray, num_values: int) -> np.ndarray:
    """Return numbers from 0 up to 1 that hang on seed, epoch, row and column alone.

    SplitMix64 of a counter: its numbers can be had in any order, and cost a few nanoseconds.

    Returns
    -------
    ndarray of float64, shape (len(row_ids), num_values)
    """
    low, high = philox_key(seed, Stream.ROWS, epoch)
    counters = row_ids.astype(np.uint64)[:, None] * np.uint64(0xD1342543DE82EF95) + low
    columns = np.arange(num_values, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + high
    bits = _mixed(_mixed(counters) + columns)
    return (bits >> np.uint64(11)) * 2.0**-53


def scrambled(bits: np.ndarray, seed: int) -> np.ndarray:
    """Return uint64 numbers that hang on other ones and a seed, evenly spread."""
    key = np.uint64((seed * 0x9E3779B97F4A7C15 + 0xD1342543DE82EF95) % 2**64)
    return _mixed(_mixed(bits + key))


def _mixed(bits: np.ndarray) -> np.ndarray:
    """Return the finalizer of SplitMix64 (Steele, Lea and Flood 2014) of each number."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
