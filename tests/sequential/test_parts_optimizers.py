"""States of optimizers go by names, there and back: parameters of one shape are not mixed up."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.sequential.test_parts import Numbered
from torchgpipe import GPipe
from torchgpipe.sequential import optimizer_state, original_names, to_sequential

IDS = torch.arange(12).view(4, 3)


class Net(nn.Module):
    """All weights have one shape, and none is where forward uses it; one is tied, one frozen."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(12, 12, bias=False)
        self.late, self.soon, self.frozen = (nn.Linear(12, 12) for _ in range(3))
        self.words = nn.Embedding(12, 12)
        self.unused = nn.Linear(12, 12)
        self.head.weight = self.words.weight
        self.frozen.requires_grad_(False)

    def forward(self, ids):
        x = self.frozen(self.soon(self.words(ids)).tanh())
        return self.head(self.late(x).tanh())


def named(model, learns=True):
    """Return an optimizer of a model that keeps the names."""
    return torch.optim.AdamW(
        [(name, p) for name, p in model.named_parameters() if p.requires_grad or not learns],
        lr=0.01,
    )


def without_names(model):
    """Return one that has two groups, and none of the names."""
    ps = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(
        [
            {'params': [p for p in ps if p.dim() < 2], 'lr': 0.1},
            {'params': [p for p in ps if p.dim() > 1], 'weight_decay': 0.1},
        ],
        lr=0.05,
        momentum=0.9,
    )


def train(model, optimizer, steps=3):
    """Take some steps."""
    for k in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(IDS).flatten(0, 1), (IDS.flatten() + k) % 12).backward()
        optimizer.step()


def trained(optimizer_of):
    """Return a model and its optimizer after some steps, a copy of it in a pipeline, and that."""
    torch.manual_seed(0)
    model = Net().double()
    optimizer = optimizer_of(model)
    train(model, optimizer)
    layers = to_sequential(copy.deepcopy(model), IDS)
    assert len(layers) > 3
    pipe = GPipe(layers, [2, len(layers) - 2], devices=['cpu', 'cpu'], chunks=2)
    return model, optimizer, pipe


def assert_equal(pipe, model):
    """Compare all parameters."""
    for name, x in original_names(pipe.state_dict()).items():
        torch.testing.assert_close(x, model.state_dict()[name], rtol=0, atol=1e-12)


def state_of(optimizer):
    """Return a state dict as from a file: an optimizer changes the tensors that it was given."""
    return copy.deepcopy(optimizer.state_dict())


def check_there_and_back(model, optimizer, pipe, own, source, back):
    """Go on with the pipeline as with the model, and with the model as with the pipeline."""
    for state, other, there in (
        (state_of(optimizer), own, (pipe, own, source)),
        (None, back, (pipe, back, own)),
    ):
        state = state_of(own) if state is None else state
        other.load_state_dict(optimizer_state(state, *there))
        train(model, optimizer)
        train(pipe, own)
        assert_equal(pipe, model)
        optimizer = back


def test_there_and_back_by_the_names_that_pytorch_keeps():
    for optimizer_of in [named, lambda model: named(model, learns=False)]:
        for own_of in [named, without_names]:
            model, optimizer, pipe = trained(optimizer_of)
            own = optimizer_of(pipe)
            if own_of is without_names:
                for group in own.param_groups:
                    del group['param_names']
            check_there_and_back(model, optimizer, pipe, own, None, optimizer_of(model))


def with_names(model):
    """Return the optimizer of :func:`without_names`, with names."""
    names = {id(p): name for name, p in model.named_parameters()}
    return torch.optim.SGD(
        [
            {**group, 'params': [(names[id(p)], p) for p in group['params']]}
            for group in without_names(model).param_groups
        ]
    )


def test_a_state_without_names():
    """It goes by the names of an optimizer that is made as that was, on the meta device."""
    model, optimizer, pipe = trained(without_names)
    with torch.device('meta'):
        source = with_names(Net())
    own = without_names(pipe)
    check_there_and_back(model, optimizer, pipe, own, source, with_names(model))
    assert [group['lr'] for group in own.param_groups] == [0.1, 0.05]


def test_parameters_that_both_have():
    """The layers have the parameters of the model: they need no names."""
    model, optimizer, _ = trained(without_names)
    other = copy.deepcopy(model)
    again = without_names(other)
    again.load_state_dict(state_of(optimizer))
    layers = to_sequential(model, IDS)
    pipe = GPipe(layers, [len(layers)], devices=['cpu'])
    own = without_names(pipe)
    own.load_state_dict(optimizer_state(state_of(optimizer), layers, own, optimizer))
    train(other, again)
    train(pipe, own)
    assert_equal(pipe, other)


def test_refusals():
    model, optimizer, pipe = trained(named)
    state, bare = state_of(optimizer), state_of(optimizer)
    del bare['param_groups'][0]['param_names']
    own = named(pipe)
    foreign = named(nn.Sequential(nn.Embedding(2, 2), *pipe.partitions[1][-1:]))
    for what, given in (
        (
            'the state dict has .* no names: make the optimizers of named_parameters',
            (bare, pipe, own),
        ),
        (
            'has groups of .7. parameters, and the source of .9.',
            (bare, pipe, own, named(model, learns=False)),
        ),
        (
            'has groups of .7. parameters, and the source of .3, 4.',
            (bare, pipe, own, with_names(model)),
        ),
        (
            "only one has .'frozen.bias', 'frozen.weight'., of 7 .* and 9 in the target",
            (state, pipe, named(pipe, learns=False)),
        ),
        (
            "no group of the same parameters .*'late.bias'.* which are 3: make both",
            (state, pipe, without_names(pipe)),
        ),
        (
            "the target has parameters that are not those of the model, .*: .'0.weight'. of 4",
            (state, pipe, foreign),
        ),
        (
            'names of parameters are those of a converted model: .* not Net, which has none',
            (state, model, own),
        ),
        (
            "'exp_avg' of 'late.bias' has shape .5,., but the parameter .12,.: the source",
            (other_shape(state), pipe, own),
        ),
    ):
        with pytest.raises(ValueError, match=what):
            optimizer_state(*given)
    source = torch.optim.LBFGS(pipe.parameters(), max_iter=2)
    loss = pipe(IDS).square().mean()
    loss.backward()
    source.step(lambda: loss)
    with pytest.raises(ValueError, match="keeps a list as 'old_dirs', .* as that of LBFGS"):
        optimizer_state(source.state_dict(), pipe, torch.optim.LBFGS(pipe.parameters()), source)


def test_names_of_a_state_dict_come_before_names_of_the_source():
    model, optimizer, pipe = trained(named)
    own = named(pipe)
    source = torch.optim.AdamW([*reversed([*model.named_parameters()])][:7])
    state = state_of(optimizer)
    expected = optimizer_state(state, pipe, own)
    found = optimizer_state(state, pipe, own, source)
    assert all(x is found['state'][k] for k, x in expected['state'].items())


def other_shape(state):
    """Return a state dict of another model."""
    state = copy.deepcopy(state)
    number = state['param_groups'][0]['param_names'].index('late.bias')
    state['state'][number]['exp_avg'] = torch.zeros(5)
    return state


def test_names_of_the_model_that_are_also_names_of_layers():
    """``0.weight`` is another one in layers: all names together decide which one is meant."""
    model = Numbered()
    layers = to_sequential(copy.deepcopy(model), torch.rand(4, 4))
    target = torch.optim.Adam(reversed([*layers.parameters()]))
    for module in (model, layers):
        source = torch.optim.Adam(module.named_parameters())
        for k, p in enumerate(module.parameters()):
            source.state[p] = {'step': torch.tensor(float(k))}
        state = optimizer_state(source.state_dict(), layers, target)['state']
        assert [state[k]['step'].item() for k in range(2)] == [1, 0]
    one = torch.optim.Adam([('0.weight', p) for p in model.parameters()][:1])
    with pytest.raises(ValueError, match="under its names alone: .'0.weight'. of 1"):
        optimizer_state(one.state_dict(), layers, target)


def test_states_with_sums_over_rows():
    """States of Adafactor have other sizes than their parameters."""
    source, layers = Net(), to_sequential(Net(), IDS)
    there, here = (
        torch.optim.Adafactor(
            [(name, x) for name, x in each.named_parameters() if x.requires_grad]
        )
        for each in (source, layers)
    )
    train(source, there)
    state = optimizer_state(there.state_dict(), layers, here)
    found = {
        name: x
        for name, x in zip(state['param_groups'][0]['params'], here.param_groups[0]['params'])
    }
    assert len(found) == len(here.param_groups[0]['params'])
    here.load_state_dict(state)
    assert {tuple(x['row_var'].shape) for x in here.state.values() if 'row_var' in x} == {(12, 1)}
