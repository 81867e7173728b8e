"""Refusals with many processes: a small program in one of them for each row of that section."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

from tests.distributed.models import Behind
from torchgpipe import NoChunk
from torchgpipe import shard as ts
from torchgpipe.distributed import DistributedGPipe, init_mesh, load_checkpoint, save_checkpoint
from torchgpipe.distributed.agreement import Facts, NotBegun, check_settings
from torchgpipe.distributed.checkpoint import check_scheduler
from torchgpipe.distributed.comparison import difference
from torchgpipe.distributed.failures import Watch
from torchgpipe.distributed.layers import check_plan
from torchgpipe.distributed.mesh import Axis, axis_of
from torchgpipe.distributed.rank import Rank, other_model, other_tensors
from torchgpipe.distributed.replicas import Replicas
from torchgpipe.distributed.starts import (
    StepFacts,
    check_counts,
    check_equal,
    check_losses,
    check_same_samples,
)
from torchgpipe.distributed.steps import check_same_losses
from torchgpipe.distributed.ties import Ties, tie_again
from torchgpipe.distributed.transport import Header, Messages, outline_of
from torchgpipe.distributed.units import check_shardable
from torchgpipe.schedule import Action
from torchgpipe.schedule.messages import Send
from torchgpipe.shard.nn import Experts
from torchgpipe.shard.sums import like

CPU = torch.device('cpu')
WEIGHT = torch.ones(2, 2)


def wrap(*layers, **options):
    """Make a model of one process."""
    return DistributedGPipe(
        options.pop('module', nn.Sequential(*layers)),
        [1],
        **{'mesh': init_mesh(device_type='cpu'), **options},
    )


def other_axes():
    """Name an axis as it is named elsewhere."""
    wrap(nn.Linear(2, 2), mesh=init_device_mesh('cpu', (1,), mesh_dim_names=('dp',)))


def raised(error):
    """Raise an error."""
    raise error


def clip_one_rank():
    """Clip the gradients of one rank of several."""
    model = wrap(nn.Linear(2, 2))
    model._rank.mesh = SimpleNamespace(pipe=SimpleNamespace(size=2))
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def with_shards():
    """Give a shard of torchgpipe.shard to a model."""
    init_mesh(device_type='cpu')
    ts.distributed.init_process_group()
    try:
        wrap(ts.nn.ParallelLinear(2, 2, dim=1))
    finally:
        ts.distributed.destroy_process_group()


def scheduler_of_other_groups():
    """Load the state of a scheduler into one of more groups."""
    parameters = [{'params': [nn.Parameter(WEIGHT)]} for _ in range(2)]
    scheduler = StepLR(torch.optim.SGD(parameters, 0.1), 1)
    check_scheduler('scheduler', scheduler, {'base_lrs': [0.1]}, [])


def split_in_two_ways():
    """Split a weight in one of its two places."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    mesh = init_device_mesh('cpu', (1,))
    first.weight = nn.Parameter(distribute_tensor(first.weight, mesh, [Shard(0)]))
    tie_again([['0.weight', '1.weight']], {'0': first, '1': second})


def rank_of():
    """Make an object with the parts of a rank that its checks read."""
    return SimpleNamespace(
        mesh=SimpleNamespace(same_stages=[{0, 1}], data=SimpleNamespace(group=1)),
        replaced=[],
        replicas=SimpleNamespace(records=SimpleNamespace(of=lambda x: None)),
        _check_used=lambda x, where: None,
    )


def unused(x=WEIGHT):
    """Let a layer have a parameter of another rank."""
    rank = SimpleNamespace(_unused={id(x): ('0.weight', lambda: x)})
    Rank._check_used(rank, x, "'1.shared'")


def hooked():
    """Make a model of a parameter with a hook, which becomes parts."""
    layer = nn.Linear(2, 2)
    layer.weight.register_hook(abs)
    wrap(layer, data='shard', mp_policy=MixedPrecisionPolicy())


def replaced():
    """Replace a tied weight."""
    module = nn.Sequential(nn.Linear(2, 2))
    ties = Ties(module._modules, [((0, '0.weight'), (1, '1.weight'))], [0, 1], None, 0)
    module[0].weight = nn.Parameter(torch.ones(2, 2))
    ties.check()


def shared_input():
    """Let an input of all micro-batches learn, over replicas."""
    model = wrap(nn.Linear(2, 2))
    axis = SimpleNamespace(group=1, size=2)
    model._rank.mesh = replace(model._rank.mesh, data=axis)
    x = torch.ones(2, 2)
    model.step((NoChunk(x.clone().requires_grad_()), x), x, F.mse_loss)


def waits():
    """Freeze a parameter whose gradient waits."""
    model = wrap(nn.Linear(2, 2))
    x = torch.ones(2, 2)
    with model.no_sync():
        model.step(x, x, F.mse_loss)
    model.get_parameter('0.bias').requires_grad_(False)
    model.step(x, x, F.mse_loss)


def sharded(change):
    """Make a model whose parameters are parts, and change it."""
    model = wrap(nn.Linear(2, 2), data='shard', mp_policy=MixedPrecisionPolicy())
    change(model.get_submodule('0'))
    model.step(torch.ones(2, 2), torch.ones(2, 2), F.mse_loss)


class Doubles(nn.Linear):
    """A layer that changes its weight."""

    def forward(self, x):
        with torch.no_grad():
            self.weight.mul_(2)
        return super().forward(x)


def changed_in_shards():
    """Change a weight of which ranks have parts."""
    model = wrap(Doubles(2, 2), data='shard', mp_policy=MixedPrecisionPolicy())
    model.step(torch.ones(2, 2), torch.ones(2, 2), F.mse_loss)


def direct_with_a_hook():
    """Give a parameter with a hook a gradient that does not come through its leaf."""
    axis = Axis('data', 1, 0, None, None)
    layers = nn.Sequential(nn.Linear(2, 2))
    x = layers[0].weight
    replicas = Replicas({0: layers}, axis, {}, {id(x)})
    x.register_hook(abs)
    with replicas.direct_gradients():
        x.grad = torch.ones_like(x)
        replicas.take_direct()


class Uses(nn.Linear):
    """A layer that uses the weight of another one, in its last micro-batch."""

    def forward(self, x):
        return super().forward(x) * (self.others[0].weight.sum() if x.sum() > 0 else 1)


def shards(layers, loss_of=lambda model: F.mse_loss):
    """Train two stages whose parameters are gathered."""
    model = DistributedGPipe(
        layers,
        [1, 1],
        mesh=init_mesh(device_type='cpu'),
        chunks=4,
        data='shard',
        mp_policy=MixedPrecisionPolicy(),
        checkpoint='never',
    )
    model.step(
        torch.tensor([[-1.0], [-1.0], [-1.0], [1.0]]).expand(4, 2),
        torch.ones(4, 2),
        loss_of(model),
    )


def used_later():
    """Use a parameter of the second stage in the first one."""
    layers = nn.Sequential(Uses(2, 2), nn.Linear(2, 2))
    layers[0].others = [layers[1]]
    shards(layers)


def descending():
    """Make a mesh in another order."""
    mesh = SimpleNamespace(mesh=torch.tensor([1, 0]), mesh_dim_names=('pipe',))
    axis_of(mesh, 'pipe')


def unreadable():
    """Load where files can be seen, and not read."""
    with patch.object(FileSystemReader, 'read_data', side_effect=OSError('no such device')):
        checkpoint(made)()


def frozen_on_one():
    """Tie weights of two ranks, of which one is frozen."""
    module = nn.Sequential(nn.Linear(2, 2))
    ties = Ties(module._modules, [((0, '0.weight'), (1, '1.weight'))], [0, 1], None, 0)
    with patch.object(ties, '_sum_of', lambda x, *others: (x, 1, 1)):
        ties.sum([])


def other_message():
    """Send a tensor with another shape than in an earlier step."""
    message = Send(Action(0, 'F', 0), 1)
    known = {message: Header((outline_of(0, torch.ones(2)),))}
    Messages(None, [0, 0], CPU, known).send(message, Header((outline_of(0, torch.ones(3)),)), [])


class Fails(nn.Linear):
    """A layer that fails."""

    def forward(self, x):
        raise ValueError('it is broken')


def goes_on():
    """Take another step after one that has failed."""
    model = wrap(Fails(2, 2))
    for _ in range(2):
        try:
            model.step(torch.ones(2, 2), torch.ones(2, 2), F.mse_loss)
        except ValueError:
            pass


def ended():
    """End a step as another rank does."""
    watch = Watch(init_mesh(device_type='cpu'))
    watch._name = 'rank 0 (data 0, pipe 0, tensor 0)'
    watch._monitor = SimpleNamespace(ask=lambda: 'rank 1 raised ValueError: it is broken')
    with watch.run('a step'):
        raise NotBegun


def made(layer=None, kind=torch.optim.SGD):
    """Make a layer and its optimizer."""
    module = nn.Sequential(layer or nn.Linear(2, 2))
    return module, kind(module.parameters(), lr=0.1)


def checkpoint(load, change=lambda folder: None, save=made):
    """Load a checkpoint that does not fit."""

    def program():
        with TemporaryDirectory() as folder:
            save_checkpoint(Path(folder) / 'model', *save())
            change(Path(folder) / 'model')
            load_checkpoint(Path(folder) / 'model', *load())

    return program


def checkpoint_in_the_way():
    """Save to a name beside another checkpoint."""
    with TemporaryDirectory() as folder:
        for name in ('best.before', 'best'):
            save_checkpoint(Path(folder) / name, *made())


def other_things():
    """Save into a folder with other things in it."""
    with TemporaryDirectory() as folder:
        (Path(folder) / 'notes.txt').touch()
        save_checkpoint(folder, *made())


def not_written():
    """Save where there is no room."""
    with TemporaryDirectory() as folder, patch('torch.save', side_effect=OSError('no space left')):
        save_checkpoint(folder, *made())


def other_options():
    """Make an optimizer of two groups."""
    module, _ = made()
    return module, torch.optim.SGD(
        [{'params': [module[0].weight]}, {'params': [module[0].bias], 'lr': 0.2}], lr=0.1
    )


def nested_state():
    """Make an optimizer that keeps a list."""
    module, optimizer = made()
    optimizer.state[module[0].weight]['history'] = [torch.ones(2)]
    return module, optimizer


def frozen_bias():
    """Make an optimizer of the weight alone."""
    module, _ = made()
    return module, torch.optim.SGD([module[0].weight], lr=0.1)


REFUSALS = [
    lambda: init_mesh(pipe=2, device_type='cpu'),
    other_axes,
    lambda: wrap(nn.Linear(2, 2), data='fsdp'),
    lambda: wrap(nn.Linear(2, 2), places=[1]),
    lambda: wrap(module=[nn.Linear(2, 2)]),
    lambda: wrap(module=[lambda: 3]),
    lambda: wrap(nn.Linear(2, 2), tensor_plan={'1': None}),
    lambda: check_plan({}, nn.Sequential(), 2),
    split_in_two_ways,
    lambda: raised(RuntimeError(difference(['0.weight'], [0, 1], 'data'))),
    lambda: raised(RuntimeError(difference(['0.weight'], [0, 1], 'tensor', 'the gradient of '))),
    with_shards,
    clip_one_rank,
    lambda: raised(other_model(0, [('0.a', (2,))], 1, [])),
    lambda: raised(other_tensors(0, [('0.a', (2,))], 1, [])),
    lambda: raised(other_tensors(0, [('0.a', ()), ('0.b', ())], 1, [('0.b', ()), ('0.a', ())])),
    lambda: Rank.check_states(rank_of(), {0: Facts(state=1), 1: Facts(state=2)}),
    lambda: check_same_samples({0: StepFacts(samples=1), 1: StepFacts(samples=2)}, [[0, 1]]),
    lambda: check_losses({0: StepFacts(normalizer=6.0), 1: StepFacts()}),
    lambda: check_losses({0: StepFacts(loss=1), 1: StepFacts()}),
    lambda: check_same_losses({0: 1.0, 1: 2.0}),
    unused,
    lambda: Rank.check_learning(rank_of(), {0: (WEIGHT, 'stage 1')}, []),
    direct_with_a_hook,
    hooked,
    lambda: check_shardable(nn.ModuleList([nn.ParameterList([torch.empty(0)])]), set()),
    lambda: check_shardable(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2).double()]), set()),
    lambda: sharded(lambda layer: layer.weight.register_hook(abs)),
    replaced,
    waits,
    shared_input,
    lambda: sharded(lambda layer: setattr(layer, 'bias', nn.Parameter(torch.ones(2)))),
    changed_in_shards,
    used_later,
    lambda: shards(
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
        lambda model: Behind(model.get_submodule('0')),
    ),
    lambda: wrap(nn.Linear(2, 2), max_active_stages=2),
    lambda: like(torch.ones(2, 2), torch.eye(2).to_sparse()),
    descending,
    lambda: check_equal({0: 2, 1: 3}),
    lambda: check_counts([1.0, 0.0]),
    lambda: Experts(2, 2, 2)(torch.full((1, 2), torch.nan)),
    lambda: check_settings('a step of this model', {0: Facts(1), 1: Facts(2)}),
    ended,
    goes_on,
    lambda: outline_of(0, torch.eye(2).to_sparse()),
    other_message,
    frozen_on_one,
    lambda: load_checkpoint('nowhere', *made()),
    checkpoint(made, lambda folder: (folder / '.metadata').write_text('?')),
    other_things,
    checkpoint_in_the_way,
    not_written,
    unreadable,
    checkpoint(made, lambda folder: next(folder.glob('*.distcp')).unlink()),
    checkpoint(lambda: made(nn.Sequential(nn.Linear(2, 2)))),
    checkpoint(lambda: made(nn.Linear(2, 3))),
    checkpoint(made, save=lambda: made()[:1]),
    checkpoint(lambda: (made()[0], made()[1])),
    checkpoint(frozen_bias),
    checkpoint(lambda: made(kind=torch.optim.AdamW)),
    checkpoint(made, save=other_options),
    checkpoint(made, save=nested_state),
    scheduler_of_other_groups,
]
