"""Petastorm: row groups in random order, and a queue in which rows are shuffled."""

import numpy as np
from common import compete
from petastorm import make_batch_reader
from petastorm.pytorch import BatchedDataLoader


def epoch(table, folder, batch_size, seed):
    options = {"reader_pool_type": "thread", "workers_count": 2, "num_epochs": 1}
    with make_batch_reader(table.as_uri(), shuffle_row_groups=True, **options) as reader:
        for batch in BatchedDataLoader(reader, batch_size, shuffling_queue_capacity=100_000):
            names = sorted(batch, key=lambda name: int(name[1:]))
            yield np.stack([batch[name].numpy() for name in names], axis=1)


compete("petastorm", epoch)
