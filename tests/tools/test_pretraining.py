"""The page about pretraining: its script on several meshes, killed in between, and its export."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.tools, pytest.mark.slow]

PAGE = Path(__file__).parents[2] / 'docs/guide/pretraining.md'


def trained(folder, data, pipe, steps):
    """Run the script on a mesh; return its output."""
    ranks = data * pipe
    launch = ['-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', str(ranks)]
    found = subprocess.run(
        [
            sys.executable,
            *(launch if ranks > 1 else []),
            'pretrain.py',
            *map(str, (data, pipe, steps)),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(PAGE.parents[2])},
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


def test_the_script_is_the_same_on_all_meshes_and_goes_on(tmp_path):
    transformers = pytest.importorskip('transformers')
    script = re.search(r'^```py\n(# pretrain.py\n.*?)^```$', PAGE.read_text(), re.M | re.S)[1]
    printed = set()
    for name, runs in {
        'one': [(1, 1, 8)],
        'two': [(1, 2, 4), (2, 1, 8)],
        'four': [(1, 1, 3), (2, 2, 8)],
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / 'pretrain.py').write_text(script)
        printed.add([trained(folder, *each) for each in runs][-1])
    assert len(printed) == 1 and re.fullmatch(r'step 8, loss \d.\d{4}', *printed)
    models = [
        transformers.GPT2LMHeadModel.from_pretrained(tmp_path / name / 'trained')
        for name in ('one', 'four')
    ]
    for x, y in zip(*(model.parameters() for model in models)):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)
