"""Writing through Megatron's own dataset builder; only this part of `megatron-ext data` imports it."""

import warnings
from array import array
from pathlib import Path

import numpy


class DatasetWriter:
    """Megatron's IndexedDatasetBuilder for one corpus. Importing it takes about ten seconds.

    Args:
        bin_path: where the tokens go.
        vocab_size: decides the integer type, by Megatron's own rule.
    """

    def __init__(self, bin_path: Path, vocab_size: int) -> None:
        indexed_dataset = import_indexed_dataset()
        self.dtype = indexed_dataset.DType.optimal_dtype(vocab_size)
        self._builder = indexed_dataset.IndexedDatasetBuilder(str(bin_path), dtype=self.dtype)

    def add(self, ids: array) -> None:
        """Append one document of 32-bit ids."""
        self._builder.add_document(numpy.frombuffer(ids, dtype=numpy.int32), [len(ids)])

    def close(self, idx_path: Path) -> None:
        """Finish the tokens and write the index."""
        self._builder.finalize(str(idx_path))

    def abandon(self) -> None:
        """Close the file without an index."""
        self._builder.data_file.close()


def import_indexed_dataset():
    """Megatron's module, without the warnings about optional packages that it emits on import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets import indexed_dataset
    return indexed_dataset
