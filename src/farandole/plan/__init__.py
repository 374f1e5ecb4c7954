"""Pure decisions: what follows from a job's seed, sizes and membership. No I/O, clock or torch."""
