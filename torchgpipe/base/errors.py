"""Errors and text: notes, messages that several files share, tables, sizes and durations."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any


def add_note(error: BaseException, note: str) -> None:
    """Add a line that a traceback shows below the error (PEP 678)."""
    # `add_note` came with Python 3.11. Before, only the attribute is set.
    notes = getattr(error, '__notes__', [])
    # The exception is more important than its note, if its attributes cannot be set.
    with suppress(Exception):
        error.__notes__ = [*notes, note]  # type: ignore[attr-defined]


def other_path(difference: str) -> RuntimeError:
    """Return the error for a recomputation that differs from the first pass."""
    return RuntimeError(
        'the recomputation of a checkpointed micro-batch took another path than its first pass: '
        f'{difference}. Gradients would be wrong. Let the layers do the same in both passes '
        "(torchgpipe.is_recomputing() tells them apart), or use checkpoint='never'."
    )


def changed_input(input: object) -> str:
    """Return the error message for a checkpointed call that changed its input in place.

    It is used if the layer is not known.
    """
    return (
        'the input of a checkpointed micro-batch, or a skip tensor that it popped, was '
        "changed in place; change a copy instead (inplace=False), or use checkpoint='never'"
    )


def nested() -> RuntimeError:
    """Return the error for a nested tensor that a checkpoint does not support."""
    return RuntimeError(
        'a checkpointed micro-batch cannot make a nested tensor again: PyTorch takes the ragged '
        'size of each new one for another size, and has no sizes for the layout torch.strided. '
        'Let a layer make it that is kept out of recomputation, torchgpipe.no_recompute(layer), '
        "with layout=torch.jagged; or use checkpoint='never' for the partitions that it is in."
    )


# Text: tables, sizes, and durations with three digits.


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[Any]],
) -> str:
    """Format rows in aligned columns: the first column to the left, the others to the right."""
    texts = [[*header]]
    for row in rows:
        texts.append([*map(str, row)])

    widths = []
    for column in range(len(header)):
        widths.append(max(len(row[column]) for row in texts))

    lines = []
    for row in texts:
        cells = [text.rjust(width) for text, width in zip(row, widths)]
        cells[0] = row[0].ljust(widths[0])
        # An empty last column would leave spaces at the end of the line.
        lines.append('  '.join(cells).rstrip())
    rule = '  '.join(['─' * width for width in widths])
    lines.insert(1, rule)
    return '\n'.join(lines)


def format_bytes(number: float) -> str:
    """Format a number of bytes with three digits.

    >>> format_bytes(512), format_bytes(1536), format_bytes(22 * 2 ** 30)
    ('512 B', '1.50 KiB', '22.0 GiB')
    """
    if number < 1024:
        return f'{number:.0f} B'
    for unit in ('KiB', 'MiB', 'GiB', 'TiB'):
        number /= 1024
        if number < 1000 or unit == 'TiB':
            break
    # Only a number of TiB can have more than three digits, because 1000 KiB are 0.98 MiB.
    decimals = max(0, 3 - len(str(int(number))))
    return f'{number:.{decimals}f} {unit}'


def duration(seconds: float) -> str:
    """Format a duration with three digits.

    >>> duration(0.01234), duration(2.5), duration(0.0000042), duration(0)
    ('12.3 ms', '2.5 s', '4.2 µs', '0 s')
    """
    if seconds >= 1 or seconds == 0:
        return f'{seconds:.3g} s'
    if seconds * 1e3 >= 1:
        return f'{seconds * 1e3:.3g} ms'
    return f'{seconds * 1e6:.3g} µs'
