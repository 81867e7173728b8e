"""Timelines of actions with given times: numbers, text, a trace."""

import json

import pytest

from torchgpipe.schedule import Action, Timed
from torchgpipe.timeline import Copied, Timeline, compare


def timed(text, device, start, end):
    """Make an action that has a time."""
    return Timed(device, Action.parse(text), start, end)


def two(offset=0.0):
    """Return a step on two devices that starts at any time; in another order than by start."""
    actions = [
        timed('0B0', 0, 4.0, 6.0),
        timed('0F0', 0, 0.0, 1.0),
        timed('1F0', 1, 1.0, 2.0),
        timed('1B0', 1, 2.0, 4.0),
    ]
    return Timeline(
        [each._replace(start=each.start + offset, end=each.end + offset) for each in actions],
        ['a', 'b'],
    )


def test_numbers():
    for offset in [0.0, 7.0]:
        timeline = two(offset)
        assert (timeline.start, timeline.seconds) == (offset, 6.0)
        assert timeline.utilisations == (0.5, 0.5), offset
        assert timeline.utilisation == timeline.bubble == 0.5, offset
        assert [str(each.action) for each in timeline.actions] == ['0F0', '1F0', '1B0', '0B0']
        assert repr(timeline) == '<Timeline of 4 actions on 2 devices: 6 s, bubble 50.0 %>', offset


def test_time_counts_once_where_boxes_overlap():
    timeline = Timeline(
        [
            timed('0F0', 0, 0.0, 3.0),
            timed('0F1', 0, 1.0, 2.0),
            timed('0F2', 0, 2.5, 4.0),
            timed('1F0', 1, 3.0, 4.0),
        ]
    )
    assert timeline.utilisations == (1.0, 0.25)


def test_nothing_at_all():
    timeline = Timeline([])
    assert (timeline.seconds, timeline.devices, timeline.utilisation) == (0.0, (), 0.0)
    assert str(timeline) == '0 s, bubble 100.0 %'


def test_no_time_at_all():
    """In v0.8.0, a comparison divided by zero."""
    nothing, something = (Timeline([timed('0F0', 0, 1.0, end)]) for end in (1.0, 3.0))
    assert (nothing.seconds, nothing.utilisations, nothing.bubble) == (0.0, (0.0,), 1.0)
    assert str(nothing).endswith('0 s, bubble 100.0 %')
    for predicted in (nothing, something):
        assert str(compare(predicted, nothing)).endswith('predicted over measured: nan')
    assert compare(nothing, something).ratio == 0


def test_a_lane_without_a_name():
    assert Timeline([timed('0F0', 1, 0.0, 1.0)]).devices == ('device 0', 'device 1')
    with pytest.raises(ValueError, match=r"an action in lane 1, but only 1 devices .*\['a'\]"):
        Timeline([timed('0F0', 1, 0.0, 1.0)], ['a'])


def test_text():
    for offset in [0.0, 7.0]:
        assert two(offset).text(12).splitlines() == [
            'a F0      B0──  50 %',
            'b   F0B0──      50 %',
            '6 s, bubble 50.0 %',
        ]
        assert two(offset).text(12, seconds=12.0).splitlines()[:2] == [
            'a F   B0        50 %',
            'b  FB0          50 %',
        ]
        assert str(two(offset)) == two(offset).text(100)


def test_stages_are_named_where_a_lane_has_several():
    timeline = Timeline(
        [timed('0F0', 0, 0.0, 1.0), timed('1F0', 1, 1.0, 2.0), timed('2F0', 0, 2.0, 3.0)]
    )
    assert timeline.text(9).splitlines()[:2] == [
        'device 0 0F0   2F0  67 %',
        'device 1    1F0     33 %',
    ]


def test_a_trace(tmp_path):
    timeline = Timeline(two().actions, ['a', 'b'], [Copied(0, 1, 0, 1.0, 1.5)])
    timeline.to_chrome_trace(tmp_path / 'trace.json')
    events = json.loads((tmp_path / 'trace.json').read_text())['traceEvents']
    names = {event['tid']: event['args']['name'] for event in events if event['ph'] == 'M'}
    assert names == {0: 'a', 2: 'b', 3: 'b, copies'}
    boxes = [event for event in events if event['ph'] == 'X']
    assert len(events) == len(names) + len(boxes)
    assert [(box['name'], names[box['tid']], box['ts'], box['dur']) for box in boxes] == [
        ('forward 0', 'a', 0.0, 1e6),
        ('forward 0', 'b', 1e6, 1e6),
        ('backward 0', 'b', 2e6, 2e6),
        ('backward 0', 'a', 4e6, 2e6),
        ('copy 0', 'b, copies', 1e6, 0.5e6),
    ]
    assert [box['args'] for box in boxes][2:] == [
        {'micro-batch': 0, 'stage': 1},
        {'micro-batch': 0, 'stage': 0},
        {'micro-batch': 0, 'from': 'a'},
    ]
