"""Loaders for loops outside a job that give what jobs give."""
