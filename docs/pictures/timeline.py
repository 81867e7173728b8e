"""Measure one training step on cpu:0 and cpu:1: ``python docs/pictures/timeline.py`` writes JSON.

Each partition notes when it starts and ends, in forward, recomputation and backward. Of several
steps the one with the median duration is kept.
"""
import json
import os
import time
from datetime import date
from pathlib import Path

import torch
from torch import nn

from torchgpipe import GPipe, is_recomputing

CHUNKS, WIDTH, DEPTH, ROWS, STEPS = 4, 512, 8, 256, 21


def watch(partition, j, events):
    """Let a partition note ``[kind, j, start, end]``, in the order in which it starts."""
    def start(kind):
        events.append([kind, j, time.perf_counter(), None])

    def end(kind):
        event = next(x for x in reversed(events) if x[:2] == [kind, j])
        event[3] = time.perf_counter()

    partition.register_forward_pre_hook(lambda *_: start('R' if is_recomputing() else 'F'))
    partition.register_forward_hook(lambda *_: end('R' if is_recomputing() else 'F'))
    partition.register_full_backward_pre_hook(lambda *_: start('B'))
    partition.register_full_backward_hook(lambda *_: end('B'))


def place(events):
    """Give ``[kind, i, j, start, end]`` in milliseconds: micro-batches come back last first."""
    cells = []
    zero = min(start for _, _, start, _ in events)
    for kind, j, start, end in events:
        nth = sum(cell[0] == kind and cell[2] == j for cell in cells)
        i = nth if kind == 'F' else CHUNKS - 1 - nth
        cells.append([kind, i, j, round((start - zero) * 1e3, 3), round((end - zero) * 1e3, 3)])
    return cells


def measure():
    """Run the steps, and give the cells of the median one."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(2 * DEPTH)])
    model = GPipe(model, [DEPTH, DEPTH], devices=['cpu:0', 'cpu:1'], chunks=CHUNKS,
                  checkpoint='always')
    x = torch.randn(CHUNKS * ROWS, WIDTH, requires_grad=True)
    events, steps = [], []
    for j, partition in enumerate(model.partitions):
        watch(partition, j, events)
    for _ in range(STEPS):
        model(x).sum().backward()
        steps.append(place(events))
        events.clear()
    steps.sort(key=lambda cells: max(cell[4] for cell in cells))
    return steps[STEPS // 2]


def write():
    """Write what was measured, and on what."""
    with open('/proc/cpuinfo') as file:
        cpu = next(line.split(':')[1].strip() for line in file if line.startswith('model name'))
    data = {'cpu': cpu, 'cores': os.cpu_count(), 'torch': torch.__version__,
            'date': date.today().isoformat(), 'cells': measure()}
    Path(__file__).with_suffix('.json').write_text(json.dumps(data) + '\n')


if __name__ == '__main__':
    write()
