from farandole.testing.comm import CommSuite
from farandole.testing.worlds import ProcessWorld, connect_gloo, connect_shared_memory


class TestSharedMemory(CommSuite):
    world = ProcessWorld(connect_shared_memory)


class TestGloo(CommSuite):
    world = ProcessWorld(connect_gloo)
    names_lost_peer = False
