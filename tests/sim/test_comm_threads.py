from farandole.testing.comm import CommSuite
from farandole.testing.worlds import SoloWorld, ThreadWorld


class TestInProcess(CommSuite):
    world = ThreadWorld()


class TestSingle(CommSuite):
    world = SoloWorld()
    sizes = (1,)
