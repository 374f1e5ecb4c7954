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
    from farandole.data import ArrayDataset, ParquetDataset, Preprocessor
    from farandole.data.sources import from_delta, from_iceberg
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
    "ParquetDataset",
    "Preprocessor",
    "Result",
    "__version__",
    "errors",
    "from_delta",
    "from_iceberg",
    "load_model",
    "run",
]

_HOMES = {
    "ArrayDataset": "farandole.data",
    "Batch": "farandole.job.batch",
    "Job": "farandole.job.session",
    "JobConfig": "farandole.config",
    "ParquetDataset": "farandole.data",
    "Preprocessor": "farandole.data",
    "Result": "farandole.job.launch",
    "from_delta": "farandole.data.sources",
    "from_iceberg": "farandole.data.sources",
    "load_model": "farandole.job.model",
    "run": "farandole.job.launch",
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
