"""Policies: the results of operations that a checkpointed micro-batch keeps for its recomputation.

A policy is a function in the terms of ``torch.utils.checkpoint``, which is called after each
operation of a first pass::

    policy(ctx, operation, *args, **kwargs) ──▶ CheckpointPolicy

It applies to a model, a partition, a layer or a module within a layer; the innermost one counts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

from torchgpipe.base.private import HigherOrderOperator
from torchgpipe.engine.checkpoint.random import operation_of

TModule = TypeVar('TModule', bound=nn.Module)

#: A policy, in the signature of ``torch.utils.checkpoint.create_selective_checkpoint_contexts``.
Policy = Callable[..., CheckpointPolicy | bool]

#: The name of a policy, the operations whose results are kept, a policy, or ``None`` for nothing.
Keep = str | Sequence[Any] | Policy | None

#: One of these for all partitions; or one for each partition by index, layer or module by name.
KeepRules = Keep | Mapping[Any, Keep]

#: The types of ``torch.ops.aten.mm.default`` and ``torch.ops.aten.mm``.
OVERLOAD = type(torch.ops.aten.mm.default)
PACKET = type(torch.ops.aten.mm)

#: The attribute that marks a module.
MARK = 'torchgpipe_no_recompute'


@dataclass(slots=True)
class OperationContext:
    """The first argument of a policy, as PyTorch's ``SelectiveCheckpointContext``."""

    #: The result of the operation.
    op_output: Any
    #: The number of earlier calls of the same operation in this micro-batch and partition, where
    #: the policy applies.
    index: int
    #: Always false: a recomputation repeats the decisions of its first pass.
    is_recompute: bool = False


def no_recompute(module: TModule) -> TModule:
    """Mark a module whose operations checkpointing does not run again. Their results are kept.

    Use it for a layer that takes long. A recomputation calls the module's forward, but takes the
    results of its operations from the first pass. Views, changes in place, casts and new tensors
    without a computation are made again. Tensors for its own backward are saved as without
    checkpointing, so the module may ask for gradients in its forward.

    >>> layer = nn.Sequential(no_recompute(nn.Conv2d(3, 8, 3)), nn.BatchNorm2d(8), nn.ReLU())

    Args:
        module: The layer, or any module within one, which is not compiled. Kernels that PyTorch
            does not see, such as of Triton without ``torch.library.triton_op``, run again.

    Returns:
        The module.

    Raises:
        TypeError: It is not a module.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            'a layer that is kept out of recomputation is an nn.Module, but this is '
            f'{type(module).__name__}; mark a module that calls it'
        )
    module.__dict__[MARK] = True  # `torch.compile(module)` would set it on the wrapped module
    return module


# --- policies by name


def keep_everything(ctx: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep all results that can be kept."""
    return CheckpointPolicy.PREFER_SAVE


#: Products of matrices.
MATRIX_PRODUCTS = frozenset(
    [
        'aten.mm.default',
        'aten.addmm.default',
        'aten._scaled_mm.default',
        'aten._grouped_mm.default',
        'aten._scaled_grouped_mm.default',
    ]
)

#: Operations whose results :func:`keep_products` keeps.
PRODUCTS = MATRIX_PRODUCTS | {
    'aten.convolution.default',
    'aten._scaled_dot_product_flash_attention.default',
    'aten._scaled_dot_product_efficient_attention.default',
    'aten._scaled_dot_product_cudnn_attention.default',
    'aten._scaled_dot_product_flash_attention_for_cpu.default',
    'aten._scaled_dot_product_fused_attention_overrideable.default',
    'aten._flash_attention_forward.default',
    'aten._efficient_attention_forward.default',
    'flex_attention',
}

#: Operations whose results it keeps unless they are larger than the arguments, as the scores of
#: attention and gathered tensors are.
SMALL_PRODUCTS = frozenset(
    [
        'aten.bmm.default',
        'aten.baddbmm.default',
        '_c10d_functional.all_reduce.default',
        '_c10d_functional.all_gather_into_tensor.default',
        '_c10d_functional.reduce_scatter_tensor.default',
        '_c10d_functional.all_to_all_single.default',
    ]
)

name_of_operation = cache(str)


def keep_products(ctx: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep products of matrices, convolutions, attention, and collectives that return new tensors.

    Products of batches of matrices and collectives are kept unless their results are larger than
    their arguments, as the scores of attention and gathered tensors are.
    """
    name = name_of_operation(operation)
    is_kept = name in PRODUCTS
    if name in SMALL_PRODUCTS:
        remaining = _size(ctx.op_output)
        for x in args:
            if isinstance(x, Tensor):
                remaining -= _size(x)
        is_kept = remaining <= 0
    return CheckpointPolicy.PREFER_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _size(x: Tensor) -> int:
    return prod(x.shape)


def keep_every_second_product(
    ctx: Any, operation: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """Keep as :func:`keep_products`, but only every second product of matrices."""
    if name_of_operation(operation) in MATRIX_PRODUCTS and ctx.index % 2:
        return CheckpointPolicy.PREFER_RECOMPUTE
    return keep_products(ctx, operation, *args, **kwargs)


POLICIES: dict[str, Policy] = {
    'products': keep_products,
    'every second product': keep_every_second_product,
    'all': keep_everything,
}


def _keep_listed(
    operations: frozenset[Any], ctx: Any, operation: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    if operation in operations:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


# --- checks of the argument ``keep``


class PartitionPolicy(NamedTuple):
    """The policies of a partition: for all of it, and for modules by their names."""

    policy: Policy | None = None
    modules: Mapping[str, Policy | None] = {}


def parse_keep(
    keep: KeepRules, module: nn.Sequential, balance: Sequence[int]
) -> tuple[PartitionPolicy, ...]:
    """Check the argument ``keep`` of a pipeline, and return the policies of each partition.

    Raises:
        TypeError: It is not a policy, or a listed operation is not an operation.
        ValueError: A policy, a partition or a module with such a name does not exist; or a listed
            operation does not return a new tensor.
    """
    policies: list[Policy | None] = [None] * len(balance)
    modules: list[dict[str, Policy | None]] = []
    for _ in balance:
        modules.append({})
    if not isinstance(keep, Mapping):
        policies = [parse_policy(keep)] * len(balance)
        keep = {}

    partition_of: dict[str, int] = {}
    names = iter(module._modules)
    for j, number in enumerate(balance):
        for _ in range(number):
            partition_of[next(names)] = j
    for place, value in keep.items():
        policy = parse_policy(value)
        if isinstance(place, str):
            layer = place.partition('.')[0]
            if layer not in partition_of or not _has_module(module, place):
                raise ValueError(
                    f"keep has a policy for '{place}', which is no module of this model; name a "
                    f"layer, such as '{next(iter(partition_of))}', or a module within one"
                )
            modules[partition_of[layer]][place] = policy
        elif isinstance(place, int) and 0 <= place < len(balance):
            policies[place] = policy
        else:
            raise ValueError(
                f'keep has a policy for {place!r}; its keys are names of modules, and indices of '
                f'partitions from 0 to {len(balance) - 1}'
            )
    return tuple(map(PartitionPolicy, policies, modules))


def _has_module(module: nn.Module, name: str) -> bool:
    try:
        module.get_submodule(name)
    except AttributeError:
        return False
    return True


def parse_policy(keep: Keep) -> Policy | None:
    """Return a policy as a function; ``None`` if nothing is kept."""
    if keep is None:
        return None
    if isinstance(keep, str):
        if keep not in POLICIES:
            names = ', '.join(map(repr, POLICIES))
            raise ValueError(f'keep is one of {names}, but is {keep!r}')
        return POLICIES[keep]
    if isinstance(keep, (list, tuple, set, frozenset)):
        return partial(_keep_listed, frozenset(_overloads(keep)))
    if callable(keep) and not isinstance(keep, (type, nn.Module)):
        return keep
    raise TypeError(
        'keep is the name of a policy, a list of operations such as torch.ops.aten.mm.default, or '
        f'a function policy(ctx, operation, *args, **kwargs), but is {keep!r}'
    )


def _overloads(operations: Sequence[Any]) -> list[Any]:
    """Return listed operations; for an operation without an overload, all of its overloads."""
    overloads: list[Any] = []
    for operation in operations:
        if isinstance(operation, str):
            operation = _named(operation)
        if isinstance(operation, PACKET):
            for name in operation.overloads():
                overload = getattr(operation, name)
                if operation_of(overload).makes_tensors:
                    overloads.append(overload)
        elif isinstance(operation, (OVERLOAD, HigherOrderOperator)):
            if not operation_of(operation).makes_tensors:
                raise ValueError(not_new(operation))
            overloads.append(operation)
        else:
            raise TypeError(
                'keep lists operations, such as torch.ops.aten.mm.default, but has '
                f'{operation!r}; a dispatch mode shows the operations of a layer'
            )
    return overloads


def _named(name: str) -> Any:
    """Return an operation by its name, such as ``'aten.mm.default'``."""
    operation: Any = torch.ops
    for part in name.split('.'):
        operation = getattr(operation, part, None)
    return name if operation is None else operation


def not_new(operation: Any) -> str:
    """Return the error message for a kept operation that does not return new tensors."""
    kind = 'a view or no tensor'
    if operation_of(operation).written:
        kind = 'its argument, changed in place'
    return (
        f'keep asks for the result of {operation}, but it is {kind}, which only a recomputation '
        'makes again; return CheckpointPolicy.PREFER_RECOMPUTE for it, or PREFER_SAVE for all '
        'operations whose results can be kept'
    )


class Decision(NamedTuple):
    """The answer of a policy for one call of an operation."""

    #: Whether the result is kept.
    keeps: bool
    #: Whether it waits in the memory of the host.
    offloads: bool = False
    #: Whether it is not kept if it is the output of the model.
    is_optional: bool = False


def decision_of(
    policy: Policy, ctx: OperationContext, operation: Any, args: Any, kwargs: Any
) -> Any:
    """Call a policy and check its answer.

    Raises:
        TypeError: The answer is not a :class:`torch.utils.checkpoint.CheckpointPolicy`.
        ValueError: The result must be kept, but cannot be.
    """
    answer = policy(ctx, operation, *args, **kwargs)
    if isinstance(answer, bool):  # As PyTorch accepts it.
        answer = CheckpointPolicy.MUST_SAVE if answer else CheckpointPolicy.PREFER_RECOMPUTE
    if not isinstance(answer, CheckpointPolicy):
        raise TypeError(
            f'the policy of keep returned {answer!r} for {operation}; it has to return a '
            'torch.utils.checkpoint.CheckpointPolicy'
        )
    if answer.name.endswith('RECOMPUTE'):
        return Decision(False)
    properties = operation_of(operation)
    is_must = answer.name.startswith('MUST')
    if is_must and not properties.makes_tensors:
        raise ValueError(not_new(operation))
    # Autocast keeps the casts of weights for several micro-batches, and a layer may keep a new
    # tensor for longer and change it.
    if not properties.makes_tensors or properties.takes_options and not is_must:
        return Decision(False)
    return Decision(
        True,
        answer.name.endswith('OFFLOAD'),
        is_optional=not is_must and policy is not keep_everything,
    )
