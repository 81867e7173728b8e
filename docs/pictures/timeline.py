"""Measure one training step on cpu:0 and cpu:1: ``python -m docs.pictures.timeline`` writes JSON.

Of several steps the one with the median duration is kept.
"""
import json
from pathlib import Path

import torch
from torch import nn

from benchmarks.experiments.timeline.record import record
from benchmarks.harness.report import machine
from torchgpipe import GPipe

CHUNKS, WIDTH, DEPTH, ROWS, STEPS = 4, 512, 8, 256, 21
LETTERS = {'forward': 'F', 'recomputation': 'R', 'backward': 'B'}


def measure():
    """Run the steps; give ``[kind, i, j, start, end]`` of the median one, in milliseconds."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(2 * DEPTH)])
    model = GPipe(model, [DEPTH, DEPTH], devices=['cpu:0', 'cpu:1'], chunks=CHUNKS,
                  checkpoint='always')
    x = torch.randn(CHUNKS * ROWS, WIDTH)
    steps = [record(model, lambda: model(x).sum().backward()) for _ in range(STEPS)]
    steps.sort(key=lambda boxes: max(box.end for box in boxes))
    return [[LETTERS[box.kind], box.i, box.j, round(box.start * 1e3, 3), round(box.end * 1e3, 3)]
            for box in steps[STEPS // 2]]


if __name__ == '__main__':
    data = {**machine(), 'cells': measure()}
    Path(__file__).with_suffix('.json').write_text(json.dumps(data) + '\n')
