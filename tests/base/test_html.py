"""Objects in notebooks: well-formed HTML, with pictures."""

import sys
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from torchgpipe.base.html import Box, figure_as_html, rows_as_html, text_as_html
from torchgpipe.distributed import dry_run
from torchgpipe.plan import Transformer, plan
from torchgpipe.schedule import Action, Timed, make
from torchgpipe.timeline import Copied, Timeline, compare

SVG = '{http://www.w3.org/2000/svg}'


def boxes(html):
    """Return the boxes of a picture: title, left edge and right edge in pixels."""
    root = ElementTree.fromstring(html[html.index('<svg') :])
    found = []
    for group in root.iter(f'{SVG}g'):
        rect = group.find(f'{SVG}rect')
        left, width = float(rect.get('x')), float(rect.get('width'))
        found.append((group.find(f'{SVG}title').text, left, left + width))
    return found


def texts(html):
    return [text.text for text in ElementTree.fromstring(html).iter(f'{SVG}text')]


def test_text_keeps_its_columns_and_is_escaped():
    assert text_as_html('<a> & b') == '<pre>&lt;a&gt; &amp; b</pre>'


def test_boxes_cover_the_width_in_proportion_to_their_times():
    html = rows_as_html(
        ['a', 'b'],
        [Box(0, 2.0, 3.0, 'x', 'first', 'red'), Box(1, 3.0, 6.0, 'y', 'second', 'blue')],
        'below',
    )
    (first, left, middle), (second, start, right) = boxes(html)
    assert (first, second) == ('first', 'second')
    # Half a pixel separates boxes.
    assert middle == pytest.approx(start - 0.5, abs=0.02) and right == pytest.approx(
        999.5, abs=0.02
    )
    assert right - start == pytest.approx(3 * (middle - left), abs=2)
    assert texts(html) == ['a', 'b', 'x', 'y', 'below']


def test_a_label_that_does_not_fit_is_left_out():
    html = rows_as_html(
        ['a'], [Box(0, 0.0, 1.0, 'long label', '', 'red'), Box(0, 1.0, 1000.0, 'z', '', 'red')], ''
    )
    assert 'long label' not in texts(html) and 'z' in texts(html)


def test_boxes_that_are_narrower_than_a_pixel_are_drawn_once_for_each_place():
    many = [Box(0, i, i + 1.0, '', '', 'red') for i in range(100_000)]
    html = rows_as_html(['a'], many, '')
    rects = [*ElementTree.fromstring(html).iter(f'{SVG}rect')]
    assert len(html) < 100_000 and 450 < len(rects) <= 501
    assert {rect.get('width') for rect in rects} == {'2'}
    # An action that takes no time is seen beside one that does.
    html = rows_as_html(
        ['a'], [Box(0, 0.0, 0.0, '', '', 'red'), Box(0, 0.0, 9.0, '', '', 'blue')], ''
    )
    assert 'fill="red"' in html and 'fill="blue"' in html


def test_long_names_and_control_characters():
    html = rows_as_html(['x' * 200, 'a\x00b'], [Box(0, 0.0, 1.0, '', 'c\x1bd', 'red')], '')
    assert texts(html)[:2] == ['x' * 39 + '…', 'a�b']
    ((title, left, right),) = boxes(html)
    assert title == 'c�d' and right - left > 500


def test_names_and_titles_are_escaped():
    html = rows_as_html(['<a>'], [Box(0, 0.0, 1.0, '<b>', '<c>', 'red')], '<d>')
    assert boxes(html)[0][0] == '<c>' and texts(html) == ['<a>', '<b>', '<d>']


def test_an_empty_picture():
    assert texts(rows_as_html([], [], 'nothing')) == ['nothing']
    assert texts(Timeline([])._repr_html_()) == ['0 s, bubble 100.0 %']


def test_a_schedule_shows_each_action_once():
    for name in ['1f1b', 'interleaved', 'zb-v']:
        schedule = make(name, 2, 3)
        html = schedule._repr_html_()
        actions = sum(map(len, schedule.rows))
        assert len(boxes(html)) == len({title for title, *_ in boxes(html)}) == actions, name
        assert (
            'forward, stage 0, micro-batch 2' in html and '2 devices, 3 micro-batches' in html
        ), name


TIMELINE = Timeline(
    [Timed(0, Action(0, 'F', 0), 5.0, 6.0), Timed(1, Action(1, 'F', 0), 7.0, 9.0)],
    ['cpu:0', 'cpu:1'],
    [Copied(0, 1, 0, 6.0, 7.0)],
)


def test_a_timeline_shows_actions_and_copies():
    html = TIMELINE._repr_html_()
    assert [title for title, *_ in boxes(html)] == [
        'forward, stage 0, micro-batch 0, 1 s',
        'forward, stage 1, micro-batch 0, 2 s',
        'copy of micro-batch 0 from cpu:0, 1 s',
    ]
    assert {'cpu:0 25 %', 'cpu:1 50 %', '4 s, bubble 62.5 %'} <= {*texts(html)}


def test_a_comparison_has_one_axis_of_time():
    other = Timeline([Timed(0, Action(0, 'F', 0), 1.0, 3.0)])
    html = compare(other, TIMELINE)._repr_html_()
    (_, zero, half), (_, start, quarter), *_, (_, _, end) = boxes(html)[:3]
    assert zero == start and end == pytest.approx(999.5, abs=0.02)
    assert half - zero == pytest.approx(2 * (quarter - zero), abs=2)
    assert texts(html)[0] == 'predicted device 0 100 %' and 'measured cpu:0 25 %' in texts(html)


def test_a_plan_shows_its_table_and_its_step():
    for schedules in [['1f1b'], ['plain call'], ['interleaved']]:
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        found = plan(
            model,
            torch.rand(8, 4),
            devices=['cpu:0', 'cpu:1'],
            chunks=[2],
            schedules=schedules,
            timeout=0.01,
        )
        html = found._repr_html_()
        assert html.startswith(text_as_html(str(found))), schedules
        assert len(boxes(html)) == len(found.simulation.actions) > 0, schedules
        assert 'predicted step: ' in html, schedules


@pytest.fixture
def no_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)


def of_a_mesh():
    return plan(Transformer(4, 64, 4, 100, 16), mesh=2, machine='H100', batch=8)


def of_a_dry_run():
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return dry_run(
        layers,
        [1, 1],
        torch.rand(4, 4),
        torch.rand(4, 4),
        nn.functional.mse_loss,
        mesh={'pipe': 2},
        chunks=2,
    )


def test_a_report_with_its_figure():
    for make_one in [of_a_mesh, of_a_dry_run]:
        found = make_one()
        assert found._repr_html_().startswith(text_as_html(str(found)) + '<img '), make_one


@pytest.mark.parametrize('make_one', [of_a_mesh, of_a_dry_run])
def test_a_report_without_matplotlib(make_one, no_matplotlib):
    found = make_one()
    assert found._repr_html_() == text_as_html(str(found))
    assert figure_as_html(found.draw) == ''
