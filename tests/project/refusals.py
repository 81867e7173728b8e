"""Restrictions of the library: one small program for each row of
``docs/reference/restrictions.md``."""

import random
from collections import OrderedDict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
from pytest import MonkeyPatch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.parametrizations import weight_norm

import torchgpipe.shard as ts
from tests.distributed.refusals import REFUSALS as DISTRIBUTED
from tests.helpers import Call, in_two_memories
from torchgpipe import GPipe, NoChunk, is_recomputing, no_recompute
from torchgpipe.balance import Profile, SkipProfile, profile
from torchgpipe.base.context import check_order
from torchgpipe.base.private import find
from torchgpipe.plan import Costs, Link, Plan, StageCosts, plan, simulate
from torchgpipe.schedule import Schedule, make
from torchgpipe.sequential import from_stages, original_names, to_sequential
from torchgpipe.skip import pop, skippable, stash
from torchgpipe.testing import check_parity
from torchgpipe.timeline import Timeline, compare

CPUS = ['cpu:0', 'cpu:1']


class Net(nn.Sequential):
    """A sequential module with a forward of its own."""

    def forward(self, input):
        return super().forward(input) + 1


@skippable(stash=['x'])
class Stash(nn.Module):
    """Stash a tensor, or whatever a function yields."""

    def __init__(self, function=None):
        super().__init__()
        self.function = function

    def forward(self, input):
        if self.function is None:
            yield stash('x', input)
        elif self.function(input) is not None:
            yield self.function(input)
        return input


@skippable(pop=['x'])
class Pop(nn.Module):
    """Pop it."""

    def __init__(self, in_place=False):
        super().__init__()
        self.in_place = in_place

    def forward(self, input):
        skip = yield pop('x')
        return skip.add_(input) if self.in_place else input + skip


def wrap(*layers, balance=None, devices=CPUS, chunks=2, **options):
    """Wrap layers, in two partitions by default."""
    balance = [1, len(layers) - 1] if balance is None else balance
    return GPipe(nn.Sequential(*layers), balance, devices=devices, chunks=chunks, **options)


def one(*layers, **options):
    """Wrap layers in one partition, all of it checkpointed."""
    return wrap(*layers, balance=[len(layers)], devices=['cpu'], checkpoint='always', **options)


def linear():
    """Return a linear layer."""
    return nn.Linear(4, 4)


def train(model, input=None):
    """Run forward and backward."""
    model(torch.randn(4, 4) if input is None else input).sum().backward()


def on_two_devices(*layers, **options):
    """Train layers in two partitions, as if each had a memory of its own."""
    with MonkeyPatch.context() as patches:
        in_two_memories(patches)
        train(wrap(*layers, **options))


def compiled_in_a_policy():
    """Keep results of a compiled layer."""
    layer = linear()
    layer.compile(backend='eager')
    train(one(layer, keep='products'))


def within_another():
    """Share a parameter with a layer of a pipeline on another device."""
    a, b = linear(), linear()
    b.weight = a.weight
    on_two_devices(a, one(b))


def of_another():
    """Have a layer of a pipeline elsewhere, too."""
    layer = linear()
    wrap(one(layer), layer)


class Between(nn.Module):
    """Two linear layers, and a function of this module and a tensor between them."""

    def __init__(self, function=lambda module, x: x):
        super().__init__()
        self.inside, self.outside = linear(), linear()
        self.function = function
        self.seen = []
        self.write = Call(lambda x, to: (setattr(to, 'x', 0), x)[1])

    def forward(self, x, scale=1):
        return self.outside(self.function(self, self.inside(x * scale)))


class Negated(torch.autograd.Function):
    """A function with a backward of its own."""

    @staticmethod
    def forward(ctx, x):
        return -x


class Frozen(nn.Sequential):
    """Layers that stay in evaluation mode."""

    def train(self, mode=True):
        """Stay in it."""
        return super().train(False)


class Auxiliary(nn.ReLU):
    """One more result in training."""

    def forward(self, x):
        return (x, x) if self.training else {'x': x, 0: x}


def convert(function=lambda module, x: x, **options):
    """Make it sequential."""
    return to_sequential(Between(function), torch.randn(4, 4), **options)


def in_stages(*functions):
    """Make it sequential by hand."""
    return from_stages(Between(), functions, torch.randn(4, 4))


def embedding_and_head():
    """Share a weight between partitions, of which one writes to it."""
    embedding, head = nn.Embedding(4, 4, max_norm=0.1), linear()
    head.weight = embedding.weight
    wrap(embedding, head)(torch.arange(4))


def processes(program):
    """Run a program in the only process of torch.distributed."""
    dist.init_process_group('gloo', rank=0, world_size=1, store=dist.HashStore())
    try:
        program()
    finally:
        dist.destroy_process_group()


def alone(program):
    """Run a program in a parallel group of one."""

    def within():
        ts.distributed.init_process_group()
        try:
            program()
        finally:
            ts.distributed.destroy_process_group()

    return lambda: processes(within)


def sharded(dim):
    """Return a sharded layer."""
    return ts.nn.ParallelLinear(4, 4, dim=dim)


def tagged(input, dim=-1):
    """Tag a tensor."""
    ts.register_parallel_dim(input, dim)
    return input


def other_weight():
    """Put a weight of another shape into a sharded layer."""
    sharded(1).weight = nn.Parameter(torch.randn(3, 4))


def put_behind():
    """Put a parameter into a sharded layer behind its back."""
    layer = sharded(1)
    layer._parameters['weight'] = nn.Parameter(torch.randn(4, 4))
    layer(torch.randn(4, 4))


def tied():
    """Convert one of two layers that have the same weight."""
    embedding, head = nn.Embedding(4, 4), linear()
    head.weight = embedding.weight
    ts.nn.ParallelLinear.convert_parallel_linear(nn.Sequential(embedding, head), dim=1)


def loss_of(*shape, target=None, **options):
    """Compute the loss of logits."""
    target = torch.arange(4) if target is None else target
    ts.nn.functional.parallel_cross_entropy(torch.randn(*shape), target, **options)


def of_a_state_dict(change):
    """Load a state dict into a sharded layer."""
    layer = sharded(1)
    ts.relocate_state_dict(layer, change(layer.state_dict()))


def of_a_checkpoint():
    """Load a checkpoint into a layer of another size."""
    with TemporaryDirectory() as folder:
        ts.save_checkpoint(folder, sharded(1))
        ts.load_checkpoint(folder, ts.nn.ParallelLinear(4, 5, dim=1))


def of_an_optimizer():
    """Load the state of an optimizer into one of more parameters."""
    layer = sharded(1)
    one, other = (torch.optim.SGD(each, 0.1) for each in ([layer.weight], layer.parameters()))
    ts.relocate_optimizer_state_dict(other, one.state_dict())


class Communicates(nn.Module):
    """A layer that communicates."""

    def __init__(self, says_so=True):
        super().__init__()
        self.communicates = says_so

    def forward(self, input):
        check_order()
        return input


def own_parameter():
    """Return the sequential module a parameter."""
    module = nn.Sequential(linear())
    module.register_parameter('scale', nn.Parameter(torch.ones(1)))
    GPipe(module, [1], devices=['cpu'])


def own_hook():
    """Return the sequential module a hook."""
    module = nn.Sequential(linear())
    module.register_forward_hook(print)
    GPipe(module, [1], devices=['cpu'])


def replaced():
    """Replace a layer of a partition."""
    model = wrap(linear(), linear())
    model.partitions[0][0] = linear()
    train(model)


def parameter_step():
    """Step before backward."""
    model = one(linear())
    output = model(torch.randn(4, 4))
    model[0].weight.data.add_(0), model[0].weight.detach().add_(1)
    output.sum().backward()


def twice():
    """Go back from two outputs, one after the other."""
    a, b = one(linear(), Call(lambda x: (x, x * 2)))(torch.randn(4, 4))
    a.sum().backward()
    b.sum().backward()


def own_gradient(x):
    """Ask for a gradient within a forward."""
    y = (x * x).sum()
    return torch.autograd.grad(y, x, create_graph=True)[0]


def leave_grad_mode(x):
    """Switch grad mode off for all that comes."""
    torch.set_grad_enabled(False)
    return x


def own_call():
    """Let a layer call the pipeline that runs it."""
    layer = Call(lambda x: layer.model[0](x))
    layer.model = [wrap(linear(), layer)]
    train(layer.model[0])


def while_mutation_is_allowed():
    """Train where PyTorch would copy saved tensors before they are changed."""
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        train(wrap(linear(), linear()))


def in_other_memories():
    """Change a tensor that a copy would separate from another, as if devices had own memories."""
    with (
        patch('torchgpipe.engine.partition.Engine.apart', lambda *_: True),
        patch('torchgpipe.engine.backward_order.copy_tensor', lambda x, *streams: x.clone()),
    ):
        train(wrap(Call(lambda x: (x, x[:])), Call(lambda xs: xs[0].add_(1) + xs[1])))


def handed_on():
    """Forward a tensor that changes in place in each micro-batch."""
    kept = torch.zeros(4)
    wrap(Call(lambda x: (x, kept.add_(1))), Call(lambda xs: xs[0] + xs[1]))(torch.randn(4, 4))


def drawn_elsewhere():
    """Let another thread draw after each look at the generator's state."""

    def state(*_):
        return torch.Generator().manual_seed(int(torch.randint(1 << 30, ()))).get_state()

    with patch('torchgpipe.engine.checkpoint.random.state_of', state):
        train(one(linear(), nn.Dropout()))


def transformed(x):
    """Transform a function within a forward."""
    return x * torch.func.grad(lambda x: x.square().sum())(x)


def ragged(x):
    """Return a nested tensor."""
    return torch.nested.as_nested_tensor(list(x), layout=torch.jagged)


def padded(x):
    """Return a plain one."""
    return torch.nested.to_padded_tensor(x, 0.0)


def begins_to_write():
    """Write to a parameter in the second step."""

    def forward(x):
        layer.steps += 1
        if layer.steps > 2:  # two micro-batches
            with torch.no_grad():
                layer.linear.weight.mul_(0.5)
        return layer.linear(x)

    layer = Call(forward)
    layer.linear, layer.steps = linear(), 0
    model = one(layer)
    train(model)
    train(model)


def changed_input():
    """Change the input of a checkpointed micro-batch between forward and backward."""
    x = torch.ones(4, 4)
    output = one(linear())(x)
    x.add_(1)
    output.sum().backward()


def change_what_was_popped():
    """Change a skip in place where it is popped."""
    train(
        wrap(Stash(lambda x: stash('x', x * 2)), Pop(in_place=True), linear(), checkpoint='always')
    )


def with_gradient():
    """Profile a model that has been trained."""
    module = nn.Sequential(linear(), linear())
    train(module)
    profile(module, torch.randn(4, 4), device='cpu', timeout=0)


def costs(*layers):
    """Profile layers."""
    return profile(nn.Sequential(*layers), torch.randn(4, 4), device='cpu', timeout=0)


def parity(*layers, **options):
    """Compare a model with itself."""
    check_parity(nn.Sequential(linear(), *layers), torch.randn(4, 4), **options)


def add_one(x):
    """Change the input in place."""
    return x.add_(1)


def change_skip():
    """Change a skip in place, in another partition."""
    model = wrap(
        linear(), Stash(), Call(lambda x: x.mul_(2)), Pop(), balance=[2, 1, 1], devices=['cpu'] * 3
    )
    train(model)


def unwrapped_twice():
    """Go back twice through a graph that is not retained."""
    loss = torch.ones(1, requires_grad=True).exp()
    loss.backward()
    loss.backward()


def unwrapped_transform():
    """Transform a function under hooks."""
    with torch.autograd.graph.saved_tensors_hooks(id, id):
        transformed(torch.ones(1))


def take_step(loss=None, model=None, size=4, **options):
    """Take a step of a model of two partitions."""

    def mean(output, target):
        return (output - target).square().mean()

    gpipe = wrap(linear(), linear()) if model is None else model
    return gpipe.step(torch.randn(4, 4), torch.randn(size, 4), loss or mean, **options)


def counted():
    """Take a step in another order than expected by a layer that counts its calls."""

    def count(x):
        layer.calls += 1
        return x

    layer = Call(count)
    layer.calls = 0
    take_step(
        model=wrap(layer, linear(), layer, linear(), balance=[1] * 4, devices=CPUS * 2, chunks=2),
        schedule='interleaved',
    )


def hooked():
    """Take a step of a model with a hook of its own."""
    model = wrap(linear(), linear())
    model.register_forward_hook(lambda *args: None)
    take_step(model=model)


#: Programs that raise in PyTorch without the library, for the rows that say so, in their order.
UNWRAPPED = [lambda: nn.BatchNorm1d(4)(torch.randn(1, 4)), unwrapped_twice, unwrapped_transform]


#: In the order of the page.
def into_a_folder_of_folders():
    with TemporaryDirectory() as folder:
        (Path(folder) / 'model' / 'checkpoint-1').mkdir(parents=True)
        wrap(linear(), linear()).save_pretrained(Path(folder) / 'model')


REFUSALS = [
    lambda: GPipe(linear(), [1], devices=['cpu']),
    lambda: GPipe(Net(linear()), [1], devices=['cpu']),
    own_parameter,
    own_hook,
    lambda: GPipe(nn.Sequential(OrderedDict(partitions=linear())), [1], devices=['cpu']),
    lambda: wrap(linear(), nn.LazyLinear(4)),
    lambda: wrap(linear(), torch.jit.script(linear())),
    within_another,
    of_another,
    lambda: GPipe(nn.Sequential(linear()), devices=['cpu']),
    lambda: wrap(linear(), linear(), balance=[1, 2]),
    lambda: wrap(linear(), linear(), balance=[0, 2]),
    lambda: wrap(linear(), linear(), balance=costs(nn.ReLU(), linear()).balance(2, chunks=2)),
    lambda: wrap(linear(), linear(), balance=plan(costs(linear(), linear()), devices=CPUS)),
    lambda: wrap(linear(), linear(), devices=['cpu']),
    lambda: wrap(linear(), linear(), devices=['cpu', 'cuda:99']),
    lambda: wrap(linear(), linear(), chunks=0),
    lambda: wrap(linear(), linear(), checkpoint='sometimes'),
    lambda: wrap(linear(), linear(), checkpoint=['always']),
    lambda: wrap(nn.Linear(4, 4, device='meta'), weight_norm(nn.Linear(4, 4, device='meta'))),
    lambda: wrap(linear(), linear(), weights=linear().state_dict(prefix='0.')),
    lambda: wrap(
        nn.Linear(4, 4, device='meta'),
        nn.Linear(4, 4, device='meta'),
        weights=nn.Sequential(nn.Linear(4, 5), nn.Linear(4, 4)).state_dict(),
    ),
    lambda: wrap(linear(), linear(), weights='nowhere'),
    into_a_folder_of_folders,
    lambda: wrap(linear(), linear()).save_adapter('nowhere'),
    lambda: wrap(Stash(), linear()),
    lambda: convert(lambda module, x: x if x.sum() > 0 else -x),
    lambda: convert(lambda module, x: x if module.training else -x),
    lambda: to_sequential(Frozen(nn.BatchNorm1d(4)), torch.randn(4, 4)),
    lambda: convert(lambda module, x: torch.no_grad()(torch.neg)(x)),
    lambda: convert(lambda module, x: x * random.random()),
    lambda: convert(lambda module, x: (setattr(module, 'last', x), x)[1]),
    lambda: convert(lambda module, x: (module.seen.append(0), x)[1]),
    lambda: convert(lambda module, x: module.write(x, SimpleNamespace()), leaves=['write']),
    lambda: convert(lambda module, x, other=linear(): other(x)),
    lambda: convert(lambda module, x, negated=Negated.apply: negated(x)),
    lambda: convert(lambda module, x, last={}: (last.update(x=x), x)[1]),
    lambda: convert(lambda module, x: torch.FloatTensor([x.shape[0]]) + x),
    lambda: to_sequential(Between(lambda module, x: sum(x.chunk(2)))),
    lambda: in_stages(Between.forward, nn.ReLU()),
    lambda: to_sequential(Net(Auxiliary(), Call(lambda x: x[0])), torch.randn(4, 4)),
    lambda: convert(lambda module, x: x - x.mean(0)),
    lambda: to_sequential(nn.Sequential(linear(), Call(lambda x: (x, len(x)))), torch.ones(4, 4)),
    lambda: convert(lambda module, x: x if len(x) > 3 else -x),
    lambda: convert(leaves=['encoder']),
    lambda: convert()(torch.randn(4, 4), scale=2),
    lambda: to_sequential(Between())(torch.randn(4, 4), scale=2),
    lambda: convert(lambda module, x: x if x.dim() > 2 else -x)(torch.randn(4, 4, 4)),
    lambda: original_names(linear().state_dict()),
    lambda: in_stages(linear()),
    lambda: in_stages(
        lambda net, x: (net.inside if net.training else net.outside)(x),
        lambda net, x: net.outside(x),
    ),
    lambda: no_recompute(torch.relu),
    lambda: one(linear(), keep='some'),
    lambda: one(linear(), keep=[torch.relu]),
    lambda: one(linear(), keep={'1': 'products'}),
    lambda: wrap(linear(), linear(), keep='products', checkpoint='never'),
    lambda: train(one(linear(), keep=lambda ctx, operation, *args: 1)),
    lambda: one(linear(), keep=[torch.ops.aten.view.default]),
    compiled_in_a_policy,
    lambda: wrap(linear(), linear()).to('meta'),
    replaced,
    lambda: on_two_devices(*[nn.BatchNorm1d(4)] * 2),
    embedding_and_head,
    lambda: wrap(linear(), linear())({'x': torch.randn(4, 4), 'y': object()}),
    lambda: wrap(linear(), Call(NoChunk), linear(), balance=[2, 1])(torch.randn(4, 4)),
    lambda: wrap(linear(), linear())(torch.randn(4, 4), mask=None),
    lambda: wrap(linear(), linear(), batch_dim='last'),
    lambda: wrap(linear(), linear(), batch_dim=None),
    lambda: wrap(linear(), linear(), batch_dim={'mask': 1})(torch.randn(4, 4)),
    lambda: wrap(linear(), linear())((torch.randn(4, 4), torch.randn(3, 4))),
    lambda: wrap(linear(), linear())([NoChunk(torch.randn(4, 4))]),
    lambda: wrap(linear(), linear())(
        torch.nested.nested_tensor([torch.zeros(2, 4), torch.zeros(3, 4)], layout=torch.jagged)
    ),
    lambda: wrap(Call(lambda x, y: y.add_(1)), linear())(
        torch.randn(4, 4), NoChunk(torch.randn(4))
    ),
    lambda: wrap(linear(), linear())(torch.randn(0, 4)),
    lambda: wrap(linear(), linear())(torch.tensor(1.0)),
    lambda: train(wrap(linear(), Call(lambda x: x.mean()))),
    lambda: train(wrap(linear(), Call(lambda x: x[:1]), chunks=2)),
    lambda: wrap(linear(), Call(lambda x: x @ x.T), chunks=2)(torch.randn(3, 4)),
    lambda: wrap(linear(), Call(lambda x: [x] * len(x)), chunks=3)(torch.randn(4, 4)),
    lambda: train(wrap(Call(lambda x: (setattr(x, 'mask', x > 0), x)[1]), linear())),
    lambda: train(wrap(linear(), nn.BatchNorm1d(4), chunks=4)),
    lambda: wrap(linear(), linear())(torch.eye(4).to_sparse()),
    lambda: make_fx(wrap(linear(), linear()))(torch.randn(4, 4)),
    lambda: torch.func.vmap(wrap(linear(), linear()))(torch.randn(4, 4, 4)),
    lambda: find('torch._C:_gone', 'this')(),
    while_mutation_is_allowed,
    own_call,
    lambda: train(wrap(Call(leave_grad_mode), linear())),
    lambda: train(wrap(Stash(lambda x: None), Pop())),
    lambda: train(wrap(Stash(lambda x: stash('y', x)), Pop())),
    change_skip,
    in_other_memories,
    handed_on,
    drawn_elsewhere,
    lambda: train(wrap(linear(), Call(add_one), checkpoint='always')),
    change_what_was_popped,
    lambda: train(one(linear(), Call(lambda x: x * 2 if is_recomputing() else x))),
    parameter_step,
    twice,
    lambda: train(one(linear(), Call(own_gradient))),
    lambda: train(one(linear(), Call(ragged), Call(torch.relu), Call(padded))),
    lambda: train(one(linear(), Call(transformed))),
    changed_input,
    begins_to_write,
    with_gradient,
    lambda: costs(linear()).balance(2, chunks=2),
    lambda: costs(linear(), nn.ReLU(inplace=True)).balance(2, chunks=2),
    lambda: costs(linear(), linear()).balance(2, chunks=2, memory_limit=10),
    lambda: costs(linear(), linear()).balance(2, chunks=2, memory_limit=[10, 2000]),
    lambda: costs(linear(), linear()).balance(2, chunks=2, memory_limit=[1000]),
    lambda: costs(linear(), linear()).balance(2, chunks=2, memory_limit=-1),
    lambda: costs(linear(), linear()).balance(2, chunks=2, param_scale=float('nan')),
    lambda: plan(costs(linear(), linear()), devices=['cpu', 'cpu:0']),
    lambda: plan(costs(linear(), linear()), devices=CPUS, schedules=[]),
    lambda: plan(costs(linear(), linear()), devices=CPUS, memory_limit=10),
    lambda: plan(costs(linear(), linear()), devices=CPUS, memory_limit=161),
    lambda: StageCosts(forward=-1.0, backward=1.0),
    lambda: Link(bandwidth=float('nan')),
    lambda: simulate(make('1f1b', 2, 2), Costs([StageCosts(1.0, 1.0)] * 2, links=[[Link()]])),
    lambda: Costs([StageCosts(1.0, 1.0)] * 2, [SkipProfile(1, 1, 8)]),
    lambda: Costs.of(costs(linear(), linear()), [3], chunks=2),
    lambda: simulate(make('1f1b', 2, 2), Costs([StageCosts(1.0, 1.0)])),
    lambda: Profile((), (), batch_size=0, input_bytes=4, device='cpu'),
    lambda: Profile.from_dict({}),
    lambda: Plan.from_dict({}),
    lambda: compare(Timeline([]), Timeline([])),
    lambda: parity(Call(lambda x: x - x.mean(0))),
    lambda: parity(steps=0),
    lambda: parity(Call(lambda x: x / 0)),
    lambda: take_step(model=wrap(linear(), linear()).eval()),
    hooked,
    counted,
    lambda: take_step(schedule='2f2b'),
    lambda: take_step(
        model=wrap(*[linear() for _ in range(3)], balance=[1] * 3, devices=[*CPUS, 'cpu:0']),
        schedule='zb-v',
    ),
    lambda: take_step(schedule='auto'),
    lambda: take_step(schedule=make('1f1b', 2, 3)),
    lambda: take_step(schedule=Schedule.parse('0B0,0F0')),
    lambda: Schedule.parse('0F0,0X0'),
    lambda: take_step(schedule=make('interleaved', 1, 2, 2)),
    lambda: take_step(size=5),
    lambda: take_step(lambda output, target: output),
    lambda: take_step(lambda output, target: output.detach().mean()),
    lambda: take_step(nn.MSELoss(reduction='sum')),
    lambda: take_step(partial(nn.functional.mse_loss, reduction='none')),
    lambda: wrap(linear(), linear()).step(
        torch.randn(4, 4),
        torch.tensor([0, 1, -100, 3]),
        lambda *given: nn.functional.cross_entropy(*given),
    ),
    lambda: take_step(normalizer=0),
    lambda: take_step(normalizer=lambda target: target.sum()),
    lambda: take_step(normalizer=lambda target: 0),
    ts.distributed.get_group,
    ts.distributed.init_process_group,
    alone(lambda: ts.distributed.init_process_group()),
    lambda: processes(lambda: ts.distributed.init_process_group(2)),
    lambda: processes(
        lambda: ts.distributed.init_process_group(
            mesh=init_device_mesh('cpu', (1, 1), mesh_dim_names=('data', 'model'))
        )
    ),
    alone(lambda: sharded(2)),
    alone(other_weight),
    alone(tied),
    alone(
        lambda: ts.nn.ParallelLinear.convert_parallel_linear(
            nn.utils.spectral_norm(linear()), dim=1
        )
    ),
    alone(lambda: nn.utils.parametrizations.weight_norm(sharded(1))(torch.randn(4, 4))),
    alone(put_behind),
    alone(lambda: torch.func.grad(lambda x: sharded(1)(x).sum())(torch.randn(4, 4))),
    alone(lambda: ts.distributed.gather(torch.randn(4), size=5)),
    alone(lambda: sharded(0)(torch.randn(4, 2))),
    alone(lambda: sharded(1)(tagged(torch.randn(4, 4)))),
    alone(lambda: ts.nn.ParallelDropout()(torch.randn(4, 4))),
    alone(lambda: ts.dtensor(tagged(torch.randn(4, 4)))),
    alone(lambda: loss_of(4, 3)),
    alone(lambda: loss_of(4, 4, target=torch.rand(4))),
    alone(lambda: loss_of(4, 4, target=torch.arange(4).int())),
    alone(lambda: loss_of(4, 4, 2)),
    alone(lambda: loss_of(4, 4, weight=torch.ones(3))),
    alone(lambda: of_a_state_dict(lambda values: {'weight': values['weight']})),
    alone(of_a_checkpoint),
    alone(lambda: of_a_state_dict(lambda values: {**values, 'weight': torch.randn(2, 4)})),
    alone(of_an_optimizer),
    lambda: take_step(model=wrap(Communicates(), linear(), Communicates())),
    lambda: take_step(
        model=wrap(
            linear(),
            Communicates(),
            Communicates(False),
            balance=[1, 1, 1],
            devices=['cpu:0', 'cpu:1', 'cpu:2'],
        )
    ),
    lambda: wrap(linear(), Communicates(False))(torch.randn(4, 4)),
    *[partial(processes, program) for program in DISTRIBUTED],
]
