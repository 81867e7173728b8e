"""The cross entropy of sharded logits equals one process's in values, gradients and memory."""

import itertools
import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import torchgpipe.shard as ts
from benchmarks.harness.memory import LiveTensors
from tests.marks import slow
from tests.shard.plain import in_turn
from tests.shard.processes import run
from torchgpipe.shard.nn.loss import ParallelCrossEntropyLoss, parallel_cross_entropy
from torchgpipe.shard.parameter import local_range

SIZES = (5, 7, 31, 32)


def sharded(x, tag=-1):
    """Give this rank's part of whole logits, as the output of a layer has it: tagged."""
    begin, length = local_range(x.size(-1))
    part = x.detach()[..., begin : begin + length].clone()
    ts.register_parallel_dim(part, tag)
    return part


def as_in_pytorch(x):
    """Put the classes where PyTorch looks for them."""
    return x.movedim(-1, 1) if x.dim() > 1 else x


def check(logits, target, shard_target=False, tag=-1, **options):
    """Compare loss and gradient with one process's."""
    whole = logits.detach().requires_grad_()
    probable = target.is_floating_point()
    expected = F.cross_entropy(
        as_in_pytorch(whole), as_in_pytorch(target) if probable else target, **options
    )
    # Each loss has a gradient of its own where there are several.
    seed = torch.linspace(1, 2, expected.numel(), dtype=expected.dtype).view_as(expected)
    expected.backward(seed)

    part = sharded(logits, tag).requires_grad_()
    given = sharded(target) if shard_target else target
    loss = parallel_cross_entropy(part, given, **options)
    assert loss.shape == expected.shape and loss.dtype == expected.dtype
    loss.backward(seed)
    # A group of one gives PyTorch's results.
    same = partial(
        torch.testing.assert_close,
        rtol=0,
        equal_nan=True,
        atol=1e-12 if ts.distributed.get_group_size() > 1 else 0,
    )
    same(loss, expected)
    same(part.grad, sharded(whole.grad))


def draw(classes, shape, kind, seed=0):
    """Draw logits and targets, others for each group."""
    generator = torch.Generator().manual_seed(seed + 100 * ts.distributed.get_data_rank())
    logits = 3 * torch.randn(*shape, classes, generator=generator, dtype=torch.double)
    if kind == 'probabilities':
        return logits, torch.rand(*shape, classes, generator=generator, dtype=torch.double)
    target = torch.randint(classes, shape, generator=generator)
    if kind == 'ignored':
        target[...] = -100
    elif kind == 'some ignored':
        target[torch.rand(shape, generator=generator) < 0.4] = 2
    return logits, target


def weights(classes):
    """Give each class a weight."""
    return torch.linspace(0.5, 2, classes, dtype=torch.double)


def grid(all_sizes, shapes):
    """Try all combinations of options."""
    for number, (classes, shape, reduction, smoothing, weighted, kind) in enumerate(
        itertools.product(
            all_sizes,
            shapes,
            ('mean', 'sum', 'none'),
            (0.0, 0.3),
            (False, True),
            ('numbers', 'some ignored', 'ignored', 'probabilities'),
        )
    ):
        logits, target = draw(classes, shape, kind, number)
        check(
            logits,
            target,
            shard_target=kind == 'probabilities' and number % 5 < 2,
            tag=(-1, 1)[number % 2],
            reduction=reduction,
            label_smoothing=smoothing,
            weight=weights(classes) if weighted else None,
            ignore_index=2 if kind == 'some ignored' else -100,
        )


@pytest.mark.parametrize(
    'world, group, shapes', [(2, 1, [(2, 3)]), (2, 2, [(6,), (2, 3)]), slow(4, 4, [(2, 3)])]
)
def test_loss_and_gradient_equal_one_process(world, group, shapes):
    run(world, grid, SIZES, shapes, group=group)


# --- faults of TorchShard 0.1.0
# ----------------------------------------------------------------------------------


def test_a_group_smaller_than_the_world():
    run(4, grid, (7,), [(5,)], group=2)


def class_weights():
    """Let a class count many times."""
    logits, target = draw(7, (6,), 'numbers')
    weight = torch.ones(7, dtype=torch.double)
    weight[target[0]] = 100
    check(logits, target, weight=weight)
    plain = parallel_cross_entropy(sharded(logits), target)
    assert abs(plain - parallel_cross_entropy(sharded(logits), target, weight)) > 1e-3


def ignored():
    """Ignore an index that is no class, and one that is a class, on either rank."""
    logits, target = draw(7, (6,), 'numbers')
    for index in (-100, -1, 0, 6, 7, 1000):
        given = target.clone()
        given[1:3] = index
        for weight in (None, weights(7)):
            check(logits, given, ignore_index=index, weight=weight)
    # The values of targets that ranks compare have to be exact in float32.
    given[1:3] = 3**36
    part = sharded(logits.float())
    assert parallel_cross_entropy(part, given, ignore_index=3**36).isfinite()


def dimensions():
    """Use logits of several shapes, of which some are not contiguous."""
    for shape in ((), (4,), (2, 3), (2, 3, 2), (2, 1, 3, 2)):
        logits, target = draw(5, shape, 'numbers')
        check(logits, target)
        assert parallel_cross_entropy(sharded(logits), target, reduction='none').shape == shape
    check(logits.movedim(0, 2), target.movedim(0, 2))
    grid((5,), [(), (0,)])


def smoothed():
    """Smooth by up to all."""
    logits, target = draw(7, (6,), 'numbers')
    for smoothing in (0.1, 0.9, 1.0):
        check(logits, target, label_smoothing=smoothing)
        check(logits, target, label_smoothing=smoothing, weight=weights(7))


def probable():
    """Give probabilities: whole, or a shard of them."""
    logits, target = draw(7, (2, 3), 'probabilities')
    for shard_target in (False, True):
        check(logits, target, shard_target, weight=weights(7), label_smoothing=0.1)
        check(logits, target / target.sum(-1, keepdim=True), shard_target)


class Shapes(TorchDispatchMode):
    """Find the largest size of a dimension that an operation gives."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for each in output if isinstance(output, (tuple, list)) else [output]:
            if isinstance(each, torch.Tensor):
                self.largest = max(self.largest, *each.shape, 0)
        return output


def million(classes, batch, dtype):
    """Count the memory of a step with as many classes, and look at all shapes."""
    part = classes // ts.distributed.get_group_size()
    logits = torch.zeros(batch, part, dtype=dtype).requires_grad_()
    ts.register_parallel_dim(logits, -1)
    target = torch.arange(batch) * (classes // batch)
    live, shapes = LiveTensors(), Shapes()
    with live.watched(), shapes:
        parallel_cross_entropy(logits, target).backward()
    assert logits.grad.shape == logits.shape
    size = logits.nbytes
    return (size + live.peak) / (2 * size), shapes.largest


@pytest.mark.slow
@pytest.mark.parametrize('dtype, bound', [(torch.float32, 1.05), (torch.bfloat16, 1.2)])
def test_a_million_classes_need_no_one_hot_and_no_whole_logits(dtype, bound):
    """The limit is 1.3 times the memory of logits and gradient."""
    for peak, largest in run(4, million, 1_000_000, 64, dtype, group=4):
        assert peak <= bound
        assert largest == 250_000


# --- types
# ----------------------------------------------------------------------------------


def coarse(dtype, autocast):
    """Compare with one process in float64."""
    logits, target = draw(31, (40,), 'numbers')
    whole, weight = (10 * logits).to(dtype).requires_grad_(), weights(31).to(dtype)
    expected = F.cross_entropy(whole.double(), target, weight.double(), label_smoothing=0.1)
    expected.backward()
    part = sharded(whole).requires_grad_()
    with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
        loss = parallel_cross_entropy(part, target, weight, label_smoothing=0.1)
        whole_loss = F.cross_entropy(whole, target, label_smoothing=0.1)
    assert loss.dtype == whole_loss.dtype == (torch.float32 if autocast else dtype)
    loss.backward()
    assert part.grad.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6 if autocast else eps, atol=0)
    torch.testing.assert_close(part.grad, sharded(whole.grad), rtol=2 * eps, atol=1e-6)


def test_sums_over_coarse_types_are_computed_in_float32():
    for dtype in (torch.float16, torch.bfloat16):
        for autocast in (False, True):
            run(2, coarse, dtype, autocast, group=2)


def fine_targets():
    """Let targets decide about the type of the loss, as PyTorch does."""
    logits, target = draw(7, (6,), 'probabilities')
    part = sharded(logits.float()).requires_grad_()
    loss = parallel_cross_entropy(part, target)
    expected = F.cross_entropy(logits.float(), target)
    assert loss.dtype == expected.dtype == torch.double
    torch.testing.assert_close(loss, F.cross_entropy(logits.float().double(), target))
    loss.backward()
    assert part.grad.dtype == torch.float32
    coarse_target = target.half()
    loss = parallel_cross_entropy(sharded(logits), coarse_target)
    torch.testing.assert_close(
        loss, F.cross_entropy(logits, coarse_target.double()), rtol=0, atol=1e-12
    )
    logits, target = draw(7, (6,), 'numbers')
    for given in (logits, sharded(logits)):
        assert parallel_cross_entropy(given, target.byte()) == parallel_cross_entropy(
            given, target
        )


def other_weights():
    """Let weights have a finer type than logits, or a coarser one."""
    logits, target = draw(301, (6,), 'numbers')
    for dtype in (torch.half, torch.double):
        weight, whole = weights(301).to(dtype), logits.float().double().requires_grad_()
        expected = F.cross_entropy(whole, target, weight.double(), label_smoothing=0.9)
        expected.backward()
        part = sharded(logits.float()).requires_grad_()
        loss = parallel_cross_entropy(part, target, weight, label_smoothing=0.9)
        loss.backward()
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(part.grad.double(), sharded(whole.grad), rtol=1e-5, atol=1e-7)


# --- autograd
# ----------------------------------------------------------------------------------


def autograd():
    """Go through the graph in several ways."""
    logits, target = draw(7, (6,), 'numbers')
    part = sharded(logits).requires_grad_()
    loss = parallel_cross_entropy(part, target)
    (first,) = torch.autograd.grad(loss, part, retain_graph=True)
    (second,) = torch.autograd.grad(2 * loss, part)
    assert second.equal(2 * first)

    scaled = part * 1
    ts.register_parallel_dim(scaled, -1)
    loss = parallel_cross_entropy(scaled, target)
    with torch.no_grad():
        scaled += 1
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        loss.backward()

    # The gradient of the loss does not require one; the logits' gradient depends on them anyway.
    (first,) = torch.autograd.grad(parallel_cross_entropy(part, target), part, create_graph=True)
    with pytest.raises(RuntimeError, match='cannot be differentiated again: gather the logits'):
        (part.sum() + first.square().sum()).backward()

    with torch.no_grad():
        loss = parallel_cross_entropy(part, target, weights(7).requires_grad_())
        assert not loss.requires_grad


def test_gradients_come_again_but_not_from_changed_logits_nor_of_gradients():
    run(2, autograd, group=2)


def infinite():
    """Forbid classes by logits that are minus infinity, also all of a rank."""
    logits, target = draw(8, (6,), 'numbers')
    for forbidden in (slice(1, 3), slice(0, 4), slice(4, 8)):
        given = logits.clone()
        given[:, forbidden] = -torch.inf
        check(given, target)
        check(given, torch.full_like(target, forbidden.stop % 8), reduction='none')
        check(given, torch.full_like(target, forbidden.start), reduction='none')
    # PyTorch has no number for these either.
    logits[0] = -torch.inf
    check(logits, target, reduction='none')
    logits[0, 1] = torch.nan
    check(logits, target, reduction='none')


def blocks():
    """Work on more than one block of rows, with a rest."""
    from torchgpipe.shard.nn import loss

    loss.LOSS_BLOCK = 8
    for kind in ('numbers', 'probabilities'):
        for rows in (3, 8, 19):
            check(*draw(7, (rows,), kind), label_smoothing=0.1, weight=weights(7))
    coarse(torch.bfloat16, False)


def test_rows_in_blocks():
    run(2, blocks, group=2)


def untouched():
    """Check that the caller's tensors do not change."""
    logits, target = draw(7, (6,), 'probabilities')
    part = sharded(logits).requires_grad_()
    weight = weights(7)
    before = [x.clone() for x in (part, target, weight)]
    parallel_cross_entropy(part, target, weight, label_smoothing=0.1).backward()
    for x, was in zip((part, target, weight), before):
        assert x.equal(was)
    assert ts.get_parallel_dim(part) == -1
    assert not hasattr(target, ts._PARALLEL_DIM) and not hasattr(weight, ts._PARALLEL_DIM)


def as_module():
    """Call the module, with old options and new ones."""
    logits, target = draw(7, (6,), 'numbers')
    target[0] = 3
    options = {'ignore_index': 3, 'reduction': 'sum', 'label_smoothing': 0.1}
    module = ParallelCrossEntropyLoss(weights(7), **options)
    assert module(sharded(logits), target) == parallel_cross_entropy(
        sharded(logits), target, weights(7), **options
    )
    assert module.state_dict()['weight'].equal(weights(7))
    with pytest.warns(UserWarning, match="use reduction='sum'"):
        loss = parallel_cross_entropy(sharded(logits), target, size_average=False)
    assert loss == parallel_cross_entropy(sharded(logits), target, reduction='sum')
    # Logits without a tag are whole, and so are PyTorch's.
    for given, dim in ((logits, None), (logits[None], None)):
        # Kernels of PyTorch's may add up in another order, depending on the CPU.
        torch.testing.assert_close(
            module(given, target.expand(given.shape[:-1])),
            F.cross_entropy(logits, target, weights(7), **options),
        )


# --- bad input
# ----------------------------------------------------------------------------------


def altered(tensor, index, value):
    """Return a tensor with another element."""
    tensor = tensor.clone()
    tensor[index] = value
    return tensor


def wrong_calls():
    """Return logits, targets and options of calls that are refused."""
    logits, target = draw(7, (2, 3), 'numbers')
    part, few, likely = sharded(logits), target.clamp(max=2), logits.softmax(-1)
    rank, size = ts.distributed.get_rank(), part.size(-1)
    same_size, narrow = logits[..., 3 * rank :][..., :3].clone(), likely[..., :2]
    ts.register_parallel_dim(narrow, 1)
    other_shapes = (part, target, {}) if rank else (sharded(logits[:, :2]), target[:, :2], {})
    return {
        'too high': (part, altered(target, (1, 2), 7), {}),
        'negative': (part, altered(target, (0, 1), -1), {}),
        'a single one': (sharded(logits[0, 0]), torch.tensor(-3), {}),
        'lost tag': (part + 0, few, {}),  # These are classes of each rank.
        'lost tag of shards of one size': (same_size, few, {}),
        'lost tag, probabilities': (part + 0, likely, {}),
        'lost tag, weights': (part + 0, target * 0, {'weight': weights(7)}),
        'whole logits, probabilities': (logits + 0, logits[..., :5].softmax(-1), {}),
        'whole logits, weights': (logits + 0, target, {'weight': weights(6)}),
        'whole logits, too high': (logits + 0, target + 7, {}),
        'other targets': (part, altered(target, (0, 0), (target[0, 0] + rank) % 7), {}),
        'targets in another order': (part, target.flatten().roll(rank).view(2, 3), {}),
        'other types of targets': (part, likely if rank else likely.float(), {}),
        'other shapes': other_shapes,
        'other types': (part if rank else sharded(logits.float()), target, {}),
        'class numbers in floating point': (part, target.double(), {'weight': weights(7)}),
        'classes first': (sharded(logits.movedim(-1, 1)), target, {}),
        'ignored probabilities': (part, likely, {'ignore_index': 1}),
        'probabilities of a shard without a tag': (part, likely[..., :size], {}),
        'a shard of probabilities of another size': (part, narrow, {}),
        'weights of a shard': (part, target, {'weight': weights(7)[:size]}),
        'targets with a gradient': (part, likely.clone().requires_grad_(), {}),
        'weights with a gradient': (part, target, {'weight': weights(7).requires_grad_()}),
        'booleans': (part, target > 1, {}),
        'short integers': (part, target.int(), {}),
        'integers for logits': (part.long(), target, {}),
        'no dimension': (torch.tensor(1.0), target, {}),
        'parallel dimension 0': (sharded(logits, 0), target, {}),
        'reduction': (part, target, {'reduction': 'average'}),
        'smoothing': (part, target, {'label_smoothing': 1.5}),
    }


def refused(name):
    """Give the error of a call, on each rank."""
    logits, target, options = wrong_calls()[name]
    if name in ONLY_IN_DEBUG:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        parallel_cross_entropy(logits, target, **options)
    except Exception as error:
        return f'{type(error).__name__}: {error}'
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


#: Properties that ranks compare in the debug mode only.
ONLY_IN_DEBUG = {'other types of targets', 'other shapes', 'other types'}


def refusals(names):
    """Give the errors of several calls."""
    return [refused(name) for name in names]


LOST = (
    r'RuntimeError: .*different logits without a tag.*put ts.nn.RegisterParallelDim\(-1\) '
    r'before the loss. .*say so by ts.nn.RegisterParallelDim\(None\)'
)

REFUSALS = {
    'too high': r'IndexError: target\[1, 2\] is 7, but there are 7 classes, from 0 to 6, and '
    'ignore_index is -100$',
    'negative': r'IndexError: target\[0, 1\] is -1, but there are 7 classes',
    'a single one': 'IndexError: target is -3, but there are 7 classes',
    'lost tag': LOST,
    'lost tag of shards of one size': LOST,
    'lost tag, probabilities': LOST,
    'lost tag, weights': LOST,
    'whole logits, probabilities': r'ValueError: probabilities of .*\(2, 3, 5\) do not fit 7 cl',
    'whole logits, weights': r'ValueError: weights of shape \(6,\) do not fit 7 classes',
    'whole logits, too high': r'IndexError: target\[0, 0\] is',
    'other targets': 'RuntimeError: .*have different targets.*rank 1 has.*rank 0 has',
    'targets in another order': 'RuntimeError: .*have different targets.*rank 1 has.*rank 0 has',
    'other types of targets': 'RuntimeError: .*rank 1 has .*targets of torch.float64; rank 0 has ',
    'other shapes': r'RuntimeError: .*rank 1 has .*\(2, 3, cl.*rank 0 has .*\(2, 2, cl',
    'other types': 'RuntimeError: .*rank 1 has .*float64.*; rank 0 has .*float32',
    'class numbers in floating point': r'ValueError: .*\(2, 3\) for .*target.long',
    'classes first': r'ValueError: .*\(2, 3\) for .*\(2, 7, .*movedim\(1, -1\)',
    'ignored probabilities': 'ValueError: ignore_index=1 is a class number, and',
    'probabilities of a shard without a tag': r'ValueError: .*do not fit 7 .*register_para',
    'a shard of probabilities of another size': r'ValueError: .*\(2, 3, 2\) do not fit . classes',
    'weights of a shard': r'ValueError: weights of shape \(.,\) do not fit 7 classes: each rank',
    'targets with a gradient': r'ValueError: .*detach\(\) these',
    'weights with a gradient': r'ValueError: .*detach\(\) these',
    'booleans': 'TypeError: targets are class numbers .*, or probabilities, not torch.bool',
    'short integers': r'TypeError: targets are .*not torch.int32: target.long\(\)',
    'integers for logits': 'TypeError: logits are floating point numbers.* not torch.int64',
    'no dimension': r'TypeError: logits are floating point numbers .* of shape \(\)',
    'parallel dimension 0': 'ValueError: logits are full or split in their last dimension',
    'reduction': "ValueError: a reduction is 'mean', 'sum' or 'none', not 'average'",
    'smoothing': 'ValueError: label_smoothing is from 0 to 1, not 1.5',
}


def test_bad_input_is_refused_on_each_rank():
    for errors in run(2, refusals, list(REFUSALS), group=2):
        for (name, text), error in zip(REFUSALS.items(), errors, strict=True):
            assert error is not None and re.match(text, error), (name, error)


def whole_logits():
    """Compute the loss of logits that are the same on all ranks, about so, or said to be whole."""
    logits, target = draw(7, (2, 3), 'numbers')
    rank = ts.distributed.get_rank()
    for tag, x in (
        ('none', logits + 0),
        ('none', logits + 1e-9 * rank),
        ('none', logits + 0 / torch.zeros(1)),
        (None, logits + rank),
    ):
        x = x if tag == 'none' else ts.nn.RegisterParallelDim(tag)(x)
        expected = as_in_pytorch(x)
        torch.testing.assert_close(
            parallel_cross_entropy(x, target), F.cross_entropy(expected, target), equal_nan=True
        )


def test_options_types_and_shapes_follow_pytorch():
    run(
        2,
        in_turn,
        class_weights,
        ignored,
        dimensions,
        smoothed,
        probable,
        fine_targets,
        other_weights,
        infinite,
        untouched,
        as_module,
        whole_logits,
        group=2,
    )


class Ended(torch.autograd.Function):
    """Hide the history of the input."""

    forward = staticmethod(lambda ctx, x: x.clone())
    backward = staticmethod(lambda ctx, gradient: gradient)


def equal_shards():
    """Lose the tag of shards that are the same on all ranks, and of whole tensors."""
    target, x = torch.tensor([0, 3]), torch.randn(2, 3)
    head, other = ts.nn.ParallelLinear(3, 8, dim=1), ts.nn.ParallelLinear(8, 4, dim=0)
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    losses = {
        'from data': lambda: parallel_cross_entropy(head(x).float() + 0, target),
        'from activations': lambda: parallel_cross_entropy(
            head(x.clone().requires_grad_()).relu() * 2, target
        ),
        'in a checkpoint': lambda: parallel_cross_entropy(
            checkpoint(lambda x: head(x) + 0, x, use_reentrant=False), target
        ),
    }
    for loss in losses.values():
        with pytest.raises(
            RuntimeError,
            match="logits without a tag follow from this rank's .*"
            r'put ts.nn.RegisterParallelDim\(-1\) before',
        ):
            loss()
    with (
        torch.no_grad(),
        pytest.raises(
            IndexError,
            match=r'is 4, but there are 4 .* no tag, .*'
            r'RegisterParallelDim\(-1\)',
        ),
    ):
        parallel_cross_entropy(head(x) + 0, target + 1)
    for whole in (
        other(head(x)) + 0,
        ts.distributed.gather(head(x)) + 0,
        ts.distributed.reduce(head(x)) + 0,
        Ended.apply(head(x)) + 0,
        nn.Linear(4, 4)(other(head(x))),
    ):
        assert parallel_cross_entropy(whole, target) == F.cross_entropy(whole, target)
    head.requires_grad_(False)
    with pytest.raises(RuntimeError, match='logits without a tag follow'):
        losses['from activations']()


def test_shards_that_are_the_same_on_all_ranks_are_not_taken_for_whole():
    run(2, equal_shards, group=2)


def test_a_group_of_one_has_lost_no_tag():
    for (error,) in run(2, refusals, ['too high'], group=1):
        assert re.match(REFUSALS['too high'], error)


# --- exchanges between ranks
# ----------------------------------------------------------------------------------


class Unread(TorchDispatchMode):
    """See that the host reads nothing of a tensor."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in ('_local_scalar_dense', 'nonzero', 'masked_select', 'unique'), name
        return func(*args, **(kwargs or {}))


def exchanged():
    """Count collectives of a step, and let the host read nothing, as on an accelerator."""
    from torchgpipe.shard.nn import loss

    logits, target = draw(7, (2, 3), 'numbers')
    probabilities = logits.softmax(-1)
    counts = []

    def steps(**options):
        for given, tag in ((target, -1), (probabilities, -1), (target, None), (target, 'none')):
            x = sharded(logits) if tag == -1 else logits + 0
            if tag is None:
                ts.register_parallel_dim(x)
            x.requires_grad_()
            before = len(counts)
            value = parallel_cross_entropy(x, given, **options)
            value.sum().backward()
            yield len(counts) - before, value, x.grad

    with pytest.MonkeyPatch.context() as patch:
        all_reduce = dist.all_reduce
        patch.setattr(
            dist, 'all_reduce', lambda *args, **more: counts.append(1) or all_reduce(*args, **more)
        )
        for options in ({}, {'weight': weights(7), 'label_smoothing': 0.1, 'reduction': 'none'}):
            expected = list(steps(**options))
            with pytest.MonkeyPatch.context() as inner, Unread():
                inner.setattr(loss, 'is_read', lambda x: False)
                found = list(steps(**options))
            assert [count for count, *_ in expected] == [2, 2, 0, 1]
            for these, those in zip(found, expected):
                assert these[0] == those[0]
                assert all(torch.equal(*pair) for pair in zip(these[1:], those[1:]))


def test_a_step_has_two_collectives_and_the_host_waits_for_none():
    """In v0.8.0, ranks compared their arguments in a third one, and the host read the result."""
    run(2, exchanged, group=2)


def wrong_unread():
    """Pass mismatched arguments, where the host reads nothing."""
    from torchgpipe.shard.nn import loss

    logits, target = draw(7, (2, 3), 'numbers')
    rank = ts.distributed.get_rank()
    others, high, low = target.clone(), target.clone(), target.clone()
    others[0, 0] = (others[0, 0] + rank) % 7
    high[1, 2], low[0, 1] = 7, -1
    cases = [
        (others, {}, ...),
        (high, {}, 5),
        (low, {}, 1),
        (target, {'weight': weights(8)}, ...),
        (target.flatten().roll(rank).view(2, 3), {}, ...),
    ]
    for given, options, rows in cases:
        x = sharded(logits).requires_grad_()
        with pytest.MonkeyPatch.context() as patch, Unread():
            patch.setattr(loss, 'is_read', lambda x: False)
            value = parallel_cross_entropy(x, given, **options)
            value.backward()
        assert value.isnan() and x.grad.view(6, -1)[rows].isnan().all()
    x = (sharded(logits) + 0).requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss, 'is_read', lambda x: False)
        value = parallel_cross_entropy(x, target.clamp(max=2))
        value.backward()
    assert value.isnan() and x.grad.isnan().all()


def test_wrong_arguments_give_nan_where_the_host_does_not_wait():
    run(2, wrong_unread, group=2)
