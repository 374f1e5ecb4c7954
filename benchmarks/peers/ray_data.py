"""Ray Data: files in random order, and a local buffer in which rows are shuffled."""

import numpy as np
import ray
from common import compete


def epoch(table, folder, batch_size, seed):
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    rows = ray.data.read_parquet(str(table), shuffle="files")
    options = {"local_shuffle_buffer_size": 100_000, "local_shuffle_seed": seed}
    for batch in rows.iter_batches(batch_size=batch_size, batch_format="numpy", **options):
        yield np.stack(list(batch.values()), axis=1)


compete("ray", epoch)
