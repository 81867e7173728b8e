"""The published tables: settings and figures, by experiment, from ``published.json``.

Figures of torchgpipe 0.0.7 were measured on Tesla P40, 22 GiB each. The GPipe paper is Huang et
al., arXiv 1811.06965v4. Its speeds, and the speeds in torchgpipe's first README, were given as
ratios. So their unit is their own baseline. Memory is in GiB, except in the GPipe paper, which
uses GB. The baseline of the accuracy was trained by data parallelism. No balance was published for
its eight devices, so these settings have the balance of the speed.
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.harness.experiment import Experiment, Model, Setting

PAPER = 'GPipe paper'

#: Details of settings: two parts of the memory.
MODEL = 'model, GiB'
ACTIVATIONS = 'activations, GiB'

#: Details of an ablation.
UTILISATION = 'utilisation, %'
MEMORY = 'memory, GiB'


def read_setting(row: dict[str, Any]) -> Setting:
    """Return a line of a table."""
    fields = dict(row)
    kind, *size = row['model']
    fields['model'] = Model(kind, tuple(size))
    for name in ('balance', 'off'):
        fields[name] = tuple(row.get(name, ()))
    return Setting(**fields)


def read_experiments() -> dict[str, Experiment]:
    """Return the tables by their names."""
    tables = json.loads(Path(__file__).with_suffix('.json').read_text())
    experiments = {}
    for name, table in tables.items():
        settings = tuple(read_setting(row) for row in table.pop('settings'))
        experiments[name] = Experiment(name=name, settings=settings, **table)
    return experiments


EXPERIMENTS = read_experiments()
