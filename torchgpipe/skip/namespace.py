"""Namespaces: the same skip name, several times in one model."""
import uuid
from abc import ABCMeta
from dataclasses import dataclass, field

__all__ = ['Key', 'Namespace']


@dataclass(frozen=True, order=True)
class Namespace(metaclass=ABCMeta):
    """A scope for skip names; each new one is unlike all others.

    It is hashable and ordered, and a copy or a pickle of it equals it, so the pairs of a copied
    model still match.

    >>> import copy
    >>> namespace = Namespace()
    >>> copy.deepcopy(namespace) == namespace, Namespace() == namespace
    (True, False)
    """

    id: uuid.UUID = field(default_factory=uuid.uuid4)


# The default namespace.
Namespace.register(type(None))

#: What tells a skip tensor from all others of a model: its namespace and its name.
Key = tuple[Namespace | None, str]
