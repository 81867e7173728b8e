"""Benchmarks: ``python -m benchmarks --help``.

::

    published     the tables of torchgpipe 0.0.7 and the GPipe paper    experiment  what they are
    options       what the user chooses                                 commands    the commands
    campaign      settings one after another, tables, JSON, pictures    job         one setting
    speed, memory, timeline, accuracy                                   what is measured
    overhead, concurrency, balance, digits                              further benchmarks
    results       what was measured, and is kept                        page        its page
"""
from tqdm import tqdm

# No thread beside those that are measured.
tqdm.monitor_interval = 0
