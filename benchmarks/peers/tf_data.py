"""tf.data: decoded by pyarrow, since it reads no Parquet itself; then shuffled in a buffer."""

import numpy as np
import pyarrow.parquet as pq
import tensorflow as tf
from common import compete


def epoch(table, folder, batch_size, seed):
    def blocks():
        for path in sorted(table.glob("*.parquet")):
            for batch in pq.ParquetFile(path).iter_batches(batch_size=8192):
                yield np.stack([column.to_numpy() for column in batch.columns], axis=1)

    spec = tf.TensorSpec((None, 40), tf.float32)
    rows = tf.data.Dataset.from_generator(blocks, output_signature=spec)
    rows = rows.unbatch().shuffle(100_000, seed=seed).batch(batch_size).prefetch(2)
    for batch in rows:
        yield batch.numpy()


compete("tensorflow", epoch)
