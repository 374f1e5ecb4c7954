import torch

from farandole.protocols import Bucket
from farandole.testing.comm import CommSuite
from farandole.testing.worlds import SoloWorld, ThreadWorld, Worker


class TestInProcess(CommSuite):
    world = ThreadWorld()


class TestSingle(CommSuite):
    world = SoloWorld()
    sizes = (1,)


def _count(worker: Worker) -> list[float]:
    comm, seen = worker.comm, []
    reducer = comm.reducer([Bucket(0, 3, torch.float64, torch.device("cpu"))], comm.world_size)
    for _ in range(3):
        reducer.region(0, 0).fill_(1)
        reducer.ready(0)
        reducer.wait()
        seen.append(reducer.region(0, 0).sum().item())
    return seen


def test_a_world_of_hundreds() -> None:
    outcomes = ThreadWorld().run(300, _count)
    assert [outcome.value for outcome in outcomes] == [[900.0] * 3] * 300
