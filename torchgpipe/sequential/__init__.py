"""Sequential models from other modules.

Terms of this folder:

block
    A call of a module from a list, a dict or a sequence of such modules, if it feeds a later one.
concretize
    Turn a value of a recording into a plain Python value, which a guard then checks.
constant
    An object that a graph refers to by a name.
converted model
    The sequential module that was made from another module.
grain
    The places where a graph may be cut: at blocks, between layers, or between operations.
guard
    A step that checks that a value is the same as for the sample.
leaf
    A submodule that is called as one step, and not looked into.
part
    A module with some of the submodules, parameters and buffers of another module.
recording
    One run of a forward, which makes a graph of its steps.
value
    An object in a recording in place of a tensor or a number. It has the sample's as an example.
"""

import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.base.structure import Arguments, call, flatten_nested
from torchgpipe.engine.microbatches import check_rules, cut
from torchgpipe.losses import counts_of, with_counts
from torchgpipe.sequential.check import check_conversion, check_mixing
from torchgpipe.sequential.convert import convert, is_on_meta
from torchgpipe.sequential.effects import (
    UNKNOWN,
    copied,
    copied_value,
    same_random_numbers,
    untouched,
    without_grad,
)
from torchgpipe.sequential.layer import called_with
from torchgpipe.sequential.leaf_modules import LeafLike
from torchgpipe.sequential.parts import (
    Converted,
    NamedLayer,
    Part,
    all_names,
    converted,
    optimizer_state,
    original_names,
    put,
    with_all_names,
)
from torchgpipe.sequential.patches import watched
from torchgpipe.sequential.refusals import ConversionError

__all__ = [
    'ConversionError',
    'from_stages',
    'optimizer_state',
    'original_names',
    'sample_of',
    'to_sequential',
]

#: A function of a model and a value, or a submodule, which is a function of a value.
StageLike = Callable[..., Any] | nn.Module


def to_sequential(
    module: nn.Module,
    sample: Any = None,
    *,
    grain: str = 'block',
    leaves: Iterable[LeafLike] = (),
    batch_dim: Any = 0,
    gather: Any = None,
    check_sample: bool = True,
) -> nn.Sequential:
    """Make a sequential module of a module of any form, for :class:`~torchgpipe.GPipe`.

    The forward is recorded for the sample, and cut into layers: its blocks, and calls with weights
    outside of blocks. A value that a later layer uses goes directly there, as a skip. The layers
    hold the submodules, parameters and buffers of the module itself. Their names have the number
    of the layer as a prefix, such as ``3.blocks.0.norm.weight``.

    >>> import torch
    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 3)
    ...         self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
    ...
    ...     def forward(self, ids, mask=None):
    ...         x = self.embed(ids)
    ...         for block in self.blocks:
    ...             x = x + block(x).relu()
    ...         if mask is not None:
    ...             x = x * mask.unsqueeze(-1)
    ...         return self.head(x.mean(1))
    >>> ids = torch.randint(10, (4, 5))
    >>> layers = to_sequential(Net(), ids)
    >>> len(layers), layers(ids).shape, [*layers.state_dict()][1]
    (4, torch.Size([4, 3]), '1.blocks.0.weight')

    Args:
        module: The module. It does not change, and shares its submodules, parameters and buffers
            with the layers.
        sample: The input of the module, with two samples at least: a tensor, any structure, or
            :class:`~torchgpipe.Arguments` for several arguments. Without it, fewer programs can be
            followed, and results are not compared.
        grain: The places of cuts. With ``'block'``, there are no cuts within blocks. These are
            repeated one after the other in a list, a dict or a sequential module, and have two
            weights at least. Elsewhere, cuts are as with ``'layer'``: once between two calls with
            weights. With ``'operation'``, there are cuts wherever possible. If there are fewer
            layers than partitions, use a finer grain.
        leaves: Submodules that are called as one and not looked into, given as names (with ``*``
            for anything), classes, or modules. PyTorch's own layers always are leaves. So are
            modules whose program depends on the training mode, or changes grad mode or autocast.
        batch_dim: The batch dimension of the sample: see :class:`~torchgpipe.GPipe`.
        gather: The rule for :class:`~torchgpipe.GPipe`, for scalars in the output such as losses.
            Its result for halves is compared with the module.
        check_sample: Whether to compare outputs, gradients and buffers with the module's. The
            comparison runs in training and in evaluation mode, for the sample and for a
            micro-batch of it. It also checks that samples are not mixed. Outputs for halves of the
            sample must be halves of the output. A loss must be the mean or the sum of the halves'
            losses, or follow ``gather``.

    Returns:
        The sequential module, for any batch size. The program of the module may depend on other
        sizes, on types or on plain values. Then a guard raises :exc:`ValueError` unless these are
        as for the sample. The attribute ``wholes`` has the modules that were not looked into, the
        largest first. Each has its share of the parameters, its share of the time of one forward,
        and the reason. A module with most of the parameters gives a warning.

    Raises:
        ConversionError: The forward cannot be followed; the message shows the line and the fix.
            Or the results differ from the module's, or depend on the cut into micro-batches.
        TypeError: An argument is of the wrong type.
        ValueError: The model has no such leaf, or the sample cannot be cut into micro-batches.
    """
    check_rules(batch_dim, gather)
    converted = convert(
        module,
        UNKNOWN if sample is None else sample,
        leaves,
        grain,
        _one_of(module, sample, batch_dim),
    )
    largest = next((each for each in converted.wholes if each.warns), None)
    if largest is not None:
        warnings.warn(
            f'most of {type(module).__name__} is in one of its {len(converted)} layers, '
            f'so partitions cannot be even: {largest}. Let the part that is to blame '
            'be a smaller submodule',
            stacklevel=2,
        )
    if check_sample and sample is not None:
        _check(
            module,
            converted,
            sample,
            batch_dim,
            gather,
            'Something goes by what a graph does not have, such as a global, an object that '
            'changes, or a tensor behind its back. Name the submodule as a leaf',
        )
    return converted


def from_stages(
    module: nn.Module,
    stages: Iterable[StageLike],
    sample: Any,
    *,
    batch_dim: Any = 0,
    gather: Any = None,
    check_sample: bool = True,
) -> nn.Sequential:
    """Make a sequential module by hand, from functions that use a model's submodules.

    >>> import torch
    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 3)
    ...         self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
    ...
    ...     def forward(self, ids):
    ...         x = self.embed(ids)
    ...         for block in self.blocks:
    ...             x = block(x)
    ...         return self.head(x.mean(1))
    >>> net = Net()
    >>> layers = from_stages(net, [
    ...     net.embed,
    ...     *net.blocks,
    ...     lambda net, x: net.head(x.mean(1)),
    ... ], torch.randint(10, (4, 5)))
    >>> layers[3], [*layers.state_dict()][0]
    (Stage(<lambda>)(
      (head): Linear(in_features=8, out_features=3, bias=True)
    ), '0.embed.weight')

    Each function is called with the module and a value of any nesting. The first function gets the
    arguments of the module instead. In a layer, the function's module argument is the part that
    the function has used with the sample. A submodule is a function of a value by itself.

    Args:
        module: The module.
        stages: The functions, in order. To pickle the result, define them in a Python module, not
            as lambdas.
        sample, batch_dim, gather, check_sample: As for :func:`to_sequential`.

    Raises:
        ConversionError: The stages do not give the results of the module.
        ValueError: A stage has parameters that are not the module's.
    """
    check_rules(batch_dim, gather)
    converted = _make_stages(module, stages, sample)
    if check_sample:
        _check(
            module,
            converted,
            sample,
            batch_dim,
            gather,
            'What differs in the output is made in the last stages; a gradient that differs '
            'first, of what a stage has left out',
        )
    return converted


def _one_of(module: nn.Module, sample: Any, batch_dim: Any) -> Any:
    """Return the first sample of a batch of several, if it can be cut."""
    try:
        batches, sizes, _ = cut(sample, sys.maxsize, batch_dim, layers=[module])
    except (TypeError, ValueError):  # The check of the sample raises it again.
        return UNKNOWN
    return batches[0].value if len(sizes) > 1 else UNKNOWN


def _check(
    module: nn.Module, converted: Converted, sample: Any, batch_dim: Any, gather: Any, advice: str
) -> None:
    if is_on_meta(module):
        return  # There are no values to compare.
    tensors, structure = flatten_nested(sample)
    batches, sizes, _ = cut(sample, 2, batch_dim, layers=converted)
    whole = structure(tensors)
    halves = [batch.value for batch in batches]
    known = check_conversion(module, converted, halves, sizes[0], whole, advice)
    if len(halves) > 1:
        rule = with_counts(gather, iter(counts_of(gather, batches)))
        check_mixing(known, whole, halves, sizes, batch_dim, rule)


class Stage(Part, NamedLayer):
    """Call a function with a part of a model, which is this layer itself."""

    def __init__(
        self, root: nn.Module, function: Callable[..., Any], names: Iterable[str]
    ) -> None:
        super().__init__(root, attributes=True)
        self._function = function
        put(self, root, names, attributes=True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the function."""
        return self._function(self, *args, **kwargs)

    def _get_name(self) -> str:
        return f'Stage({getattr(self._function, "__name__", type(self._function).__name__)})'


class _CallOf:
    """Call a submodule by its name."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return model.get_submodule(self.__name__)(*args, **kwargs)


def _make_stages(module: nn.Module, stages: Iterable[StageLike], sample: Any) -> Converted:
    """Return the sequential module, without comparing it: see :func:`from_stages`."""
    names = all_names(module)
    args, kwargs = copied_value(called_with(sample))
    root = copied(module)  # It runs, and may be changed.
    layers: list[nn.Module] = []
    for stage in stages:
        function = _function(module, stage)
        value, uses = untouched(root, partial(_used, root, function, args, kwargs))
        layers.append(
            stage
            if isinstance(stage, nn.Module) and not isinstance(function, _CallOf)
            else Stage(module, function, with_all_names(module, uses, names))
        )
        args = (value,)
        kwargs = {}
    return converted(layers, module, attributes=True)


def _function(module: nn.Module, stage: StageLike) -> Callable[..., Any]:
    if not isinstance(stage, nn.Module):
        if not callable(stage):
            raise TypeError(
                f'a stage is a function of the model and a value, or a submodule, not {stage!r}'
            )
        return stage
    name = next((name for name, each in module.named_modules() if each is stage and name), '')
    if name:
        return _CallOf(name)
    if any(True for _ in (*stage.parameters(), *stage.buffers())):
        raise ValueError(
            'a stage is a submodule of the model, or a function of it, but this '
            f'{type(stage).__name__}, which has parameters, is not in it'
        )
    return lambda _, *args: stage(*args)


def _used(
    root: nn.Module, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, list[str]]:
    """Return a function's result for a model, and the names in the model that it uses."""
    uses = _Uses(root)
    with watched(uses):
        uses.watches = True
        try:
            return without_grad(lambda _: function(root, *args, **kwargs)), [*uses.names]
        finally:
            uses.watches = False


class _Uses:
    """Records the submodules that are called, and the parameters and buffers that are read."""

    def __init__(self, root: nn.Module) -> None:
        self.watches = False
        self.names: dict[str, None] = {}
        self._paths = {module: f'{name}.' if name else '' for name, module in root.named_modules()}

    def called(
        self,
        module: nn.Module,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Record a submodule that is called, which includes everything that it uses."""
        if self._paths.get(module):
            self.names.setdefault(self._paths[module][:-1])
        self.watches = False
        try:
            return run(module, *args, **kwargs)
        finally:
            self.watches = True

    def read(self, module: nn.Module, name: str, found: Any) -> Any:
        """Record a parameter or a buffer, or a submodule because of its attributes."""
        if isinstance(found, nn.Module) and found in self._paths:
            self.names.setdefault(f'{self._paths[found]}training')
        elif isinstance(found, Tensor) and module in self._paths:
            self.names.setdefault(self._paths[module] + name)
        return found


class _Called(BaseException):
    """The submodule was called; the rest of the model's forward is not needed.

    It is no :exc:`Exception`, because a forward may catch these and call the submodule again.
    """


def sample_of(model: nn.Module, submodule: nn.Module | str, sample: Any) -> Arguments:
    """Return the arguments that a submodule receives in a call of a model.

    They are a sample for :func:`to_sequential`, to run a part of a model as a pipeline, such as
    the language model of a model with images. A copy of the model runs up to the first call of the
    submodule, without gradients. The model, and the random numbers of PyTorch and Python, do not
    change.

    >>> import torch
    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.first, self.body = nn.Linear(8, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    ...
    ...     def forward(self, x):
    ...         return self.body(self.first(x))
    >>> net = Net()
    >>> sample_of(net, net.body, torch.rand(2, 8)).args[0].shape
    torch.Size([2, 4])

    Args:
        model: The model.
        submodule: A submodule, or its name in the model.
        sample: An input of the model: a value, or :class:`~torchgpipe.Arguments`.

    Returns:
        The arguments, with copies of tensors.

    Raises:
        AttributeError: The model has no submodule of this name.
        TypeError: The submodule is called without tensors, or with other objects than a sample of
            :func:`to_sequential` may have.
        ValueError: The module is not in the model, the model does not call it for this sample, or
            the model's forward is a function that does not belong to its class.
    """
    name: str = submodule if isinstance(submodule, str) else _name_of(model, submodule)
    received: list[Arguments] = []

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        received.append(copied_value(Arguments(*args, **kwargs)))
        raise _Called

    _refuse_replaced_forwards(model)
    with same_random_numbers(), _without_compiled_code():
        copy = copied(model)
        # First, before the user's hooks change the arguments, as these run again in a conversion.
        copy.get_submodule(name).register_forward_pre_hook(stop, with_kwargs=True, prepend=True)
        try:
            # The copy shares parameters, to which the forward may write.
            untouched(copy, lambda: without_grad(lambda _: call(copy, copied_value(sample))))
        except _Called:
            pass
        except Exception:
            # After the call, an error only follows from the stop.
            if not received:
                raise
    if received:
        return received[0]
    raise ValueError(
        f"{type(model).__name__} does not call '{name}' for this sample. Pass a "
        'sample with which it does, or name the submodule that it calls'
    )


def _refuse_replaced_forwards(model: nn.Module) -> None:
    """Raise if a copy of the model would call the forward of the model itself."""
    for name, module in model.named_modules():
        # A function that was set on a module refers to the module itself, also in a copy. Bound
        # methods and partials are copied with their module. A compiled module makes its forward
        # anew.
        is_compiled = '_orig_mod' in module._modules
        if isinstance(vars(module).get('forward'), FunctionType) and not is_compiled:
            where = f"submodule '{name}'" if name else type(module).__name__
            raise ValueError(
                f'the forward of {where} is a function that was set on the '
                'module, such as compiled code, so a copy would call the module '
                'itself. Remove it before (del module.forward), or compile the '
                'module by module.compile()'
            )


def _without_compiled_code() -> AbstractContextManager[object]:
    """Return a context in which compiled modules run as they were written."""
    if 'torch._dynamo' not in sys.modules:
        return nullcontext()  # Nothing is compiled, and the import takes seconds.
    stance: AbstractContextManager[object] = torch.compiler.set_stance('force_eager')
    return stance


def _name_of(model: nn.Module, submodule: nn.Module) -> str:
    for name, module in model.named_modules():
        if module is submodule:
            return str(name)
    raise ValueError(
        f'this {type(submodule).__name__} is not a submodule of the '
        f'{type(model).__name__}; pass one of its modules, or its name'
    )
