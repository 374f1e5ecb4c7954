"""The loops that are timed. As a script: one rank of DDP, or of a loop that exchanges nothing."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import farandole as fa

sys.path.insert(0, str(Path(__file__).parent))
from workload import NUM_DISTINCT_BATCHES, WORKLOADS, Prebuilt, digest

WARMUP_STEPS = 5


class Clock:
    """Times steps; the first ones do not count. The median bears with a busy machine."""

    def __init__(self) -> None:
        self._ticks: list[float] = []

    def tick(self) -> None:
        """Note the end of a step."""
        self._ticks.append(time.perf_counter())

    @property
    def steps_per_s(self) -> float:
        seconds = [after - before for before, after in itertools.pairwise(self._ticks)]
        return 1 / statistics.median(seconds[WARMUP_STEPS:])


def train(job: fa.Job, workload: str, num_steps: int, out: str) -> None:
    """Train as a job, and write the pace."""
    work = WORKLOADS[workload]
    model, optimizer = job.prepare(work.model(), work.optimizer)
    clock = Clock()
    for _ in job.epochs(1):
        for batch in job.loader(Prebuilt(work, num_steps), batch_size=work.batch_size):
            job.backward(cross_entropy(model(batch.features), batch.label))
            optimizer.step()
            if job.at_step_end:
                clock.tick()
    if job.rank == 0:
        write(out, clock, model)


def plain(workload: str, num_steps: int, out: str, *, ddp: bool, rank: int, world: int) -> None:
    """Train this rank's share of each batch in a plain loop, under DDP or alone."""
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    work = WORKLOADS[workload]
    model = work.model()
    wrapped = torch.nn.parallel.DistributedDataParallel(model) if ddp else model
    optimizer = work.optimizer(list(model.parameters()))
    batches = []
    for features, label in work.batches():
        rows = slice(len(label) * rank // world, len(label) * (rank + 1) // world)
        batches.append((torch.from_numpy(features[rows]), torch.from_numpy(label[rows])))
    clock = Clock()
    for step in range(num_steps):
        features, label = batches[step % NUM_DISTINCT_BATCHES]
        optimizer.zero_grad()
        cross_entropy(wrapped(features), label).backward()
        optimizer.step()
        clock.tick()
    if rank == 0:
        write(out, clock, model)


def alternate(job: fa.Job, workload: str, num_steps: int, rounds: int, out: str) -> None:
    """Time a job of one worker and a plain loop in turns, in one process; write both paces."""
    work = WORKLOADS[workload]
    num_slots = job.config.slots
    plain_model = work.model()
    plain_optimizer = work.optimizer(list(plain_model.parameters()))
    model, optimizer = job.prepare(work.model(), work.optimizer)
    data = Prebuilt(work, num_steps)
    batches = [[torch.from_numpy(array) for array in batch] for batch in work.batches()]
    parts = [list(zip(*(t.chunk(num_slots) for t in batch), strict=True)) for batch in batches]
    paces: dict[str, list[float]] = {"farandole": [], "plain": []}
    for _ in job.epochs(rounds):
        clock = Clock()
        for batch in job.loader(data, batch_size=work.batch_size):
            job.backward(cross_entropy(model(batch.features), batch.label))
            optimizer.step()
            if job.at_step_end:
                clock.tick()
        paces["farandole"].append(clock.steps_per_s)
        clock = Clock()
        for step in range(num_steps):
            plain_optimizer.zero_grad()
            for features, label in parts[step % NUM_DISTINCT_BATCHES]:
                loss = cross_entropy(plain_model(features), label)
                (loss if num_slots == 1 else loss / num_slots).backward()
            plain_optimizer.step()
            clock.tick()
        paces["plain"].append(clock.steps_per_s)
    result = {"paces": paces, "digests": [digest(model), digest(plain_model)]}
    Path(out).write_text(json.dumps(result))


def first_step(job: fa.Job, out: str) -> None:
    """Note when the first step is done."""
    model, optimizer = job.prepare(torch.nn.Linear(16, 10), WORKLOADS["small"].optimizer)
    for _ in job.epochs(1):
        for batch in job.loader(Prebuilt(WORKLOADS["wide"], 1), batch_size=1024):
            job.backward(cross_entropy(model(batch.features), batch.label))
            optimizer.step()
    if job.rank == 0:
        Path(out).write_text(json.dumps({"time": time.time()}))


def write(out: str, clock: Clock, model: torch.nn.Module) -> None:
    """Write a pace, and what shows that all computed the same."""
    Path(out).write_text(json.dumps({"pace": clock.steps_per_s, "digest": digest(model)}))


def main() -> None:
    mode, workload, num_steps, out = sys.argv[1:5]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if mode != "alone":
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    if mode == "first_step":
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 10))
        optimizer = WORKLOADS["small"].optimizer(list(model.parameters()))
        features, label = WORKLOADS["wide"].batches()[0]
        cross_entropy(model(torch.from_numpy(features)), torch.from_numpy(label)).backward()
        optimizer.step()
        if rank == 0:
            Path(out).write_text(json.dumps({"time": time.time()}))
    else:
        plain(workload, int(num_steps), out, ddp=mode == "ddp", rank=rank, world=world)
    if mode != "alone":
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
