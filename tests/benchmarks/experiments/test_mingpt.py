"""The GPT: sharded, it has its part of the same values, and learns the same."""

import json

import pytest
import torch
from torch import distributed

import torchgpipe.shard as ts
from benchmarks.experiments import sharded as sizes
from benchmarks.experiments.sharded.models import sharded_gpt
from benchmarks.experiments.sharded.workers import pieces_of
from torchgpipe.trainer.gpt import GPT, Sizes
from torchgpipe.trainer.processes import Processes, is_available

pytestmark = [pytest.mark.distributed, pytest.mark.skipif(not is_available(), reason='needs gloo')]

SIZES = Sizes(vocabulary=7, context=5, width=8, heads=2, depth=1, tied=False)


class Pair:
    """A worker that has both models."""

    def __init__(self):
        ts.distributed.init_process_group()
        torch.manual_seed(0)
        self.plain = GPT(SIZES)
        torch.manual_seed(0)
        self.sharded = sharded_gpt(SIZES)

    def values_are_the_same(self):
        expected = self.plain.state_dict()
        found = ts.collect_state_dict(self.sharded, self.sharded.state_dict())
        return [*found] == [*expected] and all(
            torch.equal(found[name], value) for name, value in expected.items()
        )

    def scores_are_the_same(self):
        tokens = torch.tensor([[6, 0, 3], [1, 2, 5]])
        return torch.allclose(
            ts.distributed.gather(self.sharded(tokens)), self.plain(tokens), rtol=1e-5, atol=1e-6
        )

    def a_tied_head_is_the_same(self):
        torch.manual_seed(0)
        plain = GPT(SIZES._replace(tied=True))
        torch.manual_seed(0)
        sharded = sharded_gpt(SIZES._replace(tied=True))
        tokens = torch.tensor([[6, 0, 3]])
        return sharded.lm_head.weight is sharded.transformer.wte.weight and torch.allclose(
            ts.distributed.gather(sharded(tokens)), plain(tokens), rtol=1e-5, atol=1e-6
        )

    def parameters(self):
        return sum(parameter.numel() for parameter in self.sharded.parameters())

    def odd_heads(self):
        return sharded_gpt(SIZES._replace(heads=distributed.get_world_size() + 1, width=12))


@pytest.mark.slow
def test_it_is_the_same_model():
    with Processes(2, Pair) as pair:
        assert pair.call('values_are_the_same') == [True, True]
        assert pair.call('scores_are_the_same') == [True, True]
        assert pair.call('a_tied_head_is_the_same') == [True, True]
        # Whole: positions, norms, two biases. Halves: attention, projection, network, vocabulary.
        whole = 5 * 8 + 3 * 16 + 8 + 8
        halves = (8 + 1) * 24 // 2 + 8 * 8 // 2 + (8 + 1) * 32 // 2 + 32 * 8 // 2
        assert pair.call('parameters') == [whole + halves + 2 * size * 8 for size in (4, 3)]
        with pytest.raises(Exception, match='3 heads cannot be shared by 2 processes'):
            pair.call('odd_heads')


def test_pieces_of_a_text():
    pieces = pieces_of('abcabcab', 4)
    assert pieces.tolist() == [[k % 3, (k + 1) % 3, (k + 2) % 3, k % 3] for k in range(5)]


@pytest.mark.slow
def test_mingpt(run, tmp_path):
    words = 'mingpt --processes 2 --steps 20 --width 32 --heads 2 --depth 1 --context 8'.split()
    code, out, err = run(*words, '--output', tmp_path)
    assert code == 0, err
    results = json.loads((tmp_path / 'mingpt.json').read_text())['results']
    plain, sharded = results['rows']
    assert sharded['difference'] < 1e-12 and len(sharded['ranks']) == 2
    assert plain['losses'][-1] < plain['losses'][0] - 0.1
    for rank in sharded['ranks']:
        assert all(rank[kind] < size for kind, size in plain['ranks'][0].items())
    assert f'{results["vocabulary"]} different ones' in out and 'sharded over 2' in out
    assert (tmp_path / 'mingpt.png').exists() and (tmp_path / 'mingpt.svg').exists()


@pytest.mark.slow
def test_mingpt_sizes(run, tmp_path, monkeypatch):
    """A size that fits is trained; one that does not is run as a dry run only."""
    monkeypatch.setattr(sizes, 'SIZES', {'10M': (2, 192, 4), '57M': (3, 192, 4)})
    few, many = (sizes.parameters_of(sizes.sizes_of(name)) for name in ('10M', '57M'))
    monkeypatch.setattr(sizes, 'free_memory', lambda: 20 * (few + many))
    code, out, err = run(
        'mingpt-sizes', '--processes', 2, '--size', '10M', '--size', '57M', '--output', tmp_path
    )
    assert code == 0, err
    results = json.loads((tmp_path / 'mingpt-sizes.json').read_text())['results']
    trained, dry = results['cases']
    assert [row['name'] for row in trained['rows']] == ['plain', 'sharded over 2']
    assert dry['rows'] == [] and [*dry['dry']] == ['plain', 'sharded over 2']
    # Parameters, gradients and both moments are exact; a dry run gathers the scores as well.
    for row in trained['rows']:
        predicted = trained['dry'][row['name']]
        assert max(rank['peak'] for rank in row['ranks']) == pytest.approx(predicted, rel=0.25)
    lines = [line for line in out.splitlines() if line.startswith(f'{many:,}')]
    assert len(lines) == 2 and all('—' in line for line in lines)
