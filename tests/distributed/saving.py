"""Layouts in which a model is saved and loaded: meshes, and one process without any."""

from collections import OrderedDict

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional as F

from tests.distributed.models import MODELS, batch, full
from torchgpipe import GPipe
from torchgpipe.distributed import DistributedGPipe, init_mesh, load_checkpoint, save_checkpoint
from torchgpipe.distributed.layers import Values, fill

OFFLOAD = {'data': 'shard', 'offload_policy': CPUOffloadPolicy()}

PLAN = {'*.up': ColwiseParallel(), '*.down': RowwiseParallel()}

#: The axes of a mesh, and options; without axes, the model is in one process.
LAYOUTS = {
    'gpipe': (None, {}),
    'plain': (None, {}),
    'pipe': ({'pipe': 2}, {}),
    'replicate': ({'data': 2, 'pipe': 2}, {}),
    'shard': ({'data': 2, 'pipe': 2}, {'data': 'shard'}),
    'offload': ({'data': 2}, {**OFFLOAD, 'balance': [1] * 8}),
    'offload-one': ({'data': 1}, {**OFFLOAD, 'balance': [2] * 4}),
    'offload-pipe': ({'data': 2, 'pipe': 2}, {**OFFLOAD, 'balance': [2] * 4}),
    'tensor': ({'pipe': 2, 'tensor': 2}, {'tensor_plan': PLAN}),
    'shard-tensor': ({'data': 2, 'tensor': 2}, {'tensor_plan': PLAN, 'data': 'shard'}),
    'uneven': ({'data': 4}, {'data': 'shard'}),
    'neighbours': (
        {'pipe': 2, 'data': 2, 'axes': ('pipe', 'data', 'tensor')},
        {'data': 'shard'},
    ),
    'v': ({'pipe': 2, 'data': 2}, {'balance': [2, 2, 2, 2], 'places': [0, 1, 1, 0]}),
}


def fresh(name='perceptron'):
    """A model in one process, with the initial values that all meshes have."""
    with torch.device('meta'):
        module = MODELS[name]()
    return nn.Sequential(
        OrderedDict(
            fill(
                module,
                module,
                [*module._modules],
                torch.device('cpu'),
                Values(),
                lambda name, layer: None,
            )
        )
    )


def adam(model, lr=0.02, **options):
    return torch.optim.AdamW(model.parameters(), lr=lr, **options)


class World:
    """A model in a layout, and how it is used there."""

    def __init__(self, layout, name='perceptron'):
        axes, options = LAYOUTS[layout]
        self.data, self.replica = 1, 0
        if axes is not None:
            mesh = init_mesh(**axes)
            with torch.device('meta'):
                module = MODELS[name]()
            settings = {'balance': [4, 4] if 'pipe' in axes else [8], 'chunks': 2, **options}
            self.model = DistributedGPipe(module, mesh=mesh, **settings)
            self.data, self.replica = axes.get('data', 1), mesh.get_local_rank('data')
            self.save, self.load = self.model.save, self.model.load
            return
        self.model = fresh(name)
        if layout == 'gpipe':
            self.model = GPipe(self.model, [5, 3], devices=['cpu', 'cpu'], chunks=2)
        self.save = lambda folder, *args: save_checkpoint(folder, self.model, *args)
        self.load = lambda folder, *args: load_checkpoint(folder, self.model, *args)

    def step(self, x, target):
        """Take a step, and give the loss."""
        if not isinstance(self.model, nn.Sequential) or hasattr(self.model, 'step'):
            x, target = (each.chunk(self.data)[self.replica] for each in (x, target))
            return self.model.step(x, target, F.mse_loss).item()
        loss = F.mse_loss(self.model(x), target)
        loss.backward()
        return loss.item()


def steps(world, optimizer, numbers, scheduler=None):
    """Take some steps; give their losses."""
    losses = []
    for number in numbers:
        optimizer.zero_grad()
        losses.append(world.step(*batch(number, 8)))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return losses


def made(layout, folder, name='perceptron', optimizer=adam):
    """Train for two steps in a layout, with a learning rate that changes, and save."""
    world = World(layout, name)
    own = optimizer(world.model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(own, 0.5)
    losses = steps(world, own, range(2), scheduler)
    world.save(folder, own)
    return losses


def values(model):
    """Return the values of a model, or of a rank's part of it."""
    return {name: full(x) for name, x in model.state_dict().items()}


def same(one, another):
    """Check that one has the same values as another, bit by bit."""
    assert one.keys() >= another.keys()
    for name, x in another.items():
        torch.testing.assert_close(one[name], x, rtol=0, atol=0)
