"""Adapters of the systems that start worker processes, one module each."""
