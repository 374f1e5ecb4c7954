"""The coordinator's key-value store: what torch.distributed needs to introduce its peers."""

from __future__ import annotations

import asyncio
from typing import Any

from farandole.membership import wire


class Store:
    """Keys with values of bytes, in one asyncio loop. Forgotten when the coordinator ends."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = asyncio.Condition()

    async def answer(self, message: wire.Message) -> wire.Message:
        """Carry out a request and return the answer.

        Raises
        ------
        wire.ProtocolError
            If it is none that is known, or its fields are missing or wrong.
        """
        try:
            match message:
                case {"op": "set", "key": str(key), "value": str(value)}:
                    return await self._set(key, wire.text_to_bytes(value))
                case {"op": "add", "key": str(key), "amount": int(amount)}:
                    return await self._add(key, amount)
                case {"op": "get", "key": str(key), "timeout_s": float(timeout_s)}:
                    return await self._get(key, timeout_s)
                case {"op": "wait", "keys": list(keys), "timeout_s": float(timeout_s)}:
                    return {"found": await self._wait(keys, timeout_s)}
                case {"op": "check", "keys": list(keys)}:
                    return {"found": self._has(keys)}
                case {"op": "delete", "key": str(key)}:
                    return {"found": self._values.pop(key, None) is not None}
                case _:
                    raise wire.ProtocolError(f"unknown request {message.get('op')!r}")
        except (TypeError, ValueError) as error:
            raise wire.ProtocolError(f"bad value in {message['op']!r}: {error}") from error

    async def _set(self, key: str, value: bytes) -> wire.Message:
        async with self._changed:
            self._values[key] = value
            self._changed.notify_all()
        return {}

    async def _add(self, key: str, amount: int) -> wire.Message:
        total = int(self._values.get(key, b"0")) + amount
        await self._set(key, str(total).encode())
        return {"total": total}

    async def _get(self, key: str, timeout_s: float) -> wire.Message:
        if not await self._wait([key], timeout_s):
            return {"found": False}
        return {"found": True, "value": wire.bytes_to_text(self._values[key])}

    async def _wait(self, keys: list[Any], timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self._has(keys))
        except TimeoutError:
            return False
        return True

    def _has(self, keys: list[Any]) -> bool:
        return all(key in self._values for key in keys)
