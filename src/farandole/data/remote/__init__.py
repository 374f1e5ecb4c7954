"""Files on object stores: read ahead, repeated on failure, kept on the local disk if wanted."""

from farandole.data.remote.handler import RemoteHandler, remote_handler
from farandole.data.remote.ranges import column_ranges
from farandole.data.remote.storage import (
    DEFAULT_CACHE_BYTES,
    Resolver,
    Storage,
    split_credentials,
)

__all__ = [
    "DEFAULT_CACHE_BYTES",
    "RemoteHandler",
    "Resolver",
    "Storage",
    "column_ranges",
    "remote_handler",
    "split_credentials",
]
