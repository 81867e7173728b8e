"""Progress lines: where they are shown, and where not."""

import contextlib
import io
import sys
import threading

import torch
from torch import nn

from torchgpipe.balance import profile
from torchgpipe.plan import Transformer, plan
from torchgpipe.plan.progress import progress


class Stream(io.StringIO):
    """A stderr that may be a terminal."""

    def __init__(self, is_terminal=True):
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self):
        return self.is_terminal


def printed(call, is_terminal=True):
    """Return the text that a call prints on stderr."""
    stream = Stream(is_terminal)
    with contextlib.redirect_stderr(stream):
        call()
    return stream.getvalue()


def count():
    assert [*progress(range(3), 'items')] == [0, 1, 2]


def test_a_line_in_a_terminal():
    text = printed(count)
    assert 'items' in text and '0/3' in text


def test_no_line_in_a_file():
    assert printed(count, is_terminal=False) == ''


def test_a_line_in_a_notebook(monkeypatch):
    monkeypatch.setattr(Stream, '__module__', 'ipykernel.iostream')
    assert '0/3' in printed(count, is_terminal=False)


def in_a_thread():
    thread = threading.Thread(target=count)
    thread.start()
    thread.join()


def test_no_line_in_another_thread():
    assert printed(in_a_thread) == ''


def test_no_line_without_tqdm(monkeypatch):
    monkeypatch.setitem(sys.modules, 'tqdm', None)
    assert printed(count) == ''


class ToLog:
    """A stream of a program that writes its errors to a log."""

    def write(self, text):
        raise AssertionError(text)


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


def test_no_line_without_a_stream():
    for stream in [None, ToLog(), closed()]:
        with contextlib.redirect_stderr(stream):
            count()


MODEL = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def test_a_profile_says_how_long_it_takes():
    text = printed(lambda: profile(MODEL, torch.rand(8, 4), device='cpu', timeout=0.01))
    assert 'profile, about 0.01 s' in text and '0/2' in text


def test_plans_show_their_progress():
    text = printed(lambda: plan(MODEL, torch.rand(8, 4), devices=['cpu:0', 'cpu:1'], timeout=0.01))
    assert 'profile, about 0.01 s' in text and 'plan: schedules' in text
    text = printed(lambda: plan(Transformer(4, 64, 4, 100, 16), mesh=2, machine='H100', batch=8))
    assert 'plan: bounds of meshes' in text and 'plan: simulations of meshes' in text
