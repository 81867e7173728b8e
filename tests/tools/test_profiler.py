"""torch.profiler: the trace has the work of workers."""

import json

import torch
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile

from tests.tools.models import samples, wrapped
from tests.tools.rows import works


def matmuls(events):
    """Return the thread of each matrix product of a linear layer in forward."""
    return [event.thread for event in events if event.name == 'aten::addmm']


@works(
    '`torch.profiler`',
    'the work of all threads is in `events()` and in the exported trace, '
    'with `profile_all_threads=True`',
)
def test_workers_are_in_the_trace(tmp_path):
    model, (inputs, _) = wrapped(), samples()
    for _ in range(2):  # Workers begin within the first one, and are there before the second.
        with profile(
            activities=[ProfilerActivity.CPU],
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        ) as trace:
            model(inputs).sum().backward()
        threads = matmuls(trace.events())
        assert len(set(threads)) == 2  # partition 0's and the caller's
    # Three layers and three micro-batches, the first two of which are run again by the caller.
    assert len(threads) == 3 * 3 + 3 * 2
    trace.export_chrome_trace(str(tmp_path / 'trace.json'))
    events = json.loads((tmp_path / 'trace.json').read_text())['traceEvents']
    assert sum(event.get('name') == 'aten::addmm' for event in events) == len(threads)


def test_the_default_leaves_them_out():
    """If this fails one day, the page no longer needs the experimental option."""
    model, (inputs, _) = wrapped().eval(), samples()
    with torch.no_grad():
        model(inputs)  # A worker that begins within a trace is in it.
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            model(inputs)
    threads = matmuls(trace.events())
    assert len(set(threads)) == 1 and len(threads) == 2 * 3  # Partition 1 is the caller's work.
