"""Train a converted model in pipelines, beside the model itself on the same micro-batches."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.experiments.zoo.convert import Case
from benchmarks.harness.options import equal_balance
from torchgpipe import GPipe
from torchgpipe.base.distance import distance, typical_size
from torchgpipe.base.structure import call, flatten_nested, leaves_of
from torchgpipe.engine.microbatches import cut
from torchgpipe.sequential import original_names, to_sequential
from torchgpipe.sequential.effects import copied, without_grad

#: Samples of each step, which are two micro-batches: of 2 and 1, then of 5 and 4. Batch
#: normalization takes 3 and 2 first, as it may not have a single value per channel.
STEPS, STEPS_BY_STATISTICS = (3, 9), (5, 9)
CHUNKS = 2
PARTITIONS = (2, 3)
SCHEDULES = ('plain call', '1f1b')


def without_dropout(model: nn.Module) -> None:
    """Let a model draw no random numbers, since a pipeline would draw others."""
    for module in model.modules():
        configs = [x for x in vars(module).values() if hasattr(x, 'to_dict')]
        for owner in (module, *configs):
            for name, value in [*vars(owner).items()]:
                if isinstance(value, float) and ('drop' in name or name == 'p'):
                    setattr(owner, name, 0.0)


def differences(case: Case, leaves: Sequence[str]) -> dict[str, float]:
    """Return the largest difference after two steps, by partitions and schedule.

    It covers parameters, buffers and gradients, and is relative to the model itself.
    """
    model = case.model.double().train()
    sample = _small_enough(case)
    start = _copied(model.state_dict())
    sizes = STEPS
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            sizes = STEPS_BY_STATISTICS
    samples = [_double(sample(size)) for size in sizes]
    _steps(model, partial(_by_itself, model), samples)
    expected = _results(model, model.state_dict())
    typical = typical_size([*expected.values()])
    _reset(model, start)
    layers = to_sequential(model, _double(sample(2)), leaves=leaves, check_sample=False)
    result = {}
    for n in PARTITIONS:
        for schedule in SCHEDULES:
            _reset(model, start)
            devices = [f'cpu:{j}' for j in range(n)]
            balance = equal_balance(len(layers), n)
            pipeline = GPipe(layers, balance, chunks=CHUNKS, devices=devices)
            _steps(model, partial(_by_pipeline, pipeline, schedule), samples)
            actual = _results(model, original_names(pipeline.state_dict()))
            distances = [distance(actual[name], x, typical) for name, x in expected.items()]
            # Unlike Python's, this maximum is NaN if a distance is.
            result[f'{n} partitions, {schedule}'] = torch.tensor(distances).max().item()
    return result


def _small_enough(case: Case) -> Callable[[int], Any]:
    """Return the function that makes small samples, if the model takes them."""
    try:
        without_grad(lambda _: call(copied(case.model), _double(case.small(2))))
    except Exception:
        return case.sample
    return case.small


def _steps(model: nn.Module, backward: Callable[[Any], object], samples: Sequence[Any]) -> None:
    # With the default epsilon, a gradient that is zero except for rounding becomes a step. An
    # example is the gradient of a bias before a normalization.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    for sample in samples:
        optimizer.zero_grad()
        backward(sample)
        optimizer.step()


def _by_itself(model: nn.Module, sample: Any) -> None:
    for batch in cut(sample, CHUNKS, 0)[0]:
        _loss(call(model, batch.value)).backward()


def _by_pipeline(pipeline: GPipe, schedule: str, sample: Any) -> None:
    if schedule == SCHEDULES[0]:
        _loss(call(pipeline, sample)).backward()
    else:
        size = sum(cut(sample, CHUNKS)[1])
        pipeline.step(
            sample,
            torch.zeros(size),
            lambda output, target: _loss(output),
            schedule=schedule,
            normalizer=1,
        )


def _results(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the state of a model after its steps. The pipeline shares its parameters."""
    results = _copied(state)
    for name, x in model.named_parameters():
        if x.grad is not None:
            results[f'gradient of {name}'] = x.grad.clone()
    return results


def _copied(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in state.items() if isinstance(x, Tensor)}


def _reset(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    for name, x in model.state_dict().items():
        if name in state:
            x.copy_(state[name])


def _double(sample: Any) -> Any:
    tensors, structure = flatten_nested(sample)
    return structure([x.double() if x.is_floating_point() else x for x in tensors])


def _loss(output: Any) -> Tensor:
    """Return a sum over samples, and so over micro-batches, of all real tensors in the output."""
    loss = torch.zeros(())
    for leaf in leaves_of(output):
        x = leaf.value
        if isinstance(x, Tensor) and x.requires_grad:
            target = torch.arange(x[0].numel(), dtype=x.dtype).cos().view(x.shape[1:])
            loss = loss + (x - target).square().sum() / x[0].numel()
    return loss
