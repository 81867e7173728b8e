"""How a mini-batch is cut into micro-batches, and how these are put together."""

from itertools import product

import pytest
import torch

from torchgpipe import Arguments, NoChunk
from torchgpipe.base.structure import flatten
from torchgpipe.engine.microbatches import Chunk, check_rule, cut, gather, value_of

JAGGED = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)


def batch_of(value):
    """Return a value as a micro-batch."""
    return Chunk(*flatten(value))


def scatter(input, chunks, rule=0):
    """Return the micro-batches of an input."""
    return cut(input, chunks, rule)[0]


def test_scatter_balances_sizes_and_loses_nothing():
    for size, chunks in [*product(range(1, 12), [1, 2, 3, 8])]:
        x = torch.arange(size)
        batches = scatter((x, x * 2), chunks)
        sizes = [len(batch.value[0]) for batch in batches]
        assert len(batches) == min(chunks, size)
        assert sum(sizes) == size and max(sizes) - min(sizes) <= 1
        a, b = gather(batches, sizes)
        assert torch.equal(a, x) and torch.equal(b, x * 2)


def test_scatter_and_gather_are_adjoint():
    x = torch.randn(7, 3, dtype=torch.double, requires_grad=True)
    ys = [torch.randn(n, 3, dtype=torch.double) for n in (3, 2, 2)]
    forward = sum((batch.value * y).sum() for batch, y in zip(scatter(x, 3), ys))
    forward.backward()
    assert torch.equal(x.grad, gather([batch_of(y) for y in ys]))


def test_scatter_refuses_values_that_it_would_lose():
    for input, numbers in [
        ((torch.zeros(4, 1), torch.zeros(3, 1)), r'input\[0\]: 4, input\[1\]: 3.*NoChunk'),
        ({'x': torch.zeros(4, 1), 'y': torch.zeros(1, 4)}, r"input\['x'\]: 4, input\['y'\]: 1"),
        (Arguments(torch.zeros(4), k=[torch.zeros(2)]), r"args\[0\]: 4, kwargs\['k'\]\[0\]: 2"),
        (torch.tensor(1.0), 'input has no dimensions'),
        ((torch.tensor(1.0), NoChunk(torch.zeros(2))), r'no tensor .* \[\(\), \(2,\)\]'),
        (torch.zeros(0, 5), r'\(0, 5\)'),
        ((), 'empty tuple'),
        ({'x': torch.zeros(4, 1).to_sparse()}, r"input\['x'\] is sparse"),
        ([JAGGED], r'input\[0\] is a nested'),
    ]:
        with pytest.raises(ValueError, match=numbers):
            scatter(input, 2)


def test_gather_refuses_another_number_of_samples():
    for outputs in [
        [torch.zeros(1, 3), torch.zeros(2, 3)],
        [torch.zeros(()), torch.zeros(())],
        [torch.zeros(4, 3), torch.zeros(4, 3)],
    ]:
        with pytest.raises(ValueError, match='with 2 samples and came out with shape'):
            gather([batch_of(x) for x in outputs], [2, 2])


def test_gather_refuses_other_structures_and_plain_values():
    x = torch.zeros(1)
    with pytest.raises(ValueError, match='different numbers of tensors, or with other plain'):
        gather([batch_of({'x': x}), batch_of({'y': x})], [1, 1])
    with pytest.raises(ValueError, match=r'numbers of tensors.*\[1, 2\] tensors'):
        gather([batch_of((x,)), batch_of((x, x))], [1, 1])
    with pytest.raises(ValueError, match=r"\{'x': \(1,\), 'n': 3\}, \{'x': \(1,\), 'n': 4\}"):
        gather([batch_of({'x': x, 'n': 3}), batch_of({'x': x, 'n': 4})], [1, 1])


def values(value, chunks, rule=0):
    """Return the values of micro-batches."""
    return [batch.value for batch in scatter(value, chunks, rule)]


def test_shared_values_are_whole_in_each_micro_batch():
    x, table = torch.arange(3), torch.zeros(5)
    first, second = values(
        {'x': x, 'n': 3, 's': torch.tensor(7), 'none': None, 't': NoChunk([table, {'u': table}])},
        2,
    )
    assert torch.equal(first.pop('x'), x[:2]) and torch.equal(second.pop('x'), x[2:])
    assert first['t'][0] is table and second['t'][1]['u'] is table
    assert first.pop('s') is second.pop('s')
    assert [*first] == ['n', 'none', 't'] and first['n'] == 3 and first['none'] is None


def test_a_rule_says_where_the_batch_is():
    x = torch.arange(12).reshape(3, 4)
    assert [y.shape[1] for y in values(x, 2, 1)] == [2, 2]
    assert [y.shape[1] for y in values(x, 2, -1)] == [2, 2]
    (a, b), _ = values((x, x.T), 2, [1])
    assert a.shape == (3, 2) and b.shape == (2, 3)
    rule = {'mask': {'a': 1}, 'table': None}
    one, two = values({'x': x.T, 'mask': {'a': x, 'b': x.T}, 'table': [x]}, 2, rule)
    assert one['mask']['a'].shape == (3, 2) and one['mask']['b'].shape == (2, 3)
    assert one['table'][0] is two['table'][0] is x
    one, two = values(Arguments(x.T, mask=x), 2, {'mask': 1})
    assert one.args[0].shape == (2, 3) and two.kwargs['mask'].shape == (3, 2)
    with pytest.raises(ValueError, match=r"input\['x'\] has no dimension 2 .* \(3, 4\)"):
        scatter({'x': x}, 2, {'x': 2})


def test_scalars_are_put_together_by_a_rule():
    batches = [
        batch_of({'y': torch.zeros(2, 1), 'loss': torch.tensor(1.0)}),
        batch_of({'y': torch.ones(1, 1), 'loss': torch.tensor(4.0)}),
    ]
    with pytest.raises(ValueError, match=r"shape \(\) as output\['loss'\].*gather='mean'"):
        gather(batches, [2, 1])
    for rule in ({'loss': 'mean'}, 'mean'):
        output = gather(batches, [2, 1], rule)
        assert output['y'].tolist() == [[0], [0], [1]] and output['loss'].item() == 2
    assert gather(batches, [2, 1], 'sum')['loss'].item() == 5
    x = torch.tensor(3)
    assert gather([batch_of(x)], [2], 'mean').item() == 3
    assert gather(batches, [2, 1], 'stack')['loss'].tolist() == [1, 4]


def test_a_rule_by_name_is_for_any_shape():
    batches = [batch_of((torch.ones(2, 3), torch.ones(5))) for _ in range(2)]
    with pytest.raises(ValueError, match=r'shape \(5,\) as output\[1\]'):
        gather(batches, [2, 2], 'sum')
    assert gather(batches, [2, 2], {1: 'sum'})[1].tolist() == [2] * 5
    assert gather(batches, [2, 2], (0, 'stack'))[1].shape == (2, 5)
    turned = [batch_of(torch.ones(3, 2)), batch_of(torch.ones(3, 1))]
    assert gather(turned, [2, 1], 1).shape == gather(turned, [2, 1], None, 1).shape == (3, 3)


@pytest.mark.filterwarnings('ignore:The PyTorch API of nested tensors')
def test_nested_tensors_of_either_layout_are_refused():
    strided = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    assert strided.layout is torch.strided
    with pytest.raises(ValueError, match='input is a nested tensor.*pad it'):
        scatter(strided, 2)


def test_a_rule_that_is_one():
    check_rule('gather', {'x': [0, 'sum'], 'y': (None, -1)}, [None, 'sum'])


def test_a_rule_that_is_none():
    for rule in ['max', {'x': 'max'}, [0, 1.5], (True,)]:
        with pytest.raises(ValueError, match='gather must be a dimension, one of None, .sum., or'):
            check_rule('gather', rule, [None, 'sum'])


def test_samples_that_are_mixed():
    """In v0.8.0, it was an error of ``torch.cat`` about sizes."""
    for rule, shapes in [
        (None, r'\(3, 3\), \(2, 2\) as output\[1\]: outputs are gathered along dimension 0'),
        ({1: -1}, r'\(3, 3\), \(2, 2\) as output\[1\]: outputs are gathered along dimension -1'),
        ({1: 'stack'}, r'\(3, 3\), \(2, 2\) as output\[1\]: outputs are gathered by .stack.'),
    ]:
        batches = [batch_of((x, x @ x.T)) for x in torch.randn(7, 4).split([3, 2, 2])]
        with pytest.raises(
            ValueError, match=shapes + '.* model that mixes them.* after the pipel'
        ):
            gather(batches, [3, 2, 2], rule)


def test_a_mean_of_means():
    """In v0.8.0, the message advised it for whatever is no mean over samples."""
    with pytest.raises(
        ValueError,
        match='where each is a mean over samples.*labels that are not '
        'padding, is not the mean of these means: let gather '
        r'count them, gather=lambda.*normalizer=',
    ):
        gather([batch_of(torch.zeros(()))] * 2, [2, 1])


def test_a_tensor_in_two_places_is_cut_once_and_put_together_once():
    x = torch.arange(4)
    batches = scatter((x, x), 2)
    assert [len(batch.tensors) for batch in batches] == [1, 1]
    a, b = gather(batches)
    assert a is b and torch.equal(a, x)
    y, z = torch.ones(1), torch.zeros(1)
    a, b = gather([batch_of((y, y)), batch_of((z, z))])
    assert a is b


def test_values_that_all_micro_batches_share_are_returned_unchanged():
    shared = torch.ones(5)
    found = gather(
        [batch_of((torch.ones(2), shared)), batch_of((torch.ones(1), shared))],
        [2, 1],
        shared=[shared],
    )
    assert len(found[0]) == 3 and found[1] is shared


def test_several_arguments_are_one_value():
    x, y = torch.ones(2), torch.zeros(2)
    assert value_of((x,), {}) is x and value_of((), {'input': x}) is x
    both = value_of((x,), {'input': y})
    assert isinstance(both, Arguments) and both.args == (x,) and both.kwargs == {'input': y}
