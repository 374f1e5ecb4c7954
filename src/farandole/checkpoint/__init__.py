"""Durable state of a job: written in the background, committed by one rename."""
