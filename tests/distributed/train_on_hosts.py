"""A training on two hosts: ``train_on_hosts.py FOLDER UNREACHABLE STEPS SECONDS``.

In the third step, a layer of the last rank holds Python's lock for some seconds.
"""

import ctypes
import os
import sys
from pathlib import Path

import torch
from torch import nn

from torchgpipe.distributed import DistributedGPipe, init_mesh, links


class Holds(nn.Linear):
    """A layer that holds Python's lock once."""

    calls = 0
    seconds = 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 5 and self.seconds:
            ctypes.PyDLL(None).sleep(self.seconds)
        return super().forward(x)


def main(folder, unreachable, steps, seconds):
    rank = int(os.environ['RANK'])
    Holds.seconds = seconds * (rank == 3)
    for name, value in links._OPTIONS.items():
        factor = unreachable / links.UNREACHABLE
        links._OPTIONS[name] = max(1, int(value * factor)) if name != 'TCP_KEEPCNT' else value
    torch.manual_seed(0)
    mesh = init_mesh(data=2, pipe=2, device_type='cpu')
    layers = nn.Sequential(nn.Linear(4, 4), Holds(4, 4))
    model = DistributedGPipe(layers, [1, 1], mesh=mesh, chunks=2)
    for step in range(steps):
        model.step(torch.ones(4, 4), torch.ones(4, 4), nn.functional.mse_loss)
        if step == 1:
            (folder / f'{rank}.runs').touch()
    (folder / f'{rank}.done').touch()


if __name__ == '__main__':
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
