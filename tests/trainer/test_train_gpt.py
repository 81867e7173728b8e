"""The trainer of a GPT: it learns as a plain loop does, on any mesh, and resumes exactly."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from math import cos, pi
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.harness.memory import peak_of_activations
from tests.trainer import killing
from torchgpipe.base.devices import CPU
from torchgpipe.distributed import DistributedGPipe, init_mesh
from torchgpipe.plan import MACHINES
from torchgpipe.trainer import command, planning, train_gpt
from torchgpipe.trainer.config import complete, config_of, option_fields
from torchgpipe.trainer.gpt import GPT, init_gpt2, layers
from torchgpipe.trainer.launch import launch
from torchgpipe.trainer.prediction import predict
from torchgpipe.trainer.processes import is_available
from torchgpipe.trainer.ranks import NOT_FINITE
from torchgpipe.trainer.tokens import TokenFiles, samples_at, starts_of

pytestmark = [pytest.mark.distributed, pytest.mark.skipif(not is_available(), reason='needs gloo')]

ROOT = Path(__file__).parents[2]
COMMAND = sys.executable, '-m', 'torchgpipe.trainer'
#: A tiny model in float64, and short steps.
TINY = (
    '--cpu --n-layer 4 --n-head 2 --n-embd 16 --block-size 8 --dtype float64 '
    '--global-batch-size 16 --steps 6 --generate 0 --eval-interval 3 --eval-batches 3 '
    '--warmup-steps 2'
).split()


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv('OMP_NUM_THREADS', '1')


def options_of(folder, *args):
    """Return the options of the trainer as it checks them."""
    Path(folder).mkdir(exist_ok=True)
    words = [*TINY, '--output', folder, '--log', Path(folder, 'log'), *args]
    with command.train_gpt.make_context('train-gpt', [*map(str, words)]) as context:
        return complete(config_of(context.params))


def lines_of(path):
    return [*map(json.loads, Path(path).read_text().splitlines())]


def launched(folder, *args):
    """Run the trainer in processes that this one starts; return the lines of its log."""
    config = options_of(folder, *args)
    start(command.run_rank, config, None)
    return lines_of(folder / 'log')


def start(run, config, *args):
    """Start ranks that run a function with the options and the description of a training."""
    training = command.check_files(config)
    launch(
        run,
        config,
        training,
        *args,
        world=config.world,
        restarts=config.restarts,
        final=command.FINAL,
    )
    return training


def run_tiny(run, folder, *args):
    """Run the command with the tiny model. A text may have several words; others are one."""
    words = []
    for arg in args:
        words += arg.split() if isinstance(arg, str) else [arg]
    return run(*TINY, '--output', folder, *words)


def assert_same(found, expected):
    """Compare losses, norms and validations of all steps."""
    for key in ('step', 'loss', 'grad_norm', 'val_loss'):
        values, others = ([line.get(key, 0) for line in lines] for lines in (found, expected))
        assert values == pytest.approx(others, rel=1e-9, abs=1e-9), key


def plain_curve(config, steps):
    """Train the unwrapped model by a plain loop."""
    data, sizes = TokenFiles(config), config.sizes
    tokens, val = data.train, data.val
    model = GPT(sizes).double()
    # The initial values that layers of a pipeline have follow from the seed and their numbers.
    model.load_state_dict(plain_values(config))
    decay, rest = (
        [x for x in model.parameters() if (x.dim() > 1) == each] for each in (True, False)
    )
    optimizer = torch.optim.AdamW(
        [{'params': decay, 'weight_decay': 0.1}, {'params': rest, 'weight_decay': 0.0}],
        betas=(0.9, 0.95),
    )
    lines = []
    for k in range(steps):
        x, y = samples_at(config, tokens, starts_of(config, len(tokens), k).flatten(), CPU)
        loss = F.cross_entropy(model(x).transpose(1, 2), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate = (
            1e-3 * (k + 1) / 2
            if k < 2
            else 1e-4 + 9e-4 * (1 + cos(pi * (k - 2) / (config.steps - 3))) / 2
        )
        for group in optimizer.param_groups:
            group['lr'] = rate
        optimizer.step()
        optimizer.zero_grad()
        lines.append({'step': k + 1, 'loss': loss.item(), 'grad_norm': norm.item()})
        if (k + 1) % 3 == 0:
            n = min((len(val) - 1) // config.block_size, 3 * config.global_batch_size)
            pieces = torch.stack(
                [val[k * config.block_size :][: config.block_size + 1] for k in range(n)]
            ).long()
            lines[-1]['val_loss'] = F.cross_entropy(
                model(pieces[:, :-1]).transpose(1, 2), pieces[:, 1:]
            ).item()
    return lines


def plain_values(config):
    """Return the values of a pipeline of one process, by the names of the unwrapped model."""
    with torch.device('meta'):
        module = layers(GPT(config.sizes)).double()
    model = DistributedGPipe(
        module,
        [len(module)],
        mesh=init_mesh(device_type='cpu'),
        init=lambda each: init_gpt2(each, config.sizes.depth),
    )
    torch.distributed.destroy_process_group()
    return {re.sub(r'^\d+\.', '', name): x for name, x in model.state_dict().items()}


def test_it_learns_as_a_plain_loop_does(tmp_path, run):
    code, out, err = run(*TINY, '--output', tmp_path, '--log', tmp_path / 'log')
    assert code == 0, err
    assert_same(lines_of(tmp_path / 'log'), plain_curve(options_of(tmp_path), 6))
    assert out.count('TFLOP/s  ') == 6 and 'validation loss' in out
    assert (tmp_path / 'train-gpt.png').exists() and (tmp_path / 'train-gpt.svg').exists()


def test_a_wrong_option_gets_one_line_before_any_process_starts(run, tmp_path, monkeypatch):
    for args, reason in [
        (['--data', '4', '--global-batch-size', '6'], '6 is not a multiple of --data 4'),
        (['--micro-batch-size', '5'], '--micro-batch-size 5'),
        (['--n-head', '3'], '--n-embd 16 is not a multiple of --n-head 3'),
        (['--tensor', '4'], '--n-head 2 is not a multiple of --tensor 4'),
        (['--pipe', '7'], '7 stages'),
        (['--schedule', 'zb-v', '--pipe', '4'], '8 stages'),
        (['--schedule', 'interleaved'], '--pipe 2 or more'),
        (['--schedule', '2f2b'], "'1f1b'"),
        (['--model', 'gpt2', '--block-size', '2048'], '--block-size 2048 is more than the 1024'),
        (['--model', 'gpt5'], "'gpt2'"),
        (['--steps', '0'], '--steps'),
        (['--text', '/proc/nothing'], '/proc/nothing'),
        (['--tokens', '/proc/nothing'], 'nothing'),
        (['--tokens', '/proc/self'], 'train.bin'),
        (['--text', '/dev/null'], '0 tokens'),
        (['--vocab-size', '99'], 'there is a token 122'),
        (['--text', __file__, '--mock-data'], 'exclude each other'),
        (['--block-size', '2000'], '--block-size 2000 takes 4000 and 2001'),
        (['--resume'], '--save FOLDER'),
        (['--restarts', '1'], '--save FOLDER'),
        (['--save', '/proc/nothing'], '/proc/nothing'),
        (['--output', '/proc/nothing'], 'nothing'),
        (['--log-samples'], '--log FILE'),
        (['--log', '/proc/nothing/log'], '/proc/nothing'),
        (['--offload', '--plan', 'auto'], '--offload is without --plan'),
        (['--tokenizer', 'gpt2'], '--tokenizer is for --dataset'),
        (['--dataset', '/proc/nothing', '--mock-data'], 'exclude each other'),
        (['--dtype', 'int8'], "'bfloat16'"),
    ]:
        monkeypatch.setattr(command, 'launch', None)
        monkeypatch.setattr(command, 'train', None)
        code, out, err = run(*TINY, '--output', tmp_path, *args)
        assert code == 2 and not out
        assert reason in err and err.startswith('Error: ') and err.count('\n') == 1


def test_the_guide_has_a_word_on_each_option():
    page = (ROOT / 'docs/guide/train-gpt.md').read_text()
    names = ['--' + item.name.replace('_', '-') for item in option_fields()]
    assert [name for name in names if f'`{name}' not in page] == []
    assert '`--no-such-option' not in page


@pytest.mark.slow
def test_a_dry_run_prints_and_draws_the_needs_of_each_rank(run, tmp_path, monkeypatch):
    monkeypatch.setattr(command, 'launch', None)
    monkeypatch.setattr(command, 'train', None)
    mesh = ['--data', '2', '--pipe', '2', '--tensor', '2']
    words = [*TINY, '--output', tmp_path, *mesh, '--dry-run']
    code, out, _ = run(*words)
    assert code == 0 and out.startswith('8 ranks: data 2 × pipe 2 × tensor 2; 8 micro-batches')
    report = json.loads((tmp_path / 'dry-run.json').read_text())
    assert (tmp_path / 'dry-run.png').exists() and len(report['ranks']) == 8
    config = options_of(tmp_path, *mesh)
    module = train_gpt.build_layers(config, config.n_layer)
    whole = sum(x.numel() * x.element_size() for x in module.parameters())
    ranks = [each['parameters'] for each in report['ranks']]
    assert ranks[:4] == ranks[4:] and whole / 4 < max(ranks) < whole
    code, out, _ = run(*words, '--memory', '1KiB')
    assert code == 1 and 'more than the limit of 1.00 KiB' in out


def test_a_plan_chooses_the_mesh_of_a_dry_run(run, tmp_path):
    options = '--plan auto --devices 8 --machine H100 --dtype bfloat16 --dry-run'
    code, out, err = run_tiny(run, tmp_path, options)
    assert code == 0, err
    assert 'slower by' in out and 'the first: compute' in out
    mesh = re.search(r'^8 ranks: data (\d+) × pipe (\d+) × tensor (\d+)', out, re.MULTILINE)
    assert out.splitlines()[2].split()[:3] == [*mesh.groups()]


@pytest.mark.slow
def test_a_plan_chooses_the_mesh_of_a_training(run, tmp_path, monkeypatch):
    """Its losses are those of a plain loop."""
    monkeypatch.setattr(planning, 'measure_machine', lambda device: MACHINES['A100'])
    words = [*TINY, '--output', tmp_path, '--log', tmp_path / 'log']
    code, out, err = run(*words, '--plan', 'auto', '--devices', 2)
    assert code == 0 and 'starting 2 processes' in err and 'slower by' in out, err
    assert_same(lines_of(tmp_path / 'log'), plain_curve(options_of(tmp_path), 6))


def test_a_plan_that_cannot_be_made_is_refused(run, tmp_path):
    for args, reason in [
        (['--devices', 2], '--devices and --machine are for --plan auto'),
        (['--machine', 'H100'], '--devices and --machine are for --plan auto'),
        (['--plan', 'auto', '--machine', 'H100'], '--machine is for --devices'),
        (
            ['--plan', 'auto', '--devices', 2, '--data', 2],
            '--devices chooses --data: leave it out',
        ),
        (
            ['--plan', 'auto', '--devices', 2, '--checkpoint', 'always', '--micro-batch-size', 1],
            '--devices chooses --checkpoint, --micro-batch-size: leave',
        ),
        (
            ['--plan', 'auto', '--devices', 2, '--experts', 2],
            'without --experts, --offload and --chunked-loss',
        ),
        (
            ['--plan', 'auto', '--devices', 2, '--machine', 'H100', '--memory', '1KiB'],
            'no plan for this mesh',
        ),
        (
            ['--plan', 'auto', '--devices', 2, '--machine', 'H1'],
            "'H1' is not one of 'A100', 'H100'",
        ),
    ]:
        code, out, err = run(*TINY, '--output', tmp_path, '--dtype', 'float32', *args)
        assert (code, out) == (2, '') and reason in err


@pytest.mark.slow
def test_a_dry_run_of_each_schedule(run, tmp_path):
    for options in ('interleaved', 'looped-bfs --shard', 'zb-h2', 'zb-v', '1f1b --dtype bfloat16'):
        words = f'--data 2 --pipe 2 --dry-run --schedule {options}'
        code, out, _ = run_tiny(run, tmp_path, words)
        assert code == 0 and out.startswith('4 ranks')


def test_a_dry_run_that_cannot_be_made_gets_one_line(run, tmp_path):
    for args, reason in [
        (['--memory', '80'], "'80' is no size above zero"),
        (['--memory', '0GiB'], 'no size above zero'),
        (['--plan', 'auto'], '--plan measures layers'),
        (['--experts', '4', '--data', '2'], 'a dry run has no values'),
    ]:
        code, out, err = run(*TINY, '--output', tmp_path, '--dry-run', *args)
        assert code == 2 and not out
        assert reason in err and err.startswith('Error: ') and err.count('\n') == 1


def test_a_mesh_fits_its_world(run, tmp_path, monkeypatch):
    monkeypatch.setattr(command, 'train', None)
    for name, value in (('RANK', '0'), ('WORLD_SIZE', '2')):
        monkeypatch.setenv(name, value)
    code, _, err = run(*TINY, '--output', tmp_path, '--data', 4)
    assert code == 2 and 'take 4 processes, but there are 2 of torchrun' in err
    code, _, err = run_tiny(run, tmp_path, '--data 2 --restarts 1 --save', tmp_path / 'saved')
    assert code == 2 and 'run torchrun again, with --resume' in err


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


def mesh_of(data, pipe, tensor):
    return ['--data', data, '--pipe', pipe, '--tensor', tensor]


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
    alone, spread = (
        launched(tmp_path / str(data), '--experts', 4, '--data', data) for data in (1, 2)
    )
    assert_same(spread, alone)


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
    # After and before a save.
    training = start(killing.killed_at_a_step, config, (victim, 2 + victim))
    assert f'rank {victim} ended by signal 9' in capfd.readouterr().err
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


def test_it_stops_before_the_optimizer_uses_values_that_are_not_finite(tmp_path, run):
    code, out, err = run(*TINY, '--output', tmp_path, '--lr', '1e300')
    assert code == NOT_FINITE
    assert re.search(r'^step 2: the loss is nan.* not finite on ranks \[0\]', err)


@pytest.mark.slow
def test_a_folder_of_another_training_is_refused(run, tmp_path):
    save = [*TINY, '--output', tmp_path, '--save', tmp_path / 'saved', '--steps', 1]
    assert run(*save)[0] == 0
    code, _, err = run(*save)
    assert code == 2 and 'has checkpoints already: give --resume' in err
    code, out, err = run(*save, '--resume', '--generate', 5, '--vocab-size', 256)
    assert code == 0 and 'continues after step 1' in out, err  # there is nothing left to do
    code, _, err = run(*save, '--resume', '--n-layer', 5)
    assert code == 2 and "another training's checkpoints (depth 4 there, 5 here)" in err
    (tmp_path / 'saved/training.json').write_text('{"voc')
    code, _, err = run(*save, '--resume')
    assert code == 2 and 'training.json: ' in err and err.count('\n') == 1


def forks(attempt, output):
    """End the server that forks ranks, on the first one, and wait."""
    Path(output, os.environ['RANK']).write_text(str(os.getpid()))
    while len(list(Path(output).glob('[01]'))) < 2:
        time.sleep(0.01)
    if os.environ['RANK'] == '0' and killing.once(output):
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(100)


@pytest.mark.slow
def test_no_rank_outlives_its_attempt(tmp_path):
    with pytest.raises(SystemExit):
        launch(forks, str(tmp_path), world=2)
    for rank in '01':
        path = Path('/proc', (tmp_path / rank).read_text(), 'stat')
        for _ in range(1000):  # It is a zombie for a moment.
            if not path.exists() or ') Z ' in path.read_text():
                break
            time.sleep(0.01)
        else:
            pytest.fail(f'rank {rank} lives on')


@pytest.mark.slow
def test_ranks_end_with_the_process_that_started_them(tmp_path):
    words = [*COMMAND, *TINY, '--data', 2, '--steps', 10**6, '--output', tmp_path]
    process = subprocess.Popen(
        [*map(str, words)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    while b'step     2' not in process.stdout.readline():
        assert process.poll() is None
    process.kill()
    process.communicate(timeout=60)  # until no rank can write any more


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
