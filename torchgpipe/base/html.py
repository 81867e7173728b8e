"""HTML by which objects show themselves in notebooks: text, figures, and rows of boxes."""

import base64
import io
import re
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The colour of text and lines: readable on white and on black, because SVG has no background.
NEUTRAL = '#808080'

#: Sizes in pixels.
PICTURE_WIDTH = 1000
ROW_HEIGHT = 30
BOX_HEIGHT = 24
CHARACTER_WIDTH = 7.5

#: The most characters of a name.
LONGEST = 40

#: Boxes that are narrower than so many pixels have no gap, label or title. Where several of them
#: fall on the same pixels, the first is drawn, so that a picture of many boxes stays small.
NARROW = 2

#: Characters that XML does not allow.
_CONTROLS = re.compile('[\x00-\x08\x0b\x0c\x0e-\x1f]')


class Box(NamedTuple):
    """A coloured box in a row of a picture.

    Attributes:
        label: The text in the box. It is left out where it does not fit.
        share_of_height: The part of the usual height that it takes, from 0 to 1.
    """

    row: int
    #: The start and the end, in one unit.
    start: float
    end: float
    label: str
    #: The text while the pointer is on the box.
    title: str
    #: As in CSS.
    colour: str
    share_of_height: float = 1.0


def text_as_html(text: str) -> str:
    """Return text that keeps its columns.

    >>> text_as_html('a < b')
    '<pre>a &lt; b</pre>'
    """
    return f'<pre>{escape(text)}</pre>'


def figure_as_html(draw: Callable[[], 'Figure']) -> str:
    """Return a figure of matplotlib as an image, or an empty text without matplotlib."""
    try:
        figure = draw()
    except ImportError:
        return ''
    file = io.BytesIO()
    figure.savefig(file, format='png', dpi=100)
    data = base64.b64encode(file.getvalue()).decode()
    return f'<img style="max-width: 100%" src="data:image/png;base64,{data}">'


def rows_as_html(
    names: Sequence[str],
    boxes: Iterable[Box],
    caption: str,
) -> str:
    """Return a picture with a row of boxes for each name, and a caption below.

    Args:
        boxes: The boxes. The earliest start is at the left edge, the latest end at the right one.
    """
    boxes = [*boxes]
    start = min((box.start for box in boxes), default=0.0)
    span = max((box.end for box in boxes), default=0.0) - start
    longest = max(map(len, names), default=0)
    names_width = CHARACTER_WIDTH * (1 + min(longest, LONGEST))
    scale = (PICTURE_WIDTH - names_width) / (span or 1.0)
    picture_height = ROW_HEIGHT * (len(names) + 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {PICTURE_WIDTH} '
        f'{picture_height}" style="display: block; max-width: {PICTURE_WIDTH}px" '
        'font-family="monospace" font-size="12">'
    ]
    for row, name in enumerate(names):
        if len(name) > LONGEST:
            name = f'{name[: LONGEST - 1]}…'
        baseline = ROW_HEIGHT * (row + 0.6)
        parts.append(_text(0, baseline, name, NEUTRAL))

    drawn: set[tuple[int, float, int]] = set()
    for box in boxes:
        left = names_width + (box.start - start) * scale
        width = (box.end - box.start) * scale
        height = BOX_HEIGHT * box.share_of_height
        # Boxes of less height have the same bottom.
        top = ROW_HEIGHT * box.row + BOX_HEIGHT - height
        rest = f'y="{top:.1f}" height="{height:.1f}" fill="{box.colour}"/>'

        if width < NARROW:
            column = int(left / NARROW)
            place = box.row, box.share_of_height, column
            if place not in drawn:
                parts.append(f'<rect x="{column * NARROW}" width="{NARROW}" {rest}')
                drawn.add(place)
            continue

        # Half a pixel separates neighbours.
        parts.append(
            f'<g><title>{_escaped(box.title)}</title>'
            f'<rect x="{left:.2f}" width="{width - 0.5:.2f}" {rest}'
        )
        if CHARACTER_WIDTH * len(box.label) < width:
            middle = left + width / 2
            parts.append(_text(middle, top + 0.67 * height, box.label, 'white', 'middle'))
        parts.append('</g>')

    parts.append(_text(names_width, ROW_HEIGHT * (len(names) + 0.5), caption, NEUTRAL))
    parts.append('</svg>')
    return ''.join(parts)


def _text(
    x: float,
    y: float,
    text: str,
    colour: str,
    anchor: str = 'start',
) -> str:
    return (
        f'<text x="{x:.2f}" y="{y:.2f}" fill="{colour}" text-anchor="{anchor}">'
        f'{_escaped(text)}</text>'
    )


def _escaped(text: str) -> str:
    return escape(_CONTROLS.sub('�', text))
