"""Benchmarks: ``python -m benchmarks --help``."""
from tqdm import tqdm

# No thread beside those that are measured.
tqdm.monitor_interval = 0
