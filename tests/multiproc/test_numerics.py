"""What may change the bits of a job is named, or refused, on another machine than before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from farandole.job.rundir import RunDir

TRAIN = """
import numpy as np, torch, farandole as fa

def train(job):
    model, optimizer = job.prepare(torch.nn.Linear(2, 1), lambda p: torch.optim.SGD(p, lr=0.1))
    data = fa.ArrayDataset(np.ones((32, 2), np.float32))
    for _ in job.epochs(1):
        for batch in job.loader(data, batch_size=16):
            job.backward(model(batch.features).mean())
            optimizer.step()
"""


def farandole(folder: Path, *flags: str, capability: str | None = None) -> tuple[int, str]:
    command = [sys.executable, "-m", "farandole.cli", "run", str(folder / "train.py")]
    command += ["--run-dir", str(folder / "job"), "-o", "checkpoint.every_steps=1", *flags]
    env = dict(os.environ)
    if capability is not None:
        env["ATEN_CPU_CAPABILITY"] = capability
    done = subprocess.run(
        command, env=env, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stderr


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="this CPU has no other capability"
)
def test_another_cpu_is_named_or_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    assert farandole(tmp_path, "--workers", "1")[0] == 0
    resume = ("--workers", "2", "--resume")
    code, said = farandole(tmp_path, *resume, "--require-exact", capability="default")
    assert code == 2
    assert "bits may differ: the checkpoint: cpu_capability is DEFAULT here" in said
    assert "--no-require-exact" in said
    assert "Traceback" not in said
    assert farandole(tmp_path, *resume, "--no-require-exact", capability="default")[0] == 0
    warnings = [e["message"] for e in RunDir(tmp_path / "job").events() if e["kind"] == "warning"]
    assert any("cpu_capability is DEFAULT here" in message for message in warnings)
