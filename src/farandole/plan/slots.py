"""Which worker computes which slots. Depends on the membership alone."""

from __future__ import annotations


def slots_of(rank: int, world_size: int, num_slots: int) -> range:
    """Return the contiguous run of slots that a rank computes.

    The first ``num_slots % world_size`` ranks have one slot more than the others.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in a world of {world_size}")
    base, extra = divmod(num_slots, world_size)
    start = rank * base + min(rank, extra)
    return range(start, start + base + (rank < extra))


def owner_of(slot: int, world_size: int, num_slots: int) -> int:
    """Return the rank that computes a slot."""
    base, extra = divmod(num_slots, world_size)
    large = extra * (base + 1)
    return slot // (base + 1) if slot < large else extra + (slot - large) // base
