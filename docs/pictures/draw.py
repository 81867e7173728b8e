"""Draw the pictures of the documentation: ``python docs/pictures/draw.py [FOLDER]``.

Steps come from schedules that are simulated, times from ``timeline.json``. One file serves
light and dark pages: nothing has a background, words are grey, and colours lie halfway.
"""

import json
import sys
from html import escape
from pathlib import Path

from torchgpipe.plan import Costs, StageCosts, simulate
from torchgpipe.schedule import make
from torchgpipe.schedule.generators import V_SHAPED

HERE = Path(__file__).parent
COLOURS = {'F': '#3b78c4', 'R': '#7a6bb5', 'B': '#c2612c', 'I': '#c2612c', 'W': '#3f8f6b'}
WORDS = '#747981'
LINE = '#74798166'
FONT = "font-family='system-ui, sans-serif'"


class Picture:
    """Shapes, and how far they reach."""

    def __init__(self, title):
        self.title = title
        self.shapes = []
        self.width = self.height = 0

    def _grow(self, x, y):
        self.width, self.height = max(self.width, x), max(self.height, y)

    def box(self, x, y, width, height, colour, label=''):
        """Draw a filled box with a white label."""
        self._grow(x + width, y + height)
        self.shapes.append(
            f"<rect x='{x:.1f}' y='{y:.1f}' width='{width - 1:.1f}' "
            f"height='{height - 1:.1f}' rx='2' fill='{colour}'/>"
        )
        if label:
            self.words(x + (width - 1) / 2, y + height / 2 + 3.5, label, 'middle', '#fff', 10.5)

    def words(self, x, y, text, anchor='start', colour=WORDS, size=11.5):
        """Write a line."""
        self._grow(x, y + 4)
        self.shapes.append(
            f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' fill='{colour}' "
            f"text-anchor='{anchor}'>{escape(text)}</text>"
        )

    def path(self, points, colour=LINE, width=1, arrow=False):
        """Draw a line through points, with an arrow at its end if wanted."""
        for x, y in points:
            self._grow(x, y)
        d = 'M' + ' L'.join(f'{x:.1f} {y:.1f}' for x, y in points)
        end = " marker-end='url(#arrow)'" if arrow else ''
        self.shapes.append(
            f"<path d='{d}' fill='none' stroke='{colour}' stroke-width='{width}'{end}/>"
        )

    def svg(self):
        """Return the file."""
        width, height = self.width + 4, self.height + 4
        arrow = (
            f"<defs><marker id='arrow' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='6' "
            f"markerHeight='6' orient='auto'><path d='M0 0 L8 4 L0 8 z' fill='{WORDS}'/>"
            '</marker></defs>'
        )
        return (
            "<svg xmlns='http://www.w3.org/2000/svg' "
            f"viewBox='0 0 {width:.0f} {height:.0f}' "
            f"width='{width * 1.6:.0f}' role='img' {FONT}>"
            f'<title>{escape(self.title)}</title>\n'
            f'{arrow}\n' + '\n'.join(self.shapes) + '\n</svg>\n'
        )


def plain_call(m, n, forward=1, backward=2):
    """Return the plain call of equally fast partitions, simulated."""
    return simulate(make('gpipe', n, m), Costs([StageCosts(forward, backward)] * n))


def step(picture, top, m, n, unit, forward=1, backward=2, left=50, label='{}{}'):
    """Draw a training step; return the place of its end."""
    simulated = plain_call(m, n, forward, backward)
    for j, (_, kind, i), start, end in simulated.actions:
        picture.box(
            left + unit * start,
            top + 24 * j,
            unit * (end - start),
            24,
            COLOURS[kind],
            label.format(kind, i),
        )
    for j in range(n):
        picture.words(0, top + 24 * j + 16, f'cuda:{j}')
    return left + unit * simulated.seconds


def pipeline():
    """Draw GPipe's schedule: four micro-batches, four partitions."""
    picture = Picture('Forward and backward of four micro-batches on four devices')
    end = step(picture, 0, m=4, n=4, unit=17)
    _time(picture, end, 108)
    return picture


def _time(picture, end, y):
    picture.path([(50, y), (end, y)], WORDS, arrow=True)
    picture.words(end, y + 14, 'time', 'end')


def bubble():
    """Draw the same work as one micro-batch and as four."""
    picture = Picture('The same mini-batch as one micro-batch, and as four')
    picture.words(0, 10, 'chunks=1: one device works at a time')
    end = step(picture, 18, m=1, n=3, unit=10, forward=4, backward=8)
    picture.words(0, 116, 'chunks=4: the same work, half the time')
    step(picture, 124, m=4, n=3, unit=10, label='{1}')
    _time(picture, end, 204)
    return picture


def fraction():
    """Draw the part of the devices' time that is bubble."""
    picture = Picture('Bubble by number of micro-batches, for 2, 4 and 8 partitions')
    left, top, width, height, largest = 40, 8, 320, 160, 32

    def at(m, part):
        return left + (m - 1) / (largest - 1) * width, top + height * (1 - part)

    for part in (0, 0.25, 0.5, 0.75, 1):
        picture.path([at(1, part), at(largest, part)])
        picture.words(left - 5, at(1, part)[1] + 4, f'{part:.0%}', 'end')
    for m in (1, 4, 8, 16, 32):
        picture.words(at(m, 0)[0], top + height + 16, str(m), 'middle')
    picture.words(left + width / 2, top + height + 32, 'micro-batches', 'middle')
    for n, colour, y in ((8, 'B', 4), (4, 'R', 2), (2, 'F', 6)):
        points = [at(m, plain_call(m, n).bubble) for m in range(1, largest + 1)]
        picture.path(points, COLOURS[colour], 2)
        picture.words(points[-1][0] + 5, points[-1][1] + y, f'n = {n}', colour=COLOURS[colour])
    picture.width += 34
    return picture


def checkpointing():
    """Draw the last partition's step in the three modes, with the activations that it holds."""
    picture = Picture('What each checkpoint mode computes and holds')
    m, unit, left = 4, 17, 4
    for row, (mode, stop) in enumerate((('never', 0), ('except_last', m - 1), ('always', m))):
        top = row * 70
        picture.words(left, top + 11, f"checkpoint='{mode}'")
        x, held = left, 0
        for kind, i, length in _partition_step(m, stop):
            kept = kind == 'F' and i >= stop
            picture.box(x, top + 18, unit * length, 22, COLOURS[kind], f'{kind}{i}')
            for level in range(held + (kind != 'B')):
                picture.path(
                    [(x, top + 46 + 5 * level), (x + unit * length, top + 46 + 5 * level)],
                    WORDS,
                    4,
                )
            held += {'F': kept, 'R': 1, 'B': -1}[kind]
            x += unit * length
    return picture


def _partition_step(m, stop):
    for i in range(m):
        yield 'F', i, 1
    for i in reversed(range(m)):
        if i < stop:
            yield 'R', i, 1
        yield 'B', i, 2


def timeline():
    """Draw the step that was measured."""
    data = json.loads((HERE / 'timeline.json').read_text())
    n = len(data['gpus'])
    picture = Picture(f'A training step, measured on {n} simulated accelerators')
    left, scale = 40, 340 / max(cell[4] for cell in data['cells'])
    for kind, i, j, start, end in data['cells']:
        width = (end - start) * scale + 1
        picture.box(
            left + start * scale, 26 * j, width, 26, COLOURS[kind], str(i) if width > 8 else ''
        )
    for j in range(n):
        picture.words(0, 26 * j + 17, f'sim:{j}')
    low = 26 * n
    for ms in range(0, 801, 200):
        if ms * scale < 345:
            x = left + ms * scale
            picture.path([(x, low + 2), (x, low + 7)], WORDS)
            picture.words(x, low + 19, f'{ms} ms', 'middle')
    for k, (kind, name) in enumerate((('F', 'forward'), ('R', 'recompute'), ('B', 'backward'))):
        picture.box(left + 110 * k, low + 32, 12, 12, COLOURS[kind])
        picture.words(left + 110 * k + 18, low + 42, name)
    share = f'{data["utilisation"]:.0%}'
    picture.words(left, low + 62, f'{n} simulated accelerators at work for {share} of the time')
    return picture


def schedules():
    """Draw schedules as they are simulated: backward takes as long as two forwards."""
    picture = Picture('The schedules of eight micro-batches on four devices')
    devices, m, unit, left, height = 4, 8, 9, 50, 18
    for row, name in enumerate(
        ('gpipe', '1f1b', 'interleaved', 'zb-h1', 'zb-h2', 'zb-v', 'v-half', 'v-min')
    ):
        v = 2 if name in ('interleaved', *V_SHAPED) else 1
        stage = StageCosts(forward=1 / v, backward=2 / v, activation_bytes=1 / v)
        step = simulate(make(name, devices, m), Costs([stage] * (devices * v)))
        top = row * (devices * height + 36)
        picture.words(
            0,
            top + 11,
            f'{name}: bubble {step.bubble:.0%}, {max(step.peak_bytes):g} micro-batches alive',
        )
        for device, (_, kind, i), start, end in step.actions:
            picture.box(
                left + start * unit,
                top + 18 + device * height,
                (end - start) * unit,
                height,
                COLOURS[kind],
                str(i) if v == 1 else '',
            )
        for device in range(devices):
            picture.words(0, top + 31 + device * height, f'cuda:{device}')
    return picture


def skip():
    """Draw a skip from the first partition to the last."""
    picture = Picture('A skip goes from its source straight to its destination')
    for j in range(4):
        picture.box(4 + 100 * j, 46, 70, 34, COLOURS['F'], f'partition {j}')
        if j:
            picture.path([(4 + 100 * j - 31, 63), (4 + 100 * j - 3, 63)], WORDS, 1.5, arrow=True)
    picture.path([(39, 45), (39, 22), (339, 22), (339, 43)], COLOURS['B'], 1.5, arrow=True)
    picture.words(189, 15, 'skip tensor, copied once', 'middle', COLOURS['B'])
    return picture


def memory():
    """Draw the memory of the first of four devices over a step, with and without checkpoints."""
    picture = Picture('Activations on the first of four devices, with and without checkpoints')
    m, n, left, top, width, height = 8, 4, 40, 8, 380, 150
    schedule = make('gpipe', n, m)
    never = StageCosts(1.0, 2.0, activation_bytes=8)
    always = StageCosts(1.0, 2.0, activation_bytes=8, output_bytes=1, recomputed=m)
    steps = {
        'never': simulate(schedule, Costs([never] * n)),
        'always': simulate(schedule.recomputing([m] * n), Costs([always] * n)),
    }
    span = max(step.seconds for step in steps.values())
    most = max(step.peak_bytes[0] for step in steps.values())

    for part in (0, 0.5, 1):
        y = top + height * (1 - part)
        picture.path([(left, y), (left + width, y)])
        picture.words(left - 5, y + 4, f'{part:.0%}', 'end')
    for k, (mode, colour) in enumerate((('never', 'F'), ('always', 'B'))):
        points, last = [], 0.0
        for second, bytes in (*steps[mode].bytes[0], (steps[mode].seconds, 0.0)):
            x = left + width * second / span
            points += [
                (x, top + height * (1 - last / most)),
                (x, top + height * (1 - bytes / most)),
            ]
            last = bytes
        picture.path(points, COLOURS[colour], 2)
        picture.box(left + 150 * k, top + height + 24, 12, 12, COLOURS[colour])
        picture.words(left + 150 * k + 18, top + height + 34, f"checkpoint='{mode}'")
    picture.words(left + width, top + height + 16, 'time', 'end')
    return picture


def mesh():
    """Draw the eight ranks of a mesh of data 2 × pipe 2 × tensor 2 on two hosts."""
    picture = Picture('A mesh of two replicas, two stages and two parts of each layer')
    picture.width = 400
    left, right, size, height = 4, 234, 160, 30
    for data in range(2):
        top = 24 + 132 * data
        picture.words(left, top - 8, f'host {data}: replica {data}')
        for tensor in range(2):
            y = top + 44 * tensor
            for pipe, x in enumerate((left, right)):
                rank = 4 * data + 2 * pipe + tensor
                picture.box(
                    x,
                    y,
                    size,
                    height,
                    COLOURS['FR'[pipe]],
                    f'rank {rank}: stage {pipe}, part {tensor}',
                )
            picture.path(
                [(left + size + 2, y + 15), (right - 3, y + 15)], COLOURS['B'], 1.5, arrow=True
            )
        for x in (left, right):
            picture.path([(x + 80, top + height), (x + 80, top + 44)], COLOURS['W'], 3)
    for x in (left, right):
        picture.path([(x + 125, 24 + 44 + height), (x + 125, 24 + 132)], WORDS, 1.5)
    for k, (colour, text) in enumerate(
        (
            (COLOURS['W'], 'tensor: activations within each layer, on the fastest links'),
            (COLOURS['B'], 'pipe: activations of each micro-batch, and their gradients'),
            (WORDS, 'data: gradients once per step, on the slowest links'),
        )
    ):
        y = 250 + 18 * k
        picture.path([(left, y), (left + 20, y)], colour, 3 if k == 0 else 1.5)
        picture.words(left + 28, y + 4, text)
    return picture


PICTURES = (pipeline, bubble, fraction, checkpointing, timeline, schedules, skip, memory, mesh)


def draw(folder):
    """Write all pictures into a folder."""
    for picture in PICTURES:
        (folder / f'{picture.__name__}.svg').write_text(picture().svg())


if __name__ == '__main__':
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
