"""The layers that a model is cut into, and the values passed from one to the next."""

import pytest
import torch
from torch import nn

from benchmarks.models.resnet101 import resnet101
from benchmarks.models.unet import unet
from tests.marks import slow
from tests.sequential.convnets import ResNet
from torchgpipe import Arguments, GPipe
from torchgpipe.balance import profile
from torchgpipe.sequential import to_sequential


def of(function, **modules):
    """Make a model of submodules and a function of it."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            for name, module in modules.items():
                setattr(self, name, module)

        def forward(self, *args):
            return function(self, *args)

    return Model()


def linears(number, width=4):
    return nn.ModuleList(nn.Linear(width, width) for _ in range(number))


def skips(layers):
    """Return for each skip where it starts and where it ends."""
    starts = {key: k for k, layer in enumerate(layers) for key in layer.stashable()}
    return sorted((starts[key], k) for k, layer in enumerate(layers) for key in layer.poppable())


def called(layers):
    """Return the names of the modules in each layer that have no others in them."""
    return [
        [name for name, m in layer.named_modules() if name and not [*m.children()]]
        for layer in layers
    ]


def test_a_cut_is_where_least_goes_across():
    def forward(m, x):
        x = m.pool(m.norm(m.first(x)).relu())  # the pool halves it: the cut is behind it
        y = m.second(m.before(x))  # x goes on beside its norm: the cut is before the norm
        return m.third((x + y).tanh())  # the last of equal places

    model = of(
        forward,
        first=nn.Conv1d(2, 4, 1),
        norm=nn.BatchNorm1d(4),
        pool=nn.MaxPool1d(2),
        before=nn.BatchNorm1d(4),
        second=nn.Conv1d(4, 4, 1),
        third=nn.Conv1d(4, 2, 1),
    )
    layers = to_sequential(model, torch.randn(4, 2, 6))
    assert called(layers) == [['first', 'norm', 'pool'], ['before', 'second'], ['third']]
    assert skips(layers) == [] and 'tanh' in layers[1].code


def test_a_value_goes_straight_to_where_it_is_used():
    """From there on to where it is used next, so it crosses no boundary twice."""

    def forward(m, x):
        first = m.layers[0](x)
        y = m.layers[3](m.layers[2](m.layers[1](first)))
        y = m.layers[4](y + first)
        y = m.layers[6](m.layers[5](y * first))
        return y + first

    layers = to_sequential(of(forward, layers=linears(7)), torch.randn(4, 4))
    assert skips(layers) == [(1, 3), (4, 6)]  # and by hand from 0 to 1, and from 3 to 4


def test_a_shape_goes_and_not_the_tensor():
    def forward(m, x):
        wide = m.layers[0](x)
        y = m.layers[2](m.layers[1](wide))
        return m.layers[3](y).view(wide.shape) * wide.size(0)

    layers = to_sequential(of(forward, layers=linears(4)), torch.randn(4, 4), check_sample=False)
    assert skips(layers) == []
    assert layers(torch.randn(9, 4)).shape == (9, 4)
    assert isinstance(layers[0](torch.randn(9, 4)), tuple)


def test_a_query_of_a_weight_leaves_it_in_one_layer():
    def forward(m, x):
        for layer in m.layers:
            x = layer(x.to(layer.weight.dtype)) * torch.ones(layer.weight.shape[0])
        return x

    layers = to_sequential(of(forward, layers=linears(4)), torch.randn(4, 4))
    assert [[*layer.state_dict()] for layer in layers] == [
        [f'layers.{k}.weight', f'layers.{k}.bias'] for k in range(4)
    ]


def test_a_shape_is_read_after_its_change():
    def forward(m, x):
        y = m.layers[0](x)
        y.unsqueeze_(0)
        n = y.shape[0] + 2
        return m.layers[1](y) * n

    model = of(forward, layers=linears(2))
    x = torch.randn(4, 4)
    assert torch.equal(to_sequential(model, x, check_sample=False)(x), model(x))


def test_a_layer_hands_over_a_tensor():
    """If two towers follow each other, the first one's output passes the second one."""

    def forward(m, a, b):
        for layer in m.left:
            a = layer(a)
        for layer in m.right:
            b = layer(b)
        return a @ b.t()

    model = of(forward, left=linears(2), right=linears(3))
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    layers = to_sequential(model, Arguments(a, b), check_sample=False)
    assert len(layers) == 5 and torch.equal(layers(a, b), model(a, b))
    assert skips(layers) == [(1, 4)]  # the left output; b is passed on


def test_a_layer_hands_over_the_smallest_tensor():
    """The output of the left tower, 4 wide, or the input of the right one."""
    for width, expected in [(2, [(1, 4)]), (9, [(0, 2), (2, 4)])]:

        def forward(m, a, b):
            a, b = m.left(a), m.right(b)
            return a + b

        model = of(
            forward,
            left=nn.Sequential(*linears(2)),
            right=nn.Sequential(nn.Linear(width, 4), *linears(2)),
        )
        layers = to_sequential(model, Arguments(torch.randn(4, 4), torch.randn(4, width)))
        assert len(layers) == 5 and skips(layers) == expected


def test_only_tensors_and_numbers_cross_boundaries():
    def forward(m, x):
        pack = nn.utils.rnn.pack_padded_sequence(
            m.first(x), torch.tensor([3, 2, 2, 1]), batch_first=True
        )
        lengths = pack.batch_sizes.tolist()
        y, _ = m.rnn(x)
        return m.last(y) * sum(lengths)

    model = of(
        forward, first=nn.Linear(4, 4), rnn=nn.GRU(4, 4, batch_first=True), last=nn.Linear(4, 4)
    )
    x = torch.randn(4, 3, 4)
    layers = to_sequential(model, x, check_sample=False)
    assert torch.equal(layers(x), model(x))

    class Handle:
        def __init__(self, x):
            self.x = x

    class Make(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.eye(4))

        def forward(self, x):
            return Handle(x @ self.weight)

    model = of(
        lambda m, x: m.third(m.second(m.make(x).x)),
        make=Make(),
        second=nn.Linear(4, 4),
        third=nn.Linear(4, 4),
    )
    layers = to_sequential(model, x, leaves=['make'])
    assert called(layers) == [['make'], ['second'], ['third']]
    model = of(
        lambda m, x: (lambda h: m.third(m.second(x) + h.x))(m.make(x)),
        make=Make(),
        second=nn.Linear(4, 4),
        third=nn.Linear(4, 4),
    )
    layers = to_sequential(model, x, leaves=['make'])
    assert called(layers) == [['second', 'make'], ['third']]


def test_an_in_place_change_is_in_the_layer_of_its_tensor():
    def forward(m, x):
        y = m.first(x)
        part = y[:, :2]
        y = m.second(y.sigmoid())  # a cut is before the sigmoid or behind it
        part.zero_()
        return m.third(y + part.sum())

    model = of(forward, first=nn.Linear(4, 8), second=nn.Linear(8, 4), third=nn.Linear(4, 4))
    layers = to_sequential(model, torch.randn(4, 4))
    assert torch.equal(layers.eval()(torch.ones(4, 4)), model.eval()(torch.ones(4, 4)))

    def in_place(m, x):
        y = m.first(x)
        z = y.relu_()
        return m.second(z)

    model = of(in_place, first=nn.Linear(4, 4), second=nn.Linear(4, 4))
    assert 'relu_' in to_sequential(model, torch.randn(4, 4))[0].code


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:The .grad attribute of a Tensor that is not a leaf')
def test_layers_are_compiled():
    """PyTorch counts how often it compiles a code, and gives up: each layer has its own."""

    def forward(m, x):
        first = y = m.layers[0](x)
        for layer in m.layers[1:]:
            y = layer(y) * first.mean(1, True) if y.shape[1] == 4 else y
        return y

    model, x = of(forward, layers=linears(24)), torch.randn(4, 4)
    layers = to_sequential(model, x)
    pipe = GPipe(layers, [12, 12], devices=['cpu', 'cpu'], chunks=2)
    expected = pipe(x)
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        pipe.compile(backend=backend)
        assert torch.allclose(pipe(x), expected, atol=1e-6)
    assert (
        sum(
            node.op == 'call_function' and 'linear' in str(node.target)
            for graph in compiled
            for node in graph.graph.nodes
        )
        >= 24
    )


# --- beside models that were written by hand
# -------------------------------------------------------------------------------------------------


class UNet(nn.Module):
    def __init__(self, depth, convs, c):
        super().__init__()

        def stack(channels, mid, out):
            widths = [channels, *[mid] * (convs - 1), out]
            return nn.Sequential(
                *(
                    layer
                    for a, b in zip(widths, widths[1:])
                    for layer in (
                        nn.Conv2d(a, b, 3, padding=1, bias=False),
                        nn.Dropout2d(0.1),
                        nn.InstanceNorm2d(b),
                        nn.LeakyReLU(0.01),
                    )
                )
            )

        self.down = nn.ModuleList(
            stack(c << (i - 1) if i else 3, c << i, c << i) for i in range(depth)
        )
        bottom = c << (depth - 1)
        self.bottom = stack(bottom, 2 * bottom, bottom)
        self.up = nn.ModuleList(
            stack(c << (i + 1), (c << i) // 2, (c << i) // 2) for i in reversed(range(depth))
        )
        self.head = nn.Conv2d(c // 2, 1, 1, bias=False)

    def forward(self, x):
        kept = []
        for stack in self.down:
            x = stack(x)
            kept.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.bottom(x)
        for stack in self.up:
            skip = kept.pop()
            x = nn.functional.interpolate(x, size=skip.shape[-2:])
            x = stack(torch.cat((x, skip), 1))
        return self.head(x)


def least_across(found, share):
    """Return the least bytes at a cut that leaves about this share of the parameters before it."""
    sizes = [layer.parameter_bytes for layer in found.layers]
    return min(
        layer.output_bytes + sum(s.bytes for s in found.skips if s.source <= k < s.target)
        for k, layer in enumerate(found.layers[:-1])
        if abs(sum(sizes[: k + 1]) / sum(sizes) - share) < 0.1
    )


@pytest.mark.parametrize(
    'by_hand, model, number',
    [
        slow(resnet101, lambda: ResNet((3, 4, 23, 3)), 105),
        (lambda: unet(depth=3, num_convs=2, base_channels=4), lambda: UNet(3, 2, 4), 15),
    ],
    ids=['ResNet-101', 'U-Net'],
)
def test_no_more_goes_across_the_best_cut_than_by_hand(by_hand, model, number):
    x = torch.randn(2, 3, 32, 32)
    by_hand = by_hand()
    layers = to_sequential(model(), x, grain='layer', check_sample=False)
    assert len(layers) == number
    assert sum(p.numel() for p in layers.parameters()) == sum(
        p.numel() for p in by_hand.parameters()
    )
    found, known = (profile(each, x, device='cpu', timeout=0) for each in (layers, by_hand))
    for share in (0.25, 0.5, 0.75):
        assert least_across(found, share) <= 1.05 * least_across(known, share)
