"""LitData: the table converted to its own format, then shuffled."""

import numpy as np
import pyarrow.parquet as pq
from common import compete
from litdata import StreamingDataLoader, StreamingDataset, optimize


def rows_of(path):
    columns = pq.read_table(path).columns
    yield from np.stack([c.to_numpy() for c in columns], axis=1)


def prepare(table, folder):
    files = sorted(map(str, table.glob("*.parquet")))
    optimize(rows_of, files, output_dir=str(folder), chunk_bytes="16MB", num_workers=1)


def epoch(table, folder, batch_size, seed):
    dataset = StreamingDataset(str(folder), shuffle=True, seed=seed)
    for batch in StreamingDataLoader(dataset, batch_size=batch_size):
        yield np.asarray(batch)


if __name__ == "__main__":
    compete("litdata", epoch, prepare)
