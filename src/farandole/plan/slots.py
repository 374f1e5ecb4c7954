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


def default_slots(batch_size: int) -> int:
    """Return the number of slots for loops that do not say.

    That is the divisor of the batch size, up to 8, or up to a 16th of it and 48, that most
    numbers of workers divide, even ones first. It hangs on the batch size alone, so that the
    order of rows does not on the workers; it divides it, so that these get equally many rows;
    and it is small beside it, since the last batch is longer by up to twice as many rows.
    """
    most = min(max(8, batch_size // 16), 48)
    divisors = [slots for slots in range(1, most + 1) if batch_size % slots == 0]
    return max(
        divisors, key=lambda slots: (sum(slots % n == 0 for n in divisors), slots & -slots, slots)
    )
