"""Plans against published trainings: the bounds that they keep, and the page."""

import pytest
import torch

from benchmarks.experiments import plans


@pytest.fixture(scope='module')
def machines():
    return plans.fitted_machines()


def off(text):
    return abs(float(text.removesuffix(' %')))


def column(rows, name, last=False):
    header, body = rows
    places = [k for k, each in enumerate(header) if each == name]
    return [row[places[-1 if last else 0]] for row in body]


@pytest.mark.slow
def test_seconds_of_korthikanti(machines):
    """One constant, of the second row; the others within 10 %, 5 % on average."""
    errors = [off(x) for x in column(plans.korthikanti_rows(machines), 'off')]
    assert errors.pop(1) < 0.01
    assert max(errors) < 10 and sum(errors) / len(errors) < 5


@pytest.mark.slow
def test_memory_of_korthikanti(machines):
    rows = plans.memory_rows(machines)
    assert max(off(x) for name in (False, True) for x in column(rows, 'off', name)) < 5


def test_simumax(machines):
    rows = plans.simumax_rows(machines)
    assert max(off(x) for x in column(rows, 'off')) < 15
    assert max(off(x) for x in column(rows, 'off', last=True) if x) < 5


def test_megatron_core(machines):
    rows = plans.tflops_rows(plans.MEGATRON_CORE, machines, recomputed=False)
    assert max(off(x) for x in column(rows, 'off')) < 10
    ranks = torch.stack(
        [
            torch.tensor([float(x) for x in column(rows, name)]).argsort().argsort()
            for name in ('published', 'predicted')
        ]
    )
    assert torch.corrcoef(ranks.double())[0, 1] >= 0.8  # Spearman's


@pytest.mark.slow
def test_narayanan(machines):
    """No constant was fitted on these."""
    rows = plans.tflops_rows(plans.NARAYANAN, machines, recomputed=True)
    assert max(off(x) for x in column(rows, 'off')) < 10


def test_others_say_why_they_are_off(machines):
    rows = plans.other_rows(machines)
    assert len(rows[1]) > 10
    for error, why in zip(column(rows, 'off'), column(rows, 'assumptions')):
        assert off(error) <= 25 or why


def test_places(machines):
    header, ((name, mesh, place, part, first, slower),) = plans.place_rows(
        [plans.MEGATRON_CORE[0]], machines
    )
    assert (mesh, place, slower) == ('48 × 1 × 1', '1 of 45', '0.0%')
    assert first == 'data 48 × pipe 1 × tensor 1'


@pytest.mark.slow
def test_the_page(machines, monkeypatch, tmp_path, run):
    monkeypatch.setattr(plans, 'PAGE', tmp_path / 'plans.md')
    monkeypatch.setattr(plans, 'place_rows', lambda trainings, machines: (['model'], [['x']]))
    monkeypatch.setattr(plans, 'chosen_rows', lambda: (['model'], [['y']]))
    code, out, _ = run('plans')
    assert code == 0 and str(tmp_path / 'plans.md') in out
    text = (tmp_path / 'plans.md').read_text()
    assert text.count('\n| ') > 60 and '| x |' in text and '| y |' in text
