"""Skippable layers: classes that declare the tensors that they stash and pop.

[Note: The level called module]
In torchgpipe 0.0.7 a skippable layer was a wrapper around the layer, its child ``module``. Here it
is the layer itself, of a class derived from the decorated one. Names still have that level, in
``state_dict``, ``named_modules`` and ``named_parameters``. The attribute ``module`` returns the
layer. So checkpoints and code that use names of 0.0.7 still work.

A skippable layer's ``forward`` is a generator. It yields requests and is resumed with the results.
Its return value is the layer's output::

    forward            the caller
    yield stash(…) ──▶ tracker.save
                  ◀──  None
    yield pop(…)   ──▶ tracker.load
                  ◀──  tensor
    return output  ──▶ output
"""

import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from functools import partial, wraps
from operator import itemgetter
from types import GeneratorType, new_class
from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn

from torchgpipe.base.private import uncompiled
from torchgpipe.skip.layout import DeclaresSkips
from torchgpipe.skip.transfer import Key, Namespace, current_skip_tracker

# --- a forward that is a generator
# ----------------------------------------------------------------------------------


class stash:
    """Yield it to keep a tensor for a later layer: ``yield stash('name', tensor)``.

    >>> from torch import nn
    >>> from torchgpipe.skip import skippable
    >>> @skippable(stash=['residual'])
    ... class Start(nn.Module):
    ...     def forward(self, input):
    ...         yield stash('residual', input)
    ...         return input * 2

    The ``yield`` raises :exc:`RuntimeError` if the layer has not declared the name or has stashed
    it already, and :exc:`TypeError` for a value that is not a tensor.

    Args:
        name: A name that the layer declares as stashable.
        tensor: The tensor for the later layer, of any shape, or ``None``.
    """

    __slots__ = ('name', 'tensor')

    def __init__(self, name: str, tensor: Tensor | None) -> None:
        self.name = name
        self.tensor = tensor


class pop:
    """Yield it to get the tensor of an earlier layer: ``tensor = yield pop('name')``.

    >>> from torch import nn
    >>> from torchgpipe.skip import skippable
    >>> @skippable(pop=['residual'])
    ... class End(nn.Module):
    ...     def forward(self, input):
    ...         residual = yield pop('residual')
    ...         return input + residual

    It raises :exc:`RuntimeError` where it is yielded if the layer has not declared the name or has
    popped it already, or if nothing has been stashed.

    Args:
        name: A name that the layer declares as poppable.
    """

    __slots__ = ('name',)

    def __init__(self, name: str) -> None:
        self.name = name


#: The annotation for the ``forward`` of a skippable layer: ``-> SkipGenerator``.
SkipGenerator = Generator[stash | pop, Any, Any]


def run_generator(
    generator: Any,
    namespaced: Callable[[str], Key],
    stashable: frozenset[str],
    poppable: frozenset[str],
) -> Any:
    """Run a forward that is a generator, and handle its requests.

    Args:
        generator: The result of the forward; any value but a generator is the output itself.
    """
    # In each forward, a skip is stashed once and popped once.
    to_stash = set(stashable)
    to_pop = set(poppable)
    output = generator
    if isinstance(generator, GeneratorType):
        # A list, from which a step is taken before it runs, so that no error is in a cycle with
        # the frame that it leaves.
        steps: list[Callable[[], Any]] = [partial(generator.send, None)]
        while True:
            try:
                request = steps.pop()()
            except StopIteration as stop:
                output = stop.value
                break

            try:
                answer = _obey(
                    request,
                    namespaced,
                    stashable,
                    poppable,
                    to_stash,
                    to_pop,
                )
                steps.append(partial(generator.send, answer))
                del answer
            except Exception as error:  # It appears to the layer where it yielded.
                steps.append(partial(generator.throw, error))
            # Otherwise this frame would hold the stashed tensor while the layer runs on.
            del request

    if to_stash:
        raise RuntimeError(f'{_quoted(to_stash)} must be stashed but have not')
    if to_pop:
        raise RuntimeError(f'{_quoted(to_pop)} must be popped but have not')
    return output


@uncompiled
def _obey(
    request: Any,
    namespaced: Callable[[str], Key],
    stashable: frozenset[str],
    poppable: frozenset[str],
    to_stash: set[str],
    to_pop: set[str],
) -> Tensor | None:
    if isinstance(request, stash):
        _check(request.name, stashable, to_stash, 'stashable', 'stashed')
        if request.tensor is not None and not isinstance(request.tensor, Tensor):
            raise TypeError(
                f"'{request.name}' must be a tensor or None to be stashed, but is "
                f'{type(request.tensor).__name__}'
            )
        current_skip_tracker().save(None, *namespaced(request.name), request.tensor)
        return None
    if isinstance(request, pop):
        _check(request.name, poppable, to_pop, 'poppable', 'popped')
        try:
            return current_skip_tracker().load(None, *namespaced(request.name))
        except KeyError:
            raise RuntimeError(f"'{request.name}' has not been stashed") from None
    raise TypeError(
        f"a skippable layer yields stash('name', tensor) or pop('name'), but got {request!r}"
    )


def _check(
    name: str,
    declared: frozenset[str],
    left: set[str],
    adjective: str,
    participle: str,
) -> None:
    if name not in declared:
        raise RuntimeError(f"'{name}' has not been declared as {adjective}")
    if name not in left:
        raise RuntimeError(
            f"'{name}' has already been {participle}; a skip goes from one stash "
            'to one pop in each forward'
        )
    left.remove(name)


def _quoted(names: Iterable[str]) -> str:
    return ', '.join(f"'{name}'" for name in sorted(names))


# --- the class
# ----------------------------------------------------------------------------------


TModule = TypeVar('TModule', bound=nn.Module)
TSkippable = TypeVar('TSkippable', bound='Skippable')


class Skippable(nn.Module):
    """The base class that :func:`skippable` adds to a class.

    A class may name it as its base by itself, for type checkers, which see a decorated class as
    it was before.

    >>> @skippable(stash=['x'])
    ... class Layer(nn.Module):
    ...     pass
    >>> isinstance(Layer(), Skippable), [name for _, name in Layer().stashable()]
    (True, ['x'])
    """

    #: The names that :func:`skippable` declares, for the class that it derives.
    stashable_names: ClassVar[frozenset[str]] = frozenset()
    poppable_names: ClassVar[frozenset[str]] = frozenset()
    #: The namespaces of those names that are not in the default one.
    namespaces: Mapping[str, Namespace | None] = {}

    def __getattr__(self, name: str) -> Any:
        # First, because the layer may have a child of this name.
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == 'module':  # [Note: The level called module]
                return self
            raise

    def namespaced(self, name: str) -> Key:
        """Return a name together with its namespace."""
        return self.namespaces.get(name), name

    def stashable(self) -> Iterator[Key]:
        """Yield the skips that this layer stashes."""
        return map(self.namespaced, sorted(self.stashable_names))

    def poppable(self) -> Iterator[Key]:
        """Yield the skips that this layer pops."""
        return map(self.namespaced, sorted(self.poppable_names))

    def isolate(
        self: TSkippable,
        ns: Namespace | None,
        *,
        only: Iterable[str] | None = None,
    ) -> TSkippable:
        """Put this layer's skips into a namespace, so that their names can be used again.

        >>> from torchgpipe.skip import Namespace, pop, skippable, stash
        >>> @skippable(stash=['x'])
        ... class Stash(nn.Module):
        ...     def forward(self, input):
        ...         yield stash('x', input)
        ...         return input
        >>> namespace = Namespace()
        >>> layer = Stash().isolate(namespace)

        Args:
            ns: The namespace, the same for the layer that stashes and the one that pops.
            only: The names to put there; all by default.

        Returns:
            The layer itself.
        """
        if not isinstance(ns, Namespace):
            raise TypeError(
                f'ns must be a Namespace or None, but got {ns!r}; make one with Namespace()'
            )
        names = self.stashable_names | self.poppable_names
        if only is not None:
            names &= set(only)
        # A new dictionary, because layers share the default, and a shallow copy shares any other.
        self.namespaces = {
            **self.namespaces,
            **dict.fromkeys(names, ns),
        }
        return self

    def __repr__(self) -> str:
        return f'@skippable({super().__repr__()})'

    def state_dict(
        self,
        *,
        destination: Any = None,
        prefix: str = '',
        keep_vars: bool = False,
    ) -> Any:
        """Return the state, with names as in [Note: The level called module]."""
        # The destination already has the states of other layers.
        before = set(destination or ())
        destination = super().state_dict(
            destination=destination,
            prefix=prefix,
            keep_vars=keep_vars,
        )
        level = prefix + 'module.'
        names = {}
        for key in destination:
            if key not in before:
                names[key] = level + key[len(prefix) :]
        _rename(destination, names)
        return destination

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        *args: Any,
    ) -> None:
        # Names without the level are taken too, from a model before it was skippable.
        mine = set(super().state_dict(prefix=prefix, keep_vars=True))
        level = prefix + 'module.'
        complete = all(level + key[len(prefix) :] in state_dict for key in mine)
        names = {}
        for key in state_dict:
            # If not all names have the level, one of them may belong to a child that is called
            # "module".
            if key.startswith(level) and (complete or key not in mine):
                names[key] = prefix + key[len(level) :]
        _rename(state_dict, names)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def named_modules(
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = '',
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield this layer and all within: [Note: The level called module]."""
        if prefix:
            prefix += '.'
        yield from super().named_modules(memo, prefix + 'module', remove_duplicate)

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        cls = type(self)
        base = cls.__dict__.get('_decorated')
        # Where a function call has made this class, its name leads to the class that it is
        # derived from.
        if base is not None and _find(cls) is base:
            names = cls.stashable_names, cls.poppable_names
            return _restore, (base, *names), *reduced[2:]
        return reduced


def _rename(
    state_dict: dict[str, Any],
    names: dict[str, str],
) -> None:
    # All are taken out first, because the new name of one may be the old name of another.
    values = [state_dict.pop(name) for name in names]
    state_dict.update(zip(names.values(), values))


def _find(cls: type) -> Any:
    """Return the object with the name of a class."""
    candidate: Any = sys.modules.get(cls.__module__)
    for name in cls.__qualname__.split('.'):
        candidate = getattr(candidate, name, None)
    return candidate


def _restore(
    base: type[nn.Module],
    stashable: frozenset[str],
    poppable: frozenset[str],
) -> Any:
    # `__reduce_ex__` returns the attributes as a state, so `__init__` is not called.
    cls = skippable(stashable, poppable)(base)
    return cls.__new__(cls)


def skippable(
    stash: Iterable[str] = (),
    pop: Iterable[str] = (),
) -> Callable[[type[TModule]], type[TModule]]:
    """Declare the skips of a layer: a class decorator.

    The layer's ``forward`` is a generator then, which yields :class:`stash` and :class:`pop`.

    >>> import torch
    >>> from torchgpipe.skip import pop, skippable, stash
    >>> @skippable(stash=['residual'])
    ... class Start(nn.Module):
    ...     def forward(self, input):
    ...         yield stash('residual', input)
    ...         return input * 2
    >>> @skippable(pop=['residual'])
    ... class End(nn.Module):
    ...     def forward(self, input):
    ...         residual = yield pop('residual')
    ...         return input + residual
    >>> nn.Sequential(Start(), nn.ReLU(), End())(torch.ones(2))
    tensor([3., 3.])

    Args:
        stash: Names of the skips that the layer stashes, each once in every forward.
        pop: Names of the skips that it pops, each once in every forward.

    Returns:
        A decorator that derives a class of the same name from a module class. Its layers also
        have :meth:`~Skippable.isolate`. As the name then stands for the derived class, write
        ``super().__init__()`` and not ``super(Layer, self).__init__()``.
    """
    # A string is an iterable of names with one letter.
    if isinstance(stash, str) or isinstance(pop, str):
        raise TypeError(
            'stash and pop are iterables of names, not a name: '
            f'skippable(stash=[{(stash or pop)!r}])'
        )
    stashable = frozenset(stash)
    poppable = frozenset(pop)

    def decorate(module_cls: type[TModule]) -> type[TModule]:
        if not (isinstance(module_cls, type) and issubclass(module_cls, nn.Module)):
            raise TypeError(f'a skippable layer is a class of nn.Module, not {module_cls!r}')
        return _derive(module_cls, stashable, poppable)

    return decorate


def _derive(
    base: type[Any],
    stashable: frozenset[str],
    poppable: frozenset[str],
) -> type[Any]:
    # A pickled layer has to get the same class again, not another one of the same name.
    for derived in base.__subclasses__():
        if derived.__dict__.get('_decorated') is not base:
            continue
        if derived.stashable_names == stashable and derived.poppable_names == poppable:
            return derived

    @partial(uncompiled, recursive=False)  # PyTorch cannot compile a generator.
    @wraps(base.forward)
    def forward(
        self: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        generator = base.forward(self, *args, **kwargs)
        return run_generator(generator, self.namespaced, stashable, poppable)

    # A skippable class that is decorated again already has the methods.
    bases = (base,) if issubclass(base, Skippable) else (Skippable, base)
    # In tracebacks, representations and pickles, the class has the name of its base.
    body = {
        '__doc__': base.__doc__,
        '__module__': base.__module__,
        '__qualname__': base.__qualname__,
        '_decorated': base,
        'forward': forward,
        'stashable_names': stashable,
        'poppable_names': poppable,
    }
    return new_class(
        base.__name__,
        bases,
        exec_body=lambda namespace: namespace.update(body),
    )


def verify_skippables(module: nn.Sequential) -> None:
    """Check that each skip of a sequential module is stashed once, and popped once after that.

    :class:`~torchgpipe.GPipe` does so by itself.

    >>> @skippable(stash=['residual'])
    ... class Start(nn.Module):
    ...     def forward(self, input):
    ...         yield stash('residual', input)
    ...         return input
    >>> verify_skippables(nn.Sequential(Start(), nn.ReLU()))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    TypeError: one or more pairs of stash and pop do not match:
    <BLANKLINE>
    * no module declared 'residual' as poppable but stashed
    ...

    Args:
        module: Its layers, the direct children, are looked at.

    Raises:
        TypeError: Some are not, one line for each.
    """
    problems: list[str] = []
    stashed: set[Key] = set()
    popped: set[Key] = set()
    # Not `named_children`, which leaves out a layer that is in the model twice.
    for layer_name, layer in module._modules.items():
        if isinstance(layer, DeclaresSkips):
            problems += _verify_layer(layer_name, layer, stashed, popped)
    for name in sorted([name for _, name in stashed - popped]):
        problems.append(f"no module declared '{name}' as poppable but stashed")
    if problems:
        raise TypeError(
            'one or more pairs of stash and pop do not match:\n\n* '
            + '\n* '.join(problems)
            + '\n\nGive each pair of layers that uses a name again a namespace: '
            'layer.isolate(Namespace()).'
        )


def _verify_layer(
    layer_name: str,
    layer: DeclaresSkips,
    stashed: set[Key],
    popped: set[Key],
) -> Iterator[str]:
    # The layer would pop its own skip, so these are reported once and not matched.
    both = set(layer.stashable()) & set(layer.poppable())
    for _, name in sorted(both, key=itemgetter(1)):
        yield f"'{layer_name}' declared '{name}' both as stashable and as poppable"
    for key in layer.stashable():
        if key in both:
            continue
        if key in stashed:
            yield _redeclared(layer_name, key, 'stashable')
        stashed.add(key)
    for key in layer.poppable():
        if key in both:
            continue
        if key in popped:
            yield _redeclared(layer_name, key, 'poppable')
        elif key not in stashed:
            yield f"'{layer_name}' declared '{key[1]}' as poppable but it was not stashed"
        popped.add(key)


def _redeclared(
    layer_name: str,
    key: Key,
    what: str,
) -> str:
    return f"'{layer_name}' redeclared '{key[1]}' as {what} but not isolated by namespace"
