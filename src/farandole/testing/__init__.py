"""For tests of Farandole and of what plugs into it: conformance suites, simulated worlds."""
