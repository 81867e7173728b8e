"""The harness of equivalence: a wrapped model trains as the unwrapped one on its micro-batches.

A case is a layer of the zoo with one value of each factor. The cases of a layer have each schedule
once, and each value of the other factors at least once. Together, the cases of all layers have
each pair of values of two factors::

    layer of the zoo ─┬─ schedule: the plain call, or a step by each schedule
                      ├─ placement: partitions in one worker, in two, or in one each
                      ├─ mode of checkpointing: three, or another one for each partition
                      └─ option: autocast, hooks, frozen parameters, ties, …

The oracle is the unwrapped model, run on one micro-batch after the other. Compared are outputs,
losses, gradients of parameters and of the input, buffers, parameters, and numbers among the
attributes of layers, in each of three steps of an optimizer.
"""

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy

from tests.helpers import assert_same, compare_all_pending, gradients, micro_batches, on_first
from tests.zoo import LAYERS
from tests.zoo.entry import Entry
from torchgpipe import GPipe, no_recompute
from torchgpipe.base.errors import add_note
from torchgpipe.schedule import NAMES
from torchgpipe.schedule.generators import V_SHAPED

CHUNKS = 3

#: Samples in a mini-batch. Micro-batches then have 3, 2 and 2 of them.
SIZE = 7

#: Schedules in which a device has several stages.
LOOPED = ('interleaved', 'looped-bfs')

#: The plain call, and a step by each schedule.
SCHEDULES = (None, *NAMES)

MODES = ('always', 'except_last', 'never', ('always', 'never', 'except_last', 'always'))


def one_worker(schedule):
    """Return four places in one worker."""
    return [0, 0, 0, 0]


def two_workers(schedule):
    """Return places in two workers, each of which has two partitions."""
    if schedule in V_SHAPED:
        return [0, 1, 1, 0]
    return [0, 1, 0, 1] if schedule in LOOPED else [0, 0, 1, 1]


def four_workers(schedule):
    """Return a place for each partition, where the schedule admits that."""
    return two_workers(schedule) if schedule in (*V_SHAPED, *LOOPED) else [0, 1, 2, 3]


PLACEMENTS = {'one worker': one_worker, 'two workers': two_workers, 'a worker each': four_workers}


# --- options: each changes the model, or the way in which it is called


def as_it_is(model):
    """Leave the model as it is."""


def evaluate_layers(model):
    """Set the layers of the zoo to evaluation, as when statistics are frozen."""
    for partition in model:
        partition.layer.eval()


def freeze_every_second_parameter(model):
    """Freeze parameters."""
    for parameter in list(model.parameters())[::2]:
        parameter.requires_grad_(False)


def freeze_first_partitions(model):
    """Leave parameters that need gradients in the last partition only."""
    model[:3].requires_grad_(False)


def tie_weights(model):
    """Let the first, the second and the last partition share a weight."""
    first, second, _, last = model
    second.before.weight = last.before.weight = first.before.weight


def share_layer(model):
    """Let a layer without state stand in two partitions."""
    model[3].after = model[1].after


def keep_layers_out_of_recomputation(model):
    """Mark the layers of the zoo in every second partition."""
    for partition in model[::2]:
        no_recompute(partition.layer)


def register_hooks(model):
    """Register hooks on a layer and on a weight, which change outputs and gradients."""
    model[1].before.register_forward_hook(lambda layer, args, output: output * 2)
    model[2].before.register_full_backward_hook(double_gradients)
    model[0].before.weight.register_hook(lambda grad: grad * 0.5)


def double_gradients(layer, grad_input, grad_output):
    """Double the gradient of the input."""
    return tuple([None if grad is None else grad * 2 for grad in grad_input])


@dataclass(frozen=True)
class Option:
    """A change of the model, and the circumstances of its training."""

    change: Callable[[nn.Module], None] = as_it_is
    #: Changes the layers in their places, because a tensor that moves loses its hooks.
    change_in_place: Callable[[nn.Module], None] = as_it_is
    context: Callable = nullcontext
    size: int = SIZE
    input_grad: bool = True
    dtype: torch.dtype = torch.double
    tolerance: float = 1e-9
    #: The results that checkpointing keeps.
    keep: object = None


def keep_all_results(ctx, operation, *args, **kwargs):
    """Keep each result that can be kept, but do not save tensors for backward."""
    return CheckpointPolicy.PREFER_SAVE


def autocast():
    """Return a context in which products are in a smaller type."""
    return torch.autocast('cpu', torch.bfloat16)


def packed():
    """Return hooks of the user, under which autograd saves lists."""
    return saved_tensors_hooks(lambda x: [x.detach().clone()], lambda kept: kept[0])


OPTIONS = {
    'plain': Option(),
    'input needs no gradient': Option(input_grad=False),
    'one sample': Option(size=1),
    'layers in evaluation': Option(evaluate_layers),
    'autocast': Option(context=autocast, dtype=torch.float, tolerance=3e-2),
    'hooks of the user': Option(change_in_place=register_hooks),
    'hooks of saved tensors': Option(context=packed),
    'frozen parameters': Option(freeze_every_second_parameter),
    'frozen partitions': Option(freeze_first_partitions, input_grad=False),
    'tied weights': Option(tie_weights),
    'shared layer': Option(share_layer),
    'kept out of recomputation': Option(keep_layers_out_of_recomputation),
    'products kept': Option(keep='products'),
    'all results kept': Option(keep=keep_all_results),
}


# --- cases


@dataclass(frozen=True)
class Case:
    """A layer of the zoo, with a value of each factor."""

    layer: str
    schedule: str | None
    placement: str
    mode: str | tuple[str, ...]
    option: str


def cases_of(name):
    """Return the cases of a layer: each schedule once, in another order for each layer."""
    choose = random.Random(name)

    def column(factor):
        values = list(factor) * (1 + len(SCHEDULES) // len(factor))
        values = values[: max(len(SCHEDULES), len(factor))]
        choose.shuffle(values)
        return values

    options = [option for option in OPTIONS if option not in entry_of(name).lacks]
    columns = [column(factor) for factor in (SCHEDULES, PLACEMENTS, MODES, options)]
    number = max(map(len, columns))
    return [Case(name, *[column[k % len(column)] for column in columns]) for k in range(number)]


def entry_of(name):
    """Return a layer of the zoo, or a sequence of layers with their names joined by ``+``."""
    if '+' not in name:
        return LAYERS[name]
    entries = [LAYERS[part] for part in name.split('+')]
    return Entry(
        lambda: Several(entry.make() for entry in entries),
        refused=frozenset().union(*[entry.refused for entry in entries]),
        draws=any(entry.draws for entry in entries),
        lacks=frozenset().union(*[entry.lacks for entry in entries]),
    )


class Several(nn.ModuleList):
    """Layers one after the other, each of which adds to its input, so that all of them matter."""

    def forward(self, x):
        for layer in self:
            x = x + layer(x).tanh()
        return x


class Partition(nn.Module):
    """A layer of the zoo between layers without state."""

    def __init__(self, name, has_layer=True):
        super().__init__()
        entry = entry_of(name)
        self.before = nn.Linear(4, 4) if entry.shape[-1] == 4 else nn.PReLU()
        self.layer = entry.make() if has_layer else nn.Tanh()
        self.after = nn.Tanh()

    def forward(self, x):
        return self.after(self.layer(self.before(x)))


def model_of(name, option):
    """Return an unwrapped model of four partitions with a layer of the zoo.

    A layer that draws random numbers stands in one partition only, where the order of its
    micro-batches is theirs in the mini-batch, whatever the schedule.
    """
    torch.manual_seed(0)
    places = (1,) if entry_of(name).draws else range(4)
    default = torch.get_default_dtype()
    # A conversion later on would make several buffers of a shared one.
    torch.set_default_dtype(option.dtype)
    try:
        model = nn.Sequential(*[Partition(name, j in places) for j in range(4)])
    finally:
        torch.set_default_dtype(default)
    option.change(model)
    return model


def loss_of(output, target):
    """Return a mean over samples. The simulated accelerator has no kernel for PyTorch's loss."""
    return (output - target).square().mean()


def run_unwrapped(model, x, target):
    """Run forward and backward on one micro-batch after the other. Return outputs and the loss."""
    outputs = []
    total = 0.0
    for part, label in zip(micro_batches(x, CHUNKS), micro_batches(target, CHUNKS)):
        output = model(part)
        loss = loss_of(output, label) * len(part) / len(x)
        loss.backward()
        outputs.append(output.detach())
        total += loss.detach()
    return torch.cat(outputs), total


def run_wrapped(gpipe, schedule, x, target):
    """Run forward and backward in the pipeline. Return its output and the loss."""
    if schedule is None:
        output = gpipe(x)
        loss = loss_of(output, target)
        loss.backward()
    else:
        loss, output = gpipe.step(x, target, loss_of, schedule=schedule, return_output=True)
    compare_all_pending(gpipe)
    return output.detach(), loss.detach()


def numbers_of(model):
    """Return the numbers among the attributes of all layers, by name."""
    return {
        (name, key): value
        for name, layer in model.named_modules()
        for key, value in vars(layer).items()
        if isinstance(value, int | float)
    }


def state_of(model):
    """Return gradients, parameters and buffers."""
    tensors = [*gradients(model), *model.state_dict().values()]
    return [x if x is None else x.detach().to_dense() for x in tensors]


class Refused(Exception):
    """The pipeline has raised an error that names its place."""


def train(case, devices, steps=3):
    """Train a layer of the zoo wrapped and unwrapped, and compare them after each step.

    Args:
        case: The layer, and a value of each factor.
        devices: Returns a number of devices.

    Raises:
        AssertionError: They differ, or an error does not name its place.
        Refused: The pipeline has raised an error.
    """
    option = OPTIONS[case.option]
    model = model_of(case.layer, option)
    available = devices(4)
    gpipe = GPipe(
        model_of(case.layer, option),
        [1] * 4,
        devices=[available[k] for k in PLACEMENTS[case.placement](case.schedule)],
        chunks=CHUNKS,
        checkpoint=case.mode if isinstance(case.mode, str) else list(case.mode),
        keep=None if case.mode == 'never' else option.keep,
    )
    for net in (model, gpipe):
        option.change_in_place(net)
    optimizers = [torch.optim.SGD(net.parameters(), 0.05, 0.9) for net in (model, gpipe)]
    shape = (option.size, *entry_of(case.layer).shape)
    for step in range(steps):
        torch.manual_seed(step + 1)
        x, target = torch.randn(2, *shape, dtype=option.dtype)
        results = []
        for net in (model, gpipe):
            torch.manual_seed(step + 1)
            with option.context():
                if net is model:
                    own = x.clone().requires_grad_(option.input_grad)
                    output, loss = run_unwrapped(model, own, target)
                else:
                    own = on_first(gpipe, x).requires_grad_(option.input_grad)
                    output, loss = run_or_refuse(gpipe, case, own, target)
            results.append([output, loss, own.grad, *state_of(net)])
        assert_same(results[1], results[0], option.tolerance)
        assert numbers_of(nn.Sequential(*gpipe)) == numbers_of(model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def run_or_refuse(gpipe, case, x, target):
    """Run the pipeline. Raise `Refused` if it raises an error that names a place."""
    try:
        return run_wrapped(gpipe, case.schedule, x, target.to(gpipe.devices[-1]))
    except Exception as error:
        text = '\n'.join([str(error), *getattr(error, '__notes__', ())])
        # PyTorch raises the first one in a backward that PyTorch runs.
        is_pytorchs = case.schedule is None and 'modified by an inplace operation' in text
        if is_pytorchs or 'partition' in text or "layer '" in text:
            raise Refused(text) from error
        raise


def is_refused(case):
    """Return whether the pipeline refuses a case, or None if it depends on its option."""
    modes = {case.mode} if isinstance(case.mode, str) else set(case.mode)
    if case.option == 'kept out of recomputation':
        modes.add('never')
    if not modes & entry_of(case.layer).refused:
        return False
    # A layer after another one may have an input whose backward does not notice the change.
    return True if case.option == 'plain' and '+' not in case.layer else None


def check(case, devices):
    """Train, and check that the pipeline refuses the case only if the zoo says so."""
    raised = False
    try:
        train(case, devices)
    except Refused:
        raised = True
        assert is_refused(case) is not False, case
    except BaseException as error:
        add_note(error, f'in {case}')
        raise
    assert raised or not is_refused(case), case
