"""A progress line for calls that take seconds or minutes."""

import sys
import threading
from collections.abc import Collection, Iterable
from typing import Any, TypeVar

T = TypeVar('T')


def progress(
    items: Collection[T],
    description: str,
) -> Iterable[T]:
    """Return the items, with a line on stderr that shows how many are done and the time left.

    There is no line without tqdm, outside the main thread, or if stderr is neither a terminal nor
    the output of a notebook.

    >>> [item for item in progress([1, 2], 'layers')]
    [1, 2]
    """
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    # Workers that measure at the same time would each have a line.
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not _shows_lines(sys.stderr):
        return items

    class WithoutMonitor(tqdm):  # type: ignore[misc]
        # The thread of tqdm's monitor would disturb the measurement of layers.
        monitor_interval = 0

    return WithoutMonitor(
        items,
        desc=description,
        leave=False,
    )


def _shows_lines(stream: Any) -> bool:
    """Return whether a stream is a terminal, or the output of a notebook."""
    if type(stream).__module__.partition('.')[0] == 'ipykernel':
        return True
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # no stream, a logger in its place, or a closed stream
        return False
