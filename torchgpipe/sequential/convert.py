"""Convert a module to a sequential one with the same submodules, parameters and names."""

import inspect
import re
from collections.abc import Iterable, Mapping
from functools import partial
from traceback import clear_frames
from types import FunctionType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from torchgpipe.base.structure import call, flatten_nested, leaves_of, path_name
from torchgpipe.sequential.cuts import GRAINS, blocks_among, cut_graph
from torchgpipe.sequential.effects import (
    UNKNOWN,
    copied,
    copied_value,
    same_random_numbers,
    untouched,
    without_grad,
)
from torchgpipe.sequential.layer import Inputs, arguments_of, build, called_with
from torchgpipe.sequential.leaf_modules import (
    LeafLike,
    LeafModules,
    holds_most,
    leaf_names,
    modules_within,
)
from torchgpipe.sequential.parts import Converted
from torchgpipe.sequential.patches import one_at_a_time
from torchgpipe.sequential.record import ForwardTracer, asks_for_all, widen
from torchgpipe.sequential.refusals import (
    ConversionError,
    NeedsLeaf,
    is_from_checkpoint,
    line_of_error,
    refused,
)


def not_sequential(module: object) -> TypeError:
    """Return the error that a module is not sequential, and whether it can be converted."""
    rule = f'module must be nn.Sequential to be partitioned, but got {type(module).__name__}'
    if not isinstance(module, nn.Module):
        return TypeError(rule)
    way = 'torchgpipe.sequential.to_sequential(module, sample)'
    try:
        layers = len(convert(module, UNKNOWN, ()))
    except ConversionError as error:
        return TypeError(
            f'{rule}; {way} may make it one: it knows more by a sample. Without one '
            f'it stops here:\n\n{error}'
        )
    except Exception as error:
        return TypeError(f'{rule}; {way} may make it one, if it can be followed: {error}')
    return TypeError(f'{rule}; {way} would make it one, of {layers} layers')


def convert(
    module: nn.Module,
    sample: Any,
    leaves: Iterable[LeafLike],
    grain: str = 'block',
    one: Any = UNKNOWN,
) -> Converted:
    """Return a sequential module without comparing it: see :func:`to_sequential`.

    It also works for a batch of ``one`` sample, if this does not need another program.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f'a module is converted, not {type(module).__name__}')
    if grain not in GRAINS:
        raise ValueError(f'grain must be one of {", ".join(map(repr, GRAINS))}, but is {grain!r}')
    names = leaf_names(module, leaves)
    classes: dict[type, str] = {}
    with one_at_a_time, torch.inference_mode(False), torch.enable_grad():
        if sample is not UNKNOWN:
            _call_once(module, sample)
            tensors, structure = flatten_nested(sample)
            sample = structure(tensors)  # without marks
        while True:
            try:
                return _converted(module, sample, names, classes, grain, one)
            except NeedsLeaf as error:  # The conversion starts again with more leaves.
                why, *found = error.args
                classes.update(dict.fromkeys(found, why))


def is_on_meta(module: nn.Module) -> bool:
    """Return whether a parameter or buffer of a module is on the meta device."""
    return any(x.is_meta for x in (*module.parameters(), *module.buffers()))


def _call_once(module: nn.Module, sample: Any) -> None:
    """Call a copy of a module, which raises its own errors and fills its caches."""
    try:
        with same_random_numbers():
            copy = copied(module)
            untouched(copy, lambda: without_grad(lambda _: call(copy, copied_value(sample))))
    except Exception as error:
        if _has_keywords(module, sample):
            raise TypeError(
                f'{type(module).__name__} fails for a {type(sample).__name__} as its one argument,'
                f' and its forward takes the keys {[*sample]} by name: pass Arguments(**batch) to '
                'to_sequential, and call the pipeline by model(**batch)'
            ) from error
        # If it fails because values are missing, the recording may still succeed.
        if not isinstance(error, RuntimeError) or not is_on_meta(module):
            raise


def _has_keywords(module: nn.Module, sample: Any) -> bool:
    """Return whether a sample is a mapping of keyword arguments that a module takes."""
    if not isinstance(sample, Mapping):
        return False
    try:
        inspect.signature(module.forward).bind(**sample)
    except TypeError:
        return False
    return True


def _converted(
    module: nn.Module, sample: Any, names: set[str], classes: dict[type, str], grain: str, one: Any
) -> Converted:
    def recorded(value: Any) -> tuple[ForwardTracer, Inputs]:
        found = _recorded(module, value, names, classes, flipped=False)
        if found[0].uses_of_training:
            other = _recorded(module, value, names, classes, flipped=True)
            if asks_for_all(other[0], found[0]):
                return other
            if not asks_for_all(found[0], other[0]):
                found[0].check_training(other[0])
        return found

    tracer, inputs = recorded(sample)
    blocks = blocks_among(tracer.calls, tracer.root, tracer.graph)
    if one is not UNKNOWN:
        widen(tracer, inputs.take(*copied_value(called_with(one))), lambda: recorded(one)[0])
    seconds = {} if is_on_meta(module) else _seconds(tracer)
    steps = cut_graph(tracer.graph, tracer.root, tracer.leaves, grain, blocks)
    found = build(tracer.graph, steps, module, inputs, tracer.constants)
    found.wholes = LeafModules(module, names, classes).wholes(seconds)
    _check_modes(tracer.root, tracer.leaves)
    return found


def _seconds(tracer: ForwardTracer) -> dict[str, float]:
    """Return the seconds of calls by module name, and of all other steps by ``''``."""
    found: dict[str, float] = {}
    for node in tracer.graph.nodes:
        name = str(node.target) if node.op == 'call_module' else ''
        found[name] = found.get(name, 0) + node.meta.get('seconds', 0)
    return found


def _check_modes(root: nn.Module, leaves: LeafModules) -> None:
    """Check that layers get the modes that a model gives its submodules in ``train()``.

    Raises:
        ConversionError: A module has its own ``train()``, which layers would not run.
    """
    within = [*modules_within(root, leaves)]
    if not any(map(_has_own_train, within)):
        return
    for mode in (True, False):
        root.train(mode)
        modes = {each: each.training for each in root.modules()}
        for each in within:
            each.training = mode
            for child in each.children():
                if child in leaves:
                    child.train(mode)
        others = [
            name
            for name, each in root.named_modules()
            if each.training is not modes[each] and _goes_by_training(type(each))
        ]
        if others:
            raise _other_modes(
                root,
                mode,
                others,
                [
                    name
                    for name, each in root.named_modules()
                    if each in within and _has_own_train(each)
                ],
            )


def _has_own_train(module: nn.Module) -> bool:
    return type(module).train is not nn.Module.train or 'train' in vars(module)


def _goes_by_training(cls: type) -> bool:
    """Return whether a method of a class or of a base class reads ``training``."""
    return any(
        'training' in method.__code__.co_names
        for base in cls.__mro__
        if base is not nn.Module
        for method in vars(base).values()
        if isinstance(method, FunctionType) and method.__name__ != 'train'
    )


def _other_modes(
    root: nn.Module, mode: bool, others: list[str], names: list[str]
) -> ConversionError:
    """Return the error that submodules are in another mode, because of a named ``train()``."""
    inner = max(
        (name for name in names if f'{others[0]}.'.startswith(f'{name}.')),
        key=len,
        default=names[0],
    )
    code = getattr(root.get_submodule(inner).train, '__code__', None)
    hint = (
        'let them keep their mode by a train() of their own, as in class '
        'Frozen(nn.BatchNorm2d): def train(self, mode=True): return super().train(False); or '
        'let a submodule that is named as a leaf have them, and that train()'
    )
    return refused(
        root,
        f'after model.train({"" if mode else False}), {", ".join(others[:4])} would be in '
        f'{"training" if mode else "evaluation"} mode in the layers, and are not in the model, '
        'where a train() of its own sets modes',
        f'  {code.co_filename}, line {code.co_firstlineno}, in {code.co_name}'
        if code
        else '  (its train is an object)',
        inner or None,
        '' if inner else hint,
    )


def _recorded(
    module: nn.Module, sample: Any, names: set[str], classes: dict[type, str], flipped: bool
) -> tuple[ForwardTracer, Inputs]:
    """Record a module, in the other training mode if ``flipped``."""
    root = copied(module)  # It runs, and may be changed.
    for each in root.modules():
        each.training ^= flipped
    tracer = ForwardTracer(root, LeafModules(root, names, classes))
    args, kwargs, inputs = _values(tracer, module, sample)
    try:
        untouched(root, partial(tracer.record, args, kwargs))
        args = ()
        kwargs = {}
        tracer.end()
    except Exception as error:
        args = ()
        kwargs = {}
        clear_frames(error.__traceback__)  # which hold values
        _raise_again(error, root, tracer)
    finally:
        tracer.release()
    return tracer, inputs


def _raise_again(error: Exception, root: nn.Module, tracer: ForwardTracer) -> NoReturn:
    """Raise the error that explains a failed recording."""
    if is_from_checkpoint(error):
        raise refused(
            root,
            'it calls torch.utils.checkpoint',
            line_of_error(error.__traceback__),
            tracer.inner,
            'turn that off, with model.activation_checkpointing_disable() for a model '
            'of Hugging Face, or gradient_checkpointing_disable() in older versions; '
            'GPipe(…, checkpoint=…) does it',
        ) from error
    if isinstance(error, NeedsLeaf):
        raise error
    if isinstance(error, ConversionError):
        # The cause may be modules whose program depends on the training mode. They can be leaves,
        # except a module with most of the model, such as one that makes a cache in evaluation.
        asking = [
            type(x)
            for use in tracer.uses_of_training
            for x in use.module
            if not holds_most(x, root)
        ]
        if asking:
            raise NeedsLeaf(
                'its program goes by the training mode, and can be followed in one mode only',
                *asking,
            ) from None
        raise error
    why = [f'it cannot be followed ({type(error).__name__}: {error})']
    tracer.draws.check(why.append)  # Random numbers may be the cause.
    # Operations raise this type. A leaf calls the same operation on the meta device.
    hint = _NOT_ON_META if isinstance(error, RuntimeError) and is_on_meta(root) else ''
    raise refused(
        root, '; '.join(why), line_of_error(error.__traceback__), tracer.inner, hint
    ) from error


#: The way out of an operation that does not work on the meta device.
_NOT_ON_META = (
    'the operation does not work on the meta device, where a leaf would call it as '
    'well. If PyTorch has it there for other dtypes, convert the model in one of '
    'these, as by model.to(torch.bfloat16); or convert a model that has values'
)


def _values(
    tracer: ForwardTracer, module: nn.Module, sample: Any
) -> tuple[tuple[Any, ...], dict[str, Any], Inputs]:
    """Return the arguments to record a forward with, and the inputs that extract their tensors."""
    signature = _signature_of(module)
    bound = signature.bind_partial()
    if sample is UNKNOWN:
        names = [
            name
            for name, each in signature.parameters.items()
            if each.default is each.empty
            and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        ]
        bound.arguments.update((name, tracer.placeholder(name, UNKNOWN)) for name in names)
        return bound.args, bound.kwargs, Inputs(signature, names)
    given = arguments_of(signature, *called_with(sample))
    tensors, structure = flatten_nested(given)
    names = [
        '_'.join(re.findall(r'\w+', path_name(leaf.path)))
        for leaf in leaves_of(given)
        if isinstance(leaf.value, Tensor)
    ]
    # Each place has its own argument, because other calls may have another tensor or other memory
    # there.
    values = [tracer.placeholder(name, x.detach().clone()) for name, x in zip(names, tensors)]
    bound.arguments.update(structure(values))
    inputs = Inputs(signature, structure=structure, number=len(tensors))
    return bound.args, bound.kwargs, inputs


def _signature_of(module: nn.Module) -> inspect.Signature:
    """Return the signature of a module's forward without annotations: pickle may refuse them."""
    found = inspect.signature(module.forward)
    return found.replace(
        parameters=[
            each.replace(annotation=inspect.Parameter.empty) for each in found.parameters.values()
        ],
        return_annotation=inspect.Signature.empty,
    )
