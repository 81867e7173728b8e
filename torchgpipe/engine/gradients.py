"""Gradients in a step: leaves that accumulate them, and a backward split into halves.

A schedule may split backward into the actions ``I`` and ``W`` (Qi et al., "Zero Bubble Pipeline
Parallelism", 2023). ``I`` computes the gradients that the previous partition waits for, and ``W``
computes the gradients of weights::

    forward     x, weight, bias ──▶ y
    I           gradient of x ◀── gradient of y          x and the gradient of y are kept
    W           weight.grad, bias.grad += …              from x and the gradient of y

A parameter of type :class:`Weight` marks that its gradient may be deferred, and its layer remains
unchanged. Linear layers and convolutions defer it (``_SPLIT``), except in the cases that
:func:`_splits` excludes. For example, a cast of autocast separates the parameter from the
function. These cases and all other functions compute the gradient in ``I``.

Only the backward pass of the step defers (rule of :meth:`DeferredWork.begin`). A layer may run
another pass within it, such as the adjoint of an equation or the solver of an equilibrium. That
pass returns all gradients to the layer, which may scale them or use them twice.

Ownership: until ``W``, a list of the cell (:class:`DeferredWork`) owns the input and the output
gradient of each call. All of these tensors are on the compute stream of the cell. If a layer
changes one of them in place between ``I`` and ``W``, then ``W`` raises, as autograd does.

:class:`Leaves` replaces each parameter by a leaf during a step, and :func:`give` adds the
accumulated gradients to the parameters at the end::

    parameter ──detach──▶ leaf          one for all places; one in each partition that has W
                            ├──▶ cell of micro-batch 0     backward: leaf.grad = g0
                            └──▶ cell of micro-batch 1     backward: leaf.grad = g0 + g1

    at the end      leaf.grad ──▶ Give ──▶ hooks ──▶ parameter.grad

If a layer assigns a leaf to another slot, the parameter takes its place at the end. If it freezes
a leaf, the parameter is frozen at the end.

Therefore hooks of a parameter see its whole gradient, once in a step. Hooks that a layer registers
on a leaf belong to its parameter, and so they outlive the step. A step that fails leaves no part
of the gradient in ``parameter.grad``. A layer may also keep a parameter outside of its
``_parameters``. That reference is the parameter itself, and its gradient is added there at once.
"""

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from torchgpipe.base.context import context
from torchgpipe.base.private import (
    FakeTensor,
    backward_pass,
    innermost_hooks,
    is_transformed,
    tree_map_only,
    versions,
)
from torchgpipe.base.structure import PLAIN_TYPES, Gradients, Grads, Slot
from torchgpipe.engine.checkpoint.swaps import Swap, substituted, with_data

#: Functions that compute some gradients of weights and accumulate them.
Work = list[Callable[[], None]]

# Split backward: deferred gradients of weights.


class DeferredWork:
    """Where the calls of a partition defer gradients of weights.

    A call keeps the list that its forward found. This is not thread-local, because a recomputation
    may run in a thread of autograd.
    """

    #: The list of the current action, if there is one.
    work: Work | None = None
    #: The number of the backward pass that defers.
    backward_pass: int | None = None

    def begin(self, grads: object = None) -> None:
        """Let the present backward pass defer. Autograd calls this before a root of the pass.

        A root has to be a node that no layer can reach. Otherwise, a pass within a hook of the
        root could call this first.
        """
        self.backward_pass = backward_pass()


#: Calls a function without a dispatch to ``__torch_function__`` of the arguments.
_as_parameter: Any = nn.Parameter.__torch_function__


class Weight(nn.Parameter):
    """A parameter whose gradient may be deferred, because ``grad`` is read at the end only."""

    deferred: DeferredWork

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        """Call a function, with a split backward where possible."""
        kwargs = kwargs or {}
        # Python functions of PyTorch, such as `torch.autograd.grad`, also list plain tensors.
        if not {cls, Tensor}.issuperset(types):
            # Together with a tensor of another class, pass the weight as a plain tensor.
            args, kwargs = tree_map_only(cls, _plain, (args, kwargs))
            return func(*args, **kwargs)
        if func in _SPLIT:
            output = _as_parameter(_SPLIT[func], types, args, kwargs)
            if output is not None:
                return output
        return _as_parameter(func, types, args, kwargs)


PLAIN_TYPES.add(Weight)


class FakeWeights(TorchFunctionMode):
    """A mode in which fake parameters have a split backward, as a :class:`Weight` has."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SPLIT:
            output = _SPLIT[func](*args, **kwargs)
            if output is not None:
                return output
        return func(*args, **kwargs)


def _plain(weight: Weight) -> Tensor:
    plain: Tensor = _as_parameter(Tensor.as_subclass, (), (weight, Tensor), {})
    return plain


def _splits(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> bool:
    """Return whether a call defers its gradients of weights."""
    deferred = getattr(weight, 'deferred', None)
    return (
        deferred is not None
        and deferred.work is not None
        and torch.is_grad_enabled()
        and (hasattr(bias, 'deferred') or bias is None)
        and type(input) in (Tensor, FakeTensor)
        and input.layout is torch.strided
        and not input.is_complex()
        and not is_transformed()
        and not torch.is_autocast_enabled(input.device.type)
        and _is_run_again_alike()
    )


def _is_run_again_alike() -> bool:
    """Return whether a recomputation of this call, if any, also sees a :class:`Weight`.

    A checkpoint within a layer recomputes in backward, when modules have their parameters back.
    """
    hooks = innermost_hooks()
    return hooks is None or getattr(hooks[0], '__module__', '').startswith('torchgpipe.')


class _Split(torch.autograd.Function):
    """A function of ``(function, *tensors)`` with deferred gradients of weights."""

    @staticmethod
    def forward(
        ctx: Any,
        function: '_Linear | _Convolution',
        input: Tensor,
        weight: Weight,
        bias: Weight | None,
    ) -> Tensor:
        ctx.function = function
        ctx.deferred = weight.deferred
        ctx.work = weight.deferred.work
        ctx.set_materialize_grads(False)  # An unused output has no gradient, not one of zeros.
        ctx.leaves = weight, bias  # An unpack hook may return another tensor.
        ctx.hooked = False
        # Of a leaf, autograd would save the variable itself. `weight.data = …` gives that another
        # memory, which is not counted as a change.
        ctx.save_for_backward(input, weight.detach())
        return function(input, weight, bias).detach()  # [Note: Identity without a view]

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Grads:
        if grad is None:
            return None, None, None, None
        # Without `__torch_function__`, as in PyTorch's nodes: it takes 5 µs per access.
        return _as_parameter(_go_back, (), (ctx, grad))  # type: ignore[no-any-return]


def _go_back(ctx: Any, grad: Tensor) -> Grads:
    input, weight = ctx.saved_tensors
    if torch.is_grad_enabled():  # create_graph=True
        weight = ctx.leaves[0]
    input_grad = None
    if ctx.needs_input_grad[1]:
        input_grad = ctx.function.input_grad(grad, input, weight)
    # A hook of the node sees all gradients, and a pass within the step's returns them all.
    if ctx.hooked or ctx.deferred.backward_pass != backward_pass():
        return None, input_grad, *_weight_grads(ctx.function, grad, input, ctx.leaves)
    # Detached: otherwise nodes of the graph would own each other, and the garbage collector
    # would not see the cycle.
    input = input.detach()
    arguments = ctx.function, grad, input, ctx.leaves, versions([grad, input])
    ctx.work.append(partial(_as_parameter, _finish, (), arguments))
    return None, input_grad, None, None


def _register_hook(ctx: Any, hook: Callable[..., Any]) -> Any:
    """Register a user's hook on the node, which may also see and change gradients of weights."""
    ctx.hooked = True
    return super(type(ctx), ctx).register_hook(hook)


def _split(
    function: '_Linear | _Convolution',
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> Tensor:
    output: Any = _Split.apply(function, input, weight, bias)  # type: ignore[no-untyped-call]
    type(output.grad_fn).register_hook = _register_hook
    return output  # type: ignore[no-any-return]


WeightAndBias = tuple[Weight, Weight | None]


def _weight_grads(
    function: '_Linear | _Convolution',
    grad: Tensor,
    input: Tensor,
    leaves: WeightAndBias,
) -> tuple[Tensor | None, Tensor | None]:
    weight, bias = leaves
    weight_grad = None
    if weight.requires_grad:
        weight_grad = function.weight_grad(grad, input, weight)
    bias_grad = None
    if bias is not None and bias.requires_grad:
        bias_grad = function.bias_grad(grad)
    return weight_grad, bias_grad


def _finish(
    function: '_Linear | _Convolution',
    grad: Tensor,
    input: Tensor,
    leaves: WeightAndBias,
    expected: list[int],
) -> None:
    """Run the second half of a call's backward.

    Raises:
        RuntimeError: The gradient or the input is at other versions than expected.
    """
    now = versions([grad, input])
    if now != expected:
        raise RuntimeError(
            'one of the variables needed for gradient computation has been modified by an inplace '
            'operation between the two halves of its backward (output gradient and input, of '
            f'shape {tuple(input.shape)}, are at versions {now}; expected versions {expected}). '
            'Give the layer a copy (tensor.clone()), or use a schedule with whole backwards, such '
            "as '1f1b'"
        )

    for leaf, weight_grad in zip(leaves, _weight_grads(function, grad, input, leaves)):
        if leaf is not None and weight_grad is not None:
            _add(leaf, weight_grad)


def _add(leaf: Tensor, grad: Tensor) -> None:
    if leaf.grad is None:
        leaf.grad = grad.to(leaf.grad_dtype)
    else:
        leaf.grad += grad


class _Linear(NamedTuple):
    """A linear layer."""

    def __call__(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        return F.linear(input, weight, bias)

    def input_grad(
        self,
        grad: Tensor,
        input: Tensor,
        weight: Tensor,
    ) -> Tensor:
        return grad @ weight

    def weight_grad(
        self,
        grad: Tensor,
        input: Tensor,
        weight: Tensor,
    ) -> Tensor:
        # A matrix of all samples: other dimensions than the last one belong to the batch.
        grad = grad.reshape(-1, grad.shape[-1])
        return grad.t() @ input.reshape(-1, input.shape[-1])

    def bias_grad(self, grad: Tensor) -> Tensor:
        return grad.reshape(-1, grad.shape[-1]).sum(0)


class _Convolution(NamedTuple):
    """A convolution."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int

    def __call__(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        output: Tensor = _aten.convolution(input, weight, bias, *self._options())
        return output

    def _options(self) -> tuple[Any, ...]:
        transposed = False
        output_padding = [0] * len(self.stride)
        return self.stride, self.padding, self.dilation, transposed, output_padding, self.groups

    def _backward(
        self,
        grad: Tensor,
        input: Tensor,
        weight: Tensor,
        mask: list[bool],
    ) -> Any:
        return _aten.convolution_backward(grad, input, weight, None, *self._options(), mask)

    def input_grad(
        self,
        grad: Tensor,
        input: Tensor,
        weight: Tensor,
    ) -> Tensor:
        input_grad, _, _ = self._backward(grad, input, weight, [True, False, False])
        return input_grad  # type: ignore[no-any-return]

    def weight_grad(
        self,
        grad: Tensor,
        input: Tensor,
        weight: Tensor,
    ) -> Tensor:
        _, weight_grad, _ = self._backward(grad, input, weight, [False, True, False])
        return weight_grad  # type: ignore[no-any-return]

    def bias_grad(self, grad: Tensor) -> Tensor:
        return grad.sum([0, *range(2, grad.dim())])


_aten: Any = torch.ops.aten


def _linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
) -> Any:
    # Other shapes are broadcast, and their gradients are sums over more dimensions.
    has_bias_of_rows = bias is None or bias.shape == weight.shape[:1]
    if weight.dim() != 2 or not has_bias_of_rows:
        return None
    if not _splits(input, weight, bias):
        return None
    return _split(_Linear(), input, weight, bias)


def _convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    # An input without a batch, or padding by name, has another backward.
    if input.dim() != weight.dim() or isinstance(padding, str):
        return None
    if not _splits(input, weight, bias):
        return None
    dims = weight.dim() - 2
    function = _Convolution(
        _by_dim(stride, dims), _by_dim(padding, dims), _by_dim(dilation, dims), groups
    )
    return _split(function, input, weight, bias)


def _by_dim(option: Any, dims: int) -> list[int]:
    """Return an option of a convolution for each dimension."""
    options = [option] if isinstance(option, int) else list(option)
    return options * dims if len(options) == 1 else options


#: The functions with a split backward.
_SPLIT: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    F.conv1d: _convolution,
    F.conv2d: _convolution,
    F.conv3d: _convolution,
}


# Leaves: accumulation over micro-batches, in place of the parameters.

#: The methods that register hooks of a tensor.
_REGISTRATIONS = 'register_hook', 'register_post_accumulate_grad_hook'


class Leaves:
    """The leaves of one step.

    Args:
        dtype: The dtype in which gradients accumulate. By default, it is the parameter's dtype.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._leaves: dict[tuple[int, int], tuple[Tensor, nn.Parameter]] = {}

    def swaps(
        self,
        modules: Iterable[nn.Module],
        copies: Mapping[Slot, Tensor],
        deferred: DeferredWork | None = None,
    ) -> list[Swap]:
        """Return the swaps that put leaves in place of the parameters of some modules."""
        swaps = []
        for module in modules:
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                x = copies.get((module, name), parameter)
                if not x.requires_grad:
                    continue
                leaf = self._leaf_of(x, deferred)
                put = partial(_put_leaf, module, name, leaf, parameter)
                swaps.append(Swap(put, partial(_put_back, module, name, x, leaf)))
        return swaps

    def _leaf_of(
        self,
        x: Tensor,
        deferred: DeferredWork | None,
    ) -> nn.Parameter:
        key = id(x), id(deferred)
        if key not in self._leaves:
            data = x.detach()
            leaf = nn.Parameter(data)
            if deferred is not None and type(data) is Tensor:
                leaf = Weight(data)
            if deferred is not None and type(data) in (Tensor, FakeTensor):
                leaf.deferred = deferred  # type: ignore[attr-defined]
            leaf.__dict__.update(x.__dict__)
            for name in _REGISTRATIONS:
                leaf.__dict__[name] = partial(_register, getattr(x, name))
            if self._dtype is not None:
                leaf.grad_dtype = self._dtype
            self._leaves[key] = x, leaf
        return self._leaves[key][1]

    def put_back(self, modules: Iterable[nn.Module]) -> None:
        """Put parameters in place of their leaves, which a layer may have assigned elsewhere."""
        parameters = {id(leaf): x for x, leaf in self._leaves.values()}
        for module in modules:
            slots: dict[str, Any] = module._parameters
            for name, x in [*slots.items()]:
                if id(x) in parameters:
                    slots[name] = parameters[id(x)]

    def freeze(self) -> None:
        """Freeze the parameters whose leaves a layer has frozen in forward."""
        for x, leaf in self._leaves.values():
            if not leaf.requires_grad and x.is_leaf:
                x.requires_grad_(False)

    @property
    def numbers(self) -> set[int]:
        """The ``id`` of each leaf."""
        return {id(leaf) for _, leaf in self._leaves.values()}

    def watch(
        self,
        only: Container[int],
        arrived: Callable[[Tensor], None],
    ) -> list[RemovableHandle]:
        """Call a function with each parameter whose leaf gets its gradient of a backward.

        Args:
            only: The ``id`` of each parameter to watch.

        Returns:
            Handles that end this.
        """
        handles = []
        for x, leaf in self._leaves.values():
            if id(x) in only and leaf.requires_grad:
                hook = partial(_call_with, arrived, x)
                # The leaf's own attribute of this name registers hooks of its parameter.
                register: Any = Tensor.register_post_accumulate_grad_hook
                handles.append(register(leaf, hook))
        return handles

    def take(self, only: Container[int] | None = None) -> Gradients:
        """Return parameters, or their copies, with their gradients, and clear ``leaf.grad``.

        A parameter also gets the memory that a layer has given its leaf by ``leaf.data = …``.

        Args:
            only: The ``id`` of each parameter to return. By default, all are returned.
        """
        gradients = []
        for x, leaf in self._leaves.values():
            if only is not None and id(x) not in only:
                continue
            # A fake tensor and a sparse one have no address.
            has_address = not isinstance(x, FakeTensor) and x.layout is torch.strided
            if has_address and leaf.data_ptr() != x.data_ptr():
                x.data = leaf.data
            if leaf.grad is not None:
                gradients.append((x, leaf.grad))
                leaf.grad = None
        return gradients


def _call_with(
    arrived: Callable[[Tensor], None],
    x: Tensor,
    leaf: Tensor,
) -> None:
    """Call a function with the parameter of a leaf, as a hook of the leaf."""
    arrived(x)


def _register(
    register: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Register a hook of a leaf's parameter. A recomputation does not register it again."""
    if context.recomputing:
        return RemovableHandle(OrderedDict())
    return register(*args, **kwargs)


def within(
    swaps: Sequence[Swap],
    function: Callable[..., Any],
) -> Callable[..., Any]:
    """Return a function that runs with the leaves in place of the parameters."""
    return partial(_run_within, swaps, function)


def _run_within(
    swaps: Sequence[Swap],
    function: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    with substituted(swaps):
        return function(*args, **kwargs)


def _put_leaf(
    module: nn.Module,
    name: str,
    leaf: Tensor,
    parameter: Tensor,
) -> None:
    """Set a parameter of a module to its leaf."""
    # In a recomputation, modules may have other dictionaries than when the step began. In
    # TorchScript it is not a dictionary.
    parameters: Any = module._parameters
    if context.recomputing and parameters[name] is not parameter:
        # The layer has written to the parameter, and this is its value in the first pass.
        leaf = with_data(leaf, parameters[name].detach(), leaf.requires_grad)
    parameters[name] = leaf


def _put_back(
    module: nn.Module,
    name: str,
    parameter: Tensor,
    leaf: Tensor,
) -> None:
    """Set a parameter of a module again, unless the layer has set another one."""
    parameters: Any = module._parameters
    if name in parameters and parameters[name] is leaf:
        parameters[name] = parameter


def give(gradients: Gradients) -> None:
    """Run backward from tensors with given gradients, through the hooks of these tensors.

    Args:
        gradients: Tensors that require grad, each with its gradient. The list is emptied, so that
            only the parameter refers to its gradient, and autograd need not copy it.
    """
    if gradients:
        tensors = [x for x, _ in gradients]
        grads = [grad for _, grad in gradients]
        gradients.clear()
        Give.apply(grads, *tensors).backward()  # type: ignore[no-untyped-call]


class Give(torch.autograd.Function):
    """Return the given gradients in backward: ``Give.apply(gradients, *tensors)``."""

    @staticmethod
    def forward(
        ctx: Any,
        gradients: list[Tensor],
        *tensors: Tensor,
    ) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, phony: Tensor) -> Grads:
        gradients = tuple(ctx.gradients)
        ctx.gradients.clear()
        return None, *gradients


def edge_of(y: Tensor, own_node: bool = False) -> GradientEdge:
    """Return the edge at which a tensor's gradient enters its graph. It keeps the graph alive."""
    # There is no view of a sparse tensor, which PyTorch makes for a leaf.
    if y.layout is not torch.strided and not y.is_nested:
        y = y.clone()
    elif own_node:
        y = y.view_as(y)
    return get_gradient_edge(y)


def leaf_of(x: Tensor) -> Tensor:
    """Return a tensor detached as a leaf of another graph."""
    return x.detach().requires_grad_(x.requires_grad)
