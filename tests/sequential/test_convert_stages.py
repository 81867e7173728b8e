"""Sequential models by hand, of functions that use a model's submodules."""

import copy
import pickle

import pytest
import torch
from torch import nn

from tests.devices import devices
from torchgpipe import Arguments, GPipe
from torchgpipe.sequential import ConversionError, from_stages, original_names


class Net(nn.Module):
    """A typical stack of layers."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
        self.head.weight = self.words.weight
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.norm, self.pool = nn.LayerNorm(8), nn.Linear(8, 2)
        self.places = nn.Parameter(torch.randn(5, 8))
        self.register_buffer('table', torch.rand(8))
        self.drop = nn.Dropout(0.5)
        self.scale = 0.5
        self.unused = nn.Sequential(nn.Linear(3, 3))

    @property
    def factor(self):
        return self.scale * 2

    def embed(self, ids, mask=None):
        x = self.words(ids) * self.factor + self.places[: ids.shape[1]]
        return x if mask is None else x * mask.unsqueeze(-1)

    def run(self, x, begin, end):
        for block in self.blocks[begin:end]:
            x = x + block(x) * self.table
        return self.drop(x) if self.training else x

    def forward(self, ids, mask=None):
        x = self.run(self.run(self.embed(ids, mask), 0, 3), 3, 6)
        return {'words': self.head(self.norm(x)) * self.norm.eps, 'pool': self.pool(x[:, 0])}


def first(net, ids, mask=None):
    return {'x': net.embed(ids, mask)}


def second(net, value):
    return {'x': net.run(value['x'], 0, 3)}


def third(net, value):
    x = value['x']
    for block in [*net.blocks][-3:]:
        x = x + block(x) * net.table
    return net.drop(x)


def last(net, x):
    return {'words': net.head(net.norm(x)) * net.norm.eps, 'pool': net.pool(x[:, 0])}


STAGES = [first, second, third, last]


@devices
def test_stages(devices):
    for sample in [
        torch.randint(10, (6, 5)),
        Arguments(torch.randint(10, (6, 5)), mask=torch.ones(6, 5).double()),
    ]:
        torch.manual_seed(0)
        net = Net().double()
        net.drop.p = 0.0 if devices.are_accelerators else 0.5  # where generators are others
        layers = from_stages(net, STAGES, sample)
        args, kwargs = (
            (sample.args, sample.kwargs) if isinstance(sample, Arguments) else ((sample,), {})
        )
        reference = copy.deepcopy(net)
        pipe = GPipe(layers, [2, 2], devices=devices(2), chunks=1, checkpoint='always')
        for step in range(3):
            outputs = []
            for model in (reference, pipe):
                torch.manual_seed(step)
                model.zero_grad()
                place = devices.first if model is pipe else 'cpu'
                output = model(
                    *(x.to(place) for x in args),
                    **{name: x.to(place) for name, x in kwargs.items()},
                )
                (output['words'].square().sum() + output['pool'].sum()).backward()
                outputs.append({name: x.cpu() for name, x in output.items()})
                with torch.no_grad():
                    for p in model.parameters():
                        if p.grad is not None:
                            p -= 0.003 * p.grad
            for name, x in outputs[0].items():
                assert (x - outputs[1][name]).abs().max() <= 1e-12, sample
        state = reference.state_dict()
        found = original_names(pipe.state_dict())
        assert found.keys() == state.keys(), sample
        assert all((found[name].cpu() - x).abs().max() <= 1e-12 for name, x in state.items())
        pipe.load_state_dict(state)
        assert all(
            torch.equal(x.cpu(), state[name])
            for name, x in original_names(pipe.state_dict()).items()
        ), sample


def test_a_stage_has_the_parameters_that_it_uses():
    net = Net()
    layers = from_stages(net, STAGES, torch.randint(10, (4, 5)))
    names = [sorted({name.partition('.')[0] for name in layer.state_dict()}) for layer in layers]
    assert names == [
        ['places', 'words'],
        ['blocks', 'table'],
        ['blocks', 'table'],
        ['head', 'norm', 'pool', 'unused'],
    ]
    assert layers[2].blocks[5] is net.blocks[5] is layers[2].blocks[-1]
    assert len(layers[2].blocks) == 6 and layers[0].factor == 1.0
    for get in (
        lambda: layers[2].blocks[0](torch.ones(8)),
        lambda: layers[0].head,
        lambda: layers[2].blocks[-6].weight,
    ):
        with pytest.raises(AttributeError, match='that it used with the sample'):
            get()


def test_submodules_and_layers_of_their_own_are_stages():
    model = nn.Module()
    model.first, model.last = nn.Linear(4, 4), nn.Linear(4, 4)
    model.forward = lambda x: model.last(model.first(x).relu())
    layers = from_stages(
        model,
        [model.first, nn.ReLU(), lambda m, x: m.last(x)],
        torch.randn(4, 4),
        check_sample=False,
    )
    assert [*layers.state_dict()] == [
        '0.first.weight',
        '0.first.bias',
        '2.last.weight',
        '2.last.bias',
    ]
    assert isinstance(layers[1], nn.ReLU)
    with pytest.raises(ValueError, match='Linear, which has parameters, is not in it'):
        from_stages(model, [nn.Linear(4, 4)], torch.randn(4, 4))
    with pytest.raises(TypeError, match="a stage is a function .* not 'first'"):
        from_stages(model, ['first'], torch.randn(4, 4))


def test_other_numbers_than_the_model_has():
    net, ids = Net(), torch.randint(10, (4, 5))
    with pytest.raises(ConversionError, match=r"in training: output\['words'\] by"):
        from_stages(
            net,
            [first, second, third, lambda m, x: {**last(m, x), 'words': m.head(m.norm(x))}],
            ids,
        )
    with pytest.raises(ConversionError, match='in training: gradient of .*blocks.0.weight'):
        from_stages(
            net,
            [
                first,
                lambda m, v: (
                    second(m, {'x': v['x']})
                    if not m.training
                    else {
                        'x': (lambda y: y.detach() + (v['x'] - v['x'].detach()))(second(m, v)['x'])
                    }
                ),
                third,
                last,
            ],
            ids,
        )


def test_copies_and_pickles():
    net, ids = Net(), torch.randint(10, (4, 5))
    layers = from_stages(net, STAGES, ids).eval()
    expected = layers(ids)['words']
    for other in (copy.deepcopy(layers), pickle.loads(pickle.dumps(layers))):
        assert torch.equal(other(ids)['words'], expected)
        assert other.half()[0].places.dtype == torch.half
    assert net.places.dtype == torch.float


def test_a_pipeline_of_another_module_says_whether_it_can_be_sequential():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

        def forward(self, x):
            return self.body(x)

    with pytest.raises(
        TypeError,
        match=r'to_sequential\(module, sample\) would make it one, of '
        '2 layers',
    ):
        GPipe(Model(), [1, 1], devices=['cpu', 'cpu'])


class Routed(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def test_a_pipeline_of_a_model_that_cannot_be_sequential_says_why():
    with pytest.raises(TypeError, match=r'(?s)may make it one.*stops here.*if x.sum\(\) > 0'):
        GPipe(Routed(), [1], devices=['cpu'])
    with pytest.raises(TypeError, match='but got list$'):
        GPipe([nn.ReLU()], [1], devices=['cpu'])
