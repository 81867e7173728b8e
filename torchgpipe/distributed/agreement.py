"""Facts: numbers that ranks exchange, so that all start the same task, or raise the same error.

:func:`torchgpipe.shard.collectives.agree` exchanges them.
"""

import re
import zlib
from collections.abc import Mapping
from typing import NamedTuple

from torchgpipe.shard.collectives import NotBegun as NotBegun


class Facts(NamedTuple):
    """The facts of a rank about a task, in numbers that a float64 holds exactly."""

    #: A digest of the settings, which have to be the same on all ranks.
    settings: int = 0
    #: A digest of the state that ranks with the same stages share: modes, which parameters require
    #: grad, and which layers were replaced; or names and shapes of their tensors.
    state: int = 0
    #: A digest of the names of the tensors that ranks may share.
    names: int = 0


def digest(*values: object) -> int:
    """Return a number that is the same for values with the same ``repr``.

    Addresses in them, such as addresses of functions, do not count.
    """
    return zlib.crc32(re.sub(' at 0x[0-9a-f]+', '', repr(values)).encode())


def check_settings(task: str, settings: Mapping[int, int]) -> None:
    """Check that all ranks have the same settings, given their digests.

    Raises:
        RuntimeError: They have different settings.
    """
    first = next(iter(settings))
    for rank, value in settings.items():
        if value != settings[first]:
            raise RuntimeError(
                f'{task} has other settings on rank {rank} than on rank '
                f'{first}; all ranks call it with the same ones'
            )
