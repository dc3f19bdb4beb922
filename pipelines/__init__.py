"""DALI pipelines of the reference workloads, each one definition for CPU and GPU."""
