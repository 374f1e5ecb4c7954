"""The kernel kills a group when the process that started it ends, whatever holds what."""

import os
import subprocess
import sys
from pathlib import Path

from farandole.engines.local import LocalEngine
from farandole.testing.engine import Bench, wait_until

LAUNCHER = """
import os, pathlib, sys, time
from farandole.engines.local import LocalEngine
from farandole.protocols import WorkerSpec
engine, folder = LocalEngine(), pathlib.Path(sys.argv[1])
engine.start(WorkerSpec(0, ("sleep", "600"), {sys.argv[2]: sys.argv[3]}, folder / "log"))
child = os.fork()
if child == 0:
    time.sleep(600)
(folder / "child.part").write_text(str(child))
(folder / "child.part").rename(folder / "child")
time.sleep(600)
"""


def test_a_process_forked_from_the_launcher_keeps_no_worker_alive(tmp_path: Path):
    bench = Bench(LocalEngine(), tmp_path)
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path), "FARANDOLE_TESTING_MARK", bench.mark]
    )
    child = tmp_path / "child"
    try:
        wait_until(child.exists, "the launcher has forked")
        assert len(bench.processes()) == 1
        launcher.kill()
        launcher.wait()
        os.kill(int(child.read_text()), 0)
        bench.expect_none_left()
    finally:
        launcher.kill()
        launcher.wait()
        if child.exists():
            os.kill(int(child.read_text()), 9)
