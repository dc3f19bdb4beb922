"""WebDataset shards: index files that DALI reads right, a reader that checks before it runs, and tools."""

from dali_echo.shards.describing import Info, Sizes, info, preview
from dali_echo.shards.indexing import index
from dali_echo.shards.rates import Rate, rates
from dali_echo.shards.reading import read
from dali_echo.shards.verifying import Finding, verify
from dali_echo.shards.writing import write

__all__ = ["Finding", "Info", "Rate", "Sizes", "index", "info", "preview", "rates", "read", "verify", "write"]
