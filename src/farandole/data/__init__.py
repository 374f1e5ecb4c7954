"""Data sets: rows in a known order, read as blocks of numpy arrays. No torch."""

from farandole.data.arrays import ArrayDataset
from farandole.data.block import RowBlock

__all__ = ["ArrayDataset", "RowBlock"]
