"""Digits: GPipe learns what the model without it learns."""
import re


def test_digits(run, tmp_path):
    code, out, _ = run('digits', '--epochs', 3, '--checkpoint', 'always', '--output', tmp_path)
    assert code == 0
    accuracies = re.findall(r'(?:unwrapped|GPipe) +([\d.]+)%', out)
    assert len(accuracies) == 2 and all(float(accuracy) > 90 for accuracy in accuracies)
    assert 'largest difference of the losses' in out
    assert (tmp_path / 'digits.png').read_bytes().startswith(b'\x89PNG')
