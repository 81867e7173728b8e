"""Measure a step on simulated accelerators: ``python -m docs.pictures.timeline`` writes JSON.

Of several steps the one with the median duration is kept.
"""

import json
from pathlib import Path

import torch
from torch import nn

from benchmarks.harness.options import load
from benchmarks.harness.report import machine
from torchgpipe import GPipe
from torchgpipe.timeline import record

CHUNKS, WIDTH, DEPTH, ROWS, STEPS = 8, 512, 8, 256, 21


def measure():
    """Run the steps; give the cells and the utilisation of the median one.

    A cell is ``[kind, i, j, start, end]``, in milliseconds.
    """
    torch.manual_seed(0)
    devices = load()
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(len(devices) * DEPTH)])
    model = GPipe(
        model, [DEPTH] * len(devices), devices=devices, chunks=CHUNKS, checkpoint='always'
    )
    x = torch.randn(CHUNKS * ROWS, WIDTH).to(devices[0])
    steps = []
    for _ in range(STEPS):
        with record(model) as timeline:
            model(x).sum().backward()
        steps.append(timeline)
    timeline = sorted(steps, key=lambda step: step.seconds)[STEPS // 2]
    cells = [
        [kind, i, j, round(start * 1e3, 3), round(end * 1e3, 3)]
        for _, (j, kind, i), start, end in timeline.actions
    ]
    return {'utilisation': round(timeline.utilisation, 3), 'cells': cells}


if __name__ == '__main__':
    measured = measure()
    data = {**machine(), **measured}
    Path(__file__).with_suffix('.json').write_text(json.dumps(data) + '\n')
