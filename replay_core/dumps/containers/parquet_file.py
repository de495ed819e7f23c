"""Parquet tables as columns, through pyarrow: the one container that needs an extra."""

from __future__ import annotations

from typing import Any

from replay_core.budget import spend_values
from replay_core.dumps.containers.columns import Table
from replay_core.dumps.containers.loading import Loading
from replay_core.file_spans import regular
from replay_core.records import TensorRef

#: Rows decoded together.
BATCH = 256
#: A few bytes of run lengths can stand for any number of equal rows.
MAX_ROWS = 1 << 22
MAX_DECODED_BYTES = 1 << 31


def read_parquet(loading: Loading) -> dict[str, TensorRef]:
    """Every column of the table.

    Raises:
        DumpError: pyarrow is not installed, or cannot read the file.
    """
    if loading.nesting or loading.region.start:
        raise loading.malformed("a parquet table inside another file")
    try:
        import pyarrow as pa  # 0.2 s, 60 MB: only who looks into a parquet file pays
        import pyarrow.parquet as pq
    except ImportError as error:
        raise loading.malformed(
            "reading a parquet file needs pyarrow",
            expected="the extra `parquet`: pip install 'rldbg[parquet]'",
            found=None if isinstance(error, ModuleNotFoundError) else str(error)[:200],
        ) from None
    try:
        with regular(loading.region.path) as raw, pq.ParquetFile(raw, pre_buffer=False) as file:
            facts = file.metadata
            decoded = sum(facts.row_group(i).total_byte_size for i in range(facts.num_row_groups))
            if not 0 <= facts.num_rows <= MAX_ROWS or decoded > MAX_DECODED_BYTES:
                raise loading.malformed(
                    "the table declares more than any log of samples",
                    expected=f"at most {MAX_ROWS:,} rows and {MAX_DECODED_BYTES:,} bytes",
                    found=f"{facts.num_rows:,} rows and {decoded:,} bytes",
                )
            spend_values(facts.num_rows * max(1, facts.num_columns), f"the {facts.num_rows:,} rows it declares")
            table = Table()
            for batch in file.iter_batches(BATCH, use_threads=False):
                for row in batch.to_pylist():
                    table.add(row)
            return table.fields({field.name: _dtype(field.type, pa) for field in file.schema_arrow})
    except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError) as error:
        lines = str(error).splitlines()
        raise loading.malformed(f"the parquet file is damaged: {lines[0] if lines else error!r}") from None


def _dtype(kind: Any, pa: Any) -> str:
    """The dtype of a column of numbers, or of lists of them."""
    while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    return {"float": "float32", "double": "float64"}.get(str(kind), str(kind))
