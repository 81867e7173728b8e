"""The real run that a dry run is compared with: sizes, messages, collectives and allocations."""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from tests.distributed.models import Block, Down, Fork, Head, Join, Middle, Out, Pass, Up
from torchgpipe.base.structure import storage_id
from torchgpipe.distributed import DistributedGPipe, init_mesh
from torchgpipe.dry_run.counters import Counter, calls_seen
from torchgpipe.schedule.generators import V_SHAPED

#: Activations take more memory than parameters, and micro-batches have two sizes.
WIDTH, SIZE, LAYERS = 32, 250, 16

PLAN = {'*.up': ColwiseParallel(), '*.down': RowwiseParallel()}


def blocks(number):
    """Return equal layers."""
    return [Block(WIDTH) for _ in range(number)]


def skips():
    """Return layers with skips over several stages."""
    return [
        Down(WIDTH),
        *blocks(3),
        Middle(WIDTH),
        *blocks(8),
        Up(WIDTH),
        Block(WIDTH),
        Out(WIDTH),
    ]


def tied():
    """Return layers in which the first, a middle one and the last share a weight."""
    first = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)
    return [first, *blocks(6), Head(first.weight), *blocks(7), Head(first.weight)]


def dictionaries():
    """Return layers with dictionaries between them."""
    return [Block(WIDTH), Fork(WIDTH), *(Pass(WIDTH) for _ in range(11)), Join(WIDTH), *blocks(2)]


MODELS = {
    'equal': lambda: blocks(LAYERS),
    'skips': skips,
    'tied': tied,
    'dictionaries': dictionaries,
}


def arguments(model, mesh, schedule, data, checkpoint='except_last'):
    """Return a module, the balance and the options of a case."""
    pipe = mesh['pipe']
    several = schedule == 'interleaved' or schedule in V_SHAPED
    stages = pipe * (1 + several)
    options = {'chunks': 4, 'checkpoint': checkpoint, 'data': data}
    if schedule in V_SHAPED:
        options['places'] = [*range(pipe), *reversed(range(pipe))]
    if mesh['tensor'] > 1:
        options['tensor_plan'] = PLAN
    with torch.device('meta'):
        module = nn.Sequential(*MODELS[model]())
    return module, [LAYERS // stages] * stages, options


def local(x):
    """Return the part of a tensor on this rank."""
    return x.to_local() if isinstance(x, DTensor) else x


def bytes_of(tensors):
    """Return the size of the parts of tensors on this rank."""
    return sum(local(x).numel() * x.element_size() for x in tensors)


class Sends:
    """A context that records each message to another rank: receiver and bytes."""

    def __enter__(self):
        self.seen, self.before = [], (dist.isend, dist.send)
        dist.isend, dist.send = (self.recorded(each) for each in self.before)
        return self.seen

    def recorded(self, function):
        """Return a function that records its calls."""

        def send(x, to, *args, **options):
            self.seen.append((to, x.numel() * x.element_size()))
            return function(x, to, *args, **options)

        return send

    def __exit__(self, *args):
        dist.isend, dist.send = self.before


def peak_of(profiler):
    """Return the most memory that was in use at a time, above the memory at the start."""
    events = sorted(
        (event.start_ns(), k, event.nbytes())
        for k, event in enumerate(profiler.profiler.kineto_results.events())
        if event.name() == '[memory]'
    )
    now = peak = 0
    for _, _, size in events:
        now += size
        peak = max(peak, now)
    return peak


def real(model, mesh, schedule, data, checkpoint='except_last'):
    """Take steps on this rank; return the facts of the second one, and the peak of a third one."""
    module, balance, options = arguments(model, mesh, schedule, data, checkpoint)
    model = DistributedGPipe(module, balance, mesh=init_mesh(**mesh), compare_every=0, **options)
    parameters = [*model.parameters()]
    made = torch.optim.AdamW(parameters)

    def step():
        made.zero_grad()
        gc.collect()
        x = torch.zeros(SIZE, WIDTH, dtype=torch.float64)
        model.step(x, torch.zeros_like(x), F.mse_loss, schedule=schedule)

    step()
    made.step()
    counter, rank = Counter(), model._rank
    counter.others = {storage_id(local(x)) for x in (*parameters, *model.buffers())}
    with Sends() as sends, calls_seen(), counter:
        step()
    counter.at(None)
    groups = {
        group.group_name: axis
        for axis, group in (
            ('all', rank.mesh.everyone),
            ('data', rank.mesh.data.group),
            ('pipe', rank.mesh.pipe.group),
            ('tensor', rank.mesh.tensor.group),
        )
        if group
    }
    collectives = [
        (each.name.strip('_'), groups[each.group], each.bytes)
        for each in counter.entries[0].collectives
        if each.name not in ('send', 'recv_')
    ]
    sizes = {
        'parameters': bytes_of(parameters),
        'gradients': bytes_of(x.grad for x in parameters if x.grad is not None),
        'optimizer': bytes_of(each for state in made.state.values() for each in state.values()),
        'buffers': bytes_of(model.buffers()),
    }
    allocated = None
    if mesh['data'] == mesh['tensor'] == 1:  # Otherwise Gloo's threads allocate memory as well.
        with profile(
            activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
        ) as profiler:
            step()
        allocated = peak_of(profiler)
    shapes = {name: tuple(local(x).shape) for name, x in model.named_parameters()}
    return sizes, shapes, sends, collectives, counter.entries[0].peak, allocated
