"""MosaicML Streaming: the table converted to its own format, then shuffled."""

import numpy as np
import pyarrow.parquet as pq
from common import compete
from streaming import MDSWriter, StreamingDataset
from torch.utils.data import DataLoader


def prepare(table, folder):
    with MDSWriter(out=str(folder), columns={"x": "ndarray:float32:40"}) as out:
        for path in sorted(table.glob("*.parquet")):
            columns = pq.read_table(path).columns
            for row in np.stack([c.to_numpy() for c in columns], axis=1):
                out.write({"x": row})


def epoch(table, folder, batch_size, seed):
    dataset = StreamingDataset(
        local=str(folder), shuffle=True, shuffle_seed=seed, batch_size=batch_size
    )
    for batch in DataLoader(dataset, batch_size=batch_size):
        yield batch["x"].numpy()


compete("mosaicml-streaming", epoch, prepare)
