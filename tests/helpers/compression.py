"""Functions that compress bytes, by the suffix of a file."""

import bz2
import gzip
import lzma

import zstandard

COMPRESSIONS = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda data: zstandard.ZstdCompressor(write_checksum=True).compress(data),
}
