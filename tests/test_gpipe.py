"""The module that the user holds: construction, protocol, copies, names, moves."""

import copy
import io
import pickle
import threading

import pytest
import torch
from torch import nn

import torchgpipe
from tests.devices import devices, places
from tests.helpers import (
    Child,
    assert_same,
    call,
    gradients,
    in_partitions,
    nodes,
    nothing,
    small_model,
    threads,
    to,
)
from torchgpipe import GPipe, NoChunk
from torchgpipe.engine import split
from torchgpipe.engine.streams import use_device


def pipe(model=None, balance=(4, 4), devices=('cpu:0', 'cpu:1'), **kwargs):
    """Wrap a model in two partitions."""
    return GPipe(small_model() if model is None else model, balance, devices=devices, **kwargs)


def test_the_public_names():
    assert torchgpipe.__all__ == [
        'Arguments',
        'GPipe',
        'NoChunk',
        '__version__',
        'is_checkpointing',
        'is_recomputing',
        'no_recompute',
    ]
    assert all(hasattr(torchgpipe, name) for name in torchgpipe.__all__)
    assert not torchgpipe.is_checkpointing() and not torchgpipe.is_recomputing()


@devices
def test_attributes(devices):
    class Text:
        def __str__(self):
            return 'always'

    model = pipe(balance=iter([3, 5]), chunks=42.0, checkpoint=Text(), devices=devices(2))
    assert model.balance == [3, 5] and isinstance(model.balance, list)
    assert model.devices == [torch.device(device) for device in devices(2)]
    assert model.chunks == 42 and isinstance(model.chunks, int)
    assert model.checkpoint == 'always' and isinstance(model.checkpoint, str)
    assert isinstance(model.partitions, nn.ModuleList)
    assert [len(partition) for partition in model.partitions] == [3, 5]
    assert all(isinstance(partition, nn.Sequential) for partition in model.partitions)
    assert 'chunks=42' in repr(model) and f"'{devices(2)[1]}'" in repr(model)


def test_a_sequential_that_is_more_than_its_layers():
    class Residual(nn.Sequential):
        def forward(self, x):
            return x + super().forward(x)

    with pytest.raises(TypeError, match='Residual has a forward of its own'):
        pipe(Residual(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1])
    model = small_model()
    model.register_buffer('mine', torch.zeros(1))
    with pytest.raises(ValueError, match="'mine'"):
        pipe(model)
    model = small_model()
    model.register_forward_hook(lambda *args: None)
    with pytest.raises(ValueError, match='hooks'):
        pipe(model)


def test_not_a_sequential():
    for module in [nn.ModuleList([nn.Linear(1, 1)]), nn.Linear(1, 1), 'text']:
        with pytest.raises(TypeError, match='module must be nn.Sequential to be partitioned'):
            GPipe(module, [1], devices=['cpu'])


def test_a_missing_balance_recommends_how_to_find_one():
    with pytest.raises(ValueError) as error:
        GPipe(small_model())
    assert 'torchgpipe.balance' in str(error.value) and 'balance_by_time(' in str(error.value)


#: Arguments of GPipe, values that it refuses, and the errors.
WRONG = [
    ('balance', [[8, 1]], ValueError, r'8 layers.*\[8, 1\] adds up to 9.*torchgpipe.balance'),
    ('balance', [[]], ValueError, 'adds up to 0.*torchgpipe.balance'),
    ('balance', [[-1]], ValueError, 'up to -1.*torchgpipe.balance'),
    ('balance', [[8, 0]], ValueError, r'positive.*\[8, 0\].*torchgpipe.balance'),
    ('balance', [[9, -1]], ValueError, r'positive.*\[9, -1\].*torchgpipe.balance'),
    (
        'balance',
        [[4.0, 4.0], ['4', '4'], [True] * 8, 8, [[4], [4]], 'four'],
        TypeError,
        'integers',
    ),
    ('devices', [[]], IndexError, 'too few devices.*devices: 0, partitions: 2'),
    ('devices', [['cpu']], IndexError, 'too few devices.*devices: 1, partitions: 2'),
    (
        'devices',
        [['cpu', other] for other in ('gpu', 'cpu:x', 'cuda:99', 'meta', None, 3.5)],
        ValueError,
        'device',
    ),
    ('devices', ['cpu'], TypeError, r"\['cpu'\]"),
    (
        'chunks',
        [0, -1, 'x', None, float('inf')],
        ValueError,
        'number of chunks must be a positive integer',
    ),
    (
        'checkpoint',
        ['sometimes', None, 'ALWAYS'],
        ValueError,
        "checkpoint is not one of 'always', 'except_last', or 'never'",
    ),
    (
        'checkpoint',
        [['always', 'sometimes'], ['always', None], lambda j: 'sometimes' if j else 'always'],
        ValueError,
        "checkpoint is not one of .*: ('sometimes'|None)$",
    ),
    ('checkpoint', [['always']], ValueError, '1 modes for 2 partitions'),
]


def test_wrong_arguments():
    for name, values, error, text in WRONG:
        for value in values:
            with pytest.raises(error, match=f'(?s){text}'):
                pipe(**{name: value})


def test_an_accelerator_where_there_is_none(monkeypatch):
    monkeypatch.setattr(split, 'accelerators', list)
    with pytest.raises(ValueError, match="'cuda'; there are the CPU and no accelerator"):
        pipe(devices=['cpu', 'cuda'])


def test_a_balance_of_integers_of_another_type():
    assert pipe(balance=torch.tensor([3, 5])).balance == [3, 5]


@devices
def test_devices_that_are_not_needed_are_dropped(devices):
    assert len(pipe(devices=devices(5)).devices) == 2


@devices
def test_the_checkpoint_mode_is_kept_and_may_be_changed(devices):
    modes = ['always', 'never']
    assert pipe(checkpoint=modes, devices=devices(2)).checkpoint is modes
    model = pipe(checkpoint=lambda j: modes[j], devices=devices(2))
    assert model.checkpoint(1) == 'never'
    model.checkpoint = 'sometimes'
    with pytest.raises(ValueError, match="'sometimes'"):
        call(model, torch.rand(2, 4).double())


@devices
def test_checkpoint_nodes_in_the_graph(devices):
    for mode, count in [
        ('always', 6),
        ('except_last', 4),
        ('never', 0),
        (['always', 'never'], 3),
        (('except_last', 'always'), 5),
        (lambda j: ['never', 'except_last'][j], 2),
    ]:
        model = in_partitions(devices, nn.Linear(1, 1), nn.Linear(1, 1), chunks=3, checkpoint=mode)

        def numbers(output):
            names = [node.name() for node in nodes(output)]
            return names.count('CheckpointBackward'), names.count('RecomputeBackward')

        # In v0.21, there were no nodes of the second kind where tensors stay in one memory.
        assert numbers(model(torch.rand(3, 1, device=devices.first))) == (count, count)
        assert numbers(model.eval()(torch.rand(3, 1, device=devices.first))) == (0, 0)


@devices
def test_input_that_is_refused(devices):
    for input, error, text in [
        ([], TypeError, 'expected Tensor, but got list'),
        ({'x': object()}, TypeError, r"expected Tensor, but got object as value\['x'\]"),
        ('text', TypeError, 'expected Tensor, but got str'),
        (None, TypeError, 'expected Tensor, but got NoneType'),
        ((torch.rand(2, 4), {1}), TypeError, r'expected Tensor, but got set as value\[1\]'),
        ((torch.rand(2, 4), torch.rand(3, 4)), ValueError, r'input\[0\]: 2, input\[1\]: 3'),
        (torch.rand(()), ValueError, r'no dimensions'),
        (torch.rand(0, 4), ValueError, r'empty.*\(0, 4\)'),
    ]:
        input = to(devices.first, input)
        with pytest.raises(error, match=text):
            pipe(devices=devices(2))(input)


@devices
def test_two_positional_inputs(devices):
    model = pipe(devices=devices(2))
    with pytest.raises(
        TypeError,
        match="the first layer, '0' .Linear., cannot be called with "
        'these 2 arguments .*: too many positional arguments. '
        'Its forward takes .*as a skip',
    ):
        model(torch.rand(2, 4), torch.rand(2, 4))
    with pytest.raises(TypeError, match='missing a required argument'):
        model()


@devices
def test_a_partition_that_returns_something_else(devices):
    for returned, text in [
        (None, 'NoneType'),
        ([1], 'list'),
        ('x', 'str'),
        ({}, 'dict'),
        ((torch.rand(1), {1}), 'set'),
        (NoChunk(torch.rand(1)), 'NoChunk'),
    ]:
        for where in [0, 1]:

            class Return(nn.Module):
                def forward(self, x):
                    return returned

            layers = [nn.Identity(), nn.Identity()]
            layers[where] = Return()
            with pytest.raises(TypeError, match=f'expected Tensor, but got {text}') as error:
                call(pipe(nn.Sequential(*layers), [1, 1], devices=devices(2)), torch.rand(2, 4))
            assert f'partition {where} on {devices(2)[where]}' in error.value.__notes__[0]
            assert f"layer '{where}'" in error.value.__notes__[0]


@devices
@pytest.mark.parametrize(
    'function', [torch.sum, torch.Tensor.t, lambda x: x[:1], lambda x: torch.cat([x, x])]
)
@pytest.mark.parametrize('chunks', [1, 2])
def test_an_output_of_another_batch_size(devices, function, chunks):
    class Change(nn.Module):
        def forward(self, x):
            return function(x)

    if chunks == 1 and function is not torch.sum:  # Nothing was split, so any size is right.
        x = torch.rand(8, 3)
        gpipe = pipe(nn.Sequential(nn.Identity(), Change()), [1, 1], devices=devices(2))
        assert_same([call(gpipe, x)], [function(x)])
        return
    with pytest.raises(ValueError, match='samples and came out with shape'):
        call(
            pipe(
                nn.Sequential(nn.Identity(), Change()), [1, 1], chunks=chunks, devices=devices(2)
            ),
            torch.rand(8, 3),
        )


@devices
def test_a_batch_size_that_changes_and_changes_back(devices):
    model = nn.Sequential(nn.Flatten(0, 1), nn.Linear(3, 3), nn.Unflatten(0, (-1, 2))).double()
    x = torch.rand(5, 2, 3, dtype=torch.double)
    expected = model(x)
    assert_same([call(pipe(model, [1, 2], chunks=3, devices=devices(2)), x)], [expected])


@devices
def test_an_empty_sequential_returns_its_input(devices):
    model = GPipe(nn.Sequential(), [])
    x = torch.rand(42, device=devices.first)
    assert model(x) is x and len(model) == 0 and list(model) == []
    with pytest.raises(TypeError):
        model('text')


@devices
def test_moving_is_denied(devices):
    model = pipe(devices=devices(2))
    elsewhere = 'meta' if devices.first.type == 'cpu' else 'cpu'
    others = [model.cuda] if devices.first.type == 'cpu' else [model.cpu]
    for move in (
        *others,
        lambda: model.cuda(99),
        lambda: model.to(elsewhere),
        lambda: model.to('meta'),
        lambda: model.to(device=elsewhere),
        lambda: model.to('ipu:99'),
        lambda: model.to(torch.rand(1)),
        lambda: model.to(elsewhere, torch.half),
        lambda: model.to(tensor=torch.rand(1)),
        lambda: nn.Sequential(model).to('meta'),
        lambda: model.to_empty(device='meta'),
        lambda: GPipe(nn.Sequential(), []).to(0),
    ):
        with pytest.raises(
            TypeError,
            match='denied to move parameters and buffers, because '
            'GPipe should manage device placement',
        ):
            move()
    assert {parameter.device.type for parameter in model.parameters()} == {devices.first.type}


def test_a_move_that_moves_nothing_is_not():
    """Accelerate, and loops of its kind, move each model to the device of a process."""
    model = pipe()
    before = [*model.parameters()]
    for device in ('cpu', torch.device('cpu'), 'cpu:1'):
        assert model.to(device) is model.to(device=device) is model
    assert all(a is b for a, b in zip(model.parameters(), before))
    assert model.cpu() is model
    assert model.to('cpu', torch.half)[0].weight.dtype == torch.half


@pytest.mark.accelerator
def test_a_move_to_the_accelerator_that_has_all_is_not():
    device = places('a')[0]
    model = pipe(devices=[device] * 2)
    with use_device(torch.device(device)):
        assert model.to(device) is model.to(torch.device(device).type) is model
    for other in {'cpu', *places('aaaa')} - {device}:
        with pytest.raises(TypeError, match='denied'):
            model.to(other)
        with pytest.raises(TypeError, match='denied'):
            pipe(devices=[device, other]).to(device)


@devices
def test_changing_the_dtype_is_not(devices):
    model = pipe(devices=devices(2))
    for change, dtype in (
        (model.half, torch.half),
        (model.double, torch.double),
        (lambda: model.to(torch.float), torch.float),
        (lambda: model.to(dtype=torch.double), torch.double),
    ):
        assert change() is model
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}


@devices
def test_copies_work(devices):
    model = pipe(chunks=2, checkpoint='always', devices=devices(2))
    x = torch.rand(4, 4, dtype=torch.double, device=devices.first)
    expected = model(x)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(buffer, weights_only=False),
    ):
        output = other(x)
        assert torch.equal(output, expected)
        output.sum().backward()
        assert all(p.grad is not None for p in other.parameters())
        assert all(p.grad is None for p in model.parameters())
        assert [m for m in other.partitions[1]] == list(other)[4:]


@devices
def test_a_pickle_of_version_0_4_0(devices):
    model, x = pipe(devices=devices(2)), torch.rand(4, 4, dtype=torch.double)
    state = model.__getstate__()
    for name in ('batch_dim', 'gather', 'offload', '_known'):
        del state[name]
    other = GPipe.__new__(GPipe)
    other.__setstate__(state)
    assert_same([call(other, x)], [call(model, x)])


@devices
def test_workers_are_reused_lazy_and_end_with_the_model(devices):
    before = threads()
    model = pipe(devices=devices.distinct(2), chunks=2)
    assert threads() == before
    model(torch.rand(2, 4, dtype=torch.double, device=devices.first))
    workers = threads() - before
    # The caller does the work of the last one.
    assert [thread.name for thread in workers] == [f'torchgpipe-{devices(2)[0]}']
    for _ in range(3):
        model(torch.rand(2, 4, dtype=torch.double, device=devices.first)).sum().backward()
    assert threads() - before == workers
    del model
    assert threads() == before


@pytest.mark.filterwarnings('ignore:.*fork.*:DeprecationWarning')
def test_a_forked_process_starts_workers_of_its_own():
    model = pipe(nn.Sequential(nn.Identity(), nn.Identity()), [1, 1])
    x = torch.ones(2, 1)
    model(x)

    def run():
        assert model(x).equal(x)

    assert Child(run).wait() == 0


@devices
def test_two_threads_may_call_the_same_model(devices):
    model = pipe(chunks=4, devices=devices(2))
    xs = [torch.rand(4, 4, dtype=torch.double, device=devices.first) for _ in range(2)]
    expected = [model(x) for x in xs]
    wrong = []

    def run(k):
        for _ in range(50):
            if not torch.equal(model(xs[k]), expected[k]):
                wrong.append(k)

    threads = [threading.Thread(target=run, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@devices
def test_a_pipeline_in_a_pipeline(devices):
    for outer_mode in ['always', 'never']:
        for inner_mode in ['always', 'never']:
            for hooks in [False, True]:
                model = small_model()
                x = torch.rand(6, 4, dtype=torch.double)
                reference = copy.deepcopy(model)
                first, second = devices(2)
                # An inner pipeline with its own workers would save tensors from several threads.
                # The outer one also moves it to the device of the partition that contains it.
                together = outer_mode == 'always' or devices.are_accelerators
                inner = pipe(
                    model[2:],
                    [3, 3],
                    devices=[second if together else first, second],
                    chunks=2,
                    checkpoint=inner_mode,
                )
                outer = pipe(
                    nn.Sequential(*model[:2], inner),
                    [2, 1],
                    devices=[first, second],
                    chunks=3,
                    checkpoint=outer_mode,
                )
                with torch.autograd.graph.save_on_cpu() if hooks else nothing():
                    output = call(outer, x)
                output.sum().backward()
                expected = reference(x)
                expected.sum().backward()
                assert_same([output, *gradients(model)], [expected, *gradients(reference)])


def test_a_seed_is_an_integer():
    """In v0.21, it was an OverflowError."""
    for seed in ['x', 1.5, True]:
        with pytest.raises(TypeError, match='seed must be an integer, but got'):
            in_partitions(['cpu'], nn.Linear(2, 2, device='meta'), seed=seed)


@pytest.mark.parametrize('make', [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_that_counts_over_the_mini_batch(make):
    """In v0.21, its gradient was silently another one."""
    layers = nn.Sequential(nn.Sequential(make(4, 2, scale_grad_by_freq=True)))
    with pytest.raises(ValueError, match="'0.0' scales its gradient by the frequency"):
        GPipe(layers, [1], devices=['cpu'], chunks=2)
    GPipe(layers, [1], devices=['cpu'], chunks=1)


def test_a_step_names_the_way_out_if_a_layer_writes_to_its_weight():
    class Clipped(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    layers = nn.Sequential(Clipped(4, 4), Clipped(4, 4))
    x = torch.rand(4, 4)
    gpipe = GPipe(layers, [1, 1], devices=['cpu', 'cpu'], chunks=2, checkpoint='never')
    with pytest.raises(RuntimeError, match='modified by an inplace operation') as caught:
        gpipe.step(x, x, nn.functional.mse_loss, schedule='gpipe')
    assert "checkpoint='always'" in ''.join(caught.value.__notes__)


@pytest.mark.parametrize('mode', ['always', 'never'])
def test_forward_mode_in_training_names_a_way_that_works(mode):
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    x, tangent = torch.rand(2, 4, 4)
    gpipe = GPipe(layers, [2, 1], devices=['cpu', 'cpu'], chunks=2, checkpoint=mode)
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, tangent)
        with pytest.raises(NotImplementedError) as caught:
            gpipe(dual)
        with torch.no_grad():
            result = forward_ad.unpack_dual(gpipe(dual)).tangent
    assert 'torch.func.jvp' in ''.join(caught.value.__notes__)
    _, expected = torch.func.jvp(layers, (x,), (tangent,))
    assert torch.allclose(result, expected)
    if mode == 'never':
        assert torch.allclose(torch.func.jvp(gpipe, (x,), (tangent,))[1], expected)
