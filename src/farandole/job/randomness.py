"""Random numbers inside a job: seeded by (seed, step, slot), never by rank.

Covers the global generators of torch (all devices), numpy and python. Code that keeps a
generator of its own seeds it from `job.slot_seed`.
"""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Seed every global generator with a 63-bit number."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)
