"""Tensors that partitions share: one copy for a pass, in their place, and no changes to them."""

import copy
import signal
import threading

import pytest
import torch
from torch import nn

from tests.devices import devices as cpu_or_accelerators
from tests.devices import places
from tests.helpers import (
    assert_same,
    call,
    drop_failed_backward,
    in_two_memories,
    memory_of,
    micro_batches,
    no_gc,
    nodes,
    on_first,
)
from tests.marks import modes
from torchgpipe import GPipe, is_recomputing
from torchgpipe.engine.backward_order import Copy
from torchgpipe.engine.checkpoint import swaps
from torchgpipe.engine.partition import Engine
from torchgpipe.engine.shared import SharedTensors


@pytest.fixture
def devices(request, monkeypatch):
    """Return two devices with a memory each: of the CPU, which stand for such, or real ones."""
    if request.param == 'cc':
        in_two_memories(monkeypatch)
        return ['cpu:0', 'cpu:1']
    return places(request.param)


def _on(*letters):
    return pytest.mark.parametrize(
        'devices',
        [
            pytest.param(each, marks=[pytest.mark.accelerator] if 'a' in each else [])
            for each in letters
        ],
        indirect=True,
    )


apart = _on('cc', 'ac', 'ca')

#: Where the second device goes back in the thread that calls backward, which Ctrl-C hits.
apart_in_this_thread = _on('cc', 'ac')


class See(nn.Module):
    """A layer that shows its weight to a function."""

    def __init__(self, weight, see=lambda weight: None):
        super().__init__()
        self.weight = weight
        self.see = see

    def forward(self, x):
        self.see(self.weight)
        return x @ self.weight


def two(see=lambda weight: None, size=4):
    """Return two layers with one weight, the second of which shows it."""
    weight = nn.Parameter(torch.randn(size, size, dtype=torch.double) / size)
    return nn.Sequential(See(weight), nn.Tanh(), See(weight, see))


def pipe(model, devices, **options):
    """Wrap it in two partitions."""
    return GPipe(model, [1, len(model) - 1], devices=devices, **{'chunks': 3, **options})


def rows(number=7, width=4):
    """Return an input."""
    return torch.randn(number, width, dtype=torch.double)


# The copy


@apart
@modes
def test_one_copy_in_a_pass_for_all_cells_and_recomputations(devices, mode, monkeypatch):
    copied, seen = [], []
    real = Copy.forward, Copy.backward
    monkeypatch.setattr(
        Copy,
        'forward',
        staticmethod(lambda ctx, *args: (copied.append(args[2].shape), real[0](ctx, *args))[1]),
    )
    monkeypatch.setattr(
        Copy,
        'backward',
        staticmethod(lambda ctx, *args: (copied.append(args[0].shape), real[1](ctx, *args))[1]),
    )
    gpipe = pipe(two(seen.append), devices, checkpoint=mode)
    weight = gpipe[0].weight
    call(gpipe, rows()).sum().backward()
    assert len({id(x) for x in seen}) == 1 and seen[0] is not weight
    assert seen[0].device == gpipe.devices[1] or devices[1].startswith('cpu')
    assert len(seen) == 3 + {'always': 3, 'except_last': 2, 'never': 0}[mode]
    assert copied.count(weight.shape) == 2  # there, and the sum of its gradients back
    call(gpipe, rows())
    assert seen[-1] is not seen[0]


@apart
def test_the_copy_is_there_in_cells_only(devices):
    seen = []
    gpipe = pipe(two(seen.append), devices, checkpoint='always')
    weight = gpipe[0].weight
    output = call(gpipe, rows())
    assert gpipe[2].weight is weight
    output.sum().backward()
    assert gpipe[2].weight is weight and all(x is not weight for x in seen)
    assert list(gpipe.parameters()) == [weight]


@_on('cc', 'ac', 'ca', 'aa')
def test_the_copy_is_taken_away_after_an_error(devices):
    """A later change of the weight comes after the copying."""

    def fail(weight):
        raise ZeroDivisionError

    gpipe = pipe(two(fail), devices)
    with pytest.raises(ZeroDivisionError):
        call(gpipe, rows())
    assert gpipe[2].weight is gpipe[0].weight
    with torch.no_grad():
        gpipe[0].weight.zero_()


@apart
def test_one_copy_for_all_places_in_a_memory(devices):
    seen = []
    model = two(seen.append)
    weight = model[0].weight
    model.append(nn.Sequential(See(weight, seen.append)))
    model.append(See(weight, seen.append))
    gpipe = GPipe(model, [1, 2, 1, 1], devices=devices * 2, chunks=2)
    call(gpipe, rows())
    assert len(seen) == 6 and len({id(x) for x in seen}) == 2
    assert sum(x is gpipe[0].weight for x in seen) == 2


@pytest.mark.accelerator
def test_a_copy_for_each_memory():
    seen = []
    model = two(seen.append)
    model.append(See(model[0].weight, seen.append))
    devices = places('caa')
    gpipe = GPipe(model, [1, 2, 1], devices=devices)
    with torch.no_grad():
        call(gpipe, rows())
    assert [str(x.device) for x in seen] == devices[1:]


@apart
def test_the_hook_of_a_parameter_is_called_once(devices):
    gpipe = pipe(two(), devices, checkpoint='always')
    calls = []
    gpipe[0].weight.register_hook(calls.append)
    gpipe[0].weight.register_post_accumulate_grad_hook(calls.append)
    call(gpipe, rows()).sum().backward()
    assert len(calls) == 2


@apart
def test_without_grad_nothing_of_the_copy_remains(devices):
    seen = []
    gpipe = pipe(two(lambda weight: seen.append(memory_of(weight))), devices)
    with torch.no_grad():
        output = call(gpipe, rows())
    assert not output.requires_grad and all(ref.expired() for ref in seen)


@apart
def test_a_step_leaves_nothing_of_the_copy(devices):
    seen = []
    gpipe = pipe(
        two(lambda weight: seen.append(memory_of(weight))), devices, checkpoint='except_last'
    )
    with no_gc():
        call(gpipe, rows()).sum().backward()
        assert seen and all(ref.expired() for ref in seen)


@apart
def test_a_frozen_parameter_is_copied_without_a_graph(devices):
    seen = []
    model = two(seen.append).requires_grad_(False)
    gpipe = pipe(model, devices, checkpoint='except_last')
    assert not call(gpipe, rows()).requires_grad
    x = on_first(gpipe, rows()).requires_grad_()
    gpipe(x).sum().backward()
    assert x.grad is not None and not any(weight.requires_grad for weight in seen)
    # It is copied anew each time: changes that PyTorch does not count are there as well.
    gpipe[0].weight.data.mul_(2)
    gpipe(x)
    assert_same([seen[-1]], [gpipe[0].weight], 0)


@apart
@modes
def test_a_step_between_forward_and_backward(devices, mode):
    """The copy has the earlier values. An operation that needs the weight itself raises."""
    gpipe = pipe(two(), devices, checkpoint=mode)
    weight, x = gpipe[0].weight, rows()
    call(gpipe, x).sum().backward()
    expected, weight.grad = weight.grad, None
    output = call(gpipe, x)
    with torch.no_grad():
        weight.zero_()
    if mode == 'never':
        output.sum().backward()
        assert_same([weight.grad], [expected])
    else:
        with pytest.raises(RuntimeError, match="parameter '0.weight' has been modified"):
            output.sum().backward()
        drop_failed_backward(gpipe)


# Changes of shared tensors


class Count(nn.Module):
    """A layer with a buffer that it changes, in one of several ways."""

    def __init__(self, change, calls=None):
        super().__init__()
        self.change = change
        self.register_buffer('calls', torch.zeros(()) if calls is None else calls)

    def forward(self, x):
        self.change(self)
        return x + self.calls


def in_place(layer):
    """Change a buffer in place."""
    layer.calls += 1


def anew(layer):
    """Have another buffer."""
    layer.calls = layer.calls + 1


def through_an_alias(layer):
    """Change it through another tensor."""
    layer.calls.detach().add_(1)


def leave(layer):
    """Leave it."""


def counts(change_first, change_last):
    """Return two layers with one buffer."""
    first = Count(change_first)
    return nn.Sequential(first, nn.Tanh(), Count(change_last, first.calls))


CHANGED = r"buffer '2\.calls' in partition 1 on .* is shared with another partition on another"


@apart
def test_a_change_of_a_copy_raises(devices):
    for mode in [torch.enable_grad, torch.no_grad, torch.inference_mode]:
        for change in [in_place, anew, through_an_alias]:
            gpipe = pipe(counts(leave, change), devices)
            with mode(), pytest.raises(RuntimeError, match=CHANGED + '.*on one device'):
                call(gpipe, rows())
            assert gpipe[2].calls is gpipe[0].calls and gpipe[0].calls == 0


@apart
def test_a_change_of_a_copied_parameter_raises(devices):
    for chunks in [1, 3]:
        gpipe = pipe(two(lambda weight: weight.detach().mul_(2)), devices, chunks=chunks)
        with pytest.raises(
            RuntimeError, match=r"parameter '2\.weight' in partition 1 on .* shared"
        ):
            call(gpipe, rows())


@_on('cc')
@pytest.mark.parametrize('change', [in_place, through_an_alias])
def test_a_change_at_home_raises(devices, change):
    gpipe = pipe(counts(change, leave), devices, chunks=1)
    with pytest.raises(RuntimeError, match=CHANGED):
        call(gpipe, rows())


@apart
def test_another_buffer_at_home_is_another_one_without_a_pipeline_too(devices):
    gpipe = pipe(counts(anew, leave), devices, chunks=1)
    x = rows()
    assert_same([call(gpipe, x)], [(x + 1).tanh()])


@_on('cc')
@pytest.mark.parametrize('change', [in_place, anew])
def test_a_layer_on_two_devices_that_changes_its_buffer_raises(devices, change):
    layer = Count(change)
    gpipe = pipe(nn.Sequential(layer, nn.Tanh(), layer), devices)
    with pytest.raises(RuntimeError, match='buffer .* is shared with another partition'):
        call(gpipe, rows())


@apart
def test_another_buffer_of_a_layer_on_two_devices_raises(devices):
    """The device on which it got it would have the new one, the other device the old one."""
    changes = iter([anew, leave])
    layer = Count(lambda layer: next(changes)(layer))
    gpipe = pipe(nn.Sequential(layer, nn.Tanh(), layer), devices, chunks=1)
    with pytest.raises(RuntimeError, match='buffer .* is shared with another partition'):
        call(gpipe, rows())


@apart
def test_removed_tensors_are_not_shared(devices):
    layers = [nn.BatchNorm1d(4, affine=False).double() for _ in range(2)]
    layers[1].num_batches_tracked = layers[0].num_batches_tracked
    model = nn.Sequential(*layers).eval()
    gpipe = pipe(copy.deepcopy(model), devices)
    gpipe[1].num_batches_tracked = None
    x = rows()
    assert_same([call(gpipe, x)], [model(x)])


@cpu_or_accelerators
@pytest.mark.parametrize('change', [in_place, anew])
def test_in_one_worker_layers_may_change_their_tensors(devices, change):
    check_in_order(counts(change, leave), devices(1) * 2)
    layer = Count(change)
    check_in_order(nn.Sequential(layer, nn.Tanh(), layer), devices(1) * 2)


@pytest.mark.parametrize('change', [in_place, anew])
def test_in_one_memory_a_layer_may_change_its_tensors(change):
    layer = Count(change)
    check_in_order(nn.Sequential(layer, nn.Tanh(), layer), ['cpu:0', 'cpu:1'])


def check_in_order(model, devices):
    """Check that micro-batches find the state in which those before them have left it."""
    reference = copy.deepcopy(model)
    gpipe, x = pipe(model, devices, chunks=4), rows()
    for _ in range(2):
        expected = torch.cat([reference(part) for part in micro_batches(x, 4)])
        assert_same([call(gpipe, x)], [expected])
    assert_same(gpipe.buffers(), reference.buffers())


def test_in_one_memory_layers_may_not_change_tensors_of_others():
    devices, x, model = ['cpu:0', 'cpu:1'], rows(), counts(in_place, leave)
    expected = copy.deepcopy(model)(x)
    assert_same([pipe(copy.deepcopy(model), devices, chunks=1)(x)], [expected])
    with pytest.raises(RuntimeError, match=r"buffer '2\.calls' in partition 1.* one partition"):
        pipe(model, devices)(x)


@pytest.mark.parametrize('several', [False, True])
def test_nothing_is_put_in_place_in_one_memory_nor_where_nothing_is_shared(several, monkeypatch):
    if several:
        in_two_memories(monkeypatch)
    partitions = [nn.Sequential(layer) for layer in counts(leave, leave)]
    engine = Engine(partitions, [torch.device(f'cpu:{j}') for j in range(3)])
    shared_tensors = SharedTensors(engine, 2)
    held = [shared_tensors.held(each.j, each.lock) is not each.lock for each in engine.partitions]
    assert engine.shares and held == [False, False, several]


# Interrupts and threads


@apart_in_this_thread
def test_an_interrupt_leaves_no_copy_behind(devices, ctrl_c):
    """Ctrl-C while a recomputation runs in the thread that it hits."""

    def interrupt(weight):
        if is_recomputing():
            signal.raise_signal(signal.SIGINT)

    gpipe = pipe(two(interrupt), devices, checkpoint='always')
    output = call(gpipe, rows())
    with pytest.raises(KeyboardInterrupt):
        output.sum().backward()
    assert gpipe[2].weight is gpipe[0].weight


@apart_in_this_thread
@pytest.mark.parametrize('number', range(4))
@pytest.mark.parametrize('late', [False, True])
def test_an_interrupt_while_copies_are_put_there_or_taken_away(
    devices, ctrl_c, number, late, monkeypatch
):
    real, calls, again = swaps._restore_all, [], -1

    def call_all(functions):
        calls.append(functions)
        if late:
            real(functions)
        if len(calls) == again:
            signal.raise_signal(signal.SIGINT)
        if not late:
            real(functions)

    monkeypatch.setattr(swaps, '_restore_all', call_all)
    gpipe = pipe(two(), devices, checkpoint='always')
    output = call(gpipe, rows(3))
    again = len(calls) + 1 + number
    with pytest.raises(KeyboardInterrupt):
        output.sum().backward()
    assert gpipe[2].weight is gpipe[0].weight
    # The next thread finds no lock held.
    thread = threading.Thread(target=lambda: call(gpipe, rows()), daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


@apart
def test_threads_have_copies_of_their_own(devices):
    meet = threading.Barrier(2, timeout=20)
    gpipe = pipe(two(), devices, chunks=4, checkpoint='always')
    weight, x = gpipe[0].weight, rows(8)
    call(gpipe, x).square().sum().backward()
    expected = weight.grad.clone()
    errors = []

    def train():
        try:
            meet.wait()
            for _ in range(20):
                call(gpipe, x).square().sum().backward()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train) for _ in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not errors and gpipe[2].weight is weight
    assert_same([weight.grad], [expected * 41], 1e-9)


# The way back


@apart
def test_the_device_of_the_parameter_goes_back_through_its_cells_first(devices):
    """In the graph: from where micro-batch 0 leaves home to where the copy was taken."""
    for where in [(0, 1), (0, 0, 1), (0, 1, 0, 1)]:
        first, _, last = two()
        model = nn.Sequential(first, *[nn.Tanh() for _ in where[2:]], last)
        gpipe = GPipe(
            model,
            [1] * len(where),
            devices=[devices[k] for k in where],
            chunks=3,
            checkpoint='never',
        )
        output = call(gpipe, rows())
        taken = [
            node
            for node in nodes(output)
            if node.name() == 'TieBackward'
            and any(
                following.name() == 'WaitBackward' and hasattr(last, 'variable')
                for following, _ in node.next_functions
                for last, _ in following.next_functions
            )
        ]
        assert len(taken) == 1
        before = [
            node.name()
            for node in nodes(output)
            if any(following is taken[0] for following, _ in node.next_functions)
        ]
        assert sorted(before) == ['CopyBackward', 'TieBackward']


@apart
def test_the_graph_is_as_it_is_without_sharing_where_nothing_is_trained(devices):
    model, x = two().requires_grad_(False), rows()
    graphs = []
    for last in (model[2], See(nn.Parameter(model[2].weight.clone(), False))):
        gpipe = pipe(nn.Sequential(model[0], model[1], last), devices, checkpoint='never')
        output = gpipe(on_first(gpipe, x).requires_grad_())
        graphs.append(sorted(node.name() for node in nodes(output)))
    assert graphs[0] == graphs[1]


@cpu_or_accelerators
def test_a_parameter_may_be_changed_when_the_pass_has_ended(devices):
    """The copy has the earlier values, however late the device runs it."""
    gpipe = pipe(two(size=64), devices(2), checkpoint='except_last')
    weight, x = gpipe[0].weight, rows(7, 64)
    reference = weight.detach().cpu().clone()
    for _ in range(3):
        with torch.no_grad():
            output = call(gpipe, x)
            weight.mul_(0.5)
        assert_same([output], [(x @ reference).tanh() @ reference])
        reference.mul_(0.5)
