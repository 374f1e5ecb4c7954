"""Data sets: rows in a known order, read as blocks of numpy arrays. No torch."""

from farandole.data.arrays import ArrayDataset
from farandole.data.block import RowBlock
from farandole.data.choices import (
    arrow,
    coded,
    decode,
    filled,
    hashed,
    masked,
    npy,
    padded,
    scaled_int,
)
from farandole.data.columns import Masked, Ragged
from farandole.data.inspection import Inspection
from farandole.data.parquet import ParquetDataset
from farandole.data.preprocess import Preprocessor, fit_vocabulary
from farandole.data.rewriting import RewriteReport, rewrite

__all__ = [
    "ArrayDataset",
    "Inspection",
    "Masked",
    "ParquetDataset",
    "Preprocessor",
    "Ragged",
    "RewriteReport",
    "RowBlock",
    "arrow",
    "coded",
    "decode",
    "filled",
    "fit_vocabulary",
    "hashed",
    "masked",
    "npy",
    "padded",
    "rewrite",
    "scaled_int",
]
