"""Adapters of systems that record or serve a job. Each is reached by its entry point."""
