"""The reference trainer: `python -m train WORKLOAD`."""
