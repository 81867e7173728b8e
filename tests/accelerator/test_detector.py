"""The race detector: it reports every race, every time, and nothing else."""

import pytest
import torch

from tests import accelerator
from tests.accelerator import on

pytestmark = pytest.mark.sim

SEEDS = range(20)


@pytest.fixture
def no_race():
    """Let these tests race."""


def reports(program):
    """Run a program, and return the reported races."""
    with accelerator.detection() as races:
        program()
        for device in range(torch.accelerator.device_count()):
            torch.accelerator.synchronize(device)
        return races()


def count(program):
    """Count the seeds of delays with which a program is reported."""
    number = 0
    for seed in SEEDS:
        accelerator.set_delays(seed, 300)
        number += bool(reports(program))
    return number


def two_streams(waits=True, records=True, devices=('sim:0', 'sim:0')):
    """Make a tensor on one stream, read it on another one, free it, and take its memory."""
    a, b = map(torch.Stream, devices)
    with on(a):
        x = torch.ones(100, device=devices[0])
    if waits:
        b.wait_stream(a)
    with on(b):
        y = x * 2
    if records:
        x.record_stream(b)
    del x
    with on(a):
        z = torch.zeros(100, device=devices[0])
    return y, z


def test_right():
    assert count(two_streams) == 0


def test_missing_wait():
    assert count(lambda: two_streams(waits=False)) == 20


def test_missing_record_stream():
    assert count(lambda: two_streams(records=False)) == 20


def test_report_names_the_access_and_its_line():
    (report,) = reports(lambda: two_streams(waits=False))
    assert 'aten::mul reads on sim:0 stream' in report
    assert 'aten::fill_ writes on sim:0 stream' in report
    assert report.count(f'{__file__}:') == 2 and report.count('in two_streams') == 2


def test_report_of_freed_memory():
    (report,) = reports(lambda: two_streams(records=False))
    assert 'the next owner of memory that was freed writes on sim:0 stream' in report
    assert 'aten::mul reads on sim:0 stream' in report


def chain(*waits):
    """Write on one stream; read on a third one that waits as it is told."""
    a, b, c = (torch.Stream('sim:0') for _ in range(3))
    with on(a):
        x = torch.ones(10, device='sim:0')
    for wait in waits:
        wait(a, b, c)
    with on(c):
        x + 1
    x.record_stream(c)


RIGHT = {
    'by a stream between': [lambda a, b, c: b.wait_stream(a), lambda a, b, c: c.wait_stream(b)],
    'by an event': [lambda a, b, c: c.wait_event(a.record_event())],
    'by the host and a stream': [lambda a, b, c: a.synchronize()],
    'by the host and an event': [lambda a, b, c: a.record_event().synchronize()],
    'by the host and a device': [lambda a, b, c: torch.accelerator.synchronize(0)],
}
WRONG = {
    'not at all': [],
    'the other way round': [lambda a, b, c: a.wait_stream(c)],
    'in the wrong order': [lambda a, b, c: c.wait_stream(b), lambda a, b, c: b.wait_stream(a)],
    'for an event that was too early': [lambda a, b, c: c.wait_event(torch.Event('sim'))],
    'for another stream': [lambda a, b, c: b.synchronize()],
}


def test_ordered():
    for waits in RIGHT.values():
        assert not reports(lambda: chain(*waits))


def test_not_ordered():
    for waits in WRONG.values():
        assert reports(lambda: chain(*waits))


def test_two_readers_are_right():
    def program():
        x = torch.ones(10, device='sim:0')
        for _ in range(2):
            stream = torch.Stream('sim:0')
            stream.wait_stream(torch.accelerator.current_stream(0))
            with on(stream):
                x + 1
            x.record_stream(stream)

    assert not reports(program)


@pytest.mark.parametrize('low', [4, 5])
def test_slices(low):
    def program():
        x = torch.ones(10, device='sim:0')
        stream = torch.Stream('sim:0')
        stream.wait_stream(torch.accelerator.current_stream(0))
        with on(stream):
            x[low:].mul_(2)
        x[:5].mul_(2)
        x.record_stream(stream)

    assert bool(reports(program)) == (low == 4)


def test_write_after_read():
    def program():
        x = torch.ones(10, device='sim:0')
        stream = torch.Stream('sim:0')
        stream.wait_stream(torch.accelerator.current_stream(0))
        with on(stream):
            y = x + 1
        x.mul_(2)
        x.record_stream(stream)
        return y

    assert reports(program)


def test_copy_between_devices_is_ordered():
    def program():
        x = torch.ones(10, device='sim:0')
        y = (x * 2).to('sim:1') + 1
        return y.to('sim:0') + x

    assert count(program) == 0


def test_autograd_is_ordered():
    def program():
        x = torch.ones(10, 10, device='sim:0', requires_grad=True)
        y = (x @ x).to('sim:1')
        (y.tanh() @ y).to('sim:0').sum().backward()
        return x.grad.cpu()

    assert count(program) == 0


def test_freed_with_pending_reader_of_its_own_stream():
    def program():
        for _ in range(5):
            x = torch.ones(10, device='sim:0')
            x + 1

    assert not reports(program)


def test_wait_after_it_was_freed_is_enough():
    def program():
        a, b = torch.Stream('sim:0'), torch.Stream('sim:0')
        with on(a):
            x = torch.ones(10, device='sim:0')
        b.wait_stream(a)
        with on(b):
            x + 1
        del x
        a.wait_stream(b)
        with on(a):
            torch.ones(10, device='sim:0')

    assert not reports(program)


def test_which_event_is_over_at_which():
    a, b = torch.Stream('sim:0'), torch.Stream('sim:1')
    with accelerator.detection():
        first, other = a.record_event(), b.record_event()
        b.wait_stream(a)
        second = b.record_event()
        assert accelerator.is_ordered(first, second) and accelerator.is_ordered(other, second)
        assert not accelerator.is_ordered(first, other)
        assert not accelerator.is_ordered(second, first)
        a.synchronize()
        assert accelerator.is_ordered(first, torch.Stream('sim:2').record_event())
        with pytest.raises(RuntimeError, match='not recorded'):
            accelerator.is_ordered(first, torch.Event('sim'))
    event = a.record_event()
    with pytest.raises(RuntimeError, match='detector was off'):
        accelerator.is_ordered(event, event)


def test_fixture_fails():
    with pytest.raises(AssertionError, match='race: aten::mul'), accelerator.no_race():
        two_streams(waits=False)
    with accelerator.no_race():
        two_streams()
