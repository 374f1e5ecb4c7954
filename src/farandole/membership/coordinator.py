"""The coordinator: forms the membership of a job and keeps a small store for its members."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from farandole.errors import UsageError
from farandole.membership import wire
from farandole.membership.store import Store
from farandole.plan.quorum import Generation, Member, Waiting, first_generation, refusal

logger = logging.getLogger(__name__)

_BACKLOG = 1024
_CLOSE_WITHIN_S = 10.0


class Coordinator:
    """An asyncio server in a thread of the launcher. Never on the path of a step.

    Parameters
    ----------
    secret : bytes
        Whoever connects must know it.
    expected : int
        Workers that must have joined before the first generation is formed.
    host : str
        Address of the interface to listen on; the port is chosen by the system.
    start_timeout : timedelta
        Workers that still wait for others so long after the start are told so and let go.
    """

    def __init__(
        self,
        secret: bytes,
        *,
        expected: int,
        host: str = "127.0.0.1",
        start_timeout: timedelta = timedelta(minutes=2),
    ) -> None:
        self._secret = secret
        self._expected = expected
        self._host = host
        self._start_timeout_s = start_timeout.total_seconds()
        self._started: concurrent.futures.Future[str] = concurrent.futures.Future()
        self._thread: threading.Thread | None = None
        self._members: dict[int, Member] = {}
        self._told: set[asyncio.StreamWriter] = set()
        """Members that know the generation, and are told who leaves it."""
        self._left: list[wire.Message] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Bind the port and serve. Returns once workers can join; raises OSError if none can."""
        self._thread = threading.Thread(target=self._run, name="farandole-coordinator", daemon=True)
        self._thread.start()
        self._started.result()

    @property
    def address(self) -> str:
        """``host:port`` for workers to join."""
        if not self._started.done():
            raise UsageError(
                problem="the coordinator has no address yet", remedy="call its start() first"
            )
        return self._started.result()

    def close(self) -> None:
        """Close all connections and the port. Blocks until the thread has ended."""
        if self._thread is None or not self._thread.is_alive():
            return
        with contextlib.suppress(RuntimeError):  # the loop ended by itself in between
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_CLOSE_WITHIN_S)
        if self._thread.is_alive():
            logger.warning("the coordinator's thread does not end")

    # --- in the thread ------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:
            if self._started.done():
                logger.exception("the coordinator has failed")
            else:
                self._started.set_exception(error)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._formed: asyncio.Future[Generation] = self._loop.create_future()
        self._give_up_at = self._loop.time() + self._start_timeout_s
        self._store = Store()
        server = await asyncio.start_server(self._handle, self._host, 0, backlog=_BACKLOG)
        host, port = server.sockets[0].getsockname()[:2]
        self._started.set_result(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        await self._stop.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection; whatever is wrong with it ends it and nothing else."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        peer = "{}:{}".format(*writer.get_extra_info("peername", ("unknown", 0))[:2])
        try:
            await wire.accept(reader, writer, self._secret)
            while (message := await wire.receive(reader)) is not None:
                if message.get("op") == "join":
                    await self._serve_member(message, peer, reader, writer)
                    break
                await wire.send(writer, await self._store.answer(message))
        except wire.ProtocolError as error:
            logger.warning("refused the connection of %s: %s", peer, error)
        except OSError as error:
            logger.info("lost the connection of %s: %s", peer, error)
        except asyncio.CancelledError:  # by `_serve`, when it ends
            writer.transport.abort()
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _serve_member(
        self,
        message: wire.Message,
        peer: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        timeout_s = message.get("timeout_s")
        if not isinstance(timeout_s, float):
            raise wire.ProtocolError("joins without a timeout")
        member = wire.member_from_dict(message.get("member"))
        reason = refusal(member, self._members.values(), self._expected)
        if reason is not None:
            logger.warning("refused worker %d at %s: %s", member.worker_id, peer, reason)
            await wire.send(writer, {"op": "refused", "reason": reason})
            return
        self._members[member.worker_id] = member
        gone = asyncio.ensure_future(wire.receive(reader))
        try:
            try:
                answer = await self._wait_for_generation(gone, timeout_s)
            finally:
                if not self._formed.done():
                    del self._members[member.worker_id]
            if answer is not None:
                await wire.send(writer, answer)
            if self._formed.done():
                self._tell(writer, *self._left)
                self._told.add(writer)
                await gone
            logger.info("worker %d has left", member.worker_id)
        finally:
            self._told.discard(writer)
            if self._formed.done():
                self._left.append({"op": "left", "worker_id": member.worker_id})
                for other in self._told:
                    self._tell(other, self._left[-1])
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)

    @staticmethod
    def _tell(writer: asyncio.StreamWriter, *messages: wire.Message) -> None:
        # Not waited for: a few bytes each, and whoever does not read them must hold up no other.
        writer.write(b"".join(map(wire.encode, messages)))

    async def _wait_for_generation(
        self, gone: asyncio.Future[Any], timeout_s: float
    ) -> wire.Message | None:
        """Return what to tell a worker that has joined, or None if it has left meanwhile."""
        state = first_generation(self._members.values(), self._expected)
        if isinstance(state, Generation):
            self._formed.set_result(state)
            logger.info("generation %d has %d members", state.number, len(state.members))
        timeout_s = min(timeout_s, self._give_up_at - self._loop.time())
        await asyncio.wait(
            {gone, self._formed}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if self._formed.done():
            return {"op": "generation", "generation": asdict(self._formed.result())}
        if gone.done():
            gone.result()
            return None
        state = first_generation(self._members.values(), self._expected)
        assert isinstance(state, Waiting)
        return {"op": "refused", "reason": f"{state.reason} in the time given"}
