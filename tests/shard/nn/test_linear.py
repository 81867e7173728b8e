"""Linear layers, compared with one process."""

import copy
import io
import itertools
import pickle
import warnings

import pytest
import torch
from torch import nn

import torchgpipe.shard as ts
from tests.marks import slow
from tests.shard.nn.oracle import (
    close,
    cut,
    double,
    operations,
    over_groups,
    same_gradients,
    same_parameters,
    same_start,
    seeded,
)
from tests.shard.processes import run
from torchgpipe.shard.parameter import global_shape, is_tagged, storage_dim

SIZES = [5, 7, 31]


def same_as_plain(in_features, out_features, dim, bias):
    """Compare initial values, outputs and gradients."""
    plain, layer = same_start(
        lambda: nn.Linear(in_features, out_features, bias, dtype=torch.double),
        lambda: ts.nn.ParallelLinear(in_features, out_features, bias, dim, dtype=torch.double),
    )
    for scattered in (False, True) if dim == 0 else (False,):
        plain.zero_grad()
        layer.zero_grad()
        expected_x = double(2, 3, in_features).requires_grad_()
        x = expected_x.detach().clone().requires_grad_()
        expected, y = plain(expected_x), layer(ts.distributed.scatter(x) if scattered else x)
        assert not is_tagged(x) and is_tagged(y)
        if dim in (1, -1):
            assert ts.get_parallel_dim(y) == -1 and y.shape == cut(expected, -1).shape
            y = ts.distributed.gather(y, size=out_features)
        assert ts.get_parallel_dim(y) is None
        close(y, expected)
        grad = double(*y.shape)
        expected.backward(grad)
        y.backward(grad)
        close(x.grad, expected_x.grad)
        same_gradients(plain, layer)


@pytest.mark.parametrize('world, groups', [(2, [1, 2]), slow(4, [2, 4])])
def test_results_equal_one_process(world, groups):
    run(world, over_groups, groups, same_as_plain, SIZES, SIZES, [None, 0, 1, -1], [True, False])


def refuses():
    """Pass invalid arguments."""
    for dim in (2, -2, '0'):
        with pytest.raises(ValueError, match='None, 0, 1 or -1'):
            ts.nn.ParallelLinear(4, 4, dim=dim)
        with pytest.raises(ValueError, match='None, 0, 1 or -1'):
            ts.nn.ParallelLinear.convert_parallel_linear(nn.Linear(4, 4), dim)
    column, row = ts.nn.ParallelLinear(5, 7, dim=1), ts.nn.ParallelLinear(7, 5, dim=0)
    whole = ts.nn.ParallelLinear(5, 7)
    x = torch.randn(2, 5)
    y = column(x)
    for layer in (column, whole):
        with pytest.raises(ValueError, match=r'ParallelLinear\(in_features=5.*dim=.*gather'):
            layer(ts.distributed.scatter(x))
        with pytest.raises(ValueError, match=r'ParallelLinear\(in_features=5.* 7 features'):
            layer(torch.randn(2, 7))
    lost = r'ParallelLinear\(in_features=7.*dim=0\): .*RegisterParallelDim\(-1\)'
    with pytest.raises(ValueError, match=lost):
        row(y.relu())
    with pytest.raises(ValueError, match='parallel_linear: .*RegisterParallelDim'):
        ts.nn.functional.parallel_linear(y.relu(), row.weight)
    assert ts.get_parallel_dim(row(ts.nn.RegisterParallelDim(-1)(y.relu()))) is None
    wrong = torch.randn(2, 1)
    ts.register_parallel_dim(wrong, -1)
    with pytest.raises(ValueError, match='tagged as a shard, and has 1'):
        row(wrong)
    for parameter, message in [(torch.zeros(7, 5), 'shape'), (torch.zeros(4, 4), 'shape')]:
        with pytest.raises(ValueError, match=message):
            column.weight = nn.Parameter(parameter)
    square = ts.nn.ParallelLinear(2, 4, dim=1), ts.nn.ParallelLinear(4, 2, dim=0)
    with pytest.raises(ValueError, match='split along dimension 1 in memory'):
        square[1].weight = square[0].weight


def test_wrong_input_raises():
    run(2, over_groups, [2], refuses)


def without_bias(dim):
    """Take the bias away."""
    layer = ts.nn.ParallelLinear(7, 5, dim=dim)
    layer.bias = None
    x = torch.randn(2, 7)
    assert copy.deepcopy(layer)(x).equal(layer(x)) and [*layer.state_dict()] == ['weight']


def alone(dim):
    """Compare a group of one with the plain layers."""
    x, ids, options = torch.randn(2, 7), torch.tensor([1, 2]), {'max_norm': 0.1}
    for plain, sharded, value in [
        (nn.Linear(7, 5), ts.nn.ParallelLinear(7, 5, dim=dim), x),
        (nn.Embedding(7, 5, **options), ts.nn.ParallelEmbedding(7, 5, **options, dim=dim), ids),
    ]:
        assert operations(sharded, value) == operations(plain, value)
        assert 'copy_' not in operations(sharded.reset_parameters)


def test_a_group_of_one_gives_the_results_of_plain_layers():
    run(1, over_groups, [1], alone, [None, 0, 1])


def no_inputs(dim):
    """Have no inputs, or no outputs."""
    for sizes in ((0, 5), (5, 0)):
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # nn.Linear has no weights to draw
            plain, layer = same_start(
                lambda: nn.Linear(*sizes), lambda: ts.nn.ParallelLinear(*sizes, dim=dim)
            )
        x = torch.randn(2, sizes[0])
        y = layer(x)
        assert y.equal(cut(plain(x), -1) if dim == 1 else plain(x))
    same_start(lambda: nn.Embedding(0, 5), lambda: ts.nn.ParallelEmbedding(0, 5, dim=dim))


def test_groups_are_set_before_layers_are_split():
    for make in (
        lambda: ts.nn.ParallelLinear(2, 2, dim=1),
        lambda: ts.draws(-1).__enter__(),
        lambda: ts.nn.ParallelEmbedding(2, 2, dim=0),
        lambda: ts.nn.ParallelLinear.convert_parallel_linear(nn.Linear(2, 2), 1),
        lambda: ts.nn.functional.parallel_linear(torch.ones(2), torch.ones(2, 2), dim=0),
    ):
        with pytest.raises(RuntimeError, match='ts.distributed.init_process_group'):
            make()


def test_layers_that_are_not_split_need_no_groups():
    """In v0.8.0, it needed them, though not in TorchShard."""
    make = nn.Sequential
    plain, model = same_start(
        lambda: make(
            nn.Embedding(7, 5, 2), nn.Linear(5, 3), nn.Dropout(0.5), nn.Identity(), nn.Linear(3, 4)
        ),
        lambda: make(
            ts.nn.ParallelEmbedding(7, 5, 2),
            ts.nn.ParallelLinear(5, 3),
            ts.nn.ParallelDropout(0.5),
            ts.nn.RegisterParallelDim(),
            ts.nn.ParallelLinear(3, 4),
        ),
    )
    model = ts.nn.ParallelLinear.convert_parallel_linear(model)
    x, y = torch.tensor([0, 2, 6]), torch.tensor([1, 3, 0])
    (expected, _), (loss, _) = (
        seeded(lambda: function(module(x), y))
        for module, function in (
            (plain, nn.CrossEntropyLoss()),
            (model, ts.nn.ParallelCrossEntropyLoss()),
        )
    )
    expected.backward()
    loss.backward()
    assert loss.equal(expected)
    for one, other in zip(plain.parameters(), model.parameters()):
        assert one.grad.equal(other.grad)
    part = torch.ones(2, 2)
    ts.register_parallel_dim(part, -1)
    with pytest.raises(RuntimeError, match='ts.distributed.init_process_group'):
        ts.nn.functional.parallel_cross_entropy(part, y[:2])
    # Without parallel groups there is one state dict, too.
    assert ts.relocate_state_dict(model, model.state_dict()).keys() == model.state_dict().keys()


# --- parameters have the shape of their whole
# ------------------------------------------------------------


def knows(layer):
    """Return attributes of a layer's parameters."""
    return [
        (storage_dim(each), global_shape(each), getattr(each, ts._ORDER_ATTR))
        for each in layer.parameters()
    ]


def goes_places(dim):
    """Apply functions that replace the parameters of a layer."""
    layer = ts.nn.ParallelLinear(7, 5, dim=dim)
    known = knows(layer)
    assert known[0][:2] == ({None: None, 0: 1, 1: 0}[dim], (5, 7))
    values = [each.clone() for each in layer.parameters()]
    saved = io.BytesIO()
    torch.save(layer, saved)
    saved.seek(0)
    others = [
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(saved, weights_only=False),
        copy.deepcopy(layer).half(),
        copy.deepcopy(layer).to('meta').to_empty(device='cpu'),
    ]
    for swap, assign in itertools.product((False, True), (False, True)):
        torch.__future__.set_swap_module_params_on_conversion(swap)
        try:
            loaded = ts.nn.ParallelLinear(7, 5, dim=dim)
            loaded.load_state_dict({**layer.state_dict()}, assign=assign)
            others += [loaded, copy.deepcopy(layer).double()]
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        assert all(map(torch.equal, loaded.parameters(), values))
    tied = ts.nn.ParallelLinear(7, 5, dim=dim)
    tied.weight = layer.weight
    for other in [*others, tied, layer]:
        assert knows(other) == known


@pytest.mark.parametrize('check', [without_bias, no_inputs, goes_places])
def test_a_layer_has_its_tags_everywhere_also_without_a_bias_inputs_or_outputs(check):
    run(2, over_groups, [2], check, [None, 0, 1])


def meta(dim):
    """Make a layer without memory; then give it memory, and values."""
    made = [ts.nn.ParallelLinear(7, 5, dim=dim, device='meta')]
    with torch.device('meta'):
        made.append(ts.nn.ParallelLinear(7, 5, dim=dim))
        plain = nn.Linear(7, 5)
        made.append(ts.nn.ParallelLinear.convert_parallel_linear(plain, dim))
    made.append(torch.nn.utils.skip_init(ts.nn.ParallelLinear, 7, 5, dim=dim))
    for layer in made:
        assert layer is made[3] or layer.weight.is_meta
        layer.to_empty(device='cpu')
        plain, _ = same_start(
            lambda: nn.Linear(7, 5), lambda: [layer.reset_parameters(), layer][1]
        )


def test_the_meta_device():
    run(2, over_groups, [1, 2], meta, [None, 0, 1])


def differently_seeded(dim):
    """Agree with the first rank of all, and go on with one's own numbers."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    plain, after_first = nn.Linear(7, 5), torch.rand(1)
    torch.manual_seed(rank)
    own = torch.rand(1)
    torch.manual_seed(rank)
    layer = ts.nn.ParallelLinear(7, 5, dim=dim)
    same_parameters(plain, layer)
    assert torch.rand(1).equal(after_first if rank == 0 else own)
    # The same in conversion.
    torch.manual_seed(rank)
    same_parameters(plain, ts.nn.ParallelLinear.convert_parallel_linear(nn.Linear(7, 5), dim))


def test_ranks_agree_where_seeds_differ():
    run(4, over_groups, [2], differently_seeded, [None, 0, 1])


# --- conversion
# ---------------------------------------------------------------------------------------


def converts(dim, kind, bias):
    """Compare a converted layer with the original."""
    torch.manual_seed(5)
    plain = nn.Linear(7, 5, bias, dtype=kind).eval()
    plain.weight = nn.Parameter(plain.weight.t().contiguous().t(), False)
    plain.note = 'mine'
    seen = []
    hook = plain.register_forward_hook(lambda *_: seen.append(1))
    before = copy.deepcopy(plain)
    layer = ts.nn.ParallelLinear.convert_parallel_linear(plain, dim)
    assert type(layer) is ts.nn.ParallelLinear and type(plain) is nn.Linear
    assert all(map(torch.equal, before.parameters(), plain.parameters()))
    assert not any(map(is_tagged, plain.parameters()))
    same_parameters(plain, layer)
    assert layer.weight.is_contiguous()
    assert not layer.training and layer.note == 'mine' and layer.dim == dim
    assert all(
        each.data_ptr() != other.data_ptr() or not each.numel()
        for each, other in zip(layer.parameters(), plain.parameters())
    )
    x = torch.randn(3, 7, dtype=kind)
    y = layer(x)
    assert seen == [1]
    hook.remove()
    expected = plain(x)
    torch.testing.assert_close(y, cut(expected, -1) if dim == 1 else expected)
    layer(x)
    assert seen == [1]


def test_conversion_keeps_values_type_mode_hooks_and_options():
    run(2, over_groups, [1, 2], converts, [None, 0, 1], [torch.float, torch.double], [True, False])


def within():
    """Convert layers within a model."""

    class Mine(nn.Linear):
        pass

    shared = nn.Linear(5, 5)
    model = nn.Sequential(
        nn.Linear(7, 5),
        nn.ReLU(),
        nn.ModuleDict({'a': shared, 'b': shared}),
        Mine(5, 5),
        nn.Embedding(3, 3),
    )
    assert ts.nn.ParallelLinear.convert_parallel_linear(model, 1) is model
    assert type(model[0]) is type(model[2]['a']) is ts.nn.ParallelLinear
    assert model[2]['a'] is model[2]['b'] and type(model[3]) is Mine
    names = '0.weight 0.bias 2.a.weight 2.a.bias 2.b.weight 2.b.bias 3.weight 3.bias 4.weight'
    assert ' '.join(model.state_dict()) == names
    ts.nn.ParallelLinear.convert_parallel_linear(model, 0)  # there is nothing left to convert
    assert model[0].dim == 1
    tied = nn.Sequential(nn.Embedding(5, 7), nn.Linear(7, 5))
    tied[1].weight = tied[0].weight
    for convert in (
        ts.nn.ParallelLinear.convert_parallel_linear,
        ts.nn.ParallelEmbedding.convert_parallel_embedding,
    ):
        with pytest.raises(ValueError, match='another layer has the weight of .*, too'):
            convert(tied, 1)
    tied[1].weight = nn.Parameter(tied[1].weight.detach().clone())
    ts.nn.ParallelLinear.convert_parallel_linear(tied, 1)
    ts.nn.ParallelEmbedding.convert_parallel_embedding(tied, 0)
    tied[1].weight = tied[0].weight
    assert storage_dim(tied[0].weight) == 0
    computed = nn.utils.parametrizations.weight_norm(nn.Linear(5, 5))
    assert ts.nn.ParallelLinear.convert_parallel_linear(computed, 1) is computed
    half = nn.Linear(5, 5)
    del half.weight
    half.weight = torch.zeros(5, 5)
    with pytest.raises(ValueError, match='has no parameter weight'):
        ts.nn.ParallelLinear.convert_parallel_linear(half, 1)


def test_conversion_of_the_layers_of_a_model():
    run(2, over_groups, [2], within)
