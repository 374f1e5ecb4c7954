"""Collectives of one generation, four times: alone, in threads, on one host, over a network."""
