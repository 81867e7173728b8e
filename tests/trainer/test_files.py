"""Files that are replaced as a whole, and folders that can be written."""

import click
import pytest

from torchgpipe.trainer.files import output_folder, replacing


def test_a_file_is_replaced_when_all_is_written(tmp_path):
    path = tmp_path / 'file'
    path.write_text('old')
    with pytest.raises(RuntimeError), replacing(path) as new:
        new.write_text('half')
        raise RuntimeError
    assert path.read_text() == 'old' and [*tmp_path.iterdir()] == [path]
    with replacing(path) as new:
        new.write_text('new')
        assert path.read_text() == 'old'
    assert path.read_text() == 'new' and [*tmp_path.iterdir()] == [path]


def test_a_folder_that_cannot_be_written(tmp_path):
    assert output_folder(str(tmp_path / 'a/b')) == tmp_path / 'a/b'
    assert not [*(tmp_path / 'a/b').iterdir()]
    with pytest.raises(click.UsageError, match='cannot write to the output folder'):
        output_folder('/proc/nothing')
