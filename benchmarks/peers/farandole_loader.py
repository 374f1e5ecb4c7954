"""Farandole, shuffled, with as many threads as the last argument says."""

import sys

from common import compete

from farandole import ParquetDataset


def epoch(table, folder, batch_size, seed):
    names = [f"c{i}" for i in range(40)]
    dataset = ParquetDataset(
        str(table), features=names, index_cache=None, num_threads=int(sys.argv[6])
    )
    settings = {"seed": seed, "epoch": 0, "batch_size": batch_size, "num_slots": 1}
    plan = dataset.epoch_plan(**settings)
    for block in dataset.read(plan, range(1)):
        yield block.features


if __name__ == "__main__":
    compete("farandole", epoch)
