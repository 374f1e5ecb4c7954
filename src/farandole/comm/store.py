"""The coordinator's store, as torch.distributed wants one."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist


class StoreClient(Protocol):
    """What is needed of a key-value store; see `farandole.membership.client.StoreClient`."""

    def set(self, key: str, value: bytes) -> None:
        """Set a key's value."""
        ...

    def get(self, key: str, timeout: timedelta) -> bytes:
        """Block until a key is set; return its value."""
        ...

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; return the total."""
        ...

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Block until all keys are set."""
        ...

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are set."""
        ...

    def delete(self, key: str) -> bool:
        """Forget a key; return whether it was set."""
        ...


class CoordinatorStore(dist.Store):  # pyright: ignore[reportPrivateImportUsage]
    """A `torch.distributed.Store` over a client that is given in, and stays its owner's.

    Parameters
    ----------
    client : StoreClient
        Its methods are called from torch's own threads too.
    timeout : timedelta
        For `get` and `wait`, unless `wait` is given another.
    """

    def __init__(self, client: StoreClient, timeout: timedelta = timedelta(minutes=5)) -> None:
        super().__init__()
        self._client = client
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key's value."""
        self._client.set(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Block until a key is set; return its value."""
        return self._client.get(key, self._timeout)

    def add(self, key: str, value: int) -> int:
        """Add to a counter; return the total."""
        return self._client.add(key, value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Block until all keys are set."""
        self._client.wait(keys, self._timeout if timeout is None else timeout)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are set."""
        return self._client.check(keys)

    def delete_key(self, key: str) -> bool:
        """Forget a key; return whether it was set."""
        return self._client.delete(key)

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long `get` and `wait` block."""
        self._timeout = timeout

    def has_extended_api(self) -> bool:
        """Say that there are no appends, queues or multi-key requests."""
        return False
