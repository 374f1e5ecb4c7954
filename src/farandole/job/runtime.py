"""A worker's life: join, connect, restore, run the training function, leave word of the end."""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
import signal
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from farandole import topology
from farandole.checkpoint.checkpointer import Checkpointer, newest_usable
from farandole.checkpoint.store import CheckpointStore
from farandole.checkpoint.tree import empty_tensors, unflatten
from farandole.comm.rendezvous import Listener
from farandole.comm.single import SingleComm
from farandole.config import JobConfig
from farandole.errors import CheckpointError, JobStoppedError, MembershipError, NumericsError
from farandole.job.ends import Completion, Failure, write_completion, write_failure
from farandole.job.keeper import StateKeeper
from farandole.job.recorder import Recorder
from farandole.job.rundir import RunDir
from farandole.job.session import Job
from farandole.job.target import check_function, check_target, load_target
from farandole.membership.client import Membership, StoreClient, join
from farandole.plan.quorum import Member
from farandole.protocols import Comm

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """What a worker is told by whoever starts it.

    Attributes
    ----------
    coordinator : str or None
        ``host:port``; None for a job of one worker, which needs none.
    """

    run_dir: Path
    worker_id: int
    coordinator: str | None = None
    secret: bytes = field(default=b"", repr=False)


def run_worker(place: Place) -> int:
    """Run a worker to its end; return its exit code. Blocks as long as the job lasts."""
    run = RunDir(place.run_dir)
    rank: int | None = None
    failure: Failure | None = None
    try:
        with ExitStack() as stack:
            config = run.read_config()
            _set_threads(config.threads)
            comm, members = _connect(place, config, stack)
            rank = comm.rank
            try:
                completion = _run_function(config, run, comm, members, stack)
            except BaseException as error:
                # Now, not when all is closed: of several failures the earliest is reported.
                failure = Failure.of(error, worker_id=place.worker_id, rank=rank)
                raise
    except BaseException as error:
        failure = failure or Failure.of(error, worker_id=place.worker_id, rank=rank)
        _log.error("failed: %s", failure.traceback or failure.reason)
        try:
            write_failure(run, failure)
        except OSError as unwritable:
            _log.error("cannot leave word of it: %s", unwritable)
        return 1
    write_completion(run, place.worker_id, completion)
    return 0


def _set_threads(threads: int) -> None:
    torch.set_num_threads(threads)
    torch.set_num_interop_threads(threads)


def _run_function(
    config: JobConfig, run: RunDir, comm: Comm, members: tuple[Member, ...], stack: ExitStack
) -> Completion:
    function = _load_function(config, run)
    device = _device(comm.rank)
    numerics = _numerics(config, device)
    recorder = Recorder(run, active=comm.rank == 0)
    stack.callback(recorder.close)
    checkpointer = _checkpointer(config, run, recorder) if comm.rank == 0 else None
    restored, about = _restore(config, run, comm, recorder)
    if checkpointer is not None:
        checkpointer.restore_best(about)
    if comm.rank == 0:
        differences = _numerics_differences(numerics, members, about.get("numerics"))
        if differences and config.require_exact:
            raise NumericsError(differences=differences)
        for difference in differences:
            recorder.warn(f"the result's bits may differ: {difference}")
    keeper = StateKeeper(
        run.checkpoints,
        checkpointer=checkpointer,
        restored=restored,
        about={"numerics": numerics.to_dict(), "slots": config.slots, "seed": config.seed},
    )
    job = Job(config, comm, recorder, device=device, keeper=keeper)
    stack.enter_context(closing(job))
    signal.signal(signal.SIGTERM, lambda number, frame: job.request_stop("asked to stop"))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's affair
    try:
        value = function(job, **config.params)
        job.finish()
    except JobStoppedError as stop:
        return Completion(rank=comm.rank, stopped_after=stop.step, reason=stop.reason)
    # Nobody leaves while another may still need it, or may still fail.
    comm.all_gather("end", b"")
    return Completion(rank=comm.rank, value=value if comm.rank == 0 else None)


def _load_function(config: JobConfig, run: RunDir) -> Callable[..., Any]:
    if run.function_file.exists():
        # The launcher wrote it, into a folder of this user's.
        function = pickle.loads(run.function_file.read_bytes())
        check_function(function, config.params)
        return function
    return load_target(check_target(config.target, config.params), config.params)


def _device(rank: int) -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", rank % torch.cuda.device_count())
    return torch.device("cpu")


# --- connecting ---------------------------------------------------------------------------


def _connect(place: Place, config: JobConfig, stack: ExitStack) -> tuple[Comm, tuple[Member, ...]]:
    """Join the job and connect with the other workers. Blocks until all are there."""
    if place.coordinator is None:
        return SingleComm(), ()
    from farandole.comm.shared_memory import SharedMemoryComm

    listener = _listen(RunDir(place.run_dir), stack)
    fingerprint = _numerics(config, _device(place.worker_id)).to_dict()
    me = Member(
        worker_id=place.worker_id,
        host=topology.host_id(),
        pid=os.getpid(),
        endpoint=listener.address,
        fingerprint=fingerprint,
    )
    start_timeout = timedelta(seconds=config.start_timeout_s)
    membership = join(place.coordinator, place.secret, me, start_timeout)
    stack.callback(membership.close)
    timeout = timedelta(seconds=config.collective_timeout_s)
    listener.alarm = membership.alarm
    if _shares_memory(config, membership):
        comm: Comm = SharedMemoryComm.connect(
            listener,
            rank=membership.rank,
            addresses=[member.endpoint for member in membership.members],
            secret=place.secret,
            generation=membership.generation,
            timeout=timeout,
        )
    else:
        comm = _connect_network(place, config, membership, timeout, stack)
    stack.callback(comm.close)
    return comm, membership.members


def _listen(run: RunDir, stack: ExitStack) -> Listener:
    """Bind a socket for peers: in the run directory, which the launcher cleans up after a kill."""
    try:
        run.sockets.mkdir(exist_ok=True)
        listener = Listener(run.sockets)
    except OSError:  # a file system that cannot hold sockets
        folder = tempfile.mkdtemp(prefix="farandole-")
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        listener = Listener(Path(folder))
    stack.callback(listener.close)
    return listener


def _shares_memory(config: JobConfig, membership: Membership) -> bool:
    one_host = len({member.host for member in membership.members}) == 1
    if config.transport == "shared_memory" and not one_host:
        raise MembershipError(
            problem="workers on several hosts cannot share memory",
            remedy="use transport = 'auto' or 'network'",
        )
    if config.transport == "auto":
        return one_host and not torch.cuda.is_available()
    return config.transport == "shared_memory"


def _connect_network(
    place: Place,
    config: JobConfig,
    membership: Membership,
    timeout: timedelta,
    stack: ExitStack,
) -> Comm:
    from farandole.comm.network import NetworkComm
    from farandole.comm.store import CoordinatorStore

    assert place.coordinator is not None
    client = StoreClient(place.coordinator, place.secret)
    stack.callback(client.close)
    backend = config.backend
    if backend == "auto":
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    return NetworkComm.connect(
        CoordinatorStore(client),
        rank=membership.rank,
        world_size=membership.world_size,
        generation=membership.generation,
        backend=backend,
        timeout=timeout,
    )


# --- numerics -----------------------------------------------------------------------------


def _numerics(config: JobConfig, device: torch.device) -> topology.NumericsFingerprint:
    name = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
    return topology.numerics_fingerprint(
        threads=config.threads,
        torch_version=torch.__version__,
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        device=name,
    )


def _numerics_differences(
    mine: topology.NumericsFingerprint,
    members: tuple[Member, ...],
    before: dict[str, Any] | None,
) -> tuple[str, ...]:
    """Return why bits may differ from those of another worker, or from before a resume."""
    others = {f"worker {member.worker_id}": member.fingerprint for member in members}
    if before:
        others["the checkpoint"] = before
    differences = {
        name: mine.differences(topology.NumericsFingerprint.from_dict(fingerprint))
        for name, fingerprint in others.items()
    }
    return tuple(f"{name}: {', '.join(found)}" for name, found in differences.items() if found)


# --- checkpoints --------------------------------------------------------------------------


def _checkpointer(config: JobConfig, run: RunDir, recorder: Recorder) -> Checkpointer:
    store = CheckpointStore(run.checkpoints)
    store.sweep()

    def committed(step: int, seconds: float) -> None:
        recorder.event("checkpoint", step=step, seconds=seconds)

    return Checkpointer(store, config.checkpoint, committed, before_commit=recorder.flush)


def _restore(
    config: JobConfig, run: RunDir, comm: Comm, recorder: Recorder
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Return the state to go on from, and what the checkpoint says of itself.

    Rank 0 reads; the others get it from there. Blocks; every rank must call it.
    """
    if not config.resume:
        return None, {}
    found = _newest(run, recorder) if comm.rank == 0 else None
    message = (
        b"" if found is None else json.dumps({"skeleton": found[2], "about": found[3]}).encode()
    )
    message = comm.all_gather("checkpoint", message)[0]
    if not message:
        return None, {}
    told = json.loads(message)
    tensors = empty_tensors(told["skeleton"]) if found is None else found[1]
    comm.broadcast("checkpoint tensors", [tensors[name] for name in sorted(tensors)])
    state = unflatten(tensors, told["skeleton"])
    recorder.event("resume", step=state["step"], position=state["position"])
    return state, told["about"]


def _newest(
    run: RunDir, recorder: Recorder
) -> tuple[int, dict[str, torch.Tensor], Any, dict[str, Any]] | None:
    """Read the newest checkpoint; None if the job never came to its first one.

    Raises
    ------
    CheckpointError
        There were some, and none can be used: starting anew must be somebody's decision.
    """
    store = CheckpointStore(run.checkpoints)
    found = newest_usable(store, lambda error: recorder.warn(str(error)))
    refused = store.refused()
    if found is None and refused:
        raise CheckpointError(
            path=str(run.checkpoints),
            problem=f"none can be used ({', '.join(refused)})",
            remedy="restore one under its name, or remove them to go on from the beginning with "
            "--resume, or start a new job with another --run-dir",
        )
    if found is None:
        recorder.warn("there is no checkpoint yet, so the job goes on from its beginning")
    return found
