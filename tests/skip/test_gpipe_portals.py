"""What a skip adds to a pipeline: one copy, one way around the partitions between, or nothing."""
import copy

import pytest
import torch
from torch import nn

from tests.devices import devices, one_worker, workers
from tests.helpers import modes, nodes, small_model, train_both
from tests.skip.layers import Pop, Stash, StashLinear
from tests.skip.models import WIDTH, build
from torchgpipe import GPipe, is_checkpointing, is_recomputing
from torchgpipe.skip.portal import Portal, PortalBlue, PortalCopy, PortalOrange
from torchgpipe.skip.tracker import current_skip_tracker


@devices
@modes
def test_one_copy_however_far_a_skip_goes(devices, mode, monkeypatch):
    copies = []
    real = Portal.copy
    monkeypatch.setattr(Portal, 'copy', lambda *args: copies.append(1) or real(*args))
    model = nn.Sequential(StashLinear(), *[nn.Linear(4, 4) for _ in range(6)], Pop())
    for n, balance in ((2, [4, 4]), (4, [2, 2, 2, 2]), (8, [1] * 8)):
        copies.clear()
        gpipe = GPipe(model, balance, devices=devices(n), chunks=3, checkpoint=mode)
        output = gpipe(torch.rand(6, 4, device=devices.first))
        assert len(copies) == 3
        counts = [sum(isinstance(node, function._backward_cls) for node in nodes(output))
                  for function in (PortalBlue, PortalCopy, PortalOrange)]
        assert counts == [3, 3, 3]
        output.sum().backward()
        assert len(copies) == 3


@one_worker
def test_the_partitions_between_never_see_a_skip(devices):
    seen = []

    class See(nn.Module):
        def forward(self, x):
            seen.append((type(x), dict(current_skip_tracker().tensors)))
            return x

    model = nn.Sequential(Stash(), See(), Pop())
    GPipe(model, [1, 1, 1], devices=devices(3), chunks=2)(torch.rand(4, 4, device=devices.first))
    assert seen == [(torch.Tensor, {})] * 2


@workers
@modes
def test_no_portal_within_a_partition(devices, mode, monkeypatch):
    monkeypatch.setattr(Portal, '__init__', None)
    model = nn.Sequential(StashLinear(), nn.Linear(4, 4), Pop(), nn.Linear(4, 4)).double()
    gpipe = GPipe(copy.deepcopy(model), [3, 1], devices=devices(2), chunks=2,
                  checkpoint=mode)
    train_both(model, gpipe, torch.randn(4, 4, dtype=torch.double))


@one_worker
@modes
def test_none_makes_no_node(devices, mode):
    model = build([(0, 1)], {'s0': 'none'}, ['nothing', 'nothing'])
    gpipe = GPipe(model, [1, 1], devices=devices(2), chunks=5, checkpoint=mode)
    x = torch.rand(10, WIDTH, dtype=torch.double, requires_grad=True, device=devices.first)
    output = gpipe(x)
    assert not any('Portal' in node.name() for node in nodes(output))
    output.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


@one_worker
def test_a_model_without_skips_has_no_portal(devices):
    model = small_model()
    gpipe = GPipe(copy.deepcopy(model), [4, 4], devices=devices(2), chunks=2)
    output = gpipe(torch.randn(4, 4, dtype=torch.double, device=devices.first))
    assert not any('Portal' in node.name() for node in nodes(output))


@devices
@pytest.mark.parametrize('train', [True, False])
@modes
def test_the_life_of_a_portal(devices, train, mode):
    """[Note: Tensor life of a portal], as hooks of the layers see it."""
    seen = []

    def look(where):
        def hook(*_):
            portal, = current_skip_tracker().portals.values()
            phase = 'first' if is_checkpointing() else 'again' if is_recomputing() else 'plain'
            seen.append((where, phase, portal.tensor_life, portal.tensor is not None))
        return hook

    class AfterBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.tracker = current_skip_tracker()
            return x.detach()

        @staticmethod
        def backward(ctx, grad):
            portal, = ctx.tracker.portals.values()
            seen.append(('backward', '', portal.tensor_life, portal.tensor is not None))
            return grad

    class First(nn.Module):
        def forward(self, x):
            return AfterBackward.apply(x)

    model = nn.Sequential(First(), Stash(), Pop())
    model[1].register_forward_hook(look('stash'))
    model[2].register_forward_hook(look('pop'))
    gpipe = GPipe(model, [2, 1], devices=devices(2), chunks=2, checkpoint=mode).train(train)
    x = torch.rand(10, 2, requires_grad=True, device=devices.first)
    with torch.set_grad_enabled(train):
        output = gpipe(x)
    if train:
        output.norm().backward()
    plain = [('stash', 'plain', 1, True), ('pop', 'plain', 0, False)]
    first = [('stash', 'first', 2, True), ('pop', 'first', 1, True)]
    again = [('pop', 'again', 0, False), ('stash', 'again', 0, False)]
    checkpointed = {'always': 2, 'except_last': 1, 'never': 0}[mode] if train else 0
    assert {entry for entry in seen if entry[1]} == {
        *(first + again if checkpointed else []), *(plain if checkpointed < 2 else [])}
    assert seen.count(('backward', '', 0, False)) == (2 if train else 0)


@one_worker
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
