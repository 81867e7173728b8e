"""Timelines as text: a lane in a row of characters, and durations in words."""
from collections.abc import Iterable

__all__ = ['duration', 'row']


def row(boxes: Iterable[tuple[str, float, float]], width: int) -> str:
    """Draw the boxes of a lane, each with its label as far as that fits.

    >>> row([('F0', 0, 3.1), ('F1', 3.1, 5.9), ('F10', 6.9, 9.2), ('B1', 9.2, 10)], 10)
    'F0─F1─ F─B'

    Args:
        boxes: Labels with start and end, in characters.
        width: How many there are.
    """
    line = [' '] * width
    for label, start, end in boxes:
        low, high = round(start), min(width, round(end))
        # A label that is cut would be that of another micro-batch.
        short = label if len(label) <= high - low else label.lstrip('0123456789')[:1]
        line[low:high] = short.ljust(high - low, '─')[:max(0, high - low)]
    return ''.join(line)


def duration(seconds: float) -> str:
    """Write a duration with three digits.

    >>> duration(0.01234), duration(2.5), duration(0.0000042), duration(0)
    ('12.3 ms', '2.5 s', '4.2 µs', '0 s')
    """
    for factor, unit in ((1., 's'), (1e3, 'ms')):
        if seconds * factor >= 1 or not seconds:
            return f'{seconds * factor:.3g} {unit}'
    return f'{seconds * 1e6:.3g} µs'
