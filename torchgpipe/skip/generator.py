"""Run a forward that is a generator: execute each yielded request, and resume with its result.

A skippable layer's ``forward`` is a generator. It yields what it wants done, and is resumed with
the answer; what it returns at last is the layer's output::

    forward            who runs it
    yield stash(…) ──▶ tracker.save
                  ◀──  None
    yield pop(…)   ──▶ tracker.load
                  ◀──  tensor
    return output  ──▶ output
"""
from collections.abc import Callable, Generator, Iterable
from functools import partial
from types import GeneratorType
from typing import Any

from torch import Tensor

from torchgpipe.private import uncompiled
from torchgpipe.skip.namespace import Key
from torchgpipe.skip.tracker import current_skip_tracker

__all__ = ['SkipGenerator', 'pop', 'run_generator', 'stash']


class stash:
    """Yield it to keep a tensor for a later layer: ``yield stash('name', tensor)``.

    >>> from torch import nn
    >>> from torchgpipe.skip import skippable
    >>> @skippable(stash=['residual'])
    ... class Start(nn.Module):
    ...     def forward(self, input):
    ...         yield stash('residual', input)
    ...         return input * 2

    It raises :exc:`RuntimeError` where it is yielded if the layer has not declared the name or has
    stashed it already, and :exc:`TypeError` for what is no tensor.

    Args:
        name: A name that the layer declares as stashable.
        tensor: What the later layer will get, a tensor of any shape or ``None``.
    """

    __slots__ = ('name', 'tensor')

    def __init__(self, name: str, tensor: Tensor | None) -> None:
        self.name = name
        self.tensor = tensor


class pop:
    """Yield it to get what an earlier layer stashed: ``tensor = yield pop('name')``.

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


#: What to annotate the ``forward`` of a skippable layer with: ``-> SkipGenerator``.
SkipGenerator = Generator[stash | pop, Any, Any]


def run_generator(generator: Any, namespaced: Callable[[str], Key], stashable: frozenset[str],
                  poppable: frozenset[str]) -> Any:
    """Run the generator that a forward is, and do what it asks for.

    Args:
        generator: What the forward gave; anything but a generator is the output itself.
        namespaced: Gives a name together with its namespace.
        stashable: The names that the layer stashes.
        poppable: The names that it pops.

    Returns:
        What the generator returned.
    """
    to_stash, to_pop = set(stashable), set(poppable)
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
                answer = _obey(request, namespaced, stashable, poppable, to_stash, to_pop)
                steps.append(partial(generator.send, answer))
                del answer
            except Exception as error:  # It appears to the layer where it yielded.
                steps.append(partial(generator.throw, error))
            del request
    if to_stash:
        raise RuntimeError(f'{_quoted(to_stash)} must be stashed but have not')
    if to_pop:
        raise RuntimeError(f'{_quoted(to_pop)} must be popped but have not')
    return output


@uncompiled
def _obey(request: Any, namespaced: Callable[[str], Key], stashable: frozenset[str],
          poppable: frozenset[str], to_stash: set[str], to_pop: set[str]) -> Tensor | None:
    if isinstance(request, stash):
        _check(request.name, stashable, to_stash, 'stashable', 'stashed')
        if request.tensor is not None and not isinstance(request.tensor, Tensor):
            raise TypeError(f"'{request.name}' must be a tensor or None to be stashed, but is "
                            f'{type(request.tensor).__name__}')
        current_skip_tracker().save(None, *namespaced(request.name), request.tensor)
        return None
    if isinstance(request, pop):
        _check(request.name, poppable, to_pop, 'poppable', 'popped')
        try:
            return current_skip_tracker().load(None, *namespaced(request.name))
        except KeyError:
            raise RuntimeError(f"'{request.name}' has not been stashed") from None
    raise TypeError(f"a skippable layer yields stash('name', tensor) or pop('name'), but got "
                    f'{request!r}')


def _check(name: str, declared: frozenset[str], left: set[str], adjective: str, participle: str
           ) -> None:
    if name not in declared:
        raise RuntimeError(f"'{name}' has not been declared as {adjective}")
    if name not in left:
        raise RuntimeError(f"'{name}' has already been {participle}; a skip goes from one stash "
                           'to one pop in each forward')
    left.remove(name)


def _quoted(names: Iterable[str]) -> str:
    return ', '.join(f"'{name}'" for name in sorted(names))
