"""The blocks of a model: layers are cut between them."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.sequential.models import MODELS
from torchgpipe import Arguments, GPipe
from torchgpipe.base.structure import call, flatten
from torchgpipe.sequential import original_names, to_sequential


class Block(nn.Module):
    """A residual block of two linear layers, which asks for a shape."""

    def __init__(self, width=4):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu()).view(x.shape)


class Other(Block):
    """A block of another class."""


class Stage(nn.Module):
    """Blocks in a list, behind a layer of its own."""

    def __init__(self, number):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(number))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


class Model(nn.Module):
    """A function of submodules between two linear layers."""

    def __init__(self, function, **modules):
        super().__init__()
        self.embed, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x):
        return self.head(self.function(self, self.embed(x)))


def in_order(m, x):
    for block in m.blocks:
        x = block(x)
    return x


def holds(layers):
    """Return the paths of the linear layers in each layer."""
    return [
        [name for name, m in layer.named_modules() if isinstance(m, nn.Linear)] for layer in layers
    ]


def converted(model, grain='block', leaves=()):
    """Convert a model, and see that it has the numbers of the model for other samples."""
    layers = to_sequential(model.double(), torch.randn(4, 4).double(), grain=grain, leaves=leaves)
    other = torch.randn(7, 4).double()
    assert torch.equal(layers(other), model(other))
    return layers


def of_blocks(*names):
    return [[f'{name}.up', f'{name}.down'] for name in names]


@pytest.mark.parametrize(
    'container',
    [
        nn.ModuleList,
        lambda blocks: nn.Sequential(*blocks),
        lambda blocks: nn.ModuleDict({f'b{k}': x for k, x in enumerate(blocks)}),
    ],
    ids=['list', 'sequential', 'dict'],
)
def test_no_cut_is_within_a_block(container):
    blocks = container([Block() for _ in range(3)])

    def forward(m, x):
        for block in m.blocks.children():
            x = block(x)
        return x

    model = Model(forward, blocks=blocks)
    names = [f'blocks.{name}' for name, _ in blocks.named_children()]
    layers = converted(model)
    assert holds(layers) == [['embed'], *of_blocks(*names), ['head']]
    assert all(
        not [*layer.poppable()] and type(layer(torch.zeros(2, 4).double())) is torch.Tensor
        for layer in layers[1:]
    )  # The shape that a block asks for stays in it.
    assert len(converted(model, 'layer')) == 8
    assert len(converted(model, 'operation')) > 12


def test_stages_are_no_blocks_as_blocks_are_in_them():
    model = Model(in_order, blocks=nn.ModuleList([Stage(2), Stage(1)]))
    assert holds(converted(model)) == [
        ['embed'],
        ['blocks.0.first'],
        *of_blocks('blocks.0.blocks.0', 'blocks.0.blocks.1'),
        ['blocks.1.first'],
        *of_blocks('blocks.1.blocks.0'),
        ['head'],
    ]


def test_modules_side_by_side_are_no_blocks():
    """As experts, of which each block has some."""

    class Mixture(Block):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(Other() for _ in range(3))

        def forward(self, x):
            return super().forward(x) + sum(expert(x) for expert in self.experts)

    model = Model(in_order, blocks=nn.ModuleList(Mixture() for _ in range(2)))
    assert [len(names) for names in holds(converted(model))] == [1, 8, 8, 1]
    model = Model(
        lambda m, x: sum(each(x) for each in m.heads),
        heads=nn.ModuleList(Block() for _ in range(3)),
    )
    assert len(converted(model)) == len(converted(model, 'layer'))


def test_a_block_that_changes_its_input_in_place():
    """The next block gets the same tensor, not the output of this one."""

    class Adds(Block):
        def forward(self, x):
            x += self.down(self.up(x.clone()))

    def forward(m, x):
        for block in m.blocks:
            block(x)
        return x

    model = Model(forward, blocks=nn.ModuleList(Adds() for _ in range(2)))
    assert holds(converted(model)) == [['embed'], *of_blocks('blocks.0', 'blocks.1'), ['head']]


def test_modules_of_a_list_that_are_not_alike_are_no_blocks():
    model = Model(in_order, blocks=nn.ModuleList([Block(), Other()]))
    assert len(converted(model)) == len(converted(model, 'layer')) == 6
    model = Model(
        in_order, blocks=nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))
    )
    assert len(converted(model)) == 5  # One weight in each: these are layers.


def test_a_block_that_is_called_several_times():
    """Each call is a block; as in a model whose blocks share their weights."""

    def forward(m, x):
        for _ in range(3):
            x = m.blocks[0](x)
        return x

    model = Model(forward, blocks=nn.ModuleList([Block()]))
    assert holds(converted(model)) == [['embed'], *of_blocks(*['blocks.0'] * 3), ['head']]


def test_blocks_in_another_order():
    def forward(m, x):
        first = m.blocks[2](x)
        y = m.others[0](first)
        return m.others[1](m.blocks[0](y) + first) + m.blocks[1](y)

    model = Model(
        forward,
        blocks=nn.ModuleList(Block() for _ in range(3)),
        others=nn.Sequential(Other(), Other()),
    )
    assert holds(converted(model)) == [
        ['embed'],
        *of_blocks('blocks.2', 'others.0', 'blocks.0', 'others.1', 'blocks.1'),
        ['head'],
    ]


def test_a_block_that_gives_no_tensor_stays_with_the_next_one():
    class Opaque:
        def __init__(self, x):
            self.x = x

    class Wraps(nn.Linear):
        def forward(self, x):
            return Opaque(super().forward(getattr(x, 'x', x)))

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(4, 4), Wraps(4, 4)

        def forward(self, x):
            return self.down(self.up(getattr(x, 'x', x)))

    model = Model(lambda m, x: in_order(m, x).x, blocks=nn.ModuleList(Wrapped() for _ in range(2)))
    assert holds(converted(model, leaves=[Wraps])) == [
        ['embed'],
        ['blocks.0.up', 'blocks.0.down', 'blocks.1.up', 'blocks.1.down'],
        ['head'],
    ]


def test_a_guard_of_several_blocks_cuts_none_short():
    """It follows the last value that it reads, if one sample takes another branch."""

    class Expanding(Block):
        def forward(self, x):
            scale = torch.ones(1, 4, dtype=x.dtype)
            if x.shape[0] != 1:
                scale = scale.expand(x.shape[0], -1)
            return super().forward(x) * scale

    model = Model(in_order, blocks=nn.ModuleList(Expanding() for _ in range(3)))
    layers = converted(model)
    assert holds(layers) == [['embed'], *of_blocks('blocks.0', 'blocks.1', 'blocks.2'), ['head']]
    one = torch.randn(1, 4).double()
    assert torch.equal(layers(one), model(one))


def test_a_change_in_place_goes_along_at_the_finest():
    model = Model(lambda m, x: x.tanh().mul(2).relu_().add(1))
    layers = converted(model, 'operation')
    assert len(layers) == 5 and '.mul(' in next(
        layer.code for layer in layers if '.relu_(' in layer.code
    )


def test_a_grain_that_is_none():
    with pytest.raises(
        ValueError, match="grain must be one of 'block', 'layer', 'operation', but is 'blocks'"
    ):
        to_sequential(nn.Linear(4, 4), torch.rand(4, 4), grain='blocks')


def test_more_partitions_than_layers():
    layers = to_sequential(
        Model(in_order, blocks=nn.ModuleList(Block() for _ in range(2))), torch.rand(4, 4)
    )
    with pytest.raises(
        ValueError,
        match=r'4 layers, but .* adds up to 6; where to_sequential has '
        r"made them, it makes more by grain='layer'",
    ):
        GPipe(layers, [1] * 6, devices=['cpu'] * 6)
    with pytest.raises(ValueError, match=r'4 layers, but the balance \[1, 2\] adds up to 3\n'):
        GPipe(layers, [1, 2], devices=['cpu'] * 2)


#: How many layers the models of the literature become, by their grain.
NUMBERS = {
    'ResNet': (5, 13),
    'MobileNetV3': (9, 25),
    'U-Net': (9, 13),
    'DenseNet': (8, 13),
    'ViT': (5, 15),
    'GPT': (6, 15),
    'T5': (7, 37),
    'two towers': (8, 16),
}


@pytest.mark.slow
@pytest.mark.parametrize('name', MODELS)
def test_models_of_the_literature(name):
    torch.manual_seed(0)
    model, sample = MODELS[name](dropout=0.1)
    model, sample = model.double().eval(), _double(sample)
    expected = flatten(call(model, sample))[0]
    found = []
    for grain in ('block', 'layer', 'operation'):
        layers = to_sequential(copy.deepcopy(model), sample, grain=grain)
        assert original_names(layers.state_dict()).keys() == model.state_dict().keys()
        actual = flatten(call(layers, sample))[0]
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
        found.append(len(layers))
    assert (*found[:2],) == NUMBERS[name] and found[1] < found[2]


def _double(sample):
    args = sample.args if isinstance(sample, Arguments) else (sample,)
    kwargs = sample.kwargs if isinstance(sample, Arguments) else {}
    return Arguments(*(x.double() if x.is_floating_point() else x for x in args), **kwargs)


class PreActivation(nn.Module):
    """A block that begins with a change of its input in place."""

    def __init__(self):
        super().__init__()
        self.f, self.g = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        x = F.relu(x, inplace=True)
        return x + self.g(self.f(x * 1))


class InPlace(PreActivation):
    """A block that adds to its input in place."""

    def forward(self, x):
        x += self.g(self.f(x * 1))
        return x


def test_a_cut_before_a_block_that_changes_its_input_is_behind_that():
    model = Deep(PreActivation)
    layers = to_sequential(model, torch.randn(4, 6))
    assert len(layers) == 8
    for n in (2, 4):
        pipeline = GPipe(layers, [8 // n] * n, devices=[f'cpu:{j}' for j in range(n)], chunks=2)
        x = torch.randn(5, 6)
        output = pipeline(x)
        assert torch.equal(output, torch.cat([model(part) for part in x.split(3)]))
        output.sum().backward()


def test_a_finer_grain_is_finer():
    for block in (PreActivation, InPlace):
        numbers = [
            len(to_sequential(Deep(block), torch.randn(4, 6), grain=grain))
            for grain in ('block', 'layer', 'operation')
        ]
        assert numbers == sorted(numbers) and numbers[0] == 8, numbers


class Deep(nn.Module):
    """An embedding, six blocks and a head."""

    def __init__(self, block):
        super().__init__()
        self.begin, self.end = nn.Linear(6, 6), nn.Linear(6, 6)
        self.blocks = nn.ModuleList(block() for _ in range(6))

    def forward(self, x):
        x = self.begin(x)
        for block in self.blocks:
            x = block(x)
        return self.end(x)
