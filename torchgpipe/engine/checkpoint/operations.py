"""Properties of an operation: random draws, generator, and the tensors that it writes to."""
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpipe.private import schema_of, tree_leaves

__all__ = ['Operation', 'operation_of']


class Operation(NamedTuple):
    """What is known of an operation, as a dispatch mode sees it."""

    #: Whether it is PyTorch's own, and so says what it does.
    native: bool
    #: Whether it says that it draws random numbers.
    random: bool
    #: The place of its generator among its arguments, if it takes one.
    generator: int | None
    #: The operation that takes a generator as well, if this one does not.
    twin: Any
    #: Places and names of the arguments that it writes to.
    written: tuple[tuple[int, str], ...]

    @property
    def takes_generator(self) -> bool:
        """Whether the operation, or its twin, can be given a generator."""
        return self.generator is not None or self.twin is not None

    def generator_of(self, args: Any, kwargs: Any) -> torch.Generator | None:
        """Return the generator that a call was given."""
        if self.generator is None:
            return None
        given: torch.Generator | None = (
            args[self.generator] if self.generator < len(args) else kwargs.get('generator'))
        return given

    def call_with(self, generator: torch.Generator, func: Any, args: Any, kwargs: Any) -> Any:
        """Call with another generator."""
        if self.generator is None:
            return self.twin(*args, **kwargs, generator=generator)
        k = self.generator
        if k < len(args):
            return func(*args[:k], generator, *args[k + 1:], **kwargs)
        return func(*args, **{**kwargs, 'generator': generator})

    def written_by(self, args: Any, kwargs: Any) -> Iterator[Tensor]:
        """Yield the tensors that a call writes to."""
        for k, name in self.written:
            given = args[k] if k < len(args) else kwargs.get(name)
            yield from (x for x in tree_leaves(given) if isinstance(x, Tensor))


@lru_cache(maxsize=None)
def operation_of(func: Any) -> Operation:
    """Return what is known of an operation."""
    schema = schema_of(func)
    if schema is None:
        return Operation(False, False, None, None, ())
    names = [argument.name for argument in schema.arguments]
    native = func.namespace in ('aten', 'prims')
    random = torch.Tag.nondeterministic_seeded in func.tags
    written = tuple((k, argument.name) for k, argument in enumerate(schema.arguments)
                    if argument.alias_info and argument.alias_info.is_write)
    if 'generator' in names:
        return Operation(native, random, names.index('generator'), None, written)
    twin = _twin(func, names) if random else None
    return Operation(native, random, None, twin, written)


def _twin(func: Any, names: list[str]) -> Any:
    packet = func.overloadpacket
    for overload in (getattr(packet, name) for name in packet.overloads()):
        if {argument.name for argument in schema_of(overload).arguments} == {*names, 'generator'}:
            return overload
    return None
