"""The page about tuning: its script on several meshes, with all weights and with adapters."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytestmark = [pytest.mark.tools, pytest.mark.slow, pytest.mark.filterwarnings('ignore')]

PAGE = Path(__file__).parents[2] / 'docs/guide/tuning.md'
PROMPT = torch.tensor([[3, 4, 5]])


def block(name):
    """Return a block of code of the page."""
    return re.search(rf'^```py\n(# {name}\n.*?)^```$', PAGE.read_text(), re.M | re.S)[1]


def with_adapters(script):
    """Return the script with the lines for adapters in the places that the page names."""
    lines = block('lora.py').splitlines()
    imports, wrap, optimizer, adapter, merged = [
        line for line in lines if line and not line.startswith('#')
    ]
    changed = []
    for line in script.splitlines():
        if line.startswith('optimizer = '):
            line = optimizer
        if line.startswith('model.save_pretrained'):
            line = f'{adapter}\n{merged}'
        changed.append(line)
        if line.startswith('    net = '):
            changed.append(wrap)
    return '\n'.join([imports, *changed])


def run_script(folder, data, pipe):
    ranks = data * pipe
    launch = ['-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', str(ranks)]
    result = subprocess.run(
        [
            sys.executable,
            *(launch if ranks > 1 else []),
            'tune.py',
            str(data),
            str(pipe),
            '40',
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(PAGE.parents[2])},
    )
    assert result.returncode == 0, result.stderr


def published(folder):
    """Save a small model with random weights."""
    transformers = pytest.importorskip('transformers')
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder / 'model')


def generated(model):
    return model.generate(PROMPT, max_new_tokens=4, do_sample=False)[0].tolist()


@pytest.mark.parametrize('adapters', [False, True])
def test_the_script_on_all_meshes(tmp_path, adapters):
    transformers = pytest.importorskip('transformers')
    script = block('tune.py')
    if adapters:
        pytest.importorskip('peft')
        script = with_adapters(script)
    states = []
    for data, pipe in ((1, 1), (1, 2), (2, 2)):
        folder = tmp_path / f'{data}{pipe}'
        folder.mkdir()
        published(folder)
        (folder / 'tune.py').write_text(script)
        run_script(folder, data, pipe)
        tuned = transformers.AutoModelForCausalLM.from_pretrained(folder / 'tuned')
        states.append(tuned.state_dict())
        if adapters:
            from peft import PeftModel

            base = transformers.AutoModelForCausalLM.from_pretrained(folder / 'model')
            model = PeftModel.from_pretrained(base, folder / 'adapter')
            assert generated(model) == generated(tuned)
            assert load_file(folder / 'adapter' / 'adapter_model.safetensors')
        else:
            assert generated(tuned) == [3, 4, 5, 6, 7, 8, 9]
    for state in states[1:]:
        for name, x in states[0].items():
            torch.testing.assert_close(state[name], x, rtol=1e-3, atol=1e-4)
