"""Profiling: every kind of layer, the memory that is kept, and a module left as it was."""
import copy
import json
import random

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import torchgpipe.balance
from tests.skip.layers import Pop, Stash, StashLinear, popping, stashing
from torchgpipe import GPipe
from torchgpipe.balance import Profile, balance_by_size, balance_by_time, profile
from torchgpipe.balance.live import LiveTensors
from torchgpipe.balance.profile import layerwise_sandbox
from torchgpipe.skip import Namespace, pop, skippable, stash
from torchgpipe.skip.tracker import current_skip_tracker

KIB = 1024


def sizes(*layers, sample=None):
    """Profile layers on 64 samples of width 64 (16 KiB); give KiB kept by each."""
    sample = torch.rand(64, 64) if sample is None else sample
    costs = profile(nn.Sequential(*layers), sample, device='cpu', timeout=0)
    return [layer.activation_bytes / KIB for layer in costs.layers]


class Function(nn.Module):
    """A function as a layer."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        """Call it."""
        return self.function(x)


def test_an_activation_counts_for_the_layer_that_made_it_if_anyone_keeps_it():
    def linear():
        return nn.Linear(64, 64)

    assert sizes(linear(), linear(), linear()) == [16, 16, 0]  # each keeps its input
    assert sizes(linear(), nn.ReLU(), linear()) == [0, 16, 0]  # keeps its output, as does the next
    assert sizes(linear(), nn.ReLU(inplace=True)) == [16, 0]  # the memory of the layer before
    assert sizes(linear(), nn.Flatten(), nn.Identity(), linear()) == [16, 0, 0, 0]  # views of it
    assert sizes(nn.ReLU(), linear()) == [16, 0]  # whose input needs no gradient
    assert sizes(nn.Sequential(linear(), nn.Sigmoid(), linear(), nn.Sigmoid())) == [32]
    assert sizes(linear().requires_grad_(False), nn.ReLU()) == [0, 0]


def test_what_a_partition_keeps_is_the_sum():
    """Against a count of what is alive after a forward of several layers at once."""
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1),
                          nn.Linear(64, 64), nn.Tanh(), nn.LayerNorm(64), nn.Linear(64, 64))
    costs = profile(model, torch.rand(64, 64), device='cpu', timeout=0)
    x = torch.rand(64, 64)
    with LiveTensors().watched() as live:
        graph = model(x).grad_fn
    assert graph is not None
    assert live.now == sum(layer.activation_bytes for layer in costs.layers)


def test_skips_count_for_the_layer_that_made_them():
    assert sizes(StashLinear(64), nn.Linear(64, 64), Pop()) == [0, 0, 0]
    square = popping('skip')
    model = nn.Sequential(StashLinear(64), nn.Linear(64, 64), square(), nn.Linear(64, 64))
    costs = profile(model, torch.rand(64, 64), device='cpu', timeout=0)
    assert [(s.source, s.target, s.bytes) for s in costs.skips] == [(0, 2, 16 * KIB)]
    assert costs.layers[0].output_bytes == 16 * KIB


def test_sizes_of_parameters():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False))
    model[2].requires_grad_(False)
    layers = profile(model, torch.rand(8, 4), device='cpu', timeout=0).layers
    assert [layer.parameter_bytes for layer in layers] == [80, 32, 64]
    assert [layer.frozen_bytes for layer in layers] == [0, 0, 64]
    assert [layer.buffer_bytes for layer in layers] == [0, 40, 0]
    assert [layer.name for layer in layers] == ['0', '1', '2']


def test_the_predicted_memory_of_a_partition():
    """Against the peak of a training step, as it is counted for the whole pipeline."""
    m, width = 8, 64
    model = nn.Sequential(*[layer for _ in range(12)
                            for layer in (nn.Linear(width, width), nn.Tanh())])
    x = torch.rand(m * 64, width)
    for mode in ('always', 'never'):
        balance = profile(model, x, device='cpu', timeout=0).balance(
            1, chunks=m, checkpoint=mode)
        gpipe = GPipe(copy.deepcopy(model), balance, devices=['cpu'], chunks=m, checkpoint=mode)
        gpipe(x).sum().backward()
        with LiveTensors().watched() as live:
            output = gpipe(x)
            output.backward(torch.ones_like(output))
        parameters = sum(p.numel() * 4 for p in model.parameters())
        peak = live.peak + 2 * parameters + x.numel() * 4
        assert 0.75 * balance.bytes[0] <= peak <= 1.25 * balance.bytes[0], mode


class Embed(nn.Module):
    """Tokens to vectors, with positions."""

    def __init__(self, width):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, width), nn.Embedding(16, width)

    def forward(self, tokens):
        """Embed."""
        return self.tokens(tokens) + self.positions(
            torch.arange(tokens.shape[1], device=tokens.device))


class Two(nn.Module):
    """Tensor to tuple, of which one part needs no gradient."""

    def forward(self, x):
        """Branch."""
        return x, x.detach().argmax(1)


class One(nn.Module):
    """Tuple to tensor, with a parameter that gets no gradient."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.rand(3))

    def forward(self, input):
        """Merge."""
        return input[0] * input[1][:, None]


def resnet():
    """Flat, with in-place layers after what is stashed."""
    def block():
        namespace = Namespace()
        return [Stash().isolate(namespace), nn.Conv2d(4, 4, 3, padding=1, bias=False),
                nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, padding=1),
                nn.BatchNorm2d(4), Pop().isolate(namespace), nn.ReLU(inplace=True)]
    return nn.Sequential(nn.Conv2d(3, 4, 3), *block(), *block(), nn.AdaptiveAvgPool2d(1),
                         nn.Flatten(), nn.Linear(4, 2)), torch.rand(8, 3, 8, 8)


def unet():
    """Skips that nest, are concatenated, and cross most of the model."""
    @skippable(pop=['skip'])
    class Concatenate(nn.Module):
        def forward(self, x):
            return torch.cat([x, (yield pop('skip'))], 1)

    one, two = Namespace(), Namespace()
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.LeakyReLU(inplace=True), Stash().isolate(one),
        nn.MaxPool2d(2), nn.Conv2d(4, 8, 3, padding=1), nn.Dropout2d(0.1),
        nn.InstanceNorm2d(8), Stash().isolate(two), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1),
        nn.Upsample(scale_factor=2), Concatenate().isolate(two), nn.Conv2d(16, 4, 3, padding=1),
        nn.Upsample(scale_factor=2), Concatenate().isolate(one), nn.Conv2d(8, 1, 1)
    ), torch.rand(4, 3, 8, 8)


def transformer():
    """Integers in."""
    layers = [nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True) for _ in range(2)]
    return nn.Sequential(Embed(8), *layers, nn.LayerNorm(8), nn.Linear(8, 11)), \
        torch.randint(11, (6, 5))


def frozen():
    """The first half does not train."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True),
                          nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 2))
    model[:3].requires_grad_(False)
    return model, torch.rand(8, 4)


def inplace():
    """Layers that change their input, even the first one."""
    return nn.Sequential(nn.Linear(4, 4), Function(lambda x: x.mul_(2)), nn.ReLU(inplace=True),
                         nn.Linear(4, 4), nn.Hardtanh(inplace=True), nn.Linear(4, 2)), \
        torch.rand(8, 4)


def tuples():
    """Tuples between layers, and parameters without gradients."""
    return nn.Sequential(nn.Linear(4, 4), Two(), One(), nn.Linear(4, 2)), torch.rand(8, 4)


MODELS = [resnet, unet, transformer, frozen, inplace, tuples]


@pytest.mark.parametrize('make', MODELS)
def test_from_profile_to_a_training_step(make):
    model, sample = make()
    costs = profile(model, sample, device='cpu', timeout=0)
    costs = Profile.from_dict(json.loads(json.dumps(costs.to_dict())))
    assert [layer.name for layer in costs.layers] == [name for name, _ in model.named_children()]
    balance = costs.balance(2, chunks=2, memory_limit=10 ** 9)
    gpipe = GPipe(model, balance, devices=['cpu:0', 'cpu:1'], chunks=2, checkpoint='always')
    optimizer = torch.optim.SGD(gpipe.parameters(), lr=0.1)
    output = gpipe(sample)
    output.square().mean().backward()
    optimizer.step()
    assert output.shape[0] == sample.shape[0]
    model, sample = make()
    assert sum(balance_by_time(2, model, sample, device='cpu', timeout=0)) == len(model)
    assert sum(balance_by_size(2, model, sample, device='cpu', chunks=2)) == len(model)


def test_no_cut_before_a_layer_that_works_in_place():
    model, sample = resnet()
    costs = profile(model, sample, device='cpu', timeout=0)
    relu = [k for k, layer in enumerate(model) if isinstance(layer, nn.ReLU)]
    changes = {k: x.changes for k, x in enumerate(costs.layers) if x.changes is not None}
    assert list(changes) == relu and list(changes.values()) == [k - 1 for k in relu]
    assert costs.edges() == [k for k in range(len(model) + 1) if k not in relu]
    for partitions in range(1, len(costs.edges())):
        cut = 0
        for number in costs.balance(partitions, chunks=2)[:-1]:
            cut += number
            assert cut not in relu
    with pytest.raises(ValueError, match="make only 16 groups for 17 partitions.*'4' is one"):
        costs.balance(17, chunks=2)
    assert sum(costs.balance(17, chunks=2, checkpoint='never')) == len(model)
    assert len(balance_by_time(17, model, sample, device='cpu', timeout=0)) == 17


def test_no_cut_between_a_layer_and_one_that_changes_it_through_a_view():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Flatten(), nn.Identity(),
                          nn.ReLU(inplace=True), nn.Linear(4, 2))
    costs = profile(model, torch.rand(8, 4), device='cpu', timeout=0)
    assert costs.edges() == [0, 1, 5, 6]


def test_what_does_not_shrink_with_the_batch():
    class Constant(nn.Module):
        def forward(self, x):
            a = torch.ones(200, 200)
            for _ in range(10):
                a = a @ a * 1e-3
            return x

    class Proportional(nn.Module):
        def forward(self, x):
            a = torch.ones(len(x) * 25, 200)
            for _ in range(10):
                a = a @ torch.ones(200, 200) * 1e-3
            return x

    layers = profile(nn.Sequential(Constant(), Proportional()), torch.rand(32, 1), device='cpu',
                     timeout=0.3).layers
    constant, proportional = [x.forward_overhead / x.forward_seconds for x in layers]
    assert constant > 0.5 > proportional
    small = profile(nn.Sequential(Constant()), torch.rand(4, 1), device='cpu', timeout=0).layers
    assert small[0].forward_overhead == 0


def test_frozen_layers_have_no_backward():
    model, sample = frozen()
    layers = profile(model, sample, device='cpu', timeout=0).layers
    assert [layer.backward_seconds > 0 for layer in layers] == [False] * 3 + [True] * 3
    assert all(layer.forward_seconds > 0 for layer in layers)


@pytest.mark.parametrize('make', MODELS)
@pytest.mark.parametrize('training', [True, False])
def test_the_module_and_the_random_state_are_untouched(make, training):
    model, sample = make()
    model.train(training)
    called = []
    for layer in model:
        layer.register_forward_hook(lambda *_: called.append('forward'))
        layer.register_forward_pre_hook(lambda *_: called.append('before'))
        layer.register_full_backward_hook(lambda *_: called.append('backward'))
    before = copy.deepcopy(model.state_dict())
    hooks = [dict(layer._forward_hooks) for layer in model]
    given = sample.clone()
    state = torch.get_rng_state()
    profile(model, sample, device='cpu', timeout=0)
    balance_by_size(1, model, sample, device='meta')
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(sample, given)
    assert not called and [dict(layer._forward_hooks) for layer in model] == hooks
    assert all(module.training == training for module in model.modules())
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not current_skip_tracker().tensors
    assert torch.is_grad_enabled()


def test_layers_are_called_in_training_mode_with_what_the_one_before_gave():
    seen = []

    class See(nn.Module):
        def forward(self, x):
            seen.append((self.training, x.requires_grad, float(x.detach().sum())))
            return x + 1

    sample = torch.zeros(1, requires_grad=True)
    with torch.no_grad():
        profile(nn.Sequential(See(), See()).eval(), sample, device='cpu', timeout=0)
    assert set(seen) == {(True, True, 0.), (True, True, 1.)}
    seen.clear()
    with torch.inference_mode():
        profile(nn.Sequential(See()), torch.zeros(1), device='cpu', timeout=0)
    assert set(seen) == {(True, False, 0.)}


def test_the_sandbox_holds_one_layer_at_a_time_in_training_mode():
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)).eval()
    for layer in layerwise_sandbox(model, torch.device('meta')):
        assert layer.training and all(p.is_meta for p in layer.parameters())
    assert not any(layer.training or p.is_meta for layer in model for p in layer.parameters())
    assert torchgpipe.balance.profile.layerwise_sandbox is layerwise_sandbox


def test_hooks_that_make_weights_run():
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)),
                          nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
                          nn.LazyLinear(3))
    layers = profile(model, torch.rand(8, 4), device='cpu', timeout=0).layers
    assert [layer.output_bytes for layer in layers] == [128, 128, 96]
    assert layers[2].parameter_bytes == 60
    assert isinstance(model[2], nn.LazyLinear)


def test_a_layer_dies_before_the_next_one_is_on_the_device():
    log = []

    class See(nn.Linear):
        def forward(self, x):
            if not any(known is self.weight for known in refs()):
                log.append(len(refs()))
                weak.append(weakref.ref(self.weight))
            return super().forward(x)

    import weakref
    weak = []

    def refs():
        return [ref() for ref in weak if ref() is not None]

    profile(nn.Sequential(See(4, 4), See(4, 4), See(4, 4)), torch.rand(2, 4), device='cpu',
            timeout=0)
    assert log == [0, 0, 0]


def test_nothing_is_left_alive():
    model, sample = unet()
    with LiveTensors().watched() as live:
        costs = profile(model, sample, device='cpu', timeout=0)
    assert costs is not None and live.now == 0


@pytest.mark.parametrize('function', [
    profile, lambda *args, **kwargs: balance_by_time(1, *args, **kwargs),
    lambda *args, **kwargs: balance_by_size(1, *args, **kwargs)])
def test_bad_input(function):
    model = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(TypeError, match='expected Tensor, but got str'):
        function(model, 'text', device='cpu')
    with pytest.raises(TypeError, match='expected Tensor, but got int'):
        function(model, (torch.rand(2, 3), 1), device='cpu')
    with pytest.raises(TypeError, match='must be nn.Sequential'):
        function(nn.Linear(3, 3), torch.rand(2, 3), device='cpu') if function is profile else \
            function(nn.ModuleList([nn.Linear(3, 3)]), torch.rand(2, 3), device='cpu')
    with pytest.raises(TypeError, match='stash and pop do not match'):
        function(nn.Sequential(Stash()), torch.rand(2, 3), device='cpu')
    with pytest.raises(ValueError, match="sample is on 'meta'"):
        function(model, torch.rand(2, 3, device='meta'), device='cpu')
    with pytest.raises(ValueError, match="device 'cuda:99' is not on this machine"):
        function(model, torch.rand(2, 3), device='cuda:99')
    with pytest.raises(ValueError, match="device 'gpu' is not on this machine"):
        function(model, torch.rand(2, 3), device='gpu')
    with pytest.raises(RuntimeError) as error:
        function(model, torch.rand(2, 4), device='cpu')
    assert error.value.__notes__ == [
        "while layer '0' was profiled on cpu with 2 samples"]
    with pytest.raises(RuntimeError) as error:
        function(nn.Sequential(nn.Embedding(3, 3)), torch.rand(2, 4), device='cpu')
    assert "layer '0'" in error.value.__notes__[0]
    model(torch.rand(2, 3)).sum().backward()
    with pytest.raises(ValueError, match="some parameter already has gradient: '0.weight'"):
        function(model, torch.rand(2, 3), device='cpu')


@pytest.mark.parametrize('call, message', [
    (lambda m, x: balance_by_time(0, m, x, device='cpu'), 'positive'),
    (lambda m, x: balance_by_size(0, m, x, device='cpu'), 'positive'),
    (lambda m, x: balance_by_time(2, m, x, device='cpu'), '1 layers can not be cut into 2'),
    (lambda m, x: balance_by_size(2, m, x, device='cpu'), '1 layers can not be cut into 2'),
    (lambda m, x: balance_by_size(1, m, x, chunks=0, device='cpu'), 'chunks'),
    (lambda m, x: balance_by_size(1, m, x, param_scale=-1, device='cpu'), 'param_scale'),
    (lambda m, x: balance_by_time(1, m, x, timeout=-1, device='cpu'), 'timeout'),
    (lambda m, x: profile(m, x, timeout=float('nan'), device='cpu'), 'timeout'),
    (lambda m, x: profile(m, x[:0], device='cpu'), 'batch is empty'),
    (lambda m, x: profile(m, x, device='meta'), "'meta'")])
def test_bad_numbers(call, message):
    with pytest.raises(ValueError, match=message):
        call(nn.Sequential(nn.Linear(3, 3)), torch.rand(2, 3))


class Expand(nn.Module):
    """Make a number of leaves as large as the input."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def forward(self, x):
        """Add them."""
        for _ in range(self.number):
            x = x + torch.rand_like(x, requires_grad=True)
        return x


def test_balance_by_size():
    x = torch.rand(10, 100, 100)
    for numbers, expected in (([1, 2, 3, 4, 5, 6], [4, 2]), ([6, 5, 4, 3, 2, 1], [2, 4])):
        model = nn.Sequential(*[Expand(number) for number in numbers])
        assert balance_by_size(2, model, x, device='cpu') == expected
    growing = nn.Sequential(*[nn.Linear(k + 1, k + 2) for k in range(6)])
    assert balance_by_size(2, growing, torch.rand(7, 1), param_scale=100, device='cpu') == [4, 2]
    shrinking = nn.Sequential(*[nn.Linear(k + 2, k + 1) for k in reversed(range(6))])
    assert balance_by_size(2, shrinking, torch.rand(1, 7), param_scale=100, device='cpu') == [2, 4]


def test_balance_by_size_takes_a_micro_batch():
    model = nn.Sequential(nn.Linear(64, 64), *[nn.Sigmoid() for _ in range(15)])
    x = torch.rand(64, 64)
    assert balance_by_size(2, model, x, device='cpu', param_scale=0)[0] >= 8
    assert balance_by_size(2, model, x, device='cpu', chunks=64)[0] < 4


def test_balance_by_size_on_meta_takes_no_memory():
    model = nn.Sequential(*[nn.Linear(1 << 17, 1 << 17, device='meta') for _ in range(4)])
    x = torch.rand(1, 1 << 17, device='meta')
    assert balance_by_size(2, model, x, device='meta') == [2, 2]


def test_balance_by_time():
    def slow(times):
        def work(x):
            a = torch.ones(200, 200)
            for _ in range(times * 4):
                a = a @ a * 1e-3
            return x
        return Function(work)

    model = nn.Sequential(*[slow(times) for times in (1, 2, 3, 4, 5, 6)])
    assert balance_by_time(2, model, torch.rand(1), device='cpu', timeout=0.3) == [4, 2]


def test_a_skip_that_is_none():
    @skippable(stash=['skip'])
    class StashNone(nn.Module):
        def forward(self, x):
            yield stash('skip', None)
            return x

    costs = profile(nn.Sequential(StashNone(), Pop()), torch.rand(2, 3), device='cpu', timeout=0)
    assert costs.skips == ()
    assert profile(nn.Sequential(stashing('a')(), popping('a')()), torch.rand(2, 3),
                   device='cpu', timeout=0).skips[0].bytes == 24


def test_a_pipeline_within_a_layer():
    inner = GPipe(nn.Sequential(nn.Linear(3, 3), nn.Dropout(), nn.Linear(3, 3)), [1, 2],
                  devices=['cpu:0', 'cpu:1'], chunks=2, checkpoint='always')
    layers = profile(nn.Sequential(inner, nn.ReLU()), torch.rand(4, 3), device='cpu',
                     timeout=0).layers
    assert layers[0].parameter_bytes == 96


def test_the_name_of_the_package_before():
    with pytest.raises(ImportError, match='torchgpipe.balance'):
        import torchgpipe_balancing  # noqa: F401


@pytest.mark.cuda
@pytest.mark.parametrize('make', MODELS)
def test_cuda(make):
    model, sample = make()
    state = torch.cuda.get_rng_state()
    costs = profile(model, sample, timeout=0)
    assert all(p.device.type == 'cpu' for p in model.parameters())
    assert torch.equal(torch.cuda.get_rng_state(), state)
    cpu = profile(model, sample, timeout=0, device='cpu')
    assert [x.parameter_bytes for x in costs.layers] == [x.parameter_bytes for x in cpu.layers]
    assert [x.output_bytes for x in costs.layers] == [x.output_bytes for x in cpu.layers]
    assert sum(balance_by_size(2, model, sample)) == sum(balance_by_time(2, model, sample))


class Caching(nn.Linear):
    """Keep the output."""

    def forward(self, x):
        """Do so."""
        self.last = super().forward(x)
        return self.last


class Quiet(nn.Linear):
    """A common mistake: `train` returns nothing."""

    def train(self, mode=True):
        """Forget to return."""
        super().train(mode)


class Graph(nn.Module):
    """A layer with a sparse buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer('adjacency', torch.eye(64).to_sparse())
        self.fc = nn.Linear(64, 64)

    def forward(self, x):
        """Mix features by the sparse matrix."""
        return torch.sparse.mm(self.adjacency, self.fc(x).t()).t()


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('make', [
    lambda: nn.utils.weight_norm(nn.Linear(64, 64)), lambda: nn.utils.spectral_norm(
        nn.Linear(64, 64)), lambda: Caching(64, 64), lambda: Quiet(64, 64), Graph,
    lambda: prune.random_unstructured(nn.Linear(64, 64), 'weight', 0.5),
    lambda: torch.jit.script(nn.Linear(64, 64))],
    ids=['weight norm', 'spectral norm', 'caching', 'train', 'sparse', 'pruned', 'script'])
def test_layers_that_are_hard_to_copy(make):
    model = nn.Sequential(make(), nn.ReLU())
    x = torch.rand(64, 64)
    model(x)
    first, second = profile(model, x, device='cpu', timeout=0).layers
    assert first.output_bytes == 16 * KIB and second.activation_bytes == 16 * KIB
    assert first.backward_seconds > 0
    assert all(p.grad is None and p.requires_grad and p.is_leaf for p in model.parameters())


def test_lazy_layers():
    model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU())
    layers = profile(model, torch.rand(16, 4), device='cpu', timeout=0).layers
    assert [layer.parameter_bytes for layer in layers] == [160, 64, 0]


def test_autocast_keeps_no_layer():
    alive = []

    class See(nn.Linear):
        def forward(self, x):
            alive.append(live.now)
            return super().forward(x)

    model = nn.Sequential(*[See(512, 512) for _ in range(4)])
    with torch.autocast('cpu', dtype=torch.bfloat16), LiveTensors().watched() as live:
        profile(model, torch.rand(2, 512), device='cpu', timeout=0)
    starts = alive[::len(alive) // 4]
    assert max(starts) < 1.5 * starts[0] + 100_000


def test_other_random_states_are_untouched():
    class Draw(nn.Module):
        def forward(self, x):
            return x + random.random() + numpy.random.rand()

    random.seed(0)
    numpy.random.seed(0)
    states = random.getstate(), numpy.random.get_state()[1].tolist()
    profile(nn.Sequential(Draw()), torch.rand(2, 3), device='cpu', timeout=0)
    assert states == (random.getstate(), numpy.random.get_state()[1].tolist())


@pytest.mark.parametrize('call, error, message', [
    (lambda m, x: balance_by_time('1', m, x, device='cpu'), TypeError, 'must be an integer'),
    (lambda m, x: balance_by_time(True, m, x, device='cpu'), TypeError, 'must be an integer'),
    (lambda m, x: balance_by_time(1, m[0], x, device='cpu'), TypeError, 'must be nn.Sequential'),
    (lambda m, x: balance_by_size(1, m, x, param_scale=float('inf'), device='cpu'), ValueError,
     'param_scale'),
    (lambda m, x: profile(m, x, timeout=float('inf'), device='cpu'), ValueError, 'timeout')])
def test_more_bad_numbers(call, error, message):
    with pytest.raises(error, match=message):
        call(nn.Sequential(nn.Linear(3, 3)), torch.rand(2, 3))
