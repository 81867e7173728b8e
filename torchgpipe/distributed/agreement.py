"""Facts: numbers that ranks exchange, so that all start the same task, or raise the same error.

:func:`torchgpipe.shard.collectives.agree` exchanges them.
"""

import re
import zlib
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from torchgpipe.shard.collectives import NotBegun as NotBegun


class AnyFacts(Protocol):
    """The facts of a rank about a task, in numbers that a float64 holds exactly."""

    @property
    def settings(self) -> int:
        """A digest of the settings, which have to be the same on all ranks."""

    @property
    def state(self) -> int:
        """A digest of the state that ranks with the same stages share.

        The state is modes, which parameters require grad, and which layers were replaced; or
        names and shapes of their tensors.
        """

    @property
    def names(self) -> int:
        """A digest of the names of the tensors that ranks may share."""


class Facts(NamedTuple):
    """The facts of a rank about a task, without further ones."""

    settings: int = 0
    state: int = 0
    names: int = 0


def digest(*values: object) -> int:
    """Return a number that is the same for values with the same ``repr``.

    Addresses in them, such as addresses of functions, do not count.
    """
    return zlib.crc32(re.sub(' at 0x[0-9a-f]+', '', repr(values)).encode())


class LastDigest:
    """The digest of values that are mostly the same as the last time."""

    def __init__(self) -> None:
        self._last: tuple[object, ...] | None = None
        self._digest = 0

    def of(self, *values: object) -> int:
        """Return the digest of values that are equal only if their ``repr`` is the same."""
        if values != self._last:
            self._last = values
            self._digest = digest(*values)
        return self._digest


def check_settings(task: str, facts: Mapping[int, AnyFacts]) -> None:
    """Check that all ranks have the same settings.

    Raises:
        RuntimeError: They have different settings.
    """
    first = next(iter(facts))
    for rank in facts:
        if facts[rank].settings != facts[first].settings:
            raise RuntimeError(
                f'{task} has other settings on rank {rank} than on rank '
                f'{first}; all ranks call it with the same ones'
            )
