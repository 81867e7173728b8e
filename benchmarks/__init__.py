"""Benchmarks: ``python -m benchmarks --help``.

::

    train_gpt     the trainer of a GPT on any mesh: an example, to read from top to bottom
    commands      the list of experiments: where a new one is added
    experiments   what is measured: a module each
    harness       what they share:
                  published   the tables of torchgpipe 0.0.7 and the GPipe paper
                  experiment  what they are
                  options     what the user chooses
                  simulated   accelerators where there are none
                  processes   several, each with a worker that does as told
                  launch      a process for each rank, started again when one fails
                  job         one setting
                  campaign    settings one after another, tables, JSON, pictures
                  page        the page of the results
    models        those of the published tables, transformers, and those that are sharded
    results       what was measured, and is kept
"""
from tqdm import tqdm

# No thread beside those that are measured.
tqdm.monitor_interval = 0
