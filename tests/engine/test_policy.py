"""Policies: which results are kept, and errors of the argument ``keep``."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy

from torchgpipe import GPipe, no_recompute
from torchgpipe.engine.policy import (
    OperationContext,
    PartitionPolicy,
    decision_of,
    keep_every_second_product,
    keep_everything,
    keep_products,
    parse_keep,
    parse_policy,
)

aten = torch.ops.aten
functional = torch.ops._c10d_functional

SAVE, RECOMPUTE = CheckpointPolicy.PREFER_SAVE, CheckpointPolicy.PREFER_RECOMPUTE


def layers():
    """Return a model of three layers, the last of which has modules."""
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))


def train(keep, module=None, **options):
    """Train a pipeline of one partition in one step."""
    module = module or layers()
    model = GPipe(
        module, [len(module)], devices=['cpu'], checkpoint='always', keep=keep, **options
    )
    model(torch.rand(2, 4, requires_grad=True)).sum().backward()


def decide(policy, operation, output, *args, index=0):
    return policy(OperationContext(output, index), operation, *args)


def test_products():
    x = torch.ones(2, 3)
    for operation, expected in [
        (aten.mm.default, SAVE),
        (aten.addmm.default, SAVE),
        (aten.convolution.default, SAVE),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, SAVE),
        (functional.wait_tensor.default, RECOMPUTE),
        (aten.gelu.default, RECOMPUTE),
        (aten.native_layer_norm.default, RECOMPUTE),
    ]:
        assert decide(keep_products, operation, x, x) is expected


def test_collectives_whose_results_are_larger_are_not_kept():
    x = torch.ones(4, 3)
    for operation, output, expected in [
        (functional.all_reduce.default, x, SAVE),
        (functional.reduce_scatter_tensor.default, x[:2], SAVE),
        (functional.all_to_all_single.default, x, SAVE),
        (functional.all_gather_into_tensor.default, torch.cat([x, x]), RECOMPUTE),
    ]:
        assert decide(keep_products, operation, output, x, 'sum', 2, 'group') is expected


def test_scores_of_attention_are_not_kept():
    queries = torch.ones(2, 9, 4)
    scores = queries @ queries.mT
    for output, args, expected in [
        (scores, (queries, queries.mT), RECOMPUTE),
        (scores @ queries, (scores, queries), SAVE),
    ]:
        assert decide(keep_products, aten.bmm.default, output, *args) is expected


def test_every_second_product():
    x = torch.ones(2, 2)
    answers = []
    for index in range(4):
        answers.append(decide(keep_every_second_product, aten.mm.default, x, x, index=index))
        assert (
            decide(keep_every_second_product, aten.convolution.default, x, x, index=index) is SAVE
        )
    assert answers == [SAVE, RECOMPUTE, SAVE, RECOMPUTE]


def test_casts_new_tensors_and_side_effects_are_not_kept_unless_it_is_a_must():
    x = torch.ones(2, 2)
    must, prefer = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE
    for operation, args, kept in [
        (aten.gelu.default, (x,), {must: True, prefer: True}),
        (aten._to_copy.default, (x,), {must: True, prefer: False}),
        (aten.rand_like.default, (x,), {must: True, prefer: False}),
        (aten.zeros.default, ([2],), {must: True, prefer: False}),
        (aten.native_batch_norm.default, (), {prefer: False}),
        (aten.view.default, (x, [4]), {prefer: False}),
        (aten._unsafe_view.default, (x, [4]), {prefer: False}),
    ]:
        for answer, keeps in kept.items():
            ctx = OperationContext(x, 0)
            policy = lambda *args, answer=answer, **kwargs: answer  # noqa: E731
            decision = decision_of(policy, ctx, operation, args, {})
            assert decision.keeps is keeps
            assert decision.is_optional is (keeps and answer is prefer)
    assert not decision_of(keep_everything, ctx, aten.gelu.default, (x,), {}).is_optional
    assert decide(keep_everything, aten.gelu.default, x, x) is SAVE


def test_rules_by_partition_and_module():
    rules = parse_keep({0: 'products', '2.0': 'all', '2': None}, layers(), [2, 1])
    assert rules == (
        PartitionPolicy(keep_products),
        PartitionPolicy(None, {'2.0': keep_everything, '2': None}),
    )
    assert parse_keep('all', layers(), [1, 2]) == (PartitionPolicy(keep_everything),) * 2


def test_an_operation_without_an_overload_is_all_of_its_overloads():
    policy = parse_policy([aten.mm, aten.mul])
    x = torch.ones(2, 2)
    for operation in (aten.mm.default, aten.mul.Tensor, aten.mul.Scalar):
        assert decide(policy, operation, x, x) is CheckpointPolicy.MUST_SAVE
    for operation in (aten.mm.out, aten.addmm.default):
        assert decide(policy, operation, x, x) is RECOMPUTE


@pytest.mark.parametrize(
    ('keep', 'error', 'text'),
    [
        ('product', ValueError, "keep is one of 'products', .*'all', but is 'product'"),
        (3, TypeError, 'keep is the name of a policy, a list of operations .*, but is 3'),
        (nn.ReLU(), TypeError, r'but is ReLU\(\)'),
        ([F.linear], TypeError, 'keep lists operations, such as torch.ops.aten.mm.default, but'),
        ([aten.relu_.default], ValueError, 'aten.relu_.default, but it is its argument, changed'),
        ([aten.view.default], ValueError, 'aten.view.default, but it is a view'),
        ({'3': 'products'}, ValueError, "for '3', which is no module .* such as '0'"),
        ({'2.weight': 'products'}, ValueError, "for '2.weight', which is no module"),
        ({2: 'products'}, ValueError, 'for 2; its keys .* from 0 to 1'),
        ({None: 'products'}, ValueError, 'for None; its keys are names of modules, and indices'),
    ],
)
def test_wrong_arguments(keep, error, text):
    with pytest.raises(error, match=text):
        GPipe(layers(), [2, 1], devices=['cpu'] * 2, keep=keep)


@pytest.mark.parametrize(
    ('answer', 'module', 'error', 'text'),
    [
        ('yes', nn.Linear(4, 4), TypeError, "returned 'yes' for aten.+; it has to return a torch"),
        (None, nn.Linear(4, 4), TypeError, 'returned None for aten'),
        (
            CheckpointPolicy.MUST_SAVE,
            nn.Flatten(0),
            ValueError,
            'aten.view.default, but it is a v',
        ),
        (True, nn.Unflatten(1, (2, 2)), ValueError, 'aten.view.default, but it is a view'),
        (
            CheckpointPolicy.MUST_SAVE,
            nn.Sequential(nn.Tanh(), nn.ReLU(inplace=True)),
            ValueError,
            'aten.relu_.default, but it is its argument, changed in place',
        ),
    ],
)
def test_wrong_answers_of_a_policy(answer, module, error, text):
    with pytest.raises(error, match=text) as raised:
        train(lambda ctx, operation, *args, **kwargs: answer, nn.Sequential(module))
    assert 'in partition 0 on cpu, micro-batch 0 of 1' in ' '.join(raised.value.__notes__)


def test_a_policy_that_prefers_to_keep_all():
    """Views and changes in place are made again."""
    for answer in (CheckpointPolicy.PREFER_SAVE, False):
        train(lambda ctx, operation, *args, **kwargs: answer)


@pytest.mark.parametrize(
    ('keep', 'checkpoint'),
    [('products', 'never'), ({1: 'all'}, ['always', 'never']), ({'2.0': 'all'}, 'never')],
)
def test_a_policy_without_checkpoints(keep, checkpoint):
    text = re.escape(f'keep={keep!r} is for checkpointed micro-batches, but with checkpoint=')
    with pytest.raises(ValueError, match=text):
        GPipe(layers(), [2, 1], devices=['cpu'] * 2, keep=keep, checkpoint=checkpoint)
    GPipe(layers(), [2, 1], devices=['cpu'] * 2, keep='all', checkpoint=['always', 'never'])


def test_no_recompute_refuses_other_objects():
    with pytest.raises(TypeError, match='is an nn.Module, but this is builtin'):
        no_recompute(torch.relu)
