"""WebDataset shards: index files that DALI reads right, and a reader that checks before it runs."""

from dali_echo.shards.indexing import index
from dali_echo.shards.reading import read

__all__ = ["index", "read"]
