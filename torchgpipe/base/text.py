"""Text output: tables, sizes, and durations with three digits."""
from collections.abc import Sequence
from typing import Any

__all__ = ['duration', 'format_bytes', 'table']


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Format rows in aligned columns: the first column to the left, the others to the right."""
    cells: list[list[str]] = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[k]) for row in cells) for k in range(len(header))]
    lines = ['  '.join(cell.ljust(width) if k == 0 else cell.rjust(width)
                       for k, (cell, width) in enumerate(zip(row, widths))).rstrip()
             for row in cells]
    return '\n'.join([lines[0], '  '.join('─' * width for width in widths), *lines[1:]])


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
    return f'{number:.{max(0, 3 - len(str(int(number))))}f} {unit}'


def duration(seconds: float) -> str:
    """Format a duration with three digits.

    >>> duration(0.01234), duration(2.5), duration(0.0000042), duration(0)
    ('12.3 ms', '2.5 s', '4.2 µs', '0 s')
    """
    for factor, unit in ((1., 's'), (1e3, 'ms')):
        if seconds * factor >= 1 or not seconds:
            return f'{seconds * factor:.3g} {unit}'
    return f'{seconds * 1e6:.3g} µs'
