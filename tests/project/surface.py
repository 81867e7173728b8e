"""Promises of every pipeline, as functions of a setting; `test_surface.py` runs all of them.

A promise compares with the unwrapped module, and raises where the two differ.
"""

import copy
import pickle
import warnings
import weakref
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from torchgpipe import Arguments, GPipe, NoChunk
from torchgpipe.base.settings import Settings

#: Each setting and its number of processes.
SETTINGS = {'gpipe': 1, 'one rank': 1, 'pipe': 2, 'data': 2}

#: Promises that a setting refuses, each with the reason.
REFUSED = {
    ('call_has_a_graph', 'distributed'): 'a graph does not lead from one process to another',
    ('pickle_a_model', 'distributed'): 'processes and their groups are not in a file',
    ('in_place_of_the_original', 'distributed'): 'a rank has a part of the original only',
}

PROMISES = {}

#: Promises to raise in the middle of a step, each with words of the error.
ERRORS = {}


def promise(function):
    """Add a promise to the list."""
    PROMISES[function.__name__] = function
    return function


def error(words):
    """Add a promise to raise in the middle of a step, after which ranks end."""

    def add(function):
        ERRORS[function.__name__] = words
        return promise(function)

    return add


class Setting:
    """A class of pipelines and the processes that run it."""

    def __init__(self, name):
        self.name = name
        self.mesh = None
        if name != 'gpipe':
            from torchgpipe.distributed import init_mesh

            axes = {'one rank': {}, 'pipe': {'pipe': 2}, 'data': {'data': 2}}[name]
            self.mesh = init_mesh(**axes, device_type='cpu')
        self.replicas = 2 if name == 'data' else 1
        self.replica = dist.get_rank() if name == 'data' else 0
        self.stages = 2 if name in ('gpipe', 'pipe') else 1
        self.is_last = name != 'pipe' or dist.get_rank() == 1
        self.is_first = name != 'pipe' or dist.get_rank() == 0

    def make(self, module, balance=None, chunks=2, **options):
        """Return a pipeline; with two partitions, the first one has all layers but the last."""
        n = len(module)
        if balance is None:
            balance = [n] if self.stages == 1 else [n - 1, 1]
        if isinstance(balance, Settings):
            chunks = options.pop('given_chunks', 1)
        return self.pipeline(module, balance, chunks=chunks, **options)

    def pipeline(self, module, balance, **options):
        """Return a pipeline with these arguments."""
        if self.mesh is None:
            if not isinstance(balance, Settings):
                options.setdefault('devices', ['cpu:0', 'cpu:1'])
            return GPipe(module, balance, **options)
        from torchgpipe.distributed import DistributedGPipe

        return DistributedGPipe(module, balance, mesh=self.mesh, **options)

    def part(self, x, dim=0):
        """Return the samples of this replica; the first one has more."""
        n = x.shape[dim]
        return x if self.replicas == 1 else x.split([n - n // 3, n // 3], dim)[self.replica]

    def equal_part(self, x):
        """Return the samples of this replica, of which each has equally many."""
        return x.chunk(self.replicas)[self.replica]

    def plan(self, module, schedule='1f1b'):
        """Return a plan for a module."""
        balance = (len(module),) if self.stages == 1 else (len(module) - 1, 1)
        sizes = tuple(
            (name, sum(x.numel() * x.element_size() for x in layer.parameters()))
            for name, layer in module.named_children()
        )
        return Settings(
            schedule, balance, ('cpu:0', 'cpu:1')[: self.stages], 2, 'except_last', sizes
        )


def layers(*more, dtype=torch.float64):
    """Return three layers with the same values on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 4, dtype=dtype), nn.Tanh(), *more, nn.Linear(4, 2, dtype=dtype)
    )


def data(n=9, out=2):
    """Return an input and a target."""
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(n, 3, generator=generator, dtype=torch.float64),
        torch.randn(n, out, generator=generator, dtype=torch.float64),
    )


def same(found, expected):
    """Compare values."""
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def same_grads(model, module):
    """Compare the gradients on this rank with the gradients of the module."""
    expected = dict(module.named_parameters(remove_duplicate=False))
    own = dict(model.named_parameters())
    assert own.keys() <= expected.keys()
    for name, x in own.items():
        assert (x.grad is None) == (expected[name].grad is None), name
        if x.grad is not None:
            same(x.grad, expected[name].grad)


def same_step(setting, module, input, target, loss_fn, batch_loss=None, args=(), **options):
    """Take a step, and compare the loss and the gradients with the module."""
    model = setting.make(copy.deepcopy(module), *args)
    loss = (batch_loss or loss_fn)(module(input), target)
    loss.backward()
    found = model.step(setting.part(input), setting.part(target), loss_fn, **options)
    same(found.double(), loss.detach().double())
    same_grads(model, module)
    return model


def same_learning(setting, model, module, x, y, **options):
    """Let both learn from a mini-batch, and compare their gradients."""
    F.mse_loss(module(x), y).backward()
    model.step(setting.part(x), setting.part(y), F.mse_loss, **options)
    same_grads(model, module)


def same_call(setting, model, output, *args, **kwargs):
    """Compare an output with the expected one, of the samples of this replica."""
    with torch.no_grad():
        found = model(*args, **kwargs)
    if setting.is_last:
        same(found, output)
    else:
        assert found is None


class Joined(nn.Module):
    """A layer of several arguments."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4, dtype=torch.float64)

    def forward(self, x, y=None, *, scale=None):
        x = self.linear(x) if y is None else self.linear(x + y)
        return x if scale is None else x * scale


def joined():
    """Return a model of several arguments."""
    torch.manual_seed(0)
    return nn.Sequential(Joined(), nn.Linear(4, 2, dtype=torch.float64))


# --- arguments and values
# --------------------------------------------------------------------------------


@promise
def call_with_several_arguments(setting):
    module, (x, _) = joined(), data()
    model = setting.make(copy.deepcopy(module))
    with torch.no_grad():
        expected = setting.part(module[1](module[0](x, x * 2)))
    same_call(setting, model, expected, setting.part(x), setting.part(x * 2))


@promise
def call_with_keywords(setting):
    module, (x, _) = joined(), data()
    model = setting.make(copy.deepcopy(module))
    with torch.no_grad():
        expected = setting.part(module[1](module[0](x, scale=x[:, :1])))
    same_call(setting, model, expected, setting.part(x), scale=setting.part(x[:, :1]))


@promise
def step_with_several_arguments(setting):
    module, (x, y) = joined(), data()
    model = setting.make(copy.deepcopy(module))
    F.mse_loss(module[1](module[0](x, x, scale=x[:, :1])), y).backward()
    x = setting.part(x)
    model.step(Arguments(x, x, scale=x[:, :1]), setting.part(y), F.mse_loss)
    same_grads(model, module)


@promise
def refuse_unknown_keywords(setting):
    model = setting.make(joined())
    with pytest.raises((TypeError, RuntimeError), match='cannot be called|could not begin'):
        model(setting.part(data()[0]), other=1)


class Keyed(nn.Module):
    """A layer from a dict to a dict."""

    def forward(self, value):
        return {**value, 'y': value['x'] * value['k']}


@promise
def values_of_any_nesting(setting):
    x, _ = data()
    model = setting.make(nn.Sequential(Keyed(), nn.Identity()))
    own = setting.part(x)
    same_call(
        setting,
        model,
        {'x': own, 'k': 2, 'none': None, 'y': own * 2},
        {'x': own, 'k': 2, 'none': None},
    )


@promise
def parts_that_all_micro_batches_share(setting):
    x, table = data()[0], torch.ones(3, dtype=torch.float64)
    model = setting.make(nn.Sequential(Keyed(), nn.Identity()))
    own = setting.part(x)
    same_call(setting, model, {'x': own, 'k': table, 'y': own}, {'x': own, 'k': NoChunk(table)})


@promise
def a_batch_in_another_dimension(setting):
    module, x = nn.Sequential(nn.Tanh(), nn.ReLU()), data()[0].t()
    model = setting.make(module, batch_dim=1)
    own = setting.part(x, 1)
    same_call(setting, model, module(own), own)


@promise
def a_batch_dimension_by_keys(setting):
    x = data()[0]
    model = setting.make(nn.Sequential(Keyed(), nn.Identity()), batch_dim={'k': None})
    own, k = setting.part(x), torch.ones(3, dtype=torch.float64)
    same_call(setting, model, {'x': own, 'k': k, 'y': own}, {'x': own, 'k': k})


@promise
def refuse_a_rule_for_no_part(setting):
    model = setting.make(nn.Sequential(Keyed(), nn.Identity()), batch_dim={'other': 1})
    with pytest.raises((ValueError, RuntimeError), match="'other'|could not begin"):
        model({'x': setting.part(data()[0]), 'k': 1})


@promise
def fewer_samples_than_chunks(setting):
    same_step(setting, layers(), *data(3), F.mse_loss)


@promise
def batches_of_other_sizes(setting):
    module = layers()
    model = setting.make(copy.deepcopy(module), chunks=4)
    for n in (8, 7, 3):
        x, y = data(n)
        loss = F.mse_loss(module(x), y)
        loss.backward()
        same(model.step(setting.part(x), setting.part(y), F.mse_loss), loss.detach())
    same_grads(model, module)


class Scalars(nn.Module):
    """Give a tensor, and scalars beside it."""

    def forward(self, x):
        return {'y': x, 'mean': x.mean(), 'sum': x.sum()}


@promise
def refuse_scalars_without_a_rule(setting):
    model = setting.make(nn.Sequential(nn.Identity(), Scalars()))
    if setting.is_last:
        with pytest.raises(ValueError, match='a scalar: say'):
            model(setting.part(data()[0]))
    else:
        model(data()[0])


@promise
def scalars_by_words(setting):
    model = setting.make(
        nn.Sequential(nn.Identity(), Scalars()), gather={'mean': 'mean', 'sum': 'sum'}
    )
    own = setting.part(data()[0])
    same_call(setting, model, Scalars()(own), own)


@promise
def scalars_in_a_stack(setting):
    model = setting.make(
        nn.Sequential(nn.Identity(), Scalars()), gather={'mean': 'stack', 'sum': 'stack'}
    )
    own = setting.part(data(6)[0])
    same_call(
        setting,
        model,
        {
            'y': own,
            'mean': torch.stack([x.mean() for x in own.chunk(2)]),
            'sum': torch.stack([x.sum() for x in own.chunk(2)]),
        },
        own,
    )


class MeanOfKept(nn.Module):
    """A mean over elements that are above zero."""

    def forward(self, x):
        return {'loss': (x * (x > 0)).sum() / (x > 0).sum()}


@promise
def scalars_by_a_function_that_counts(setting):
    model = setting.make(
        nn.Sequential(nn.Identity(), MeanOfKept()), gather={'loss': lambda x: (x > 0).sum()}
    )
    own = setting.part(data()[0])
    same_call(setting, model, MeanOfKept()(own), own)


@promise
def refuse_a_function_that_counts_nothing(setting):
    model = setting.make(nn.Sequential(nn.Identity(), MeanOfKept()), gather=lambda x: 0)
    x = setting.part(data()[0])
    if setting.is_last:
        with pytest.raises(ValueError, match='counts nothing'):
            model(x)
    else:
        model(x)


# --- settings and plans
# ------------------------------------------------------------------------------------


@promise
def a_plan_in_place_of_the_balance(setting):
    for schedule in ('1f1b', 'plain call'):
        module = layers()
        model = setting.make(module, setting.plan(module, schedule))
        assert model.chunks == 2 and sum(model.balance) == 3
        same_learning(setting, model, layers(), *data(), schedule='auto')


@promise
def a_plan_says_where_stages_are(setting):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4).double(), *(nn.Tanh() for _ in range(3)))
    sizes = setting.plan(module).layers
    devices = ('cpu:0', 'cpu:1', 'cpu:1', 'cpu:0') if setting.stages == 2 else ('cpu:0',) * 4
    schedule = 'zb-v' if setting.stages == 2 else 'gpipe'
    model = setting.make(
        copy.deepcopy(module), Settings(schedule, (1, 1, 1, 1), devices, 2, 'except_last', sizes)
    )
    same_learning(setting, model, module, *data(out=4), schedule='auto')


@promise
def refuse_settings_beside_a_plan(setting):
    module = layers()
    with pytest.raises(ValueError, match='a plan says devices, chunks, checkpoint and keep'):
        setting.make(module, setting.plan(module), given_chunks=3)


@promise
def refuse_a_plan_of_another_module(setting):
    with pytest.raises(ValueError, match='profile of another module'):
        setting.make(layers(), setting.plan(nn.Sequential(nn.Tanh(), nn.Tanh(), nn.Tanh())))


@promise
def refuse_wrong_steps(setting):
    for words, loss_fn, options in (
        ('made without one', F.mse_loss, {'schedule': 'auto'}),
        ('1g1b', F.mse_loss, {'schedule': '1g1b'}),
        ('adds up samples', nn.MSELoss(reduction='sum'), {}),
    ):
        model = setting.make(layers())
        with pytest.raises(ValueError, match=words):
            model.step(*map(setting.part, data()), loss_fn, **options)


@promise
def refuse_wrong_options(setting):
    for error, words, options in (
        (ValueError, 'nothing to split', {'batch_dim': None}),
        (ValueError, 'gather must be', {'gather': 'max'}),
        (ValueError, 'different length', {'balance': [7]}),
        (TypeError, 'integers', {'balance': [1.5, 1.5]}),
        (ValueError, 'positive integer', {'chunks': 0}),
        (ValueError, 'except_last', {'checkpoint': 'sometimes'}),
    ):
        with pytest.raises(error, match=words):
            setting.make(layers(), **options)


@promise
def refuse_no_balance(setting):
    with pytest.raises(ValueError, match='balance is required'):
        setting.pipeline(layers(), None)


@promise
def refuse_what_is_not_sequential(setting):
    with pytest.raises(TypeError, match='nn.Sequential'):
        setting.pipeline(nn.Linear(2, 2), [1])


@promise
def refuse_a_layer_called_partitions(setting):
    with pytest.raises(ValueError, match="called 'partitions'"):
        setting.make(nn.Sequential(OrderedDict(partitions=nn.Tanh(), other=nn.Tanh())))


@promise
def checkpoints_of_each_partition(setting):
    module = layers()
    model = setting.make(copy.deepcopy(module), checkpoint=lambda j: ['always', 'never'][j % 2])
    same_learning(setting, model, module, *data())


# --- names and states
# ------------------------------------------------------------------------------------


@promise
def layers_with_names_of_methods(setting):
    names = ('keys', 'values', 'items', 'chunks')
    torch.manual_seed(0)
    module = nn.Sequential(
        OrderedDict((name, nn.Linear(3, 3, dtype=torch.float64)) for name in names)
    )
    model = setting.make(copy.deepcopy(module))
    same_learning(setting, model, module, *data(out=3))
    for name in model._modules:
        assert model.get_parameter(f'{name}.weight').shape == (3, 3)


@promise
def states_in_names_of_the_module(setting):
    module = layers()
    model = setting.make(copy.deepcopy(module))
    own = model.state_dict()
    expected = module.state_dict()
    assert own and own.keys() <= expected.keys()
    for name, x in own.items():
        same(x, expected[name])


@promise
def load_a_state(setting):
    model = setting.make(layers())
    state = {name: torch.full_like(x, 0.5) for name, x in model.state_dict().items()}
    model.load_state_dict(state)
    assert all((x == 0.5).all() for x in model.parameters())


@promise
def load_names_of_the_first_version(setting):
    model = setting.make(layers())
    state = {
        f'partitions.7.{name}': torch.full_like(x, 0.5) for name, x in model.state_dict().items()
    }
    model.load_state_dict(state)
    assert all((x == 0.5).all() for x in model.parameters())


@promise
def be_a_sequence(setting):
    model = setting.make(layers())
    assert len(model) == 3
    there = {name: int(name) for name in model._modules}
    assert [*model] == [model[k] for k in there.values()]
    for k in {0, 1, 2} - {*there.values()}:
        with pytest.raises(IndexError, match='another rank'):
            model[k]


@promise
def weights_from_a_mapping(setting):
    with torch.device('meta'):
        module = layers()
    state = layers().state_dict()
    model = setting.make(module, weights=state)
    for name, x in model.state_dict().items():
        same(x, state[name])


class Reversed(nn.Module):
    """A layer that shares the weight of another one."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return x @ self.weight


def tied():
    """Return a model whose first and last layers have a weight in common."""
    torch.manual_seed(0)
    first = nn.Linear(3, 4, dtype=torch.float64)
    return nn.Sequential(first, nn.Tanh(), Reversed(first.weight))


@promise
def tied_weights_under_one_of_their_names(setting):
    expected = tied().state_dict()
    for missing in ('0.weight', '2.weight'):
        with torch.device('meta'):
            module = tied()
        model = setting.make(
            module, weights={name: x for name, x in expected.items() if name != missing}
        )
        for name, x in model.state_dict().items():
            same(x, expected[name])


@promise
def tied_weights_train(setting):
    same_step(setting, tied(), *data(out=3), F.mse_loss)


@promise
def refuse_weights_of_another_model(setting):
    with pytest.raises(ValueError, match='not those of the module'):
        setting.make(
            layers(),
            weights={
                f'{k}.{name}': torch.zeros(1) for k in (0, 1, 2) for name in ('other', 'more')
            },
        )


@promise
def initial_values_on_meta(setting):
    with torch.device('meta'):
        module = layers()
    model = setting.make(module)
    assert all(x.device.type == 'cpu' and 0 < x.abs().max() < 1 for x in model.parameters())


def small(module):
    """Initialize a module."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)


def values(setting, **options):
    """Return the sum of the initial values of each parameter, with a seed."""
    with torch.device('meta'):
        module = layers()
    model = setting.make(module, seed=7, **options)
    return {name: x.sum().item() for name, x in model.named_parameters()}


def alone(**options):
    """Return the same in one process with one partition."""
    with torch.device('meta'):
        module = layers()
    model = GPipe(module, [3], devices=['cpu'], seed=7, **options)
    return {name: x.sum().item() for name, x in model.named_parameters()}


@promise
def initial_values_follow_from_the_seed(setting):
    found = values(setting)
    assert found and found.items() <= alone().items()


@promise
def initial_values_by_a_function(setting):
    found = values(setting, init=small)
    assert found and found.items() <= alone(init=small).items()
    assert all((value == 0) == ('bias' in name) for name, value in found.items())


class Custom(nn.Linear):
    """A layer whose constructor draws other values than `nn.Linear` does."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        nn.init.normal_(self.weight, std=0.02)


@promise
def refuse_values_that_are_not_of_the_constructor(setting):
    with torch.device('meta'):
        module = nn.Sequential(nn.Tanh(), nn.Tanh(), Custom(3, 3))
    with pytest.raises(ValueError, match="'2.weight' of a Custom. Pass weights"):
        setting.make(module)


@promise
def apply_a_function(setting):
    model = setting.make(layers())
    torch.manual_seed(setting.replica)  # Ranks draw other numbers by themselves.
    model.apply(small)
    found = torch.stack([x.detach().sum() for x in model.parameters()])
    assert all((x == 0).all() == ('bias' in name) for name, x in model.named_parameters())
    if setting.replicas > 1:
        others = [torch.empty_like(found) for _ in range(setting.replicas)]
        dist.all_gather(others, found)
        same(others[0], others[1])


# --- modes
# ------------------------------------------------------------------------------------


@promise
def evaluation_mode_stays(setting):
    model = setting.make(layers().eval())
    assert not model.training and not any(each.training for each in model.modules())
    with pytest.raises(RuntimeError, match='evaluation mode'):
        model.step(*map(setting.part, data()), F.mse_loss)


@promise
def modes_reach_all_layers(setting):
    model = setting.make(layers(nn.Dropout(0.5)))
    for mode in (False, True):
        model.train(mode)
        assert {each.training for each in (*model.modules(), *model.partitions.modules())} == {
            mode
        }


@promise
def dropout_is_off_in_evaluation(setting):
    module, (x, _) = layers(nn.Dropout(0.5)).eval(), data()
    model = setting.make(copy.deepcopy(module))
    own = setting.part(x)
    with torch.no_grad():
        same_call(setting, model, module(own), own)


@promise
def refuse_a_step_without_gradients(setting):
    model = setting.make(layers())
    with torch.no_grad(), pytest.raises(RuntimeError, match='gradients are off'):
        model.step(*map(setting.part, data()), F.mse_loss)


@promise
def frozen_parameters_get_no_gradient(setting):
    module = layers()
    module[0].requires_grad_(False)
    same_step(setting, module, *data(), F.mse_loss)


@promise
def deferred_batch_norm(setting):
    torch.manual_seed(0)
    module = nn.Sequential(nn.BatchNorm1d(3, dtype=torch.float64), nn.Linear(3, 2).double())
    model = setting.make(copy.deepcopy(module), deferred_batch_norm=True)
    x, y = data(8)
    module(x)
    model.step(setting.equal_part(x), setting.equal_part(y), F.mse_loss)
    for name, buffer in model.named_buffers():
        same(buffer, module.get_buffer(name))


# --- other layers
# ------------------------------------------------------------------------------------


@promise
def a_replaced_layer_runs(setting):
    module = layers()
    model = setting.make(copy.deepcopy(module))
    torch.manual_seed(3)
    module[2] = nn.Linear(4, 2, dtype=torch.float64)
    if '2' in model._modules:
        model.set_submodule('2', copy.deepcopy(module[2]))
    same_learning(setting, model, module, *data())


@promise
def a_replaced_layer_learns(setting):
    module = layers()
    model = setting.make(copy.deepcopy(module))
    x, y = data()
    model.step(setting.part(x), setting.part(y), F.mse_loss)
    model.zero_grad()
    torch.manual_seed(3 + setting.replica)  # Replicas get the values of the first one.
    new = nn.Linear(4, 2, dtype=torch.float64)
    torch.manual_seed(3)
    module[2] = nn.Linear(4, 2, dtype=torch.float64)
    if '2' in model._modules:
        model.set_submodule('2', new)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, module)]
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        same_learning(setting, model, module, x, y)
        for optimizer in optimizers:
            optimizer.step()


@promise
def refuse_a_layer_replaced_in_a_partition(setting):
    model = setting.make(layers())
    j = next(j for j, each in enumerate(model.partitions) if len(each))
    name = next(iter(model.partitions[j]._modules))
    model.partitions[j]._modules[name] = nn.Tanh()
    with pytest.raises(RuntimeError, match='replace it in the GPipe itself'):
        model(setting.part(data()[0]))


@promise
def refuse_a_removed_layer(setting):
    model = setting.make(layers())
    del model._modules[next(iter(model._modules))]
    with pytest.raises(ValueError, match='is None'):
        model(setting.part(data()[0]))


# --- losses
# ------------------------------------------------------------------------------------


def labels(n=9):
    """Return labels, some of which do not count."""
    return torch.tensor([-100, 0, 1, 1, -100, -100, 0, 1, 0])[:n]


@promise
def a_loss_of_classes_counts_its_labels(setting):
    same_step(setting, layers(), data()[0], labels(), F.cross_entropy)


@promise
def a_loss_with_weights_of_classes(setting):
    loss = nn.CrossEntropyLoss(torch.tensor([1.0, 3.0], dtype=torch.float64))
    same_step(setting, layers(), data()[0], labels(), loss)


@promise
def a_loss_with_a_function_that_counts(setting):
    def own(output, target):
        return F.cross_entropy(output, target)

    same_step(
        setting,
        layers(),
        data()[0],
        labels(),
        own,
        normalizer=lambda target: (target != -100).sum(),
    )


@promise
def a_sum_with_a_number(setting):
    same_step(
        setting,
        layers(),
        *data(),
        lambda o, t: (o - t).square().sum(),
        lambda o, t: (o - t).square().sum() / 5,
        normalizer=5,
    )


@error('normalizer=lambda target')
def refuse_a_loss_that_hides_its_count(setting):
    setting.make(layers()).step(
        setting.part(data()[0]), setting.part(labels()), lambda o, t: F.cross_entropy(o, t) * 2
    )


@error('must give a scalar tensor')
def refuse_a_loss_that_is_no_scalar(setting):
    setting.make(layers()).step(*map(setting.part, data()), lambda o, t: o - t)


@promise
def a_loss_with_parameters(setting):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2, dtype=torch.float64))

        def forward(self, output, target):
            return (output * self.scale - target).square().mean()

    module, loss, twin = layers(), Scaled(), Scaled()
    model = setting.make(copy.deepcopy(module))
    x, y = data()
    loss(module(x), y).backward()
    model.step(setting.part(x), setting.part(y), twin)
    same_grads(model, module)
    if setting.is_last:
        same(twin.scale.grad, loss.scale.grad)


class WithLoss(nn.Module):
    """A model with a loss of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4).double(), nn.Linear(4, 2).double()

    def forward(self, x, labels):
        x = self.first(x).tanh()
        return {'loss': F.cross_entropy(self.last(x), labels)}


class EarlyLoss(WithLoss):
    """A model whose last layer comes after the loss."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Linear(1, 1).double()

    def forward(self, x, labels):
        return {'loss': self.scale(super().forward(x, labels)['loss'].reshape(1, 1)).sum()}


def with_loss(net=None):
    """Return a converted model with a loss of its own."""
    from torchgpipe.sequential import to_sequential

    torch.manual_seed(0)
    return to_sequential(
        WithLoss() if net is None else net,
        check_sample=net is None,
        sample=Arguments(data()[0], labels=labels() % 2),
    )


def by_its_loss(setting, function):
    """Call `step` or `evaluate` with the loss that a model has computed."""
    input = Arguments(setting.part(data()[0]), labels=setting.part(labels()))
    function(input, None, lambda output, _: output['loss'])


@error('normalizer=lambda target')
def refuse_a_step_by_a_loss_in_the_model(setting):
    by_its_loss(setting, setting.make(with_loss()).step)


@error('normalizer=lambda target')
def refuse_a_step_by_a_loss_in_an_early_layer(setting):
    by_its_loss(setting, setting.make(with_loss(EarlyLoss())).step)


@promise
def refuse_a_mean_of_a_loss_in_the_model(setting):
    model = setting.make(with_loss(), gather={'loss': 'mean'})
    with pytest.raises((ValueError, RuntimeError)) as caught:
        model(setting.part(data(8)[0]), labels=setting.part(labels(8)))
    assert not setting.is_last or 'labels' in str(caught.value)


@promise
def a_loss_in_the_model_by_a_function(setting):
    model = setting.make(with_loss(), gather={'loss': lambda x, labels: (labels != -100).sum()})
    torch.manual_seed(0)
    own, target = setting.part(data()[0]), setting.part(labels())
    with torch.no_grad():
        expected = WithLoss()(own, target)
    same_call(setting, model, expected, own, labels=target)


@promise
def return_the_output(setting):
    module, (x, y) = layers(), data()
    model = setting.make(copy.deepcopy(module))
    loss, output = model.step(setting.part(x), setting.part(y), F.mse_loss, return_output=True)
    same(loss, F.mse_loss(module(x), y).detach())
    if setting.is_last:
        same(output, setting.part(module(x)).detach())
        assert not output.requires_grad
    else:
        assert output is None


def evaluated(setting, model, n, loss_fn, target, **options):
    """Return the mean over samples in batches of eight, of which replicas have their parts."""
    x, y = data(n)
    y = y if target is None else target
    xs, ys = (each.tensor_split(setting.replicas)[setting.replica].split(8) for each in (x, y))
    most, total, count = -(-(-(-n // setting.replicas)) // 8), 0, 0
    for k in range(most):
        own = (xs[k], ys[k]) if k < len(xs) else (None, None)
        loss, number = model.evaluate(*own, loss_fn, **options)
        total, count = total + loss * number, count + number
    return total / count, count


@promise
def evaluate_a_mean_over_samples(setting):
    module = layers().eval()
    model = setting.make(copy.deepcopy(module))
    for n in (37, 33, 17, 1 + (setting.replicas > 1)):
        found, count = evaluated(setting, model, n, F.mse_loss, None)
        same(found, F.mse_loss(module(data(n)[0]), data(n)[1]).detach())
        assert count == n
    assert not any(x.grad is not None for x in model.parameters())


@promise
def evaluate_a_mean_over_labels(setting):
    module = layers().eval()
    model = setting.make(copy.deepcopy(module))
    target = torch.arange(37) % 2
    target[8:16] = target[:5] = target[30:] = -100
    expected = F.cross_entropy(module(data(37)[0]), target).detach()
    found, count = evaluated(setting, model, 37, F.cross_entropy, target)
    same(found, expected)
    assert count == (target != -100).sum()
    found, _ = evaluated(
        setting,
        model,
        37,
        lambda o, t: F.cross_entropy(o, t),
        target,
        normalizer=lambda target: (target != -100).sum(),
    )
    same(found, expected)
    every = torch.arange(33) % 2  # One replica has no samples in the last batch.
    found, _ = evaluated(setting, model, 33, lambda o, t: F.cross_entropy(o, t), every)
    same(found, F.cross_entropy(module(data(33)[0]), every).detach())
    target[:] = -100
    assert model.evaluate(setting.part(data(37)[0]), setting.part(target), F.cross_entropy) == (
        0,
        0,
    )


@promise
def evaluate_a_sum(setting):
    module, (x, y) = layers().eval(), data()
    model = setting.make(copy.deepcopy(module))
    loss, count, output = model.evaluate(
        setting.part(x),
        setting.part(y),
        nn.MSELoss(reduction='sum'),
        normalizer=6,
        return_output=True,
    )
    same(loss, (module(x) - y).square().sum().detach() / 6)
    assert count == 6
    if setting.is_last:
        same(output, module(setting.part(x)).detach())
    else:
        assert output is None


@promise
def evaluation_keeps_no_output(setting):
    model, alive = setting.make(layers().eval(), chunks=4), []

    def loss_fn(output, target):
        assert not any(each() is not None for each in alive)
        alive.append(weakref.ref(output))
        return F.mse_loss(output, target)

    model.evaluate(*map(setting.part, data(12)), loss_fn)
    assert len(alive) == 4 * setting.is_last


@error('normalizer=lambda target')
def refuse_to_evaluate_a_loss_in_the_model(setting):
    by_its_loss(setting, setting.make(with_loss().eval()).evaluate)


@promise
def scale_the_loss(setting):
    module, (x, y) = layers(), data()
    model = setting.make(copy.deepcopy(module))
    loss = F.mse_loss(module(x), y)
    (loss * 8).backward()
    same(
        model.step(setting.part(x), setting.part(y), F.mse_loss, scale=lambda x: x * 8),
        loss.detach(),
    )
    same_grads(model, module)


@promise
def a_target_in_another_dimension(setting):
    module, (x, y) = layers(), data()
    model = setting.make(copy.deepcopy(module))
    F.mse_loss(module(x), y).backward()
    model.step(
        setting.part(x), setting.part(y.t(), 1), lambda o, t: F.mse_loss(o, t.t()), target_dim=1
    )
    same_grads(model, module)


@promise
def refuse_a_target_of_other_samples(setting):
    model = setting.make(layers())
    x, y = map(setting.part, data())
    with pytest.raises((ValueError, RuntimeError)) as caught:
        model.step(x, y[:1], F.mse_loss)
    assert not setting.is_last or 'the target has 1 samples' in str(caught.value)


@promise
def steps_by_other_schedules(setting):
    for schedule in ('gpipe', 'zb-h1'):
        same_step(setting, layers(), *data(), F.mse_loss, schedule=schedule)


@promise
def train_for_some_steps(setting):
    module = layers()
    model = setting.make(copy.deepcopy(module))
    optimizers = [torch.optim.AdamW(each.parameters(), 0.1) for each in (model, module)]
    for n in (9, 4, 7):
        for optimizer in optimizers:
            optimizer.zero_grad()
        same_learning(setting, model, module, *data(n))
        for optimizer in optimizers:
            optimizer.step()


@promise
def call_has_a_graph(setting):
    module, (x, y) = layers(), data()
    model = setting.make(copy.deepcopy(module))
    F.mse_loss(module(x), y).backward()
    F.mse_loss(model(x), y).backward()
    same_grads(model, module)


# --- errors, copies, tools
# ------------------------------------------------------------------------------------


class Broken(nn.Module):
    """A layer that raises."""

    def forward(self, x):
        raise ZeroDivisionError('by design')


@error(r"ZeroDivisionError: by design(.|\n)*in partition \d on .*, micro-batch 0 of 2, layer '1'")
def errors_name_the_layer(setting):
    setting.make(nn.Sequential(nn.Tanh(), Broken())).step(
        *map(setting.part, data(out=3)), F.mse_loss
    )


@promise
def refuse_hooks_of_the_whole_model_in_an_evaluation(setting):
    model = setting.make(layers())
    model.register_forward_pre_hook(print)
    with pytest.raises(RuntimeError, match='an evaluation does not call this model as a whole'):
        model.evaluate(*map(setting.part, data()), F.mse_loss)


@promise
def refuse_hooks_of_the_whole_model_in_a_step(setting):
    model = setting.make(layers())
    handle = model.register_forward_hook(print)
    with pytest.raises(RuntimeError, match='register them on its layers'):
        model.step(*map(setting.part, data()), F.mse_loss)
    handle.remove()
    model.step(*map(setting.part, data()), F.mse_loss)


@promise
def hooks_of_layers_run(setting):
    model, seen = setting.make(layers(), checkpoint='never'), []
    for layer in model:
        layer.register_forward_hook(lambda *_: seen.append(1))
    model.step(*map(setting.part, data()), F.mse_loss)
    assert len(seen) == 2 * len(list(model))


@promise
def copy_a_model(setting):
    module = layers()
    model = setting.make(copy.deepcopy(module))
    new = copy.deepcopy(model)
    with torch.no_grad():
        for each in new.parameters():
            each.zero_()
    same_learning(setting, model, module, *data())
    assert all(x.grad is None for x in new.parameters())
    with torch.no_grad():
        for each in module.parameters():
            each.zero_()
    module.zero_grad()
    same_learning(setting, new, module, *data())


@promise
def average_a_model(setting):
    module, (x, y) = layers(), data()
    model = setting.make(copy.deepcopy(module))
    pairs = [(each, torch.optim.swa_utils.AveragedModel(each)) for each in (module, model)]
    for _ in range(2):
        F.mse_loss(module(x), y).backward()
        model.step(setting.part(x), setting.part(y), F.mse_loss)
        for each, average in pairs:
            torch.optim.SGD(each.parameters(), 0.1).step()
            each.zero_grad()
            average.update_parameters(each)
    own = setting.part(x)
    with torch.no_grad():
        same_call(setting, pairs[1][1], pairs[0][1](own), own)


@promise
def copies_follow_a_replaced_layer(setting):
    module = layers()
    model = setting.make(copy.deepcopy(module))
    torch.manual_seed(5)
    module[2] = nn.Linear(4, 2, dtype=torch.float64)
    torch.manual_seed(5 + setting.replica)  # Replicas get the values of the first one.
    if '2' in model._modules:
        model.set_submodule('2', nn.Linear(4, 2, dtype=torch.float64))
    new = copy.deepcopy(model)
    own = setting.part(data()[0])
    with torch.no_grad():
        same_call(setting, new, module(own), own)


@promise
def pickle_a_model(setting):
    model = pickle.loads(pickle.dumps(setting.make(layers())))
    model(data()[0])


class Counted:
    """A backend that counts the graphs it compiles."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return graph.forward


@promise
def compile_partitions(setting):
    torch._dynamo.reset()
    module, (x, y), backend = layers(), data(8), Counted()
    model = setting.make(copy.deepcopy(module))
    model.compile(backend=backend)
    x, y = map(setting.equal_part, (x, y))
    partitions = len([each for each in model.partitions if len(each)])
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # Dynamo reads gradients of tensors that are no leaves.
        model.step(x, y, F.mse_loss)
        assert backend.graphs >= partitions
        graphs = backend.graphs
        with torch.no_grad():
            model.eval()(x)
    assert graphs <= backend.graphs <= graphs + 2 * partitions


@promise
def change_the_dtype(setting):
    model = setting.make(layers(dtype=torch.float32)).to(torch.float64)
    same_learning(setting, model, layers(dtype=torch.float32).double(), *data())


@promise
def refuse_to_move(setting):
    model = setting.make(layers())
    assert model.cpu() is model
    for move in (lambda: model.to('meta'), model.cuda):
        with pytest.raises(TypeError, match='denied to move'):
            move()


@promise
def in_place_of_the_original(setting):
    from torchgpipe.sequential import to_sequential

    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).double(), data()[0]
    holder = SimpleNamespace(net=nn.ModuleDict({'net': net}))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = holder.net['net']

        def forward(self, x):
            return self.net(x) * 2

    net = Net()
    expected = net(x)
    model = setting.make(to_sequential(net, x))
    with model.in_place_of(net):
        same(net(x), expected)


@promise
def a_picture_of_the_settings(setting):
    model = setting.make(layers())
    assert f'balance={model.balance}' in repr(model) and 'chunks=2' in repr(model)
