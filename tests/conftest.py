"""Fixtures of every test: a seed, one intra-op thread, and a check that it leaves no thread.

A clock is available on request.
"""

import gc
import multiprocessing
import os
import signal
import warnings
import zlib

import pytest
import torch
import torch._dynamo

from tests import accelerator
from tests.clock import Clock
from tests.devices import ACCELERATOR
from tests.helpers import threads
from tests.shard.processes import IMPORTED
from torchgpipe.plan import profile

# Modules imported by now stay. Tests often collect garbage, which need not look at them.
gc.freeze()

#: A kernel of the simulated accelerator begins later by up to so much.
MOST_MICROSECONDS = int(os.environ.get('TORCHGPIPE_SIM_MOST', 100))

#: Marks of tests that run with ``--whole`` only.
LEFT_OUT = {'slow', 'accelerator', 'sim'}

#: Of a test that needs the simulated accelerator, where that is required: why there is none.
MISSING = pytest.StashKey()


@pytest.fixture(autouse=True)
def seed():
    """Make every test repeatable by itself."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def one_intra_op_thread():
    """Let workers be the only thing that runs at the same time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_thread_left():
    """Fail a test that leaves a thread behind."""
    before = threads()
    yield
    if threads() - before:
        gc.collect()
    assert not threads() - before


@pytest.fixture(autouse=True, scope='session')
def one_server():
    """Import the modules of ranks in the process that forks all others: a worker has only one."""
    context = multiprocessing.get_context('forkserver')
    preload = context.set_forkserver_preload
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            context, 'set_forkserver_preload', lambda names: preload([*IMPORTED, *names])
        )
        yield


@pytest.fixture
def clock(monkeypatch):
    """Let the profiler look at a clock that the test moves."""
    clock = Clock()
    monkeypatch.setattr(profile, 'time', clock)
    return clock


@pytest.fixture
def compiler(monkeypatch):
    """Forget compiled code. Prevent the compiler from giving up silently, or starting a thread."""
    from tqdm import tqdm

    monkeypatch.setattr(tqdm, 'monitor_interval', 0)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        yield
    torch._dynamo.reset()


@pytest.fixture
def no_race():
    """Fail a test that races on the simulated accelerator."""
    with accelerator.no_race():
        yield


@pytest.fixture(autouse=True)
def on_sim(request):
    """Let tests run on the simulated accelerator behind delays, and look for races.

    Those that are for the simulated accelerator only make delays of their own.
    """
    if MISSING in request.node.stash:
        pytest.fail(request.node.stash[MISSING], pytrace=False)
    if not (accelerator.is_loaded() and {'sim', 'accelerator'} & set(request.keywords)):
        yield
        return
    if 'sim' in request.keywords:
        accelerator.set_delays()
    else:
        accelerator.set_delays(_seed_of(request.node.nodeid), MOST_MICROSECONDS)
    request.getfixturevalue('no_race')
    yield
    accelerator.set_delays()


def _seed_of(name):
    """Give each test delays of its own; others for another TORCHGPIPE_SIM_SEED."""
    return zlib.crc32(f'{os.environ.get("TORCHGPIPE_SIM_SEED", "")} {name}'.encode())


def pytest_addoption(parser):
    """Add an option that runs slow tests."""
    parser.addoption(
        '--whole',
        action='store_true',
        help='run all tests, also slow ones',
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """Let one worker more than cores run, as tests of processes wait."""
    return len(os.sched_getaffinity(0)) + 1 if hasattr(os, 'sched_getaffinity') else None


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Let a worker of ``-n`` that has nothing left to do take tests of another one."""
    if config.getoption('numprocesses', None) and config.getoption('dist') == 'no':
        config.option.dist = 'worksteal'


def pytest_report_header(config):
    """Say that there is more."""
    return None if config.getoption('whole') else 'a part of the tests: --whole runs all of them'


def pytest_collection_modifyitems(config, items):
    """Leave out tests that need ``--whole``, unless tests are named. Prepare accelerators."""
    if not config.getoption('whole') and not any('::' in arg for arg in config.args):
        left_out = [item for item in items if LEFT_OUT & set(item.keywords)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not LEFT_OUT & set(item.keywords)]
    _see_to_accelerators(items)


def _see_to_accelerators(items):
    """Load the simulated accelerator if tests need it. Skip tests that cannot run here."""
    ours = [item for item in items if 'sim' in item.keywords]
    any_kind = [item for item in items if 'accelerator' in item.keywords]
    if ACCELERATOR != 'sim':
        _skip(ours, f"there is one accelerator in a process, here '{ACCELERATOR}'")
    elif ours or any_kind:
        _load_accelerator([*ours, *any_kind])


def _load_accelerator(items):
    # Before the first backward pass, as autograd counts devices only once.
    wanted = os.environ.get('TORCHGPIPE_SIM')
    reason = 'TORCHGPIPE_SIM=off' if wanted == 'off' else accelerator.reason()
    if not reason:
        try:
            accelerator.load()
        except RuntimeError as error:  # as with a release of PyTorch that it was not written for
            reason = f'the simulated accelerator cannot be built: {str(error).splitlines()[0]}'
    if reason and wanted == 'required':
        for item in items:
            item.stash[MISSING] = reason
    elif reason:
        _skip(items, reason)


def _skip(items, reason):
    for item in items:
        item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def ctrl_c():
    """See that SIGINT raises, as it does not where the tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
