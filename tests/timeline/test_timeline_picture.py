"""Pictures of timelines: every box and every number is there."""

import re
import sys

import pytest

from tests.timeline.test_timeline import timed, two
from torchgpipe.plan import Costs, StageCosts, simulate
from torchgpipe.schedule import make
from torchgpipe.timeline import Copied, Timeline, compare
from torchgpipe.timeline.timeline import LEGEND


def words(path):
    """Return the texts in an SVG, in their order."""
    return re.findall(r'<text[^>]*>([^<]*)</text>', path.read_text())


def test_an_svg_has_its_text_as_text(tmp_path):
    two(offset=7.0).save(tmp_path / 'a.svg', title='Two devices')
    found = words(tmp_path / 'a.svg')
    assert {
        'F0',
        'B0',
        'a',
        'b',
        '50 %',
        's',
        'Two devices',
        '6 s, bubble 50.0 %',
        'forward',
        'backward',
    } <= {*found}
    assert found.count('F0') == found.count('B0') == 2
    assert 'recomputation' not in found and 'copy' not in found


def test_a_picture_is_the_same_each_time(tmp_path):
    for name in 'ab':
        two().save(tmp_path / f'{name}.svg')
    assert (tmp_path / 'a.svg').read_text() == (tmp_path / 'b.svg').read_text()


def test_a_png(tmp_path):
    two().save(tmp_path / 'a.png')
    assert (tmp_path / 'a.png').read_bytes().startswith(b'\x89PNG')


def boxes(figure):
    """Return lane, left edge, width and colour of all boxes of each plot."""
    from matplotlib.colors import to_hex

    return [
        sorted(
            (
                round(path.get_extents().y0 + path.get_extents().y1) // 2,
                path.get_extents().x0,
                path.get_extents().width,
                to_hex(collection.get_facecolor()[0]),
            )
            for collection in axes.collections
            for path in collection.get_paths()
        )
        for axes in figure.axes
    ]


def test_boxes():
    for offset in [0.0, 7.0]:
        forward, backward = LEGEND['F'][1], LEGEND['B'][1]
        figure = two(offset).draw()
        assert boxes(figure) == [
            [
                (0, 0.0, 1.0, forward),
                (0, 4.0, 2.0, backward),
                (1, 1.0, 1.0, forward),
                (1, 2.0, 2.0, backward),
            ]
        ], offset
        assert figure.axes[0].get_xlim() == (0.0, 6.0), offset


def test_all_kinds():
    actions = [timed(f'0{kind}0', 0, k, k + 1) for k, kind in enumerate('FRBIW')]
    figure = Timeline(actions, ['a', 'b'], [Copied(0, 1, 0, 0.0, 1.0)]).draw()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        name for name, _ in LEGEND.values()
    ]
    assert len(boxes(figure)[0]) == 6


@pytest.mark.parametrize(
    'seconds, unit, tick', [(6.0, 's', '2'), (6e-3, 'ms', '2'), (6e-6, 'µs', '2')]
)
def test_units(seconds, unit, tick, tmp_path):
    Timeline([timed('0F0', 0, 0.0, seconds)]).save(tmp_path / 'a.svg')
    assert {unit, tick} <= {*words(tmp_path / 'a.svg')}


def test_narrow_boxes_have_no_label(tmp_path):
    Timeline([timed('0F0', 0, 0.0, 0.01), timed('0F1', 0, 0.01, 1.0)]).save(tmp_path / 'a.svg')
    assert 'F1' in words(tmp_path / 'a.svg') and 'F0' not in words(tmp_path / 'a.svg')


def test_an_empty_timeline_is_drawn():
    assert boxes(Timeline([]).draw()) == [[]]


def test_a_comparison(tmp_path):
    simulation = simulate(make('1f1b', 2, 1), Costs([StageCosts(1.0, 2.0)] * 2))
    measured = Timeline(
        [each._replace(end=each.end + 1) for each in simulation.actions], ['cpu:0', 'cpu:1']
    )
    comparison = compare(simulation, measured)
    figure = comparison.draw()
    assert [axes.get_xlim() for axes in figure.axes] == [(0.0, 7.0)] * 2
    comparison.save(tmp_path / 'a.svg', title='1F1B')
    assert {
        'predicted: 6 s, bubble 50.0 %',
        'measured: 7 s, bubble 35.7 %',
        '1F1B',
        'device 0',
        'cpu:0',
    } <= {*words(tmp_path / 'a.svg')}
    assert comparison.ratio == 6 / 7
    lines = str(comparison).splitlines()
    assert lines[0] == 'predicted' and lines[4] == 'measured'
    assert lines[-1] == 'predicted over measured: 0.86'
    assert lines[3] == '6 s, bubble 50.0 %' and lines[7] == '7 s, bubble 35.7 %'
    ends = [line.rindex('─') - line.index('F') for line in (lines[1], lines[5])]
    assert ends == [85, 99]  # of 100 characters, 6/7 for the shorter one


def test_a_comparison_with_nothing():
    for pair, what in (((Timeline([]), two()), 'predicted'), ((two(), Timeline([])), 'measured')):
        with pytest.raises(ValueError, match=f'nothing is {what}'):
            compare(*pair)


@pytest.mark.parametrize(
    'function',
    [
        lambda path: two().save(path),
        lambda path: two().draw(),
        lambda path: compare(two(), two()).save(path),
    ],
)
def test_without_matplotlib(function, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)
    with pytest.raises(ImportError, match="with its extra 'pictures'"):
        function(tmp_path / 'a.svg')
    assert str(two())
