"""The local engine keeps to what every engine must do."""

from farandole.testing.engine import EngineSuite


class TestLocalEngine(EngineSuite):
    engine = "farandole.engines.local:LocalEngine"
