"""Tokens of files: which samples are in which step."""

from dataclasses import replace

import pytest
import torch

from tests.trainer.tiny import (
    options_of,
    run_tiny,
)
from torchgpipe.base.devices import CPU
from torchgpipe.trainer.processes import is_available
from torchgpipe.trainer.tokens import TokenFiles, samples_at, starts_of

pytestmark = [pytest.mark.distributed, pytest.mark.skipif(not is_available(), reason='needs gloo')]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv('OMP_NUM_THREADS', '1')


@pytest.mark.parametrize('data, chunks', [(4, 1), (2, 2)])
def test_samples_follow_from_seed_and_step(tmp_path, data, chunks):
    config = replace(options_of(tmp_path), data=data, micro_batch_size=16 // data // chunks)
    tokens, block, batch = 8 * 20 + 3, config.block_size, config.global_batch_size
    seen = torch.cat([starts_of(config, tokens, k).flatten() for k in range(19)])
    assert len(seen) == 16 * batch + 3 * batch and starts_of(config, tokens, 3).shape == (
        chunks,
        data,
        batch // chunks // data,
    )
    for epoch in seen.split(19):  # (163 - 8) // 8 samples, and 19 · 16 = 16 · 19
        first = epoch.min()
        assert sorted(epoch.tolist()) == [*range(first, first + 19 * block, block)]
        assert 0 <= first < block and epoch.max() + block < tokens
    config = replace(config, data=1, micro_batch_size=16)
    assert torch.equal(
        torch.cat([starts_of(config, tokens, k).flatten() for k in range(19)]), seen
    )
    config = replace(config, seed=1)
    assert not torch.equal(starts_of(config, tokens, 0).flatten(), seen[:batch])


@pytest.mark.slow
def test_tokens_of_nanogpt_and_mock_data(run, tmp_path):
    tokens = torch.randint(50304, (4000,), generator=torch.Generator().manual_seed(0))
    for name in ('train', 'val'):
        (tmp_path / f'{name}.bin').write_bytes(bytes(tokens.to(torch.uint16).view(torch.uint8)))
    code, out, err = run_tiny(run, tmp_path, '--steps 1 --generate 3 --tokens', tmp_path)
    assert code == 0 and '50304' not in err, err
    config = options_of(tmp_path, '--tokens', tmp_path)
    x, y = samples_at(config, TokenFiles(config).train, torch.tensor([0, 7]), CPU)
    assert torch.equal(x, torch.stack([tokens[:8], tokens[7:15]]))
    assert torch.equal(y, torch.stack([tokens[1:9], tokens[8:16]]))
    code, _, err = run_tiny(run, tmp_path, '--steps 1 --mock-data --vocab-size 40')
    assert code == 0, err


@pytest.mark.slow
def test_another_text_of_the_same_length_is_refused(run, tmp_path):
    text = tmp_path / 'text'
    text.write_text('abcd' * 999)
    words = '--steps 1 --save', tmp_path / 'saved', '--text', text
    assert run_tiny(run, tmp_path, *words)[0] == 0
    for k in (0, 1998, 3995):
        changed = bytearray(b'abcd' * 999)
        changed[k] += 1
        text.write_bytes(changed)
        code, _, err = run_tiny(run, tmp_path, *words, '--resume')
        assert code == 2 and 'digest' in err
    text.write_text('abcd' * 999)
    assert run_tiny(run, tmp_path, *words, '--resume')[0] == 0
