"""The notebook of the documentation: it runs, with the tables and pictures that are stored."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import torchgpipe

PATH = Path(torchgpipe.__file__).parent.parent / 'docs/notebook.ipynb'

pytestmark = pytest.mark.slow


def shown(cell):
    """Return how often a cell shows a table, a picture of boxes and a figure."""
    html = ''.join(
        output.data.get('text/html', '')
        for output in cell.outputs
        if output.output_type == 'execute_result'
    )
    return html.count('<pre>'), html.count('<svg'), html.count('<img')


def test_the_notebook_runs_and_shows_its_pictures(tmp_path):
    stored = nbformat.read(PATH, as_version=4)
    expected = [shown(cell) for cell in stored.cells if cell.cell_type == 'code']
    executed = nbformat.read(PATH, as_version=4)
    client = NotebookClient(
        executed,
        timeout=120,
        kernel_name='python3',
        resources={'metadata': {'path': str(tmp_path)}},
    )
    client.execute()
    cells = [cell for cell in executed.cells if cell.cell_type == 'code']
    assert [shown(cell) for cell in cells] == expected
    assert [sum(each) for each in zip(*expected)] == [2, 4, 1]
    progress = ''.join(output.get('text', '') for cell in cells for output in cell.outputs)
    assert 'profile, about 1 s' in progress and 'plan: schedules' in progress
