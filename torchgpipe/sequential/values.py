"""Values in a recording: each has a node of a graph, and its value for the sample.

::

    B, T = x.shape               two values, 4 and 7 for the sample; neither is concretized yet
    y = x.view(B * T, -1)        recorded: any batch size and length will do
    if T > 5:                    concretized: the graph gets a guard that T > 5 is true again
    check(ok, f'got {T}')        a message, which nothing goes by: its text is that for the sample

A tensor cannot be concretized, as another one would be another way through the program.
"""
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx

from torchgpipe.sequential.errors import makes_a_message

__all__ = ['UNKNOWN', 'TracedValue', 'UnknownValue']

#: The example value where there is no sample.
UNKNOWN: Any = object()


class UnknownValue(fx.Proxy):
    """A value without an example, as there is no sample."""

    _example = UNKNOWN

    tracer: Any

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy('call_function', operator.setitem, (self, key, value), {})


class TracedValue(UnknownValue):
    """A value that a forward computes, as its recording sees it.

    Args:
        node: The node that gives it.
        tracer: Records what is done with it.
        example: The value for the sample.
    """

    def __init__(self, node: fx.Node, tracer: Any, example: Any) -> None:
        super().__init__(node, tracer)
        self._example = example

    def __getattr__(self, name: str) -> Any:
        if name.startswith('__') and name.endswith('__'):
            raise AttributeError(name)
        if callable(getattr(self._example, name)):
            return lambda *args, **kwargs: self.tracer.create_proxy(
                'call_method', name, (self, *args), kwargs)
        return self.tracer.create_proxy('call_function', getattr, (self, name), {})

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ('node', 'tracer', '_example'):
            object.__setattr__(self, name, value)
        else:
            self.tracer.refuse(f'it sets the attribute {name!r} of a value')

    def __contains__(self, item: Any) -> bool:
        return bool(self.tracer.create_proxy('call_function', operator.contains, (self, item), {}))

    def __iter__(self) -> Iterator[Any]:
        return iter([self[k] for k in range(len(self))])  # type: ignore[index]

    def __round__(self, *digits: int) -> Any:
        return self.tracer.create_proxy('call_function', round, (self, *digits), {})

    def __repr__(self) -> str:
        return f'<{self.node.name} of a recording>'

    # What looks a number up, or looks at its text, may go by it.

    def __hash__(self) -> int:
        return id(self) if self.tracer.is_tensor(self) else hash(self._itself())

    def __str__(self) -> str:
        return repr(self) if self.tracer.is_tensor(self) else str(self._shown())

    def __format__(self, spec: str) -> str:
        return repr(self) if self.tracer.is_tensor(self) else format(self._shown(), spec)

    def _shown(self) -> Any:
        return self._example if makes_a_message(sys._getframe(2)) else self._itself()

    def _itself(self) -> Any:
        return self.tracer.concretize(self, _unchanged)


def _concretizing(how: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda self: self.tracer.concretize(self, how)


for _how in (bool, float, int, len, operator.index):
    setattr(TracedValue, f'__{_how.__name__}__', _concretizing(_how))


def _unchanged(example: Any) -> Any:
    return example


def _in_place(name: str) -> Callable[..., Any]:
    def method(self: Any, other: Any) -> Any:
        # A number is not changed in place, and a recorded `n += 1` would give its name another.
        function = getattr(operator, 'i' + name if self.tracer.is_tensor(self) else _PLAIN[name])
        return self.tracer.create_proxy('call_function', function, (self, other), {})

    return method


# In a recording of PyTorch's, `x += y` would be `x + y`, which another name of x does not see.
_PLAIN = {'and': 'and_', 'or': 'or_'}
for _name in ('add', 'sub', 'mul', 'truediv', 'floordiv', 'mod', 'pow', 'and', 'or', 'xor',
              'lshift', 'rshift', 'matmul'):
    _PLAIN.setdefault(_name, _name)
    setattr(UnknownValue, f'__i{_name}__', _in_place(_name))
