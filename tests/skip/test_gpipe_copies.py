"""The copies that a skip adds to a pipeline: one past the partitions between, or none."""

import torch
from torch import nn

from tests.devices import devices
from tests.helpers import nodes
from tests.skip.layers import Pop, Stash, StashLinear
from tests.skip.models import WIDTH, build
from torchgpipe import GPipe, is_recomputing
from torchgpipe.engine.backward_order import Copy
from torchgpipe.skip.transfer import current_skip_tracker


def copies(output):
    """Count the copies from memory to memory in a graph."""
    return sum(isinstance(node, Copy._backward_cls) for node in nodes(output))


@devices
def test_one_copy_however_far_a_skip_goes(devices):
    model = nn.Sequential(StashLinear(), *[nn.Linear(4, 4) for _ in range(6)], Pop())
    for n, balance in ((2, [4, 4]), (4, [2, 2, 2, 2]), (8, [1] * 8)):
        gpipe = GPipe(model, balance, devices=devices(n), chunks=3, checkpoint='except_last')
        output = gpipe(torch.rand(6, 4, device=devices.first, requires_grad=True))
        places = [torch.device(device) for device in devices(n)]
        boundaries = [*zip(places, places[1:]), (places[0], places[-1])]
        crossed = sum(a != b for a, b in boundaries) if devices.are_apart else 0
        assert copies(output) == 3 * crossed
        output.sum().backward()


@devices
def test_the_partitions_between_never_see_a_skip(devices):
    seen = []

    class See(nn.Module):
        def forward(self, x):
            seen.append((type(x), dict(current_skip_tracker().tensors)))
            return x

    model = nn.Sequential(Stash(), See(), Pop())
    GPipe(model, [1, 1, 1], devices=devices(3), chunks=2)(torch.rand(4, 4, device=devices.first))
    assert seen == [(torch.Tensor, {})] * 2


@devices
def test_none_makes_no_node(devices):
    model = build([(0, 1)], {'s0': 'none'}, ['nothing', 'nothing'])
    gpipe = GPipe(model, [1, 1], devices=devices(2), chunks=5, checkpoint='except_last')
    x = torch.rand(10, WIDTH, dtype=torch.double, requires_grad=True, device=devices.first)
    output = gpipe(x)
    assert copies(output) == (5 if devices.are_apart else 0)  # the batch's copies
    output.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


@devices
def test_recomputations_at_the_same_time_have_trackers_of_their_own(devices):
    seen = []

    class See(nn.Module):
        def forward(self, x):
            if is_recomputing():
                seen.append(current_skip_tracker())
            return x * 1

    model = nn.Sequential(StashLinear(), See(), nn.Linear(4, 4), See(), Pop(), See())
    gpipe = GPipe(model, [2, 2, 2], devices=devices(3), checkpoint='always')
    gpipe(torch.rand(4, 4, device=devices.first)).sum().backward()
    assert len(seen) == 3 and len(set(map(id, seen))) == 3
