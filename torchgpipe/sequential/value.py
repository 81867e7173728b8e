"""Values in a recording: each stands for a node of a graph, and knows what it was for the sample.

::

    B, T = x.shape               two values, 4 and 7 for the sample, of which nothing is taken yet
    y = x.view(B * T, -1)        recorded: any batch size and length will do
    if T > 5:                    taken: the graph gets a check that T > 5 is true again

A tensor can not be taken, as another one would be another way through the program.
"""
import operator
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx

__all__ = ['UNKNOWN', 'Unknown', 'Value']

#: What a value is where there is no sample.
UNKNOWN: Any = object()


class Unknown(fx.Proxy):
    """A value of which nothing is known, as there is no sample."""

    _known = UNKNOWN

    tracer: Any

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy('call_function', operator.setitem, (self, key, value), {})


class Value(fx.Proxy):
    """A value that a forward computes, as its recording sees it.

    Args:
        node: The node that gives it.
        recorder: The recorder.
        known: What it is for the sample.
    """

    def __init__(self, node: fx.Node, recorder: Any, known: Any) -> None:
        super().__init__(node, recorder)
        self._known = known

    tracer: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith('__') and name.endswith('__'):
            raise AttributeError(name)
        if callable(getattr(self._known, name)):
            return _Method(self, name)
        return self.tracer.create_proxy('call_function', getattr, (self, name), {})

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ('node', 'tracer', '_known'):
            object.__setattr__(self, name, value)
        else:
            self.tracer.refuse(f'it sets the attribute {name!r} of a value')

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy('call_function', operator.setitem, (self, key, value), {})

    def __bool__(self) -> bool:
        return bool(self.tracer.take(self, bool))

    def __index__(self) -> int:
        return operator.index(self.tracer.take(self, operator.index))

    def __int__(self) -> int:
        return int(self.tracer.take(self, int))

    def __float__(self) -> float:
        return float(self.tracer.take(self, float))

    def __len__(self) -> int:
        return int(self.tracer.take(self, len))

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
        return id(self) if self.tracer.is_tensor(self) else hash(self.tracer.take(self, _itself))

    def __str__(self) -> str:
        return (repr(self) if self.tracer.is_tensor(self)
                else str(self.tracer.take(self, _itself)))

    def __format__(self, spec: str) -> str:
        return (repr(self) if self.tracer.is_tensor(self)
                else format(self.tracer.take(self, _itself), spec))


def _itself(known: Any) -> Any:
    return known


class _Method:
    """A method of a value, which is recorded when it is called."""

    def __init__(self, value: Value, name: str) -> None:
        self._value = value
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._value.tracer.create_proxy('call_method', self._name, (self._value, *args),
                                               kwargs)


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
    for _cls in (Unknown, Value):
        setattr(_cls, f'__i{_name}__', _in_place(_name))
