"""A GPT split over ranks: losses over a split vocabulary, and parts of the sequence."""

from functools import partial
from math import prod

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from tests.helpers import assert_same
from tests.shard.processes import run
from torchgpipe.distributed import DistributedGPipe, dry_run, init_mesh
from torchgpipe.sequential import original_names
from torchgpipe.shard.nn.functional import parallel_cross_entropy
from torchgpipe.trainer.gpt import (
    GPT,
    Sizes,
    chunked_cross_entropy,
    init_gpt2,
    layers,
    layers_with_experts,
    parameter_counts,
    tensor_plan,
)

#: A vocabulary that no number of ranks divides.
SIZES = Sizes(33, 8, 16, 4, 3)


def sizes_of(is_tied, options):
    """Return the sizes of a GPT.

    PyTorch caches the unequal parts of one rank, which a process of another test had.
    """
    if options.get('data') == 'shard':
        return SIZES._replace(vocabulary=32, tied=is_tied)
    return SIZES._replace(tied=is_tied)


def batches(has_padding=True):
    """Return mini-batches of uneven sizes, with padding that differs between samples."""
    generator = torch.Generator().manual_seed(0)
    results = []
    for samples in (7, 4, 5):
        tokens, target = torch.randint(32, (2, samples, 8), generator=generator)
        if has_padding:
            for k in range(samples):
                target[k, 8 - 2 * k % 8 :] = -100
            target[0] = -100
        results.append((tokens, target))
    return results


def whole(module):
    """Return whole tensors of parameters by their names in the GPT."""
    parameters = {}
    for name, x in module.named_parameters(remove_duplicate=False):
        parameters[name] = x.full_tensor() if isinstance(x, DTensor) else x
    return {name: x.detach().clone() for name, x in original_names(parameters).items()}


def split(axes, is_tied, smoothing, sequence_parallel, options, chunk=None):
    """Train on a rank; return its losses and norms of gradients, and its parameters.

    Args:
        chunk: The number of tokens of a chunk of the loss; ``None`` for scores in the model.
    """
    mesh = init_mesh(**axes, device_type='cpu')
    with torch.device('meta'):
        module = layers(GPT(sizes_of(is_tied, options)), chunk is None).double()
    model = DistributedGPipe(
        module,
        [3, 2] if 'pipe' in axes else [5],
        mesh=mesh,
        chunks=2,
        tensor_plan=(
            tensor_plan(sequence_parallel, with_scores=chunk is None) if 'tensor' in axes else None
        ),
        init=partial(init_gpt2, depth=3),
        **options,
    )
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    replicas = axes.get('data', 1)
    loss_fn = partial(parallel_cross_entropy, label_smoothing=smoothing)
    if chunk is not None:
        loss_fn = partial(chunked_cross_entropy, size=chunk)
    results = []
    first = whole(model)
    for batch in batches(has_padding=chunk is None):
        tokens, target = (x.tensor_split(replicas)[mesh.get_local_rank('data')] for x in batch)
        results.append(model.step(tokens, target, loss_fn).item())
        results.append(model.clip_grad_norm_(0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return results, first, whole(model)


def unsplit(state, sizes, smoothing, has_padding=True):
    """Return the same of a GPT in one process, from the initial values of the split one."""
    model = GPT(sizes).double()
    model.load_state_dict(state)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    results = []
    for tokens, target in batches(has_padding):
        loss = F.cross_entropy(
            model(tokens).flatten(0, 1), target.flatten(), label_smoothing=smoothing
        )
        loss.backward()
        results.append(loss.item())
        results.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return results, dict(model.named_parameters(remove_duplicate=False))


slow = pytest.mark.slow
EIGHT = {'data': 2, 'pipe': 2, 'tensor': 2}


@pytest.mark.parametrize('sequence_parallel', [False, True])
@pytest.mark.parametrize(
    'axes, is_tied, smoothing, options',
    [
        ({'tensor': 2}, True, 0.1, {}),
        pytest.param({'tensor': 4}, False, 0.0, {'checkpoint': 'always'}, marks=slow),
        pytest.param({'tensor': 4, 'data': 2}, True, 0.1, {}, marks=slow),
        pytest.param({'tensor': 2, 'pipe': 2}, True, 0.1, {'checkpoint': 'never'}, marks=slow),
        pytest.param({'tensor': 2, 'pipe': 2}, False, 0.0, {}, marks=slow),
        pytest.param(EIGHT, True, 0.1, {}, marks=slow),
        pytest.param(EIGHT, False, 0.0, {}, marks=slow),
        pytest.param(EIGHT, True, 0.1, {'data': 'shard'}, marks=slow),
    ],
)
def test_split_vocabulary_and_sequence(axes, is_tied, smoothing, options, sequence_parallel):
    settings = axes, is_tied, smoothing, sequence_parallel, options
    outcomes = run(prod(axes.values()), split, *settings)
    state = {}
    for _, first, _ in outcomes:
        state.update(first)
    expected, parameters = unsplit(state, sizes_of(is_tied, options), smoothing)
    for results, _, last in outcomes:
        assert results == pytest.approx(expected, rel=1e-10)
        assert_same(last.values(), [parameters[name].detach() for name in last], 1e-10)


@pytest.mark.parametrize('chunk', [3, 100])
@pytest.mark.parametrize(
    'axes, sequence_parallel, options',
    [
        ({}, False, {'checkpoint': 'always'}),
        ({'pipe': 2}, False, {}),
        ({'tensor': 2}, True, {}),
        pytest.param({'data': 2}, False, {'data': 'shard'}, marks=slow),
        pytest.param({'tensor': 4}, False, {'checkpoint': 'always'}, marks=slow),
        pytest.param(EIGHT, True, {}, marks=slow),
    ],
)
def test_a_loss_in_chunks_equals_the_loss_of_all_scores(axes, sequence_parallel, options, chunk):
    settings = axes, True, 0.0, sequence_parallel, options, chunk
    outcomes = run(prod(axes.values()), split, *settings)
    state = {}
    for _, first, _ in outcomes:
        state.update(first)
    expected, parameters = unsplit(state, sizes_of(True, options), 0.0, has_padding=False)
    for results, _, last in outcomes:
        assert results == pytest.approx(expected, rel=1e-10)
        assert_same(last.values(), [parameters[name].detach() for name in last], 1e-10)


def activations_of(tensor, chunk):
    """Return the peak of activations of a GPT with many words, in a dry run, and its FLOPs."""
    with torch.device('meta'):
        module = layers(GPT(Sizes(8192, 256, 16, 4, 1)), chunk is None)
    tokens = torch.empty(1, 256, dtype=torch.long, device='meta')
    report = dry_run(
        module,
        [3],
        tokens,
        tokens,
        parallel_cross_entropy if chunk is None else partial(chunked_cross_entropy, size=chunk),
        mesh={'tensor': tensor},
        checkpoint='never',
        tensor_plan=tensor_plan(with_scores=chunk is None) if tensor > 1 else None,
    )
    return report.ranks[0].activations, report.stages[0]


@pytest.mark.parametrize('tensor', [1, 2])
def test_scores_of_a_chunk_take_the_memory_of_a_chunk(tensor):
    scores = 4 * 256 * 8192 // tensor
    weight = 4 * 16 * 8192 // tensor
    whole, _ = activations_of(tensor, None)
    chunked, work = activations_of(tensor, 32)
    assert whole > 1.9 * scores
    # A chunk has its scores, their gradient and temporary values, beside gradients of the weight.
    assert chunked < 4 * scores * 32 / 256 + 2 * weight
    # The product with the vocabulary, its gradients, and in chunks of a split vocabulary again.
    head = 2 * 256 * 16 * 8192 // tensor
    assert work.forward_flops + work.backward_flops > (3 + (tensor > 1)) * head


def refused(loss_fn):
    """Return the error of a step with split scores and a loss."""
    with torch.device('meta'):
        module = layers(GPT(SIZES)).double()
    model = DistributedGPipe(
        module,
        [5],
        mesh=init_mesh(tensor=2, device_type='cpu'),
        chunks=2,
        tensor_plan=tensor_plan(),
    )
    tokens, target = batches()[0]
    with pytest.raises((RuntimeError, ValueError)) as caught:
        model.step(tokens, target, loss_fn)
    return str(caught.value) + '\n'.join(getattr(caught.value, '__notes__', ()))


def unnormalized(scores, target):
    """Return a mean over labels that count, which differ between micro-batches."""
    return parallel_cross_entropy(scores, target)


def whole_scores(scores, target):
    """Return the loss of scores that are not split."""
    return F.cross_entropy(scores.flatten(0, 1), target.flatten())


def test_losses_that_do_not_fit_split_scores():
    for text in run(2, refused, unnormalized):
        assert 'divides by what it counts in a target' in text
    for text in run(2, refused, whole_scores):
        assert 'parallel_cross_entropy, or call the step within' in text


def test_flops_count_the_router_of_experts():
    sizes = Sizes(vocabulary=64, context=8, width=16, heads=2, depth=3)
    with torch.device('meta'):
        experts = layers_with_experts(sizes, 8)[1].experts
    in_experts = sum(x.numel() for name, x in experts.named_parameters() if name != 'router')
    total, used = parameter_counts(sizes, 8)
    assert total - used == sizes.depth * in_experts * 6 // 8
