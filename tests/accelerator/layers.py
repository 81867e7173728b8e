"""Layers of programs for the simulated accelerator."""

import threading

import torch
from torch import nn

from tests import accelerator
from tests.skip.models import WIDTH
from torchgpipe import is_recomputing
from torchgpipe.skip import pop, skippable, stash


@skippable(stash=['skip'])
class Stash(nn.Linear):
    """Stash a tensor, and give another one."""

    def forward(self, x):
        x = super().forward(x)
        yield stash('skip', x * 2)
        return x


@skippable(pop=['skip'])
class Pop(nn.Module):
    """Return a function of the stashed tensor, and ignore the input."""

    def forward(self, x):
        return (yield pop('skip')).tanh()


class AddTable(nn.Linear):
    """Add a table that comes along, and let it go on."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, x, table=None):
        x, table = x if table is None else (x, table)
        return super().forward(x).tanh() + table, table


class TwoPlaces(nn.Linear):
    """Return one tensor on the CPU, and one where the input is."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.recomputed_in = []

    def forward(self, x):
        if is_recomputing():
            self.recomputed_in.append(threading.get_ident())
        x = super().forward(x)
        return (x * 2).cpu(), x.tanh()


class Elsewhere(nn.Module):
    """Go on at another device, and make that busy in a recomputation."""

    def forward(self, x):
        if x.device.type == 'sim':
            here, x = torch.accelerator.current_stream(x.device), x.to('sim:3')
            self.moved = here.record_event()
            if is_recomputing():
                with torch.accelerator.device_index(3):
                    accelerator.sleep(50000)
        return x * 2


class Shift(nn.Linear):
    """Make a tensor on the current device."""

    def forward(self, x):
        return super().forward(x) + torch.ones(1, device=x.device.type)
