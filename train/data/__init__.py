"""Getting data sets into WebDataset shards."""

from train.data.shard_set import ShardSet, cache_folder, find_shards, remote_shards, write_shards

__all__ = ["ShardSet", "cache_folder", "find_shards", "remote_shards", "write_shards"]
