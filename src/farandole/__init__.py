"""Distributed training whose result does not depend on the number of workers.

Names are imported when they are first used, so that ``import farandole`` stays fast and loads
neither torch nor any adapter's library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farandole import errors
    from farandole.config import JobConfig
    from farandole.data import (
        ArrayDataset,
        Masked,
        ParquetDataset,
        Preprocessor,
        Ragged,
        arrow,
        coded,
        decode,
        filled,
        fit_vocabulary,
        hashed,
        masked,
        npy,
        padded,
        rewrite,
        scaled_int,
    )
    from farandole.data.mixing import mix
    from farandole.data.sources import dataset, from_delta, from_iceberg
    from farandole.data.splits import balance
    from farandole.job.batch import Batch
    from farandole.job.launch import Result, run
    from farandole.job.model import load_model
    from farandole.job.session import Job

__version__ = "0.1.0"

__all__ = [
    "ArrayDataset",
    "Batch",
    "Job",
    "JobConfig",
    "Masked",
    "ParquetDataset",
    "Preprocessor",
    "Ragged",
    "Result",
    "__version__",
    "arrow",
    "balance",
    "coded",
    "dataset",
    "decode",
    "errors",
    "filled",
    "fit_vocabulary",
    "from_delta",
    "from_iceberg",
    "hashed",
    "load_model",
    "masked",
    "mix",
    "npy",
    "padded",
    "rewrite",
    "run",
    "scaled_int",
]

_HOMES = {
    "ArrayDataset": "farandole.data",
    "Batch": "farandole.job.batch",
    "Job": "farandole.job.session",
    "JobConfig": "farandole.config",
    "Masked": "farandole.data",
    "ParquetDataset": "farandole.data",
    "Preprocessor": "farandole.data",
    "Ragged": "farandole.data",
    "Result": "farandole.job.launch",
    "arrow": "farandole.data",
    "balance": "farandole.data.splits",
    "coded": "farandole.data",
    "dataset": "farandole.data.sources",
    "decode": "farandole.data",
    "filled": "farandole.data",
    "fit_vocabulary": "farandole.data",
    "from_delta": "farandole.data.sources",
    "from_iceberg": "farandole.data.sources",
    "hashed": "farandole.data",
    "load_model": "farandole.job.model",
    "masked": "farandole.data",
    "mix": "farandole.data.mixing",
    "npy": "farandole.data",
    "padded": "farandole.data",
    "rewrite": "farandole.data",
    "run": "farandole.job.launch",
    "scaled_int": "farandole.data",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        value: Any = import_module("farandole.errors")
    elif name in _HOMES:
        value = _import(name)
    else:
        raise AttributeError(f"module 'farandole' has no attribute {name!r}")
    globals()[name] = value
    return value


def _import(name: str) -> Any:
    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from farandole.errors import MissingExtraError

        raise MissingExtraError(
            extra="torch", package="torch", purpose=f"farandole.{name}"
        ) from error


def __dir__() -> list[str]:
    return sorted(__all__)
