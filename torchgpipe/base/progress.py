"""A progress line for calls that take seconds or minutes."""
import sys
import threading
from collections.abc import Collection, Iterable
from typing import TypeVar

__all__ = ['progress']

T = TypeVar('T')


def progress(items: Collection[T], description: str) -> Iterable[T]:
    """Return the items, with a line on stderr that shows how many are done and the time left.

    There is no line without tqdm, in other threads than the main one, or if stderr is neither a
    terminal nor the output of a notebook.

    >>> [item for item in progress([1, 2], 'layers')]
    [1, 2]
    """
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    in_terminal = sys.stderr is not None and sys.stderr.isatty()
    in_notebook = 'ipykernel' in sys.modules
    # Workers that measure at the same time would each have a line.
    is_main = threading.current_thread() is threading.main_thread()
    if not (in_terminal or in_notebook) or not is_main:
        return items

    class Line(tqdm):  # type: ignore[misc]
        # No thread that runs while layers are measured.
        monitor_interval = 0

    line: Iterable[T] = Line(items, desc=description, leave=False)
    return line
