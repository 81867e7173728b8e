"""Models of any form in a pipeline: the numbers and the names of the models themselves."""

import copy
import functools
from statistics import median

import pytest
import torch

from tests.devices import ACCELERATOR, DEVICES, cpus
from tests.sequential.models import BATCH, MODELS
from torchgpipe import GPipe
from torchgpipe.balance import balance_by_size
from torchgpipe.base.structure import call, flatten, flatten_nested
from torchgpipe.sequential import original_names, to_sequential

models = pytest.mark.parametrize('name', MODELS)


def to(where, value):
    """Move the tensors of a value to a device, or let those that are floating be of a dtype."""
    tensors, kind = flatten(value)
    return kind(
        [
            x if isinstance(where, torch.dtype) and not x.is_floating_point() else x.to(where)
            for x in tensors
        ]
    )


def make(name, dropout, seed=0):
    """Return a model and a sample in float64."""
    torch.manual_seed(seed)
    model, sample = MODELS[name](dropout=dropout)
    return model.double(), to(torch.double, sample)


@functools.cache
def converted_once(name, dropout):
    """Return a model, the sequential one that is made of it, and the sample."""
    model, sample = make(name, dropout)
    return model, to_sequential(model, sample), sample


def converted(name, dropout=0.1):
    """Return copies of these for one test, which share no parameters."""
    model, sequential, sample = converted_once(name, dropout)
    return copy.deepcopy(model), copy.deepcopy(sequential), sample


def balanced(n, sequential, sample, chunks=1):
    """Return the number of layers of each partition."""
    return balance_by_size(n, sequential, sample, chunks=chunks, device='cpu')


def in_parts(model, sample, chunks):
    """Run a model on micro-batches, one after the other, and concatenate its outputs."""
    tensors, kind = flatten(sample)
    outputs = [
        flatten(call(model, kind(part)))
        for part in zip(*(x.tensor_split(chunks) for x in tensors))
    ]
    return outputs[0][1]([torch.cat(parts) for parts in zip(*(found for found, _ in outputs))])


def loss_of(output):
    """Return a loss that tells all elements of an output from each other."""
    return sum(
        (x - torch.linspace(-1, 1, x.numel(), dtype=x.dtype, device=x.device).view_as(x))
        .square()
        .mean()
        for x in flatten(output)[0]
    )


def step(run, optimizer):
    """Take a step, and return the output of the model."""
    torch.manual_seed(1)
    optimizer.zero_grad()
    output = run()
    loss_of(output).backward()
    optimizer.step()
    return output


def named(entries, original):
    """Return entries by their names in the original, where there is another model, without layers.

    Where there are several of one name, they are the same tensor.
    """
    found = {}
    for name, tensor in entries:
        if original is not None:
            layer, _, name = name.partition('.')
            assert layer.isdigit()
        assert found.setdefault(name, tensor) is tensor
    return found


def trained(model, original=None):
    """Return gradients, parameters and buffers, by their names in the original model.

    Layers may have more buffers, for tensors that the original has in no buffer.
    """
    parameters = named(model.named_parameters(remove_duplicate=False), original)
    known = dict((original or model).named_buffers(remove_duplicate=False))
    buffers = [
        (name, x)
        for name, x in model.named_buffers(remove_duplicate=False)
        if original is None or name.partition('.')[2] in known
    ]
    return [{name: p.grad for name, p in parameters.items()}, parameters, named(buffers, original)]


def largest(x):
    """Return the size of the largest element."""
    return x.detach().double().abs().max().item()


def assert_close(actual, expected):
    """Compare tensors by name: within 1e-12 of the largest element, or of the median size."""
    assert actual.keys() == expected.keys()
    if not expected:
        return
    sizes = {name: largest(x) for name, x in expected.items()}
    usual = median(sizes.values())
    for name, x in expected.items():
        assert actual[name].dtype == x.dtype and actual[name].shape == x.shape, name
        distance = largest(actual[name].cpu().double() - x.cpu().double())
        assert distance <= 1e-12 * max(sizes[name], usual), name


def assert_same_output(actual, expected):
    """Compare outputs, and how they are put together."""
    if not isinstance(expected, torch.Tensor):
        assert type(actual) is type(expected)
        assert flatten_nested(actual)[1] == flatten_nested(expected)[1]
    assert_close(*(dict(enumerate(flatten(value)[0])) for value in (actual, expected)))


def train_both(devices, mode, chunks, n, model, sequential, sample):
    """Take three steps with a model and with a pipeline, and compare all that comes of them."""
    gpipe = GPipe(
        sequential,
        balanced(n, sequential, sample, chunks),
        devices=devices(n),
        chunks=chunks,
        checkpoint=mode,
    )
    # A GPU rounds otherwise. Weights that move to the simulated accelerator are no longer tied.
    place = 'cpu' if ACCELERATOR == 'sim' else gpipe.devices[0]
    model.to(place)
    optimizers = [torch.optim.SGD(net.parameters(), 0.1, 0.9) for net in (model, gpipe)]
    tensors, kind = flatten(sample)
    for size in (BATCH, BATCH - 1, BATCH):
        part = kind([x[:size] for x in tensors])
        expected = step(lambda: in_parts(model, to(place, part), chunks), optimizers[0])
        actual = step(lambda: call(gpipe, to(gpipe.devices[0], part)), optimizers[1])
        assert_same_output(actual, expected)
        for found, known in zip(trained(gpipe, model), trained(model)):
            assert_close(found, known)
    model.eval(), gpipe.eval()
    assert_same_output(call(gpipe, to(gpipe.devices[0], sample)), call(model, to(place, sample)))


#: Partitions, chunks and the mode: all pairs.
SETTINGS = [
    (2, 1, 'always'),
    (3, 3, 'always'),
    (4, 1, 'always'),
    (2, 3, 'except_last'),
    (3, 1, 'except_last'),
    (4, 3, 'except_last'),
]
several = pytest.mark.parametrize(
    'name, n, chunks, mode', [(name, *SETTINGS[5 * k % 6]) for k, name in enumerate(MODELS)]
)


@several
@cpus
def test_three_steps(devices, name, n, chunks, mode):
    train_both(devices, mode, chunks, n, *converted(name))


@pytest.mark.accelerator
@several
def test_three_steps_without_dropout(name, n, chunks, mode):
    train_both(DEVICES['accelerators'], mode, chunks, n, *converted(name, dropout=0.0))


@models
def test_parameters_and_buffers_equal_the_model(name):
    before = make(name, 0.1)[0].state_dict()
    model, sequential, _ = converted_once(name, 0.1)
    for found, known in zip(trained(sequential, model)[1:], trained(model)[1:]):
        assert found.keys() == known.keys()
        assert all(found[key] is known[key] for key in known)
    assert all(p.grad is None for p in model.parameters())
    assert all(module.training for module in [*model.modules(), *sequential.modules()])
    assert_equal(model.state_dict(), before)


def assert_equal(actual, expected):
    """Compare state dicts."""
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name].cpu(), x) for name, x in expected.items())


@models
def test_states_there_and_back(name):
    """By the names of the model: out of the layers into it, and the other way round."""
    model, sequential, sample = converted(name)
    expected = model.state_dict()
    gpipe = GPipe(copy.deepcopy(sequential), balanced(3, sequential, sample), devices=['cpu'] * 3)
    for net in (sequential, gpipe):
        assert {key.partition('.')[0] for key in net.state_dict()} <= set(map(str, range(999)))
        other, _ = make(name, 0.0, seed=1)
        other.load_state_dict(original_names(net.state_dict()))
        assert_equal(other.state_dict(), expected)
        assert_equal(original_names(net.state_dict()), expected)
    assert gpipe.state_dict().keys() == sequential.state_dict().keys()
    state = make(name, 0.0, seed=1)[0].state_dict()
    for net in (sequential, gpipe):
        net.load_state_dict(state)
        assert_equal(original_names(net.state_dict()), state)
    more = {**state, 'another.weight': torch.zeros(1)}
    for net in (sequential, gpipe):
        with pytest.raises(RuntimeError, match='another.weight'):
            net.load_state_dict(more)
    places = [x.data_ptr() for x in state.values()]
    lost = next(key for key, place in zip(state, places) if places.count(place) == 1)
    del state[lost]
    for net in (sequential, gpipe):
        with pytest.raises(RuntimeError, match=lost):
            net.load_state_dict(state)
