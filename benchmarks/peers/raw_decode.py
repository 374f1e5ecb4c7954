"""The limit: decode every column to Arrow, in order, one thread; no matrix is made."""

import pyarrow.parquet as pq
from common import compete


def epoch(table, folder, batch_size, seed):
    for path in sorted(table.glob("*.parquet")):
        for batch in pq.ParquetFile(path).iter_batches(batch_size=65536, use_threads=False):
            yield batch.column(0).to_numpy()


compete("pyarrow", epoch)
