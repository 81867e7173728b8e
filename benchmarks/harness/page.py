"""The documentation's pages of benchmarks, made of the results that are kept."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import click

from benchmarks.harness.costs import COSTS, costs_page
from benchmarks.harness.options import SIMULATED
from benchmarks.harness.published import EXPERIMENTS
from benchmarks.harness.report import Rows, describe, markdown
from benchmarks.harness.tables import (
    experiment_rows,
    is_accelerated,
    is_simulated,
    notes,
    partition_rows,
    prediction_notes,
    prediction_rows,
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
AmoebaNet-D and U-Net. It also contains transformers from the literature, without dropout. Each
transformer is written in the usual way, and `layers(model)` returns its layers in sequence for
`GPipe`. Its `tensor_plan()` specifies how [`DistributedGPipe`](guide/processes.md) splits it over
processes:

| file | models and number of parameters | weights |
| --- | --- | --- |
| `gpt.py` | GPT-2: 124,439,808, 354,823,168, 774,030,080, 1,557,611,200; minGPT | [1] |
| `vit.py` | ViT-B/16: 86,567,656; ViT-L/16: 304,326,632 | [2] |
| `gptj.py` | GPT-J: 6,050,882,784 | weights of transformers, unchanged |

[1] `from_hugging_face` converts weights of transformers. [2] `from_timm` converts weights of timm.
Parameters have the same names in these libraries, but a different order: all queries, then all
keys, then all values. Here they are ordered by heads, so that each process has whole heads.
"""


class Section(NamedTuple):
    """The page's section on an experiment without a published table.

    Attributes:
        title: Its heading.
        name: The command, and the file of its results.
        parts: Makes text and tables of the results.
    """

    title: str
    name: str
    parts: Callable[[Any], Sequence[str | Rows]]


def make_page(modules: Sequence[ModuleType]) -> str:
    """Write the page: published tables, then the sections of those modules that have one."""
    tables = [
        _experiment(name, title)
        for name, title in (
            (experiment.name, experiment.title) for experiment in EXPERIMENTS.values()
        )
    ]
    sections = [_other(section) for section in sections_of(modules)]
    return '\n'.join([START, *filter(None, [*tables, *sections])])


def sections_of(modules: Sequence[ModuleType]) -> list[Section]:
    """Return the sections of those modules that have some."""
    sections: list[Section] = []
    for module in modules:
        sections += getattr(module, 'SECTIONS', [])
    return sections


def make_costs(modules: Sequence[ModuleType]) -> str:
    """Write the page on costs and gains of wrapping."""
    kept = {name: _kept(name) for name in ('overhead', 'concurrency', 'schedules', 'scaling')}
    by_name = {section.name: section for section in sections_of(modules)}
    shares = by_name['concurrency'].parts(kept['concurrency']['results'])
    return costs_page(kept, shares)


def _kept(name: str) -> dict[str, Any]:
    path = RESULTS / f'{name}.json'
    kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return kept


def _section(
    title: str, command: str, kept: dict[str, Any], *parts: str, accelerated: bool = False
) -> str:
    where = f'`{command}`, {describe(kept["machine"], accelerated)}:'
    return '\n\n'.join([f'## {title}', where, *parts]) + '\n'


def _experiment(name: str, title: str) -> str:
    kept = _kept(name)
    if not kept:
        return ''
    summary = kept['results']
    parts = [markdown(experiment_rows(summary)), *notes(summary)]
    if partition_rows(summary)[1]:
        parts.insert(1, markdown(partition_rows(summary)))
    parts += _prediction(name)
    parts += [_picture(title, picture) for picture in _pictures(name)]
    return _section(
        title, _command(name, summary), kept, *parts, accelerated=is_accelerated(summary)
    )


def _prediction(name: str) -> list[str]:
    """Return the text on the predictions of an experiment, if they are stored."""
    kept = _kept(f'{name}-predicted')
    if not kept:
        return []
    summary = kept['results']
    command = f'python -m benchmarks {name} --predict --seed {summary["seed"]}'
    if summary['scale'] < 1:
        command += f' --scale {summary["scale"]}'
    where = describe(kept['machine'], summary['device'] != 'cpu')
    return [
        f'Predicted by `{command}`, {where}:',
        markdown(prediction_rows(summary)),
        *prediction_notes(summary),
    ]


def _other(section: Section) -> str:
    kept = _kept(section.name)
    if not kept:
        return ''
    parts = [
        part if isinstance(part, str) else markdown(part)
        for part in section.parts(kept['results'])
    ]
    parts += [_picture(section.title, name) for name in _pictures(section.name)]
    return _section(
        section.title,
        f'python -m benchmarks {section.name}',
        kept,
        *parts,
        accelerated=bool(kept['machine']['gpus']),
    )


def _command(name: str, summary: dict[str, Any]) -> str:
    options = [
        f'--{option.replace("_", "-")} {summary[option]}'
        for option in ('scale', 'epochs', 'skip_epochs', 'dtype', 'seed')
    ]
    if summary['compile']:
        options.append('--compile')
    if summary.get('schedule'):
        options.append(f'--schedule {summary["schedule"]}')
    if is_simulated(summary):
        options.append(f'--devices {SIMULATED}')
    if any('images' in result for result in summary['settings']):
        options.append('--data DIR')
    settings = [result['setting'] for result in summary['settings']]
    if settings != [setting.name for setting in EXPERIMENTS[name].settings]:
        options += [f'--setting {setting}' for setting in settings]
    return ' '.join([f'python -m benchmarks {name}', *options])


def _pictures(name: str) -> list[str]:
    """Return the pictures of an experiment, without those of one with a longer name."""
    names = [path.stem for path in RESULTS.glob('*.json') if not path.stem.endswith('-predicted')]
    pictures = []
    for path in sorted(RESULTS.glob(f'{name}*.svg')):
        owner = max((other for other in names if path.stem.startswith(other)), key=len)
        if owner == name:
            pictures.append(path.name)
    return pictures


def _picture(title: str, name: str) -> str:
    return f'![{title}](../benchmarks/results/{name})'


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
