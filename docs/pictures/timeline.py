"""Measure a step on simulated accelerators: ``python -m docs.pictures.timeline`` writes JSON.

Of several steps the one with the median duration is kept.
"""
import json
from pathlib import Path

import torch
from torch import nn

from benchmarks.experiments.timeline.record import record, utilisation
from benchmarks.harness.report import machine
from benchmarks.harness.simulated import load
from torchgpipe import GPipe

CHUNKS, WIDTH, DEPTH, ROWS, STEPS = 8, 512, 8, 256, 21
LETTERS = {'forward': 'F', 'recomputation': 'R', 'backward': 'B'}


def measure():
    """Run the steps; give the cells and the utilisation of the median one.

    A cell is ``[kind, i, j, start, end]``, in milliseconds.
    """
    torch.manual_seed(0)
    devices = load()
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(len(devices) * DEPTH)])
    model = GPipe(model, [DEPTH] * len(devices), devices=devices, chunks=CHUNKS,
                  checkpoint='always')
    x = torch.randn(CHUNKS * ROWS, WIDTH).to(devices[0])
    steps = [record(model, lambda: model(x).sum().backward()) for _ in range(STEPS)]
    steps.sort(key=lambda boxes: max(box.end for box in boxes))
    boxes = steps[STEPS // 2]
    cells = [[LETTERS[box.kind], box.i, box.j, round(box.start * 1e3, 3), round(box.end * 1e3, 3)]
             for box in boxes if box.kind in LETTERS]
    return {'utilisation': round(utilisation(boxes, devices), 3), 'cells': cells}


if __name__ == '__main__':
    measured = measure()
    data = {**machine(), **measured}
    Path(__file__).with_suffix('.json').write_text(json.dumps(data) + '\n')
