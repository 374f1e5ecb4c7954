"""What a job is configured by: typed, frozen, validated as a whole.

Nothing here reads the environment; flags and variables enter in `farandole.cli` only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

DEFAULT_SLOTS = 8


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)


class CheckpointConfig(_Section):
    """When the state of a job is written, and which checkpoints are kept."""

    every_steps: int | None = Field(None, ge=1, description="write every N committed steps")
    every_s: float | None = Field(60.0, gt=0, description="write every N seconds")
    keep: int = Field(2, ge=1, description="how many of the newest to keep")
    best: str | None = Field(None, description="also keep the best by this logged metric")
    mode: Literal["min", "max"] = Field("min", description="whether a smaller or larger is best")


class TrackerConfig(_Section):
    """Where a job is recorded beside its run directory."""

    name: str | None = Field(None, description="tracker: mlflow, or another by entry point")
    uri: str | None = Field(None, description="tracking server; default: sqlite beside the runs")
    experiment: str = Field("farandole", min_length=1, description="experiment's name")
    flush_s: float = Field(30.0, ge=0, description="wait so long for the tracker at the job's end")


class JobConfig(_Section):
    """All that decides a job, as resolved from defaults, file and flags.

    Attributes marked *numerics* decide the bits of the result; no other attribute does.
    """

    target: str = Field(description="training function: FILE.py or FILE.py:function")
    params: dict[str, Any] = Field(default_factory=dict, description="its keyword arguments")
    workers: int | None = Field(None, ge=1, description="default: the cores over `threads`")
    slots: int = Field(DEFAULT_SLOTS, ge=1, le=4096, description="shares of a batch (numerics)")
    seed: int = Field(0, ge=0, lt=2**63, description="of order and random numbers (numerics)")
    threads: int = Field(1, ge=1, description="intra-op threads per worker (numerics)")
    reduction: Literal["exact", "fast"] = Field("exact", description="how gradients are added")
    precision: Literal["fp32", "bf16"] = Field("fp32", description="of `job.autocast` (numerics)")
    transport: Literal["auto", "shared_memory", "network"] = Field(
        "auto", description="what carries gradients; auto: shared memory on one host"
    )
    backend: Literal["auto", "gloo", "nccl"] = Field("auto", description="of the network path")
    engine: str = Field("local", description="what starts the workers")
    runs: Path = Field(Path("runs"), description="folder of the run directories")
    run_dir: Path | None = Field(None, description="this job's; default: a new one under `runs`")
    resume: bool = Field(False, description="go on from the newest checkpoint of `run_dir`")
    bucket_bytes: int = Field(4 << 20, ge=1024, description="gradients exchanged as one message")
    collective_timeout_s: float = Field(600.0, gt=0, description="a peer silent so long is lost")
    start_timeout_s: float = Field(120.0, gt=0, description="all workers must join within it")
    stop_grace_s: float = Field(20.0, ge=0, description="time to finish a step and a checkpoint")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    tracker: TrackerConfig = Field(default_factory=TrackerConfig)
