"""Logs: lines are added, and only those of a lost attempt are cut."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import click
import pytest

from torchgpipe.trainer.log import Log, check_log, sample_logs


def written(path, training, steps, last=0):
    log = Log(str(path), training, last)
    for step in steps:
        log.add({'step': step, 'loss': step / 2})
    return log


def steps_of(path):
    lines = map(json.loads, Path(path).read_text().splitlines())
    return [(line['training'], line['step']) for line in lines]


def test_lines_after_the_checkpoint_are_cut(tmp_path):
    path = tmp_path / 'log'
    written(path, 'a', range(1, 6))
    log = written(path, 'a', [4], last=3)
    assert steps_of(path) == [('a', 1), ('a', 2), ('a', 3), ('a', 4)]
    assert [line['step'] for line in log.lines] == [1, 2, 3, 4]
    assert log.lines[0] == {'step': 1, 'loss': 0.5} and log.has(4) and not log.has(5)


def test_half_a_line_of_a_killed_process_is_cut(tmp_path):
    path = tmp_path / 'log'
    written(path, 'a', [1, 2])
    before = path.read_bytes()
    for size in range(1, 40):
        written(path, 'a', [3], last=2)
        os.truncate(path, len(before) + size)
        check_log(str(path), 'a', 2)
        written(path, 'a', [], last=2)
        assert path.read_bytes() == before, size


def test_a_new_training_is_written_after_an_older_one(tmp_path):
    path = tmp_path / 'log'
    written(path, 'a', [1, 2, 3])
    check_log(str(path), 'b', 0)
    log = written(path, 'b', [1, 2])
    assert [line['step'] for line in log.lines] == [1, 2]
    written(path, 'b', [2], last=1)
    assert steps_of(path) == [('a', 1), ('a', 2), ('a', 3), ('b', 1), ('b', 2)]


def test_lines_of_another_training_are_never_cut(tmp_path):
    path = tmp_path / 'log'
    written(path, 'a', [1, 2, 3])
    written(path, 'b', [1, 2])
    before = path.read_bytes()
    for use in (lambda: check_log(str(path), 'a', 2), lambda: Log(str(path), 'a', 2)):
        with pytest.raises(click.UsageError, match='has lines of another training'):
            use()
    assert path.read_bytes() == before
    written(path, 'a', [4], last=3)
    assert steps_of(path)[-2:] == [('b', 2), ('a', 4)]


def test_a_file_that_is_no_log_is_refused_and_kept(tmp_path):
    path = tmp_path / 'log'
    lines = [b'a text\n', b'[1]\n', b'{"a": 1}\n', b'{"step": "x"}\n', b'{"step": 1}', b'\n']
    for content in (*lines, b'\xff\xfe\n'):
        path.write_bytes(content)
        for use in (check_log, Log):
            with pytest.raises(click.UsageError, match='is no log of JSON lines'):
                use(str(path), 'a', 0)
        assert path.read_bytes() == content


def test_a_link_stays_a_link(tmp_path):
    path, link = tmp_path / 'log', tmp_path / 'link'
    link.symlink_to(path)
    check_log(str(link), 'a', 0)
    written(link, 'a', [1, 2])
    written(link, 'a', [], last=1)
    assert link.is_symlink() and steps_of(path) == [('a', 1)]


def test_a_device_stays_a_device(tmp_path):
    check_log('/dev/null', 'a', 0)
    written('/dev/null', 'a', [1, 2])
    assert Path('/dev/null').is_char_device()
    with pytest.raises(click.UsageError, match='no regular file, which --log-samples takes'):
        check_log('/dev/null', 'a', 0, regular=True)


def test_lines_arrive_in_a_pipe_until_its_reader_ends(tmp_path, capsys):
    path = tmp_path / 'pipe'
    os.mkfifo(path)
    with pytest.raises(click.UsageError, match='no process reads this pipe'):
        Log(str(path), 'a', 0)
    lines = []

    def read():
        with open(path) as file:
            lines.extend([file.readline(), file.readline()])

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    check_log(str(path), 'a', 0)
    log = None
    while log is None:  # until the thread has opened the pipe
        try:
            log = Log(str(path), 'a', 0)
        except click.UsageError as error:
            assert 'no process reads this pipe' in str(error)
    log.add({'step': 1})
    log.add({'step': 2, 'text': 'x' * 2**21})  # much more than a pipe holds
    reader.join()
    log.add({'step': 3})
    log.add({'step': 4})
    assert [json.loads(line)['step'] for line in lines] == [1, 2]
    assert capsys.readouterr().err == 'step 3: the process that reads the log has ended\n'


PRINT = """
from torchgpipe.trainer.log import Log, check_log

print('a plan', flush=True)
check_log('/dev/stdout', 'a', 0)
log = Log('/dev/stdout', 'a', 0)
log.add({'step': 1})
print('done')
"""


@pytest.mark.slow
def test_lines_arrive_in_the_output_of_the_process(tmp_path):
    """Also in output that is a file, which has other text as well."""
    for name in ('out', None):
        with open(tmp_path / 'out', 'wb') as file:
            process = subprocess.run(
                [sys.executable, '-c', PRINT],
                cwd=Path(__file__).parents[2],
                stdout=file if name else subprocess.PIPE,
            )
        out = process.stdout or (tmp_path / 'out').read_bytes()
        assert process.returncode == 0
        assert out.splitlines() == [b'a plan', b'{"training": "a", "step": 1}', b'done'], name


def test_a_log_that_cannot_be_written_is_refused():
    for path in ('/proc/nothing/log', '/', '/dev/null/log'):
        with pytest.raises(click.UsageError, match='cannot write to the log'):
            check_log(path, 'a', 0)


def test_the_folder_of_a_log_is_made(tmp_path):
    check_log(str(tmp_path / 'new/folder/log'), 'a', 0)
    assert (tmp_path / 'new/folder/log').read_text() == ''


def test_logs_of_samples_have_numbers(tmp_path):
    for name in ('log', 'log.0', 'log.12', 'log.x', 'log.1.old', 'other.1', 'xlog.1', 'logs0'):
        (tmp_path / name).touch()
    assert sample_logs(str(tmp_path / 'log')) == [
        str(tmp_path / name) for name in ('log.0', 'log.12')
    ]
