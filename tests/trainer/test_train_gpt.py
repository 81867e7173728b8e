"""The trainer of a GPT: it learns as a plain loop does, on any mesh, and resumes exactly."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from benchmarks.harness.memory import peak_of_activations
from tests.trainer import killing
from tests.trainer.tiny import (
    COMMAND,
    ROOT,
    TINY,
    assert_same,
    launched,
    lines_of,
    mesh_of,
    options_of,
    plain_curve,
    start,
)
from torchgpipe.base.devices import CPU
from torchgpipe.distributed import init_mesh
from torchgpipe.trainer import train_gpt
from torchgpipe.trainer.config import Config
from torchgpipe.trainer.prediction import predict
from torchgpipe.trainer.processes import is_available
from torchgpipe.trainer.tokens import TokenFiles, samples_at, starts_of

pytestmark = [pytest.mark.distributed, pytest.mark.skipif(not is_available(), reason='needs gloo')]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv('OMP_NUM_THREADS', '1')


def test_it_learns_as_a_plain_loop_does(tmp_path, run):
    code, out, err = run(*TINY, '--output', tmp_path, '--log', tmp_path / 'log')
    assert code == 0, err
    assert_same(lines_of(tmp_path / 'log'), plain_curve(options_of(tmp_path), 6))
    assert out.count('TFLOP/s  ') == 6 and 'validation loss' in out
    assert (tmp_path / 'train-gpt.png').exists() and (tmp_path / 'train-gpt.svg').exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    'mesh, options',
    [
        ((1, 2, 1), ['--schedule', 'zb-v']),
        ((2, 2, 1), ['--shard']),
        ((2, 1, 2), ['--checkpoint', 'always']),
        ((1, 2, 2), ['--checkpoint', 'selective', '--schedule', 'zb-h1']),
        ((2, 1, 1), ['--offload', '--micro-batch-size', 2]),
        ((1, 2, 1), ['--offload']),
        ((2, 2, 1), ['--offload']),
        ((1, 2, 1), ['--plan', 'auto']),
        ((1, 2, 2), ['--plan', 'auto']),
    ],
)
def test_all_meshes_have_the_curve_of_a_plain_loop(tmp_path, mesh, options):
    lines = launched(tmp_path, *mesh_of(*mesh), *options)
    assert_same(lines, plain_curve(options_of(tmp_path), 6))


@pytest.mark.slow
def test_experts_are_spread_over_replicas(tmp_path):
    alone = launched(tmp_path / 'alone', '--experts', 4)
    for mesh in ((2, 1, 1), (1, 1, 2)):
        spread = launched(tmp_path / '-'.join(map(str, mesh)), '--experts', 4, *mesh_of(*mesh))
        assert_same(spread, alone)


@pytest.mark.slow
def test_all_meshes_generate_the_same_text(tmp_path):
    """Also if ranks divide a sequence, whose length they do not divide."""
    texts = []
    for mesh, options in (
        ((1, 1, 1), []),
        ((1, 1, 2), ['--sequence-parallel']),
        ((1, 1, 2), ['--sequence-parallel', '--chunked-loss', 4]),
        ((2, 2, 1), []),
    ):
        words = [*COMMAND, *TINY, *mesh_of(*mesh), *options, '--output', tmp_path]
        words += ['--generate', 12, '--mock-data']
        done = subprocess.run([*map(str, words)], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        texts.append(json.loads(done.stdout.splitlines()[-1]))
    assert len(texts[0]) == 12 and texts == [texts[0]] * 4


@pytest.mark.slow
@pytest.mark.parametrize('victim', [0, 1])
def test_a_killed_rank_costs_the_steps_since_the_last_save(tmp_path, capfd, victim):
    config = options_of(
        tmp_path,
        *mesh_of(2, 1, 1),
        '--save',
        tmp_path / 'saved',
        *'--save-interval 2 --restarts 1 --log-samples --async-save'.split(),
    )
    # Before the first save, and after it.
    training = start(killing.killed_at_a_step, config, (victim, 2 + 3 * victim))
    assert f'rank {victim} ended by signal 9' in capfd.readouterr().err
    if victim:
        # It continues after a checkpoint, so these lines stay, with the times in them.
        assert lines_of(tmp_path / 'log')[:2] == lines_of(tmp_path / 'log-before')[:2]
    assert_same(lines_of(tmp_path / 'log'), plain_curve(config, 6))
    starts = [starts_of(config, training['tokens'], k) for k in range(6)]
    for replica in range(2):
        assert lines_of(tmp_path / f'log.{replica}') == [
            {
                'training': training['name'],
                'step': k + 1,
                'starts': each[:, replica].flatten().tolist(),
            }
            for k, each in enumerate(starts)
        ]
    assert sorted(path.name for path in (tmp_path / 'saved').glob('step-*')) == [
        'step-4',
        'step-6',
    ]


@pytest.mark.slow
def test_a_training_resumes_on_another_mesh(tmp_path):
    config = options_of(
        tmp_path, *mesh_of(2, 2, 1), '--save', tmp_path / 'saved', '--save-interval', 3
    )
    with pytest.raises(SystemExit):
        start(killing.killed_at_a_step, config, (3, 5))
    expected = plain_curve(config, 6)
    for mesh in ((1, 1, 2), (1, 1, 1)):
        folder = tmp_path / '-'.join(map(str, mesh))
        shutil.copytree(tmp_path / 'saved', folder / 'saved')
        shutil.copy(tmp_path / 'log', folder)
        lines = launched(folder, *mesh_of(*mesh), '--save', folder / 'saved', '--resume')
        assert_same(lines, expected)
        assert lines[:3] == lines_of(tmp_path / 'log')[:3] != lines  # with the times they took


@pytest.mark.slow
@pytest.mark.parametrize('moment', range(2))
def test_a_rank_that_is_killed_during_a_save(tmp_path, moment):
    save = ['--save', tmp_path / 'saved', '--save-interval', 2]
    config = options_of(
        tmp_path, *mesh_of(2, 1, 1), *save, *(['--async-save'] if moment % 2 else [])
    )
    with pytest.raises(SystemExit):
        start(killing.killed_in_a_save, config, moment)
    assert (tmp_path / 'killed').exists()
    assert_same(launched(tmp_path, *save, '--resume'), plain_curve(config, 6))


@pytest.mark.slow
def test_it_runs_in_the_processes_of_torchrun(tmp_path):
    torchrun = [sys.executable, '-m', 'torch.distributed.run', '--standalone']
    words = [*torchrun, '--nproc-per-node', 2, '-m', 'torchgpipe.trainer', *TINY, '--pipe', 2]
    words += ['--output', tmp_path, '--log-file', tmp_path / 'log']
    done = subprocess.run([*map(str, words)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert_same(lines_of(tmp_path / 'log'), plain_curve(options_of(tmp_path), 6))


def peak_of(folder, *args):
    """Return the bytes of activations of a step, at their peak."""
    config = options_of(folder, '--n-layer', 8, '--n-embd', 64, '--block-size', 128, *args)
    loss_fn = partial(train_gpt.training_loss, config)
    plan = predict(config, train_gpt.build_layers, loss_fn, CPU)
    model = train_gpt.build_model(config, init_mesh(device_type='cpu'), plan)
    optimizer = train_gpt.build_optimizer(config, model.parameters())
    tokens = TokenFiles(config).train
    x, y = samples_at(config, tokens, starts_of(config, len(tokens), 0).flatten(), CPU)

    def step():
        with train_gpt.autocast(config, CPU):
            model.step(x, y, loss_fn, schedule='auto')

    step()
    optimizer.zero_grad()
    return peak_of_activations(step)


@pytest.mark.slow
def test_activations_of_bfloat16_take_less_memory(tmp_path):
    init_mesh(device_type='cpu')
    try:
        full, half = (peak_of(tmp_path, '--dtype', dtype) for dtype in ('float32', 'bfloat16'))
    finally:
        torch.distributed.destroy_process_group()
    assert 0.4 * full < half < 0.62 * full  # norms and the loss are in float32


def test_a_rank_uses_the_device_that_its_mesh_has_chosen(tmp_path, monkeypatch):
    """Before the mesh, the current device is the first one on all ranks."""
    config = options_of(tmp_path)
    chosen = [torch.device('cpu', 0)]

    class Chosen(Exception):
        pass

    def mesh(*sizes, device_type):
        chosen.append(torch.device(device_type, 1))
        return SimpleNamespace(get_local_rank=lambda axis: 0)

    def first_use(value, device):
        raise Chosen(device)

    monkeypatch.setattr(Config, 'device', property(lambda self: chosen[-1]))
    monkeypatch.setattr(train_gpt, 'init_mesh', mesh)
    monkeypatch.setattr(train_gpt, 'from_first_rank', first_use)
    with pytest.raises(Chosen, match='cpu:1'):
        train_gpt.train(config, {})


@pytest.mark.slow
def test_samples_are_divided_by_the_micro_batches_of_a_plan(tmp_path, monkeypatch):
    """A plan may choose another size than the options have."""
    config = options_of(tmp_path, '--micro-batch-size', 1)
    predict_plan = train_gpt.predict
    opened = []

    def predict_four(config, *args):
        return predict_plan(replace(config, micro_batch_size=4), *args)

    def open_data(config):
        opened.append(config.micro_batch_size)
        return TokenFiles(config)

    monkeypatch.setattr(train_gpt, 'predict', predict_four)
    monkeypatch.setattr(train_gpt, 'open_data', open_data)
    train_gpt.train(config, {'name': 'a-name'})
    assert opened == [4]
