"""Skips in a pipeline: the numbers of the unwrapped model, one copy, and nothing left alive."""
import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.helpers import (DEVICES, MODES, STEPS, WeakLog, assert_same, devices, gradients, modes,
                           small_model, train_both, train_twice)
from tests.skip.layers import Pop, Stash, StashLinear, popping, stashing
from torchgpipe import GPipe, is_checkpointing, is_recomputing
from torchgpipe.skip import Namespace, pop, skippable, stash
from torchgpipe.skip.portal import Portal, PortalBlue, PortalCopy, PortalOrange
from torchgpipe.skip.tracker import current_skip_tracker

WIDTH = 3

#: What a layer may stash of its input x.
KINDS = {'input': lambda layer, x: x, 'linear': lambda layer, x: layer.skip(x),
         'view': lambda layer, x: x[:, :1], 'constant': lambda layer, x: x.detach() * 2,
         'none': lambda layer, x: None, 'integers': lambda layer, x: x.detach().argmax(1)[:, None]}


class Mixer(nn.Module):
    """Pop some skips and add them, compute, stash some."""

    def __init__(self, stashes, pops, kinds, compute, width=WIDTH):
        super().__init__()
        self.stashes, self.pops, self.kinds, self.compute = stashes, pops, kinds, compute
        self.skip = nn.Linear(width, width)
        self.main = nn.Linear(width, width)
        if compute == 'frozen':
            self.requires_grad_(False)

    def forward(self, x):
        """Do so."""
        for name in self.pops:
            popped = yield pop(name)
            if popped is not None:
                x = x + popped
        for name in self.stashes:
            yield stash(name, KINDS[self.kinds[name]](self, x))
        if self.compute == 'inplace':
            return self.main(x).tanh_()
        if self.compute == 'detach':
            return self.main(x.detach())
        return x if self.compute == 'nothing' else self.main(x).tanh()


@st.composite
def models(draw):
    """Draw up to 8 layers and 6 skips between them, in two namespaces, and a balance."""
    number = draw(st.integers(1, 8))
    skips = draw(st.lists(st.tuples(st.integers(0, number - 1), st.integers(0, number - 1)),
                          max_size=6)) if number > 1 else []
    skips = [(min(skip), max(skip)) for skip in skips if skip[0] != skip[1]]
    kinds = {f's{k}': draw(st.sampled_from(sorted(KINDS))) for k in range(len(skips))}
    computes = draw(st.lists(st.sampled_from(['tanh', 'inplace', 'frozen', 'nothing', 'detach']),
                             min_size=number, max_size=number))
    cuts = draw(st.sets(st.integers(1, number - 1), max_size=4)) if number > 1 else set()
    edges = [0, *sorted(cuts), number]
    return skips, kinds, computes, [b - a for a, b in zip(edges, edges[1:])]


def build(skips, kinds, computes):
    """Make the model of a drawing."""
    namespaces = [Namespace(), None]
    layers = []
    for index, compute in enumerate(computes):
        stashes = [f's{k}' for k, (a, _) in enumerate(skips) if a == index]
        pops = [f's{k}' for k, (_, b) in enumerate(skips) if b == index]
        layer = skippable(stashes, pops)(Mixer)(stashes, pops, kinds, compute)
        for k in range(len(skips)):
            layer.isolate(namespaces[k % 2], only=[f's{k}'])
        layers.append(layer)
    return nn.Sequential(*layers).double()


@settings(max_examples=300, deadline=None, derandomize=True)
@given(model=models(), chunks=st.sampled_from([1, 2, 3]), size=st.integers(1, 5),
       mode=st.sampled_from(MODES), devices=st.sampled_from(list(DEVICES)),
       input_grad=st.booleans())
def test_random_layouts(model, chunks, size, mode, devices, input_grad):
    skips, kinds, computes, balance = model
    torch.manual_seed(size)
    module = build(skips, kinds, computes)
    reference = copy.deepcopy(module)
    gpipe = GPipe(module, balance, devices=DEVICES[devices](len(balance)), chunks=chunks,
                  checkpoint=mode)
    train_twice(reference, gpipe, torch.randn(size, WIDTH, dtype=torch.double), input_grad)


def crossing():
    """Give a model of six layers with skips that cross, nest and share a layer."""
    torch.manual_seed(1)
    return build([(0, 3), (1, 5), (0, 4), (2, 5), (1, 2)],
                 {f's{k}': kind for k, kind in enumerate(
                     ['linear', 'input', 'view', 'linear', 'constant'])}, ['tanh'] * 6)


@devices
@modes
@pytest.mark.parametrize('balance', [[6], [1] * 6, [2, 2, 2], [1, 4, 1], [3, 3]])
def test_every_mode_and_balance(devices, mode, balance):
    model = crossing()
    gpipe = GPipe(copy.deepcopy(model), balance, devices=devices(len(balance)), chunks=3,
                  checkpoint=mode)
    train_both(model, gpipe, torch.randn(7, WIDTH, dtype=torch.double))


@devices
@modes
def test_several_steps_of_an_optimizer(devices, mode):
    model = crossing()
    gpipe = GPipe(copy.deepcopy(model), [2, 2, 2], devices=devices(3), chunks=4, checkpoint=mode)
    for net in (model, gpipe):
        torch.manual_seed(2)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        for _ in range(5):
            optimizer.zero_grad()
            net(torch.randn(8, WIDTH, dtype=torch.double)).square().mean().backward()
            optimizer.step()
    assert_same(gpipe.parameters(), model.parameters(), 1e-10)


@modes
def test_gradients_may_be_asked_for_twice_and_of_gradients(mode):
    model = crossing()
    gpipe = GPipe(copy.deepcopy(model), [2, 2, 2], devices=['cpu'] * 3, chunks=2, checkpoint=mode)
    got = []
    for net in (model, gpipe):
        x = torch.linspace(-1, 1, 12, dtype=torch.double).view(4, 3).requires_grad_()
        output = net(x).square().sum()
        output.backward(retain_graph=True)
        grad, = torch.autograd.grad(output, x, create_graph=True)
        grad.square().sum().backward()
        got.append([x.grad, *gradients(net)])
    assert_same(*got)
    with pytest.raises(RuntimeError, match='a second time'):
        output.backward()


@modes
def test_a_skip_past_what_has_no_gradient(mode):
    """The main path is detached, or made of integers: the skip's gradient goes its own way."""
    class Indices(nn.Module):
        def forward(self, x):
            return x.detach().argmax(1)

    model = nn.Sequential(nn.Linear(4, 4), StashLinear(), Indices(), nn.Embedding(4, 4), Pop())
    model = model.double()
    for balance in ([1, 1, 1, 1, 1], [2, 2, 1], [2, 1, 2]):
        model.zero_grad()
        gpipe = GPipe(copy.deepcopy(model), balance, devices=['cpu'] * len(balance), chunks=3,
                      checkpoint=mode)
        train_both(model, gpipe, torch.randn(6, 4, dtype=torch.double))


@devices
@modes
def test_an_inplace_change_of_what_was_stashed(devices, mode):
    """As in the unwrapped model, whoever pops sees it."""
    class Change(nn.Module):
        def forward(self, x):
            return x.relu_()

    layers = [nn.Linear(4, 4), Stash(), Change(), nn.Linear(4, 4), Pop()]
    model = nn.Sequential(*layers).double()
    gpipe = GPipe(copy.deepcopy(model), [4, 1], devices=devices(2), chunks=2, checkpoint=mode)
    train_both(model, gpipe, torch.randn(4, 4, dtype=torch.double))


@devices
@modes
@pytest.mark.parametrize('balance', [[2, 2], [2, 1, 1], [1, 1, 1, 1]])
def test_an_inplace_change_in_another_partition_raises(devices, mode, balance):
    """There the unwrapped model's numbers can't be had: whether it is seen depends on copies."""
    class Change(nn.Module):
        def forward(self, x):
            return x.relu_()

    model = nn.Sequential(nn.Linear(4, 4), Stash(), Change(), Pop())
    gpipe = GPipe(model, balance, devices=devices(len(balance)), chunks=2, checkpoint=mode)
    with pytest.raises(RuntimeError, match="skip tensor.*was changed in place"):
        gpipe(torch.rand(4, 4))
    with pytest.raises(RuntimeError, match="skip tensor.*was changed in place"), \
            torch.no_grad():
        gpipe(torch.rand(4, 4))


@modes
def test_an_inplace_change_after_the_pop_is_fine(mode):
    class Change(nn.Module):
        def forward(self, x):
            return x.relu_()

    model = nn.Sequential(nn.Linear(4, 4), Stash(), nn.Identity(), Pop(), Change()).double()
    gpipe = GPipe(copy.deepcopy(model), [1, 1, 1, 1, 1], devices=['cpu'] * 5, chunks=2,
                  checkpoint=mode)
    if mode == 'never':
        train_both(model, gpipe, torch.randn(4, 4, dtype=torch.double))
    with torch.no_grad():
        x = torch.randn(4, 4, dtype=torch.double)
        assert_same([gpipe(x)], [model(x)])


def test_an_inplace_change_through_another_skip_raises():
    @skippable(pop=['a'])
    class Change(nn.Module):
        def forward(self, x):
            a = yield pop('a')
            return x + a.relu_()

    model = nn.Sequential(nn.Linear(4, 4), stashing('a', 'b')(), nn.Linear(4, 4), Change(),
                          popping('b')())
    gpipe = GPipe(model, [3, 1, 1], devices=['cpu'] * 3)
    with pytest.raises(RuntimeError, match='skip tensor .* was changed in place'):
        gpipe(torch.rand(4, 4))


@pytest.mark.parametrize('requires_grad', [True, False])
def test_an_inplace_change_of_what_was_popped_raises_under_checkpoints(requires_grad):
    @skippable(pop=['skip'])
    class Change(nn.Module):
        def forward(self, x):
            skip = yield pop('skip')
            return skip.mul_(2) + x

    def make(mode):
        torch.manual_seed(0)
        model = nn.Sequential(StashLinear(), nn.Linear(4, 4), Change()).double()
        model[0].requires_grad_(requires_grad)
        return model, GPipe(copy.deepcopy(model), [1, 1, 1], devices=['cpu'] * 3, chunks=2,
                            checkpoint=mode)

    x = torch.randn(4, 4, dtype=torch.double)
    model, gpipe = make('never')
    train_both(model, gpipe, x)
    _, gpipe = make('always')
    with pytest.raises(RuntimeError, match='skip tensor that it popped, was changed in place'):
        gpipe(x).sum().backward()


def nodes(tensor):
    """Give all nodes of the graph that leads to a tensor."""
    found, queue = set(), [tensor.grad_fn]
    while queue:
        node = queue.pop()
        if node is not None and node not in found:
            found.add(node)
            queue += [following for following, _ in node.next_functions]
    return found


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
        output = gpipe(torch.rand(6, 4))
        assert len(copies) == 3
        counts = [sum(isinstance(node, function._backward_cls) for node in nodes(output))
                  for function in (PortalBlue, PortalCopy, PortalOrange)]
        assert counts == [3, 3, 3]
        output.sum().backward()
        assert len(copies) == 3


def test_the_partitions_between_never_see_a_skip():
    seen = []

    class See(nn.Module):
        def forward(self, x):
            seen.append((type(x), dict(current_skip_tracker().tensors)))
            return x

    model = nn.Sequential(Stash(), See(), Pop())
    GPipe(model, [1, 1, 1], devices=['cpu'] * 3, chunks=2)(torch.rand(4, 4))
    assert seen == [(torch.Tensor, {})] * 2


@modes
def test_no_portal_within_a_partition(mode, monkeypatch):
    monkeypatch.setattr(Portal, '__init__', None)
    model = nn.Sequential(StashLinear(), nn.Linear(4, 4), Pop(), nn.Linear(4, 4)).double()
    gpipe = GPipe(copy.deepcopy(model), [3, 1], devices=['cpu:0', 'cpu:1'], chunks=2,
                  checkpoint=mode)
    train_both(model, gpipe, torch.randn(4, 4, dtype=torch.double))


@modes
def test_none_makes_no_node(mode):
    model = build([(0, 1)], {'s0': 'none'}, ['nothing', 'nothing'])
    gpipe = GPipe(model, [1, 1], devices=['cpu', 'cpu'], chunks=5, checkpoint=mode)
    x = torch.rand(10, WIDTH, dtype=torch.double, requires_grad=True)
    output = gpipe(x)
    assert not any('Portal' in node.name() for node in nodes(output))
    output.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_tuples_and_skips():
    class Branch(nn.Module):
        def forward(self, x):
            return x, x * 2

    @skippable(stash=['a', 'b'])
    class StashPair(nn.Module):
        def forward(self, input):
            yield stash('a', input[0])
            yield stash('b', input[1])
            return input

    class Merge(nn.Module):
        def forward(self, input):
            return input[0] * input[1]

    for balance in ([1, 1, 1, 1, 1], [2, 3], [3, 2]):
        model = nn.Sequential(nn.Linear(4, 4), Branch(), StashPair(), Merge(), popping('b', 'a')())
        model = model.double()
        gpipe = GPipe(copy.deepcopy(model), balance, devices=['cpu'] * len(balance), chunks=2,
                      checkpoint='always')
        train_both(model, gpipe, torch.randn(4, 4, dtype=torch.double))


@modes
def test_skips_within_a_layer_stay_there(mode):
    def block():
        return nn.Sequential(Stash(), nn.Linear(4, 4), Pop())

    model = nn.Sequential(block(), block(), block()).double()
    gpipe = GPipe(copy.deepcopy(model), [1, 1, 1], devices=['cpu:0', 'cpu:1', 'cpu:2'], chunks=2,
                  checkpoint=mode)
    train_both(model, gpipe, torch.randn(4, 4, dtype=torch.double))
    # From one layer into another, where nobody declared it, a skip does not come.
    model = nn.Sequential(nn.Sequential(Stash()), nn.Sequential(Pop()))
    gpipe = GPipe(model, [1, 1], devices=['cpu', 'cpu'])
    with pytest.raises(RuntimeError, match="'skip' has not been stashed"):
        gpipe(torch.rand(2, 4))


@modes
@pytest.mark.parametrize('inner_mode', MODES)
def test_a_pipeline_within_a_layer(mode, inner_mode):
    def model(wrap):
        torch.manual_seed(0)
        inner = nn.Sequential(StashLinear(), nn.Linear(4, 4), Pop()).double()
        if wrap:
            inner = GPipe(inner, [1, 1, 1], devices=['cpu'] * 3, chunks=2, checkpoint=inner_mode)
        one = Namespace()
        return nn.Sequential(StashLinear().double().isolate(one), inner, Pop().isolate(one))

    gpipe = GPipe(model(True), [1, 1, 1], devices=['cpu'] * 3, chunks=2, checkpoint=mode)
    train_both(model(False), gpipe, torch.randn(8, 4, dtype=torch.double))


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
    x = torch.rand(10, 2, requires_grad=True)
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


def make(devices, mode, layer=None):
    """Give a pipeline with two skips, and weak references to what passes its layers."""
    one = Namespace()
    layers = [stashing('a')(), nn.Linear(4, 4), StashLinear().isolate(one), layer or nn.Tanh(),
              Pop().isolate(one), nn.Linear(4, 4), popping('a')()]
    gpipe = GPipe(nn.Sequential(*layers), [1, 2, 1, 3], devices=devices(4), chunks=4,
                  checkpoint=mode)
    return gpipe, WeakLog(*gpipe)


@devices
@modes
@pytest.mark.parametrize('step', list(STEPS.values()), ids=list(STEPS))
def test_nothing_is_alive_after_a_step(devices, mode, step):
    gpipe, log = make(devices, mode)
    for _ in range(30):
        step(gpipe)
        assert log.alive() == 0
        log.refs.clear()


class Fail(nn.Module):
    """Raise in one pass or the other."""

    recomputing = False

    def forward(self, x):
        """Raise."""
        if is_recomputing() == self.recomputing:
            raise ZeroDivisionError
        return x * 2


@devices
@modes
@pytest.mark.parametrize('where', ['between', 'same partition'])
def test_nothing_is_alive_after_a_failure_between_stash_and_pop(devices, mode, where):
    if where == 'between':
        gpipe, log = make(devices, mode, Fail())
    else:
        model = nn.Sequential(nn.Linear(4, 4), StashLinear(), Fail(), Pop())
        gpipe = GPipe(model, [1, 3], devices=devices(2), chunks=2, checkpoint=mode)
        log = WeakLog(*gpipe)
    for _ in range(3):
        try:
            gpipe(torch.rand(8, 4))
        except ZeroDivisionError:
            pass
        else:
            raise AssertionError
        assert log.refs and log.alive() == 0
        log.refs.clear()
    assert not current_skip_tracker().tensors


@devices
def test_nothing_is_alive_after_a_recomputation_that_fails(devices):
    layer = Fail()
    layer.recomputing = True
    gpipe, log = make(devices, 'always', layer)
    output = gpipe(torch.rand(8, 4)).sum()
    try:
        output.backward()
    except ZeroDivisionError:
        pass
    else:
        raise AssertionError
    del output
    # PyTorch keeps the nodes that a failed backward had queued until the next one.
    torch.ones(1, requires_grad=True).sum().backward()
    assert log.alive() == 0


@devices
@pytest.mark.parametrize('grad', [True, False])
def test_a_skip_dies_within_the_layer_that_pops_it(devices, grad):
    """It does not wait for the end of the cell, if no layer saves it."""
    alive = []
    refs = []

    @skippable(stash=['skip'])
    class Make(nn.Module):
        def forward(self, x):
            tensor = x.detach() * 2
            refs.append(StorageWeakRef(tensor.untyped_storage()))
            yield stash('skip', tensor)
            return x

    class Look(nn.Module):
        def forward(self, x):
            alive.append([not ref.expired() for ref in refs])
            return x

    model = nn.Sequential(Make(), nn.Linear(4, 4), Look(), Pop(), Look())
    gpipe = GPipe(model, [1, 2, 2], devices=devices(3), chunks=1, checkpoint='never')
    with torch.set_grad_enabled(grad):
        gpipe(torch.rand(2, 4))
    assert alive == [[True], [False]]


@modes
def test_a_long_training_does_not_grow(mode):
    import gc
    gpipe, _ = make(DEVICES['one worker'], mode)
    gc.collect()
    for _ in range(3):
        gpipe(torch.rand(8, 4)).sum().backward()
    before = sum(type(x) is Portal for x in gc.get_objects())
    for _ in range(30):
        gpipe(torch.rand(8, 4)).sum().backward()
    gc.collect()
    assert sum(type(x) is Portal for x in gc.get_objects()) <= before


@pytest.mark.cuda
@modes
@pytest.mark.parametrize('where', [['cuda'] * 3, ['cpu', 'cuda', 'cpu'], ['cuda', 'cpu', 'cuda'],
                                   ['cuda', 'cuda', 'cpu'], ['cpu', 'cuda', 'cuda']])
def test_cuda_and_mixed_devices(mode, where):
    count = torch.cuda.device_count()
    places = [f'cuda:{j % count}' if d == 'cuda' else d for j, d in enumerate(where)]
    model = crossing()
    reference = copy.deepcopy(model)
    gpipe = GPipe(model, [2, 2, 2], devices=places, chunks=4, checkpoint=mode)
    for size in (1, 4, 9):
        x = torch.randn(size, WIDTH, dtype=torch.double)
        expected, actual = reference(x), gpipe(x.to(gpipe.devices[0]))
        expected.square().sum().backward()
        actual.square().sum().backward()
        assert_same([actual.cpu(), *(g.cpu() for g in gradients(gpipe))],
                    [expected, *gradients(reference)], 1e-10)


@pytest.mark.cuda
@modes
def test_cuda_streams_do_not_race(mode, monkeypatch):
    """Three partitions on one GPU, made to copy as if they were on three, behind slow kernels."""
    from torchgpipe import pipeline

    keys = iter(range(1 << 30))
    monkeypatch.setattr(pipeline, 'device_key', lambda device: ('cuda', next(keys) % 3))

    class Slow(nn.Module):
        def forward(self, x):
            torch.cuda._sleep(2_000_000)
            return x * 1

    model = crossing()
    reference = copy.deepcopy(model)
    layers = [layer for pair in zip([Slow() for _ in model], model) for layer in pair]
    gpipe = GPipe(nn.Sequential(*layers), [4, 4, 4], devices=['cuda'] * 3, chunks=6,
                  checkpoint=mode)
    for _ in range(10):
        x = torch.randn(24, WIDTH, dtype=torch.double)
        reference.zero_grad(), gpipe.zero_grad()
        expected, actual = reference(x), gpipe(x.cuda())
        expected.square().sum().backward()
        actual.square().sum().backward()
        assert_same([actual.cpu(), *(g.cpu() for g in gradients(gpipe))],
                    [expected, *gradients(reference)], 1e-9)


def test_a_model_without_skips_has_no_portal():
    model = small_model()
    gpipe = GPipe(copy.deepcopy(model), [4, 4], devices=['cpu', 'cpu'], chunks=2)
    output = gpipe(torch.randn(4, 4, dtype=torch.double))
    assert not any('Portal' in node.name() for node in nodes(output))


class Both(nn.Module):
    """Give the input of a skip's partition beside what it computes, as two outputs."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        """Branch."""
        return self.fc(x), x * 2


@skippable(stash=['skip'])
class StashOfPair(nn.Module):
    """Stash what is made of a pair's first part."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, input):
        """Stash."""
        yield stash('skip', self.fc(input[0]))
        return input


@skippable(pop=['skip'])
class PopIntoSecond(nn.Module):
    """Add what was stashed to a pair's second part."""

    def forward(self, input):
        """Pop."""
        return input[0], input[1] + (yield pop('skip'))


@devices
@modes
def test_a_gradient_that_was_left_behind_does_not_reach_the_next_backward(devices, mode):
    def steps(net, model):
        first, second = net(torch.ones(4, WIDTH, dtype=torch.double))
        grads = torch.autograd.grad(second.sum(), [model[0].fc.weight], retain_graph=True,
                                    allow_unused=True)
        first.sum().backward()
        return [*grads, *gradients(model)]

    model = nn.Sequential(Both(), StashOfPair(), PopIntoSecond()).double()
    gpipe = GPipe(copy.deepcopy(model), [2, 1], devices=devices(2), chunks=2, checkpoint=mode)
    assert_same(steps(gpipe, nn.ModuleList(gpipe)), steps(model, model))


@pytest.mark.filterwarnings('ignore:Using backward.. with create_graph')
@modes
@pytest.mark.parametrize('create_graph', [False, True])
def test_portals_die_after_a_backward_that_does_not_get_through(mode, create_graph):
    import gc

    def fail(grad):
        raise ZeroDivisionError

    @skippable(stash=['skip'])
    class StashAndFail(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            x = self.fc(x)
            if x.requires_grad:
                x.register_hook(fail)
            yield stash('skip', x * 2)
            return x

    model = nn.Sequential(StashAndFail(), nn.Linear(WIDTH, WIDTH), Pop())
    gpipe = GPipe(model, [1, 1, 1], devices=['cpu'] * 3, chunks=2, checkpoint=mode)

    def count():
        gc.collect()
        torch.ones(1, requires_grad=True).sum().backward()  # drops what the failed one had queued
        return sum(type(x) is Portal for x in gc.get_objects())

    before = count()
    for _ in range(5):
        try:
            gpipe(torch.rand(4, WIDTH)).square().sum().backward(create_graph=create_graph)
        except ZeroDivisionError:
            pass
        else:
            raise AssertionError
        gpipe.zero_grad()  # gradients that were made with create_graph own graphs
    assert count() == before


@modes
def test_a_gradient_penalty_leaks_nothing(mode):
    import gc

    @skippable(stash=['skip'])
    class StashParameter(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(WIDTH))

        def forward(self, x):
            yield stash('skip', self.weight * x.detach())
            return x

    model = nn.Sequential(StashParameter(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), Pop())
    gpipe = GPipe(model, [1, 2, 1], devices=['cpu'] * 3, chunks=2, checkpoint=mode)

    def step():
        x = torch.rand(4, WIDTH, requires_grad=True)
        grad, = torch.autograd.grad(gpipe(x).square().sum(), x, create_graph=True)
        grad.square().sum().backward()

    def count():
        gc.collect()
        return sum(type(x) is Portal for x in gc.get_objects())

    step()
    before = count()
    for _ in range(5):
        step()
    assert count() <= before


@devices
@modes
@pytest.mark.parametrize('context', [torch.no_grad, torch.inference_mode])
def test_a_yield_within_no_grad(devices, mode, context):
    @skippable(stash=['skip'])
    class StashWithin(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            skip = self.fc(x)
            with context():
                yield stash('skip', skip)
            return x

    @skippable(pop=['skip'])
    class PopWithin(nn.Module):
        def forward(self, x):
            with context():
                skip = yield pop('skip')
            return x * skip

    model = nn.Sequential(StashWithin(), nn.Linear(WIDTH, WIDTH), PopWithin()).double()
    gpipe = GPipe(copy.deepcopy(model), [1, 1, 1], devices=devices(3), chunks=2, checkpoint=mode)
    train_both(model, gpipe, torch.randn(4, WIDTH, dtype=torch.double))


@devices
def test_an_inplace_first_layer_before_a_stash(devices):
    """Micro-batches are views that count changes together: never wrong, but it may raise."""
    model = nn.Sequential(nn.ReLU(inplace=True), Stash(), nn.Linear(4, 4), Pop()).double()
    x = torch.randn(6, 4, dtype=torch.double)
    for chunks in (1, 3):
        gpipe = GPipe(copy.deepcopy(model), [3, 1], devices=devices(2), chunks=chunks,
                      checkpoint='never')
        try:
            assert_same([gpipe(x.clone())], [model(x.clone())])
        except RuntimeError as error:
            assert chunks == 3 and 'Use an operation that is not in place' in str(error)
        del gpipe


@modes
def test_a_change_of_the_mini_batch_between_forward_and_backward_raises(mode):
    model = nn.Sequential(nn.Linear(4, 4), StashLinear(), nn.Linear(4, 4), Pop())
    gpipe = GPipe(model, [2, 2], devices=['cpu', 'cpu'], chunks=2, checkpoint=mode)
    x = torch.rand(4, 4)
    output = gpipe(x)
    x.zero_()
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        output.sum().backward()


def test_a_skip_within_a_layer_must_not_have_the_name_of_one_that_crosses():
    model = nn.Sequential(Stash(), nn.Linear(4, 4), Pop(),
                          nn.Sequential(Stash(), nn.Linear(4, 4), Pop()))
    GPipe(model, [3, 1], devices=['cpu'] * 2)(torch.rand(2, 4))
    with pytest.raises(TypeError, match="a layer within '3' declared 'skip'"):
        GPipe(model, [2, 2], devices=['cpu'] * 2)


def test_a_skip_that_shares_its_memory_must_not_be_changed_after_its_pop():
    @skippable(pop=['a'])
    class Change(nn.Module):
        def forward(self, x):
            a = yield pop('a')
            return x + a.relu_()

    @skippable(pop=['a'])
    class Swap(nn.Module):
        def forward(self, x):
            return (yield pop('a'))

    class ChangeInput(nn.Module):
        def forward(self, x):
            return x.relu_()

    first = nn.Linear(4, 4), stashing('a', 'b')()
    for layers, balance in (
            ((*first, nn.Linear(4, 4), Change(), popping('b')()), [3, 1, 1]),
            ((*first, Swap(), ChangeInput(), popping('b')()), [2, 1, 1, 1]),
            ((nn.Linear(4, 4), stashing('a')(), Change()), [2, 1])):
        gpipe = GPipe(nn.Sequential(*layers), balance, devices=['cpu'] * len(balance))
        with pytest.raises(RuntimeError, match='skip tensor .* was changed in place'):
            gpipe(torch.rand(4, 4))


def test_recomputations_at_the_same_time_have_trackers_of_their_own():
    seen = []

    class See(nn.Module):
        def forward(self, x):
            if is_recomputing():
                seen.append(current_skip_tracker())
            return x * 1

    model = nn.Sequential(StashLinear(), See(), nn.Linear(4, 4), See(), Pop(), See())
    gpipe = GPipe(model, [2, 2, 2], devices=['cpu'] * 3, checkpoint='always')
    gpipe(torch.rand(4, 4)).sum().backward()
    assert len(seen) == 3 and len(set(map(id, seen))) == 3


def test_an_error_of_a_yield_appears_where_it_was_made():
    states = []

    @skippable(stash=['skip'])
    class Wrong(nn.Module):
        def forward(self, x):
            try:
                with torch.no_grad():
                    yield stash('typo', x)
            finally:
                states.append(torch.is_grad_enabled())

    with pytest.raises(RuntimeError, match="'typo' has not been declared") as error:
        Wrong()(torch.rand(2))
    assert states == [True] and torch.is_grad_enabled()
    assert "yield stash('typo', x)" in str(error.getrepr())


@devices
def test_a_skip_that_is_not_stashed_after_all(devices):
    class Lazy(type(Stash())):
        def forward(self, x):
            return x

    gpipe = GPipe(nn.Sequential(Lazy(), Pop()), [1, 1], devices=devices(2))
    with pytest.raises(RuntimeError, match="'skip' must be stashed but have not"):
        gpipe(torch.rand(2, 4))


def test_sparse_tensors_may_skip():
    @skippable(stash=['skip'])
    class StashSparse(nn.Module):
        def forward(self, x):
            yield stash('skip', x.detach().to_sparse())
            return x

    @skippable(pop=['skip'])
    class PopSparse(nn.Module):
        def forward(self, x):
            return x + (yield pop('skip')).to_dense()

    model = nn.Sequential(StashSparse(), nn.Linear(4, 4), PopSparse()).double()
    gpipe = GPipe(copy.deepcopy(model), [1, 1, 1], devices=['cpu'] * 3, chunks=2,
                  checkpoint='never')
    train_both(model, gpipe, torch.randn(4, 4, dtype=torch.double))
