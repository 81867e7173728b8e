"""The documentation's pages of benchmarks, made of the results that are kept."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from benchmarks.harness.costs import COSTS, costs_page
from benchmarks.harness.options import SIMULATED
from benchmarks.harness.published import EXPERIMENTS
from benchmarks.harness.report import Part, Section, describe, written
from benchmarks.harness.tables import (
    experiment_parts,
    is_accelerated,
    is_simulated,
    prediction_parts,
)

RESULTS = Path(__file__).parents[1] / 'results'
PAGE = RESULTS.parents[1] / 'docs/benchmarks.md'

START = """# Benchmarks

<!-- Written by `python -m benchmarks page` from benchmarks/results; do not edit. -->

These commands repeat the tables that torchgpipe 0.0.7 and the GPipe paper published, with one
command per table. `python -m benchmarks list` lists the commands, and
`python -m benchmarks COMMAND --help` shows the options of a command. For a small machine,
`--scale 0.01` uses a hundredth of the batch size and smaller images. `--devices sim` simulates
four accelerators, and needs a source checkout and a C++ compiler. See
[the simulated backend](design.md#how-to-test-without-gpus).

The tables show published figures next to measured ones. The published figures were measured on
Tesla P40 GPUs (torchgpipe 0.0.7) or come from the
[GPipe paper](https://arxiv.org/abs/1811.06965). For all other figures, the line above the table
names the command, the versions, the machine and the date of the measurement. The results are
stored in `benchmarks/results`. The page has no entries for experiments that were not run.

## Models

`benchmarks/models` contains the models of the tables as sequential models: ResNet-101,
AmoebaNet-D and U-Net. The trainer and the tests have transformers from the literature, without
dropout. Each transformer is written in the usual way, and `layers(model)` returns its layers in
sequence for `GPipe`. Its `tensor_plan()` specifies how
[`DistributedGPipe`](guide/processes.md) splits it over processes:

| file | models and number of parameters | weights |
| --- | --- | --- |
| `torchgpipe/trainer/gpt.py` | GPT-2: 124,439,808 to 1,557,611,200; minGPT | [1] |
| `tests/benchmarks/models/vit.py` | ViT-B/16: 86,567,656; ViT-L/16: 304,326,632 | [2] |
| `tests/benchmarks/models/gptj.py` | GPT-J: 6,050,882,784 | weights of transformers, unchanged |

[1] `from_hugging_face` converts weights of transformers. [2] `from_timm` converts weights of timm.
Parameters have the same names in these libraries, but a different order: all queries, then all
keys, then all values. Here they are ordered by heads, so that each process has whole heads.
"""


def make_page(modules: Sequence[ModuleType]) -> str:
    """Write the page: published tables, then the sections of those modules that have one."""
    texts = [START]
    for experiment in EXPERIMENTS.values():
        texts.append(_experiment(experiment.name, experiment.title))
    for section in sections_of(modules):
        texts.append(_section(section))
    return '\n'.join(filter(None, texts))


def sections_of(modules: Sequence[ModuleType]) -> list[Section]:
    """Return the sections of those modules that have some."""
    sections: list[Section] = []
    for module in modules:
        sections += getattr(module, 'SECTIONS', [])
    return sections


def make_costs(modules: Sequence[ModuleType]) -> str:
    """Write the page on costs and gains of wrapping."""
    stored = {name: _stored(name) for name in ('overhead', 'concurrency', 'schedules', 'scaling')}
    by_name = {section.name: section for section in sections_of(modules)}
    shares = by_name['concurrency'].parts(stored['concurrency']['results'])
    return costs_page(stored, shares)


def _stored(name: str) -> dict[str, Any]:
    """Return the stored results of a name with their machine, if there are any."""
    path = RESULTS / f'{name}.json'
    stored: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return stored


def _text(title: str, command: str, computer: str, parts: Sequence[Part], name: str) -> str:
    """Return a section: its title, the measurement, text and tables, and its pictures."""
    pictures = [f'![{title}](../benchmarks/results/{path})' for path in _pictures(name)]
    measured = f'`{command}`, {computer}:'
    return '\n\n'.join([f'## {title}', measured, *map(written, parts), *pictures]) + '\n'


def _experiment(name: str, title: str) -> str:
    """Return the section on a published table, if it has results."""
    stored = _stored(name)
    if not stored:
        return ''
    summary = stored['results']
    parts = [*experiment_parts(summary), *_prediction(name)]
    computer = describe(stored['machine'], is_accelerated(summary))
    return _text(title, _command(name, summary), computer, parts, name)


def _prediction(name: str) -> list[Part]:
    """Return the text on the predictions of an experiment, if they are stored."""
    stored = _stored(f'{name}-predicted')
    if not stored:
        return []
    summary = stored['results']
    command = f'python -m benchmarks {name} --predict --seed {summary["seed"]}'
    if summary['scale'] < 1:
        command += f' --scale {summary["scale"]}'
    computer = describe(stored['machine'], summary['device'] != 'cpu')
    return [f'Predicted by `{command}`, {computer}:', *prediction_parts(summary)]


def _section(section: Section) -> str:
    """Return a section without a published table, if it has results."""
    stored = _stored(section.name)
    if not stored:
        return ''
    # Stored results of earlier versions have no options.
    computer = describe(stored['machine'], stored.get('accelerated', False))
    command = ' '.join(['python -m benchmarks', section.name, *stored.get('options', [])])
    parts = [*section.parts(stored['results'])]
    return _text(section.title, command, computer, parts, section.name)


def _command(name: str, summary: dict[str, Any]) -> str:
    """Return the command that measured an experiment."""
    words = [f'python -m benchmarks {name}']
    for option in ('scale', 'epochs', 'skip_epochs', 'dtype', 'seed'):
        words.append(f'--{option.replace("_", "-")} {summary[option]}')
    if summary['compile']:
        words.append('--compile')
    if summary.get('schedule'):
        words.append(f'--schedule {summary["schedule"]}')
    if is_simulated(summary):
        words.append(f'--devices {SIMULATED}')
    settings = summary['settings']
    if any('images' in result for result in settings):
        words.append('--data DIR')
    names = [result['setting'] for result in settings]
    if names != [setting.name for setting in EXPERIMENTS[name].settings]:
        words += [f'--setting {setting}' for setting in names]
    return ' '.join(words)


def _pictures(name: str) -> list[str]:
    """Return the pictures of an experiment, without those of one with a longer name."""
    names = [path.stem for path in RESULTS.glob('*.json') if not path.stem.endswith('-predicted')]
    pictures = []
    for path in sorted(RESULTS.glob(f'{name}*.svg')):
        owner = max((other for other in names if path.stem.startswith(other)), key=len)
        if owner == name:
            pictures.append(path.name)
    return pictures


@click.command(hidden=True)
@click.pass_obj
def page(modules: Sequence[ModuleType]) -> None:
    """Write the pages of the documentation from benchmarks/results."""
    pages = {PAGE: make_page(modules), COSTS: make_costs(modules)}
    for module in modules:
        for path, make in getattr(module, 'PAGES', {}).items():
            pages[path] = make()
    for path, text in pages.items():
        path.write_text(text)
        click.echo(path)
