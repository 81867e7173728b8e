"""State that ranks share stays equal: gradients from other ranks are summed, or errors name it."""

import copy
import random
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional as F

from tests.helpers import Call
from tests.shard.processes import outcomes, run
from torchgpipe import Arguments, NoChunk
from torchgpipe.distributed import DistributedGPipe, init_mesh


def linear():
    return nn.Linear(2, 2, dtype=torch.float64)


def layers(*more):
    torch.manual_seed(0)
    return nn.Sequential(linear(), nn.Tanh(), *more, linear())


def data(n=8):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, n, 2, generator=generator, dtype=torch.float64)


class World:
    """A mesh, and the part of a batch that a rank takes."""

    def __init__(self, **axes):
        self.mesh = init_mesh(**axes)
        self.replicas, self.stages = axes.get('data', 1), axes.get('pipe', 1)
        self.rank = self.mesh.get_local_rank('data')

    def model(self, module, **options):
        n = len(module)
        balance = [n] if self.stages == 1 else [n - n // 2, n // 2]
        return DistributedGPipe(module, balance, mesh=self.mesh, chunks=2, **options)

    def part(self, x):
        return x.chunk(self.replicas)[self.rank]

    def step(self, model, loss_fn=F.mse_loss, **options):
        x, y = map(self.part, data())
        return model.step(x, y, loss_fn, **options)


def check_grads(model, module):
    """Compare gradients with the unwrapped module's."""
    expected = dict(module.named_parameters(remove_duplicate=False))
    for name, x in model.named_parameters():
        grad = x.grad.full_tensor() if hasattr(x.grad, 'full_tensor') else x.grad
        torch.testing.assert_close(grad, expected[name].grad, rtol=1e-10, atol=1e-12)


def check_steps(world, model, module, steps=1):
    """Run steps of a model and of the unwrapped module, and compare the gradients."""
    x, y = data()
    for _ in range(steps):
        F.mse_loss(module(x), y).backward()
        world.step(model)
    check_grads(model, module)


# --- exact: gradients from elsewhere
# ------------------------------------------------------------------------------------------------


def closure(axes, options):
    """A loss that uses a weight of the model, which is no parameter of the loss."""
    world, module = World(**axes), layers()
    model = world.model(copy.deepcopy(module), **options)
    x, y = data()
    for _ in range(2):
        (F.mse_loss(module(x), y) + module[2].weight.square().sum()).backward()
        world.step(
            model,
            lambda o, t: F.mse_loss(o, t) + model.get_parameter('2.weight').square().sum(),
            normalizer=len,
        )
    check_grads(model, module)


def hooked(axes, options):
    """A hook of a weight that the loss takes from the model in each call."""
    world, module = World(**axes), layers()
    model = world.model(copy.deepcopy(module), **options)
    x, y = data()
    for each in (module, model):
        each.get_parameter('2.weight').register_hook(lambda grad: grad * 2)
    (F.mse_loss(module(x), y) + module[2].weight.square().sum()).backward()
    world.step(
        model,
        lambda o, t: F.mse_loss(o, t) + model.get_parameter('2.weight').square().sum(),
        normalizer=len,
    )
    check_grads(model, module)


class Listed(nn.Module):
    """A layer that uses a weight of another one, which stands in a list."""

    def __init__(self, weight):
        super().__init__()
        self.shared = [weight]

    def forward(self, x):
        return x @ self.shared[0]


def listed(axes, options):
    """A weight in a list."""
    world = World(**axes)
    module = layers()
    module.append(Listed(module[2].weight))
    own = copy.deepcopy(module)
    own[3].shared = [own[2].weight]
    model = world.model(own, **options)
    check_steps(world, model, module, 2)


def listed_and_refused(axes, options):
    """A weight in a list, in a step that is refused, and in the next one."""
    world = World(**axes)
    module = layers(linear())
    module[1] = Listed(module[0].weight)
    model = world.model(copy.deepcopy(module), **options)
    calls = []

    def no_scalar(output, target):
        calls.append(0)
        return F.mse_loss(output, target) if len(calls) == 1 else output

    with pytest.raises(ValueError, match='scalar'):
        world.step(model, no_scalar, normalizer=len)
    assert all(p.grad is None for p in model.parameters())
    check_steps(world, model, module)


class Adapted(nn.Module):
    """A layer with an adapter."""

    def __init__(self, layer):
        super().__init__()
        torch.manual_seed(3)
        self.layer, self.down = layer, linear()

    def forward(self, x):
        return self.layer(x) + self.down(x)


class Holder(nn.Module):
    """A layer in another one."""

    def __init__(self):
        super().__init__()
        self.inner = linear()

    def forward(self, x):
        return self.inner(x)


def adapted(axes, options):
    """Adapters in a model that was made before."""
    world = World(**axes)
    module = layers(Holder())
    model = world.model(copy.deepcopy(module), **options)
    for each in (module, model):
        holder = each.get_submodule('2')
        holder.inner = Adapted(holder.inner)
    check_steps(world, model, module, 2)


def frozen_first(axes, options):
    """A first stage that does not learn, or has no parameters."""
    for module in (layers(nn.Tanh()), nn.Sequential(nn.Tanh(), nn.ReLU(), linear(), linear())):
        world = World(**axes)
        for layer in module[:2]:
            layer.requires_grad_(False)
        model = world.model(copy.deepcopy(module), **options)
        x, y = data()
        F.mse_loss(module(x), y).backward()
        world.step(model)
        for name, p in model.named_parameters():
            expected = module.get_parameter(name).grad
            assert (p.grad is None) == (expected is None)
            if expected is not None:
                grad = p.grad.full_tensor() if hasattr(p.grad, 'full_tensor') else p.grad
                torch.testing.assert_close(grad, expected)


def learns_later(axes, options):
    """A frozen parameter that learns later."""
    world, module = World(**axes), layers()
    module[2].bias.requires_grad_(False)
    model = world.model(copy.deepcopy(module), **options)
    x, y = data()
    for _ in range(2):
        F.mse_loss(module(x), y).backward()
        world.step(model)
        module[2].bias.requires_grad_(True)
        model.get_parameter('2.bias').requires_grad_(True)
    check_grads(model, module)


def frozen_for_a_step(axes, options):
    """Some parameters of a layer are frozen later, and learn again."""
    for names in (['0.bias'], ['0.weight', '0.bias'], ['0.weight', '0.bias', '2.weight']):
        world, module = World(**axes), layers()
        model = world.model(copy.deepcopy(module), **options)
        x, y = data()
        for number in range(5):
            for name in names:
                for each in (module, model):
                    each.get_parameter(name).requires_grad_(number % 2 == 0)
            F.mse_loss(module(x), y).backward()
            world.step(model)
        check_grads(model, module)


def expanded(axes, options):
    """Buffers that are expanded, or sparse."""
    world = World(**axes)
    module = layers()
    module[0].register_buffer('zeros', torch.zeros(1).expand(4))
    module[0].register_buffer('numbers', torch.arange(3, dtype=torch.int16))
    module[0].register_buffer('sparse', torch.eye(2).to_sparse())
    model = world.model(copy.deepcopy(module), **options)
    check_steps(world, model, module)


DATA, SHARD = ({'data': 2}, {}), ({'data': 2}, {'data': 'shard'})


def in_turn(cases):
    """Call several functions on the ranks of one group."""
    for function, axes, options in cases:
        function(axes, options)


def test_gradients_from_other_ranks_are_of_the_whole_batch():
    changes = [(function, *kind) for function in (adapted, learns_later) for kind in (DATA, SHARD)]
    frozen = [(frozen_for_a_step, *kind) for kind in (DATA, SHARD)]
    others = [(function, *DATA) for function in (closure, hooked, listed, expanded)]
    refused = [(listed_and_refused, axes, {}) for axes in ({'data': 2}, {'pipe': 2})]
    in_stages = [(expanded, {'pipe': 2}, {}), *refused]
    run(2, in_turn, [*changes, *frozen, *others, *in_stages])
    axes = {'data': 2, 'pipe': 2}
    run(4, in_turn, [(frozen_first, axes, {'data': 'shard'}), (frozen_first, axes, {})])


# --- named
# ------------------------------------------------------------------------------------------------

WAYS = []

#: Where a way may save.
FOLDER = ''


def way(world, words, **axes):
    """Add a way in which ranks could part, with words of the error."""

    def add(function):
        WAYS.append((function, world, axes, words))
        return function

    return add


def train(world, model, change=None, loss_fn=F.mse_loss, steps=3, **options):
    """Take steps."""
    parameters = [*model.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1) if parameters else None
    for number in range(steps):
        world.step(model, loss_fn, **options)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        if change is not None:
            change(number, model)


def first_rank(function):
    """Do something on one rank, after the first step."""

    def change(number, model):
        if dist.get_rank() == 0 and number == 0:
            with torch.no_grad():
                function(model)

    return change


@way(2, "'0.weight' should be the same on ranks [0, 1], along the data axis", data=2)
def a_weight_is_changed_on_one_rank(world):
    train(world, world.model(layers()), first_rank(lambda m: m.get_parameter('0.weight').mul_(2)))


@way(2, 'loss_fn uses a tensor of shape (2.*) that requires grad, but is no parameter', data=2)
def a_criterion_in_a_closure(world):
    criterion = linear()
    train(
        world,
        world.model(layers()),
        loss_fn=lambda o, t: F.mse_loss(criterion(o), t),
        normalizer=len,
    )


@way(2, "'3.shared' is or has '0.weight', a parameter of a layer on another rank", pipe=2)
def a_weight_of_another_rank_in_a_list(world):
    module = layers()
    module.append(Listed(module[0].weight))
    train(world, world.model(module))


class Average(nn.Module):
    """Subtract a moving average."""

    def __init__(self, persistent=True):
        super().__init__()
        self.register_buffer('mean', torch.zeros(2, dtype=torch.float64), persistent=persistent)

    def forward(self, x):
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.mean


@way(2, "'2.mean' should be the same on ranks [0, 1], along the data axis", data=2)
def a_layer_moves_a_buffer_that_is_in_no_state_dict(world):
    train(world, world.model(layers(Average(persistent=False)), data='shard'))


@way(2, "'1.mean' should be the same on ranks [0, 1], along the pipe axis", pipe=2)
def a_layer_that_moves_a_buffer_stands_on_two_ranks(world):
    average = Average()
    train(world, world.model(nn.Sequential(linear(), average, linear(), average)))


@way(2, "'1.running_mean' and 1 others should be the same on ranks [0, 1], along the pipe", pipe=2)
def statistics_of_two_ranks(world):
    norm = nn.BatchNorm1d(2, dtype=torch.float64)
    train(world, world.model(nn.Sequential(linear(), norm, linear(), norm)))


class Words(nn.Module):
    """An embedding of numbers, that keeps its rows short."""

    def __init__(self, weight=None):
        super().__init__()
        torch.manual_seed(5)
        self.words = nn.Embedding(4, 2, max_norm=0.1, dtype=torch.float64)

    def forward(self, x):
        return x + self.words((x[:, 0].abs() * 2).long().clamp(0, 3))


@way(2, "'0.words.weight' should be the same on ranks [0, 1], along the data axis", data=2)
def an_embedding_with_a_norm_over_replicas(world):
    module = nn.Sequential(Words(), linear())
    module[0].words.weight.requires_grad_(False)
    x, y = data()
    model = world.model(module)
    for _ in range(3):
        model.step(
            world.part(x) if dist.get_rank() else world.part(x) * 0, world.part(y), F.mse_loss
        )


@way(2, "a layer has changed '0.words.weight' in its forward", data=2)
def an_embedding_with_a_norm_in_shards(world):
    train(world, world.model(nn.Sequential(Words(), linear()), data='shard'))


@way(2, 'ranks [0, 1] have the same stages, but not in the same state', data=2)
def a_parameter_is_frozen_on_one_rank(world):
    train(
        world,
        world.model(layers()),
        first_rank(lambda m: m.get_parameter('0.weight').requires_grad_(False)),
    )


@way(2, 'ranks [0, 1] have the same stages, but not in the same state', data=2)
def another_mode_of_a_layer_on_one_rank(world):
    train(
        world,
        world.model(layers(nn.Dropout(0.0))),
        first_rank(lambda m: m.get_submodule('2').eval()),
    )


@way(2, 'the model is in evaluation mode', data=2)
def another_mode_on_one_rank(world):
    train(world, world.model(layers(nn.Dropout(0.0))), first_rank(lambda m: m.eval()))


@way(2, 'normalizer is, by rank, {0: 6.0, 1: 0.0}', data=2)
def another_normalizer_on_one_rank(world):
    train(
        world,
        world.model(layers()),
        normalizer=6 if dist.get_rank() == 0 else None,
        loss_fn=nn.MSELoss(reduction='sum') if dist.get_rank() == 0 else F.mse_loss,
    )


PLAN = {'0': ColwiseParallel(), '2': RowwiseParallel()}


@way(2, 'ranks [0, 1] along the tensor axis compute each layer together', tensor=2)
def other_samples_along_the_tensor_axis(world):
    model = world.model(layers(), tensor_plan=PLAN)
    x, y = data()
    model.step(x + dist.get_rank(), y, F.mse_loss)


@way(2, 'ranks [0, 1] along the tensor axis compute each layer together', tensor=2)
def other_targets_along_the_tensor_axis(world):
    model = world.model(layers(), tensor_plan=PLAN)
    x, y = data()
    model.step(x, y + dist.get_rank(), F.mse_loss)


@way(2, "'3.weight' should be the same on ranks [0, 1], along the tensor axis", tensor=2)
def a_layer_without_a_style_is_changed_on_one_rank(world):
    module = layers().append(linear())
    train(
        world,
        world.model(module, tensor_plan=PLAN),
        first_rank(lambda m: m.get_parameter('3.weight').mul_(2)),
    )


@way(2, 'is sparse, but ranks add up dense ones', data=2)
def a_sparse_gradient(world):
    module = nn.Sequential(nn.Embedding(4, 2, sparse=True, dtype=torch.float64), linear())
    model = world.model(module)
    x, y = data()
    model.step(world.part(torch.arange(8) % 4), world.part(y), F.mse_loss)


@way(2, "'0.weight' has a hook, and is used in a closure", data=2)
def a_hook_of_a_weight_in_a_closure(world):
    model = world.model(layers())
    weight = model.get_parameter('0.weight')
    weight.register_hook(lambda grad: grad * 2)
    train(
        world, model, loss_fn=lambda o, t: F.mse_loss(o, t) + weight.square().sum(), normalizer=len
    )


@way(2, 'loss_fn has other parameters on some of ranks [0, 1]', data=2)
def another_loss_on_one_rank(world):
    class Loss(nn.Linear):
        def forward(self, output, target):
            return F.mse_loss(super().forward(output), target)

    torch.manual_seed(0)
    loss = Loss(2, 2, dtype=torch.float64)
    loss.bias.requires_grad_(dist.get_rank() == 0)
    train(world, world.model(layers()), loss_fn=loss, normalizer=len)


@way(2, "'0.weight' should be the same on ranks [0, 1]", data=2)
def a_save_compares(world):
    model = world.model(layers(), compare_every=0)
    train(world, model, first_rank(lambda m: m.get_parameter('0.weight').mul_(2)))
    model.save('/nowhere/model')


@way(2, "'0.weight' should be the same on ranks [0, 1]", data=2)
def a_later_step_compares(world):
    model = world.model(layers(), compare_every=7)
    train(world, model, steps=5)
    first_rank(lambda m: m.get_parameter('0.weight').mul_(2))(0, model)
    train(world, model, steps=2)
    raised = None
    try:
        train(world, model, steps=1)
    except RuntimeError as error:
        raised = error
    assert raised is not None
    raise raised


@way(2, "'2.inner.down.bias' and 1 others should be the same on ranks [0, 1]", data=2)
def adapters_that_come_later_start_with_other_values(world):
    model = world.model(layers(Holder()))
    train(world, model, steps=5)
    holder = model.get_submodule('2')
    holder.inner = Adapted(holder.inner)
    with torch.no_grad():
        holder.inner.down.weight.add_(dist.get_rank())
        holder.inner.down.bias.add_(dist.get_rank())
    train(world, model, steps=1)


@way(2, "'0.weight' should be the same on ranks [0, 1]", data=2)
def a_load_compares(world):
    model = world.model(layers())
    model.save(FOLDER)
    if dist.get_rank():
        model.register_load_state_dict_post_hook(
            lambda module, keys: setattr(
                module.get_parameter('0.weight'), 'data', torch.ones(2, 2, dtype=torch.float64)
            )
        )
    model.load(FOLDER)


@way(2, "a layer has changed '0.words.weight' in its forward", data=2)
def an_embedding_with_a_norm_in_shards_in_an_evaluation(world):
    model = world.model(nn.Sequential(Words(), linear()), data='shard').eval()
    model.evaluate(*map(world.part, data()), F.mse_loss)


class Scaled(nn.Module):
    """A loss with a parameter and a buffer."""

    def __init__(self, weight, moves=False):
        super().__init__()
        self.weight, self.moves = nn.Parameter(weight), moves
        self.register_buffer('center', torch.zeros(2, dtype=torch.float64))

    def forward(self, output, target):
        if self.moves:
            self.center = 0.9 * self.center + 0.1 * output.detach().mean(0)
        return F.mse_loss(output * self.weight, target + self.center)


@way(2, "'loss_fn.weight' should be the same on ranks [0, 1], along the data axis", data=2)
def a_loss_starts_with_other_values(world):
    loss = Scaled(torch.ones(2, dtype=torch.float64) + dist.get_rank())
    train(world, world.model(layers()), loss_fn=loss, normalizer=len)


@way(2, "'loss_fn.center' should be the same on ranks [0, 1], along the data axis", data=2)
def a_loss_moves_a_buffer(world):
    loss = Scaled(torch.ones(2, dtype=torch.float64), moves=True)
    train(world, world.model(layers()), loss_fn=loss, normalizer=len)


@way(2, "'loss_fn.weight' is or has '0.weight', a parameter of a layer on another rank", pipe=2)
def a_loss_has_a_weight_of_another_rank(world):
    module = layers()
    loss = Scaled(torch.ones(2, 2, dtype=torch.float64))
    loss.weight = module[0].weight
    train(world, world.model(module), loss_fn=loss, normalizer=len)


@way(2, "'0.weight' is or has '2.weight', a parameter of a layer on another rank", pipe=2)
def a_weight_of_another_rank_is_put_in_later(world):
    module = layers()
    weight = module[2].weight
    model = world.model(module)
    if dist.get_rank() == 0:
        model.get_submodule('0').weight = weight
    train(world, model)


class Detached(Listed):
    """A layer that uses the value of such a weight."""

    def forward(self, x):
        return x @ self.shared[0].detach()


@way(
    2,
    "'3.shared' is or has '2.weight', a parameter of a layer on another rank or one that took",
    data=2,
)
def the_value_of_a_sharded_weight(world):
    module = layers()
    module.append(Detached(module[2].weight))
    train(world, world.model(module, data='shard'))


def tied_layers():
    module = layers().append(linear())
    module[3].weight = module[0].weight
    return module


@way(2, "'weight' of a Linear, which stages on ranks [0, 1] share, was replaced", pipe=2)
def a_tied_weight_is_replaced(world):
    model = world.model(tied_layers())
    if dist.get_rank():
        layer = model.get_submodule('3')
        layer.weight = nn.Parameter(layer.weight.detach().clone())
    train(world, model)


@way(2, 'which stages on ranks [0, 1] share, was replaced', pipe=2)
def a_tied_weight_is_parametrized(world):
    model = world.model(tied_layers())
    if dist.get_rank():
        nn.utils.parametrizations.weight_norm(model.get_submodule('3'))
    train(world, model)


class Reassigned(Average):
    """The same with a new tensor each time."""

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


@way(2, "'1.mean' should be the same on ranks [0, 1], along the pipe axis", pipe=2)
def a_buffer_of_two_ranks_is_replaced_in_forward(world):
    average = Reassigned()
    train(world, world.model(nn.Sequential(linear(), average, linear(), average)))


@way(2, "'0.bias' was replaced after this model was made, but with data='shard'", data=2)
def a_bias_is_taken_out_of_shards(world):
    model = world.model(layers(), data='shard')
    model.get_submodule('0').bias = None
    train(world, model)


class Clamps(nn.Linear):
    """A layer that changes its weight without its version."""

    def forward(self, x):
        self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


@way(2, "a layer has changed '0.weight' in its forward", data=2)
def a_layer_changes_the_data_of_a_sharded_weight(world):
    train(world, world.model(nn.Sequential(Clamps(2, 2, dtype=torch.float64)), data='shard'))


@way(2, "'0.weight' should be the same on ranks [0, 1]", data=2)
def an_average_on_one_rank_only_is_evaluated(world):
    model = copy.deepcopy(world.model(layers())).eval()
    first_rank(lambda m: m.get_parameter('0.weight').mul_(2))(0, model)
    model.evaluate(*map(world.part, data()), F.mse_loss)


class Noise(nn.Module):
    """Noise from a generator that is not PyTorch's."""

    def forward(self, x):
        return x + random.Random(dist.get_rank()).random()


@way(2, 'ranks along the tensor axis compute one loss, but have, by rank, {0: ', tensor=2)
def noise_along_the_tensor_axis(world):
    module = nn.Sequential(*layers(), Noise())
    x, y = data()
    world.model(module, tensor_plan=PLAN).step(x, y, F.mse_loss)


@way(2, 'ranks [0, 1] along the tensor axis compute each layer together', tensor=2)
def another_number_along_the_tensor_axis(world):
    model = world.model(
        nn.Sequential(Call(torch.mul), *layers()),
        tensor_plan={'1': ColwiseParallel(), '3': RowwiseParallel()},
    )
    x, y = data()
    model.step(Arguments(x, dist.get_rank() + 1.0), y, F.mse_loss)


@way(2, 'along the data axis', data=2)
def optimizers_that_differ_begin_late(world):
    model = world.model(layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + dist.get_rank())
    for number in range(12):
        world.step(model)
        if number > 3:
            optimizer.step()
            optimizer.zero_grad()


@way(2, 'uses a tensor of shape (2, 2) that requires grad, but is no parameter', data=2)
def a_tensor_learns_later(world):
    model, weight = world.model(layers()), torch.eye(2, dtype=torch.float64, requires_grad=True)
    for number in range(12):
        world.step(
            model,
            lambda o, t, number=number: F.mse_loss(o if number < 3 else o @ weight, t),
            normalizer=len,
        )


@way(2, 'uses a tensor of shape (2,) that requires grad, but is no parameter', data=2)
def another_loss_learns_in_a_step_without_a_comparison(world):
    """The fourth step is none with a comparison."""
    model = world.model(layers())
    for _ in range(3):
        world.step(model)
    weight = torch.ones(2, dtype=torch.float64, requires_grad=True)
    world.step(model, lambda o, t: F.mse_loss(o * weight, t))


@way(2, 'a NoChunk in the input requires grad', data=2)
def an_input_of_all_replicas_learns(world):
    model = world.model(nn.Sequential(Call(torch.mul), *layers()))
    x, y = map(world.part, data())
    weight = nn.Parameter(torch.ones(2, dtype=torch.float64))
    model.step(Arguments(x, NoChunk(weight)), y, F.mse_loss)


@way(2, "'0.weight' has a hook, and is used in a closure", data=2)
def a_hook_after_the_gradient_of_a_weight_in_a_closure(world):
    model = world.model(layers())
    weight = model.get_parameter('0.weight')
    weight.register_post_accumulate_grad_hook(lambda x: None)
    train(
        world, model, loss_fn=lambda o, t: F.mse_loss(o, t) + weight.square().sum(), normalizer=len
    )


@way(2, "'0.weight' was replaced after this model was made, but with data='shard'", data=2)
def a_sharded_weight_is_parametrized(world):
    model = world.model(layers(), data='shard')
    nn.utils.parametrize.register_parametrization(model.get_submodule('0'), 'weight', nn.Tanh())
    train(world, model)


@way(2, 'apply does not like this rank', data=2)
def a_function_to_apply_raises_on_one_rank(world):
    def function(module):
        if dist.get_rank():
            raise ValueError('apply does not like this rank')

    world.model(layers()).apply(function)


def try_all(ways, folder):
    """Try several ways, and return the error of each on this rank, on new groups each time."""
    global FOLDER
    FOLDER, found = folder, []
    for number in ways:
        function, _, axes, _ = WAYS[number]
        try:
            function(World(**axes))
            found.append('nothing')
        except Exception as error:
            found.append(f'{type(error).__name__}: {error}')
        dist.barrier()
    return found


@pytest.mark.parametrize('part', range(4))
def test_differences_of_ranks_are_named_on_all_of_them(part, tmp_path):
    numbers = [*range(len(WAYS))][part::4]
    ranks = outcomes(2, try_all, numbers, str(tmp_path / 'model'), timeout=90)
    for found in ranks:
        assert isinstance(found, list), found
        for number, text in zip(numbers, found):
            function, _, _, words = WAYS[number]
            words = re.escape(words).replace(r'\.\*', '.*')
            assert re.search(words, text), (function.__name__, text)


# --- values that are no difference
# ------------------------------------------------------------------------------------------------


class Cache(nn.Module):
    """A layer with a mask as long as the longest batch, in no state dict."""

    def __init__(self):
        super().__init__()
        self.register_buffer('mask', torch.ones(0), persistent=False)

    def forward(self, x):
        if len(x) > len(self.mask):
            self.mask = torch.ones(len(x), dtype=x.dtype)
        return x * self.mask[: len(x), None]


def caches():
    """Replicas with other numbers of samples, and a mask of other sizes."""
    world, module = World(data=2), layers(Cache())
    model = world.model(copy.deepcopy(module))
    x, y = data(9)
    for _ in range(3):
        F.mse_loss(module(x), y).backward()
        model.step(*(each.split([6, 3])[dist.get_rank()] for each in (x, y)), F.mse_loss)
    check_grads(model, module)


def test_masks_of_other_sizes_are_no_difference():
    run(2, caches)


class Long(nn.Linear):
    """A layer that makes a cache, in no state dict, for large inputs."""

    def forward(self, x):
        if x.abs().max() > 100 and not hasattr(self, 'cache'):
            self.register_buffer('cache', torch.ones(5), persistent=False)
        return super().forward(x)


def unequal_rhythms(refused):
    """Take steps where ranks of one stage begin to compare anew, or count fewer steps.

    One replica has a cache that the other one does not have.
    """
    world = World(data=2, pipe=2)
    model = world.model(nn.Sequential(Long(2, 2), nn.Linear(2, 2)).double())
    x, y = data()
    x = x * (1 if world.rank else 1000)
    for step in range(9):
        if step == 5 and refused:
            with pytest.raises(ValueError, match='empty'):
                model.step(x[:0], y[:0], F.mse_loss)
        elif step == 5 and '1' in dict(model.named_children()):
            model.set_submodule('1', Adapted(model.get_submodule('1')))
        model.step(x, y, F.mse_loss)
        model.zero_grad()


@pytest.mark.parametrize('refused', [True, False])
def test_in_v0_29_ranks_that_did_not_expect_a_comparison_took_their_names_for_equal(refused):
    run(4, unequal_rhythms, refused)
