"""Which models of libraries are converted to sequential ones, by one line, and trained?"""

import json
import multiprocessing
import warnings
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from textwrap import shorten
from typing import Any

import click
import torch
from tqdm import tqdm

from benchmarks.experiments.zoo.convert import Case, converted, reason
from benchmarks.experiments.zoo.libraries import LIBRARIES
from benchmarks.experiments.zoo.train import differences, without_dropout
from benchmarks.harness.memory import memory_limit
from benchmarks.harness.options import choices_option, count_option
from benchmarks.harness.report import Part, Rows, Section, write_json
from torchgpipe.trainer.files import output_folder

#: How processes start: forked from one that has imported the libraries, which takes seconds.
METHOD = 'forkserver'
#: Modules that the first checkpoint of a process imports.
IMPORTED = ['torch._dynamo']
#: Seconds that a model may take.
PATIENCE = 600

MEANING = (
    'The models have their default configuration and no checkpoint. Each is called as in its '
    'documentation, in float32, with a sample of two. Brackets show the settings that are not '
    'defaults and make the model small enough. The columns are:\n\n'
    '- s: seconds of to_sequential, including its comparison of the layers with the model, on one '
    'core that other programs used as well.\n'
    '- largest leaf: the largest module that was not traced into, except layers of PyTorch, with '
    'its share of the parameters.\n'
    '- training differs by: the largest difference of a parameter, a buffer or a gradient between '
    'pipeline and model, relative to a typical tensor. Both take two steps of AdamW on the same '
    'micro-batches, in float64 and without dropout. The pipelines have 2 and 3 partitions, and '
    'run the plain call and 1F1B. Micro-batches have one to five samples (with batch '
    'normalization, two to five).\n'
    '- with: the lines that errors named, one after the other.'
)


@click.command()
@choices_option('--library', 'libraries', LIBRARIES)
@click.option('--model', 'models', multiple=True, help='Some of these only, by name.')
@click.option('--missing', is_flag=True, help='Those only that the JSON file has no row of.')
@click.option('--train', is_flag=True, help='Train them in pipelines as well.')
@count_option('--patience', PATIENCE, 'Seconds that a model may take.')
@click.option(
    '--output',
    default='results',
    metavar='DIR',
    help='The folder of the JSON file. Its rows of other models stay, but not those of another '
    'version of the library.',
)
def zoo(
    libraries: tuple[str, ...],
    models: tuple[str, ...],
    missing: bool,
    train: bool,
    patience: int,
    output: str,
) -> None:
    """Convert models of libraries to sequential ones, each in a process of its own.

    Weights are random. If a conversion raises, the line that the error names is tried. Trainings
    in 2 and 3 partitions, by the plain call and by 1F1B, are compared with the model itself on the
    same micro-batches. Each takes two steps of AdamW in float64.
    """
    folder = output_folder(output)
    results = _stored(folder / 'zoo.json')
    available: list[str] = []
    preloaded = [__name__, *IMPORTED]
    for library in libraries:
        version = _version(library)
        names = LIBRARIES[library].names()
        available += names
        preloaded += LIBRARIES[library].modules
        if results['libraries'].get(library, {}).get('version') != version:
            results['rows'][library] = {}
        results['libraries'][library] = {'version': version, 'models': len(names)}
    _check_names(models, available)

    multiprocessing.get_context(METHOD).set_forkserver_preload(preloaded)
    for library in libraries:
        rows = results['rows'][library]
        bar = tqdm(LIBRARIES[library].names(), desc=library, unit='model', leave=False)
        for name in bar:
            is_chosen = name in models or not models
            if is_chosen and not (missing and name in rows):
                bar.set_postfix_str(name)
                row = in_process(LIBRARIES[library].case, name, train, patience)
                if not train and 'training' in rows.get(name, {}):
                    row['training'] = rows[name]['training']
                rows[name] = row
                write_json(folder, 'zoo', results)
    SECTION.publish(results, folder)


def _check_names(models: Sequence[str], available: Sequence[str]) -> None:
    """Raise an error for the first unknown name, with known names like it."""
    for name in models:
        if name not in available:
            close = ' or '.join(map(repr, get_close_matches(name, available)))
            raise click.BadParameter(
                f'{name!r} is not a model of these libraries'
                + (f'; did you mean {close}?' if close else ''),
                param_hint="'--model'",
            )


def _stored(path: Path) -> dict[str, Any]:
    """Return the results of earlier runs."""
    if not path.exists():
        return {'libraries': {}, 'rows': {}}
    results: dict[str, Any] = json.loads(path.read_text())['results']
    return results


def _version(library: str) -> str:
    """Import a library, and return its version."""
    try:
        return str([import_module(module) for module in LIBRARIES[library].modules][0].__version__)
    except ImportError as error:
        raise click.ClickException(f'--library {library} takes that package: {error}') from None


def in_process(
    case: Callable[[str], Case], name: str, train: bool, patience: int
) -> dict[str, Any]:
    """Return the results of a model, run in another process, or the reason why there are none."""
    context = multiprocessing.get_context(METHOD)
    parent, child = context.Pipe(duplex=False)
    process = context.Process(target=_find, args=(child, case, name, train), daemon=True)
    process.start()
    child.close()
    row: dict[str, Any] = {}
    try:
        while parent.poll(patience):
            row.update(parent.recv())
        row['reason'] = f'it takes more than {patience} s'
    except EOFError:
        process.join()
        if process.exitcode:
            row['reason'] = f'its process ended by {process.exitcode}'
    finally:
        process.kill()
        process.join()
    return row


def _find(pipe: Connection, make: Callable[[str], Case], name: str, train: bool) -> None:
    """Convert and train one model, and send each result as soon as it is found."""
    warnings.simplefilter('ignore')
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with memory_limit():
        try:
            case = make(name)
            conversion = converted(case)
            case, leaves = conversion.case, conversion.leaves
            pipe.send({'note': case.note, **conversion.row()})
            del conversion
            if train:
                without_dropout(case.model)
                pipe.send({'training': differences(case, leaves)})
        except Exception as error:
            pipe.send({'reason': reason(error)})


def _parts(results: dict[str, Any]) -> list[Part]:
    """Return the number of converted models, and a table of each library."""
    parts: list[Part] = [MEANING]
    for library, rows in results['rows'].items():
        if not rows:
            continue
        about = results['libraries'][library]
        text = f'{library} {about["version"]}, {len(rows)} of {about["models"]} models: '
        parts += [text + _summary([*rows.values()]), _table(rows)]
    return parts


def _summary(rows: list[dict[str, Any]]) -> str:
    converted_rows = [row for row in rows if 'layers' in row]
    by_itself = sum(not row['lines'] for row in converted_rows)
    text = (
        f'{by_itself} ({by_itself / len(rows):.0%}) are converted as they are, '
        f'{len(converted_rows) - by_itself} with the line that the error names, and '
        f'{len(rows) - len(converted_rows)} are not.'
    )
    trained = [max(row['training'].values()) for row in rows if 'training' in row]
    if trained:
        text += (
            f' {len(trained)} were trained, and differ by at most {max(trained):.0e} of a '
            'typical tensor.'
        )
    return text


def _table(rows: dict[str, dict[str, Any]]) -> Rows:
    return ['model', 'layers', 'skips', 's', 'largest leaf', 'training differs by', 'with'], [
        _row(name, rows[name]) for name in sorted(rows, key=str.lower)
    ]


def _row(name: str, row: dict[str, Any]) -> list[str]:
    name += f' ({row["note"]})' if row.get('note') else ''
    if 'layers' not in row:
        return [name, *[''] * 5, shortened(f'not converted: {row["reason"]}', 200)]
    largest = row['largest']
    leaf = f'{largest["kind"]}, {largest["share"]:.0%}' if largest else '—'
    return [
        name,
        str(row['layers']),
        str(row['skips']),
        f'{row["seconds"]:.0f}',
        leaf,
        _training(row),
        ', '.join(row['lines']),
    ]


def _training(row: dict[str, Any]) -> str:
    if 'training' in row:
        return f'{max(row["training"].values()):.0e}'
    return shortened(row.get('reason', ''), 80)


def shortened(text: str, length: int) -> str:
    """Return a text as it stands in a table, whose columns are separated by bars.

    >>> shortened('Tensor | None', 10)
    'Tensor / …'
    """
    return shorten(text.replace('|', '/'), length, placeholder=' …')


SECTION = Section('Models of other libraries', 'zoo', _parts)
COMMANDS = [zoo]
SECTIONS = [SECTION]
