"""Data echoing for NVIDIA DALI: one mark, after which the rest of a pipeline runs several times."""

from dali_echo import shards
from dali_echo.definition import pipeline_def
from dali_echo.mark import echo
from dali_echo.pipeline import EchoPipeline
from dali_echo.read_only import read_only
from dali_echo.stats import EchoStats

__all__ = ["EchoPipeline", "EchoStats", "echo", "pipeline_def", "read_only", "shards"]
