"""Balance: each model once, in two partitions."""
import json

from benchmarks.experiments import balance


def test_balance(run, tmp_path, monkeypatch):
    monkeypatch.setattr(balance, 'SIZES', (2,))
    monkeypatch.setattr(balance, 'MODES', ('except_last',))
    code, out, _ = run('balance', '--rounds', 1, '--output', tmp_path)
    assert code == 0 and all(name in out for name in balance.MODELS)
    results = json.loads((tmp_path / 'balance.json').read_text())['results']
    assert len(results) == 3 and all(0.1 < result['ratio'] < 10 for result in results)
    code, _, err = run('balance', '--device', 'cuda:99')
    assert code == 1 and '--device cuda:99' in err and err.count('\n') == 1
