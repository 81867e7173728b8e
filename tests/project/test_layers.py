"""Import layers: a file imports only from layers below its own, as documented."""

import functools
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import torchgpipe

ROOT = Path(torchgpipe.__file__).parent.parent

spec = importlib.util.spec_from_file_location('layers', ROOT / 'docs/layers.py')
layers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(layers)

graph = functools.cache(layers.graph)

#: A package, and one that it must not import: the order that the architecture decides.
RULES = [
    ('skip', 'balance'),
    ('skip', 'gpipe'),
    ('engine', 'gpipe'),
    ('engine', 'balance'),
    ('engine', 'legacy'),
    ('balance', 'gpipe'),
    ('balance', 'legacy'),
    ('skip', 'legacy'),
    ('schedule', 'engine'),
    ('schedule', 'timeline'),
    ('engine', 'timeline'),
    ('gpipe', 'timeline'),
    ('engine', 'plan'),
    ('plan', 'gpipe'),
    ('plan', 'balance'),
    ('schedule', 'balance'),
    ('schedule', 'plan'),
    ('engine', 'losses'),
    ('engine', 'sequential'),
    ('engine', 'model'),
    ('losses', 'sequential'),
    ('distributed', 'dry_run'),
    *((room, 'trainer') for room in ('distributed', 'dry_run', 'gpipe', 'plan', 'timeline')),
]


def test_no_import_goes_up_or_in_a_circle():
    assert layers.layers(layers.graph())['gpipe'] > 0


def test_a_circle_would_be_found():
    graph = layers.graph()
    graph['engine.streams'] = {'engine.run'}
    with pytest.raises(ValueError, match='a cycle of imports: .*engine.streams.*engine.run'):
        layers.layers(graph)


def test_no_two_folders_import_each_other():
    """Nor more of them in a circle."""
    folders = {name.partition('.')[0] for name in layers.graph()}
    graph = {folder: set() for folder in folders}
    for name, imported in layers.graph().items():
        own = name.partition('.')[0]
        graph[own] |= {other.partition('.')[0] for other in imported} - {own}
    assert layers.layers(graph)['skip'] < layers.layers(graph)['engine']


def within(name, package):
    """Return whether a module is a package, or in it."""
    return name == package or name.startswith(package + '.')


def test_sharded_layers_stand_beside_the_rest():
    """On private names, kinds of devices, the context, and values; many processes on them."""
    for name, imported in layers.graph().items():
        if any(within(name, user) for user in ('distributed', 'dry_run', 'trainer')):
            continue
        others = {other for other in imported if within(other, 'shard') != within(name, 'shard')}
        below = {'base.context', 'base.devices', 'base.private', 'base.structure'}
        assert others <= (below if within(name, 'shard') else set()), name


def test_packages_keep_their_order():
    for above, below in RULES:
        for name, imported in graph().items():
            if within(name, above):
                assert not any(within(other, below) for other in imported), name


def test_the_table_in_the_documentation_is_up_to_date():
    """After a change of imports: python docs/layers.py."""
    assert layers.TABLE.search(layers.PAGE.read_text())[0] == layers.table()


def test_every_file_says_its_idea_in_its_first_line():
    for path in layers.FILES.values():
        assert path.read_text().startswith('"""'), path


#: Programs, for forks of one process that has imported torch.
MODULES = ['torchgpipe', 'torchgpipe.timeline', 'torchgpipe.shard']
IMPORTS = 'import sys; before = set(sys.modules); ' + ''.join(
    f'import {module}; new = set(sys.modules) - before; '
    'print({name.partition(".")[0] for name in new} - sys.stdlib_module_names '
    '- {"torchgpipe", "torch"}, *sorted(new & {"torch.distributed", '
    '"torchgpipe.timeline", "torchgpipe.shard"})); '
    for module in MODULES
)
PLAIN_CALL = (
    'import sys; from torch import nn, ones; from torchgpipe import GPipe; '
    'model = GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], '
    "devices=['cpu:0', 'cpu:1'], chunks=2); before = set(sys.modules); "
    'model(ones(4, 2)).sum().backward(); '
    "print(len(set(sys.modules) - before), 'torch._dynamo' in before, "
    "len([name for name in before if name.partition('.')[0] == 'torchgpipe']))"
)
NAMES = [
    'skip.portal.PortalBlue',
    'worker.spawn_workers',
    'copy.Copy',
    'microbatch.scatter',
    'skip.tracker.SkipTrackerThroughPortals',
    'skip.namespace.Namespace',
    'balance.blockpartition.solve',
    'balance.profile.layerwise_sandbox',
    'balance.profile',
    'sequential.to_sequential',
]
USES = (
    (
        'import torchgpipe; from importlib.util import find_spec; '
        'assert find_spec("torchgpipe.balance.profile"); '
    )
    + ''.join(f'assert "{name}".endswith(torchgpipe.{name}.__name__); ' for name in NAMES)
    + (
        'assert not hasattr(torchgpipe, "gradients"); '
        'import torchgpipe.balance.blockpartition, torchgpipe.balance.profile; '
        'assert callable(torchgpipe.balance.profile); '
        'import torchgpipe.stream, torchgpipe.engine.streams as new; '
        'assert torchgpipe.stream is new and new.__spec__.name == new.__name__'
    )
)
FORKS = """
import os, sys, torch
for code in sys.argv[1:]:
    if os.fork() == 0:
        exec(code, {})
        sys.stdout.flush()
        os._exit(0)
    assert os.wait()[1] == 0
"""


@pytest.mark.slow
def test_importing_needs_torch_only_and_a_plain_call_no_compiler():
    """The other modules are imported when they are used."""
    *imports, call = subprocess.run(
        [sys.executable, '-c', FORKS, IMPORTS, PLAIN_CALL, USES],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    ).stdout.splitlines()
    assert imports == [
        'set()',
        'set() torchgpipe.timeline',
        'set() torchgpipe.shard torchgpipe.timeline',
    ]
    new, compiler, number = call.split()
    assert (new, compiler) == ('0', 'False') and int(number) <= 46


def test_the_changelog_is_up_to_date():
    newest = re.search(r'^## ([\d.]+) \(\d', (ROOT / 'docs/changelog.md').read_text(), re.M)
    assert newest.group(1) == torchgpipe.__version__


NOTE = re.compile(r'\[Note: ([^\]]+)\]')


def test_notes_are_where_the_design_page_says():
    """Cited notes exist."""
    text = re.sub(r'\s*\n\s*(# )?', ' ', layers.PAGE.read_text().partition('| note | file |')[2])
    rows = re.findall(r'\| ([^|]+) \| `([\w/.]+)` \|', text)
    notes = {note: path for titles, path in rows for note in titles.split('; ')}
    for note, path in notes.items():
        assert note in cited(layers.PACKAGE / path), note
    found = {note for path in layers.FILES.values() for note in cited(path)}
    assert found == set(notes)


def cited(path):
    """Return the titles of notes in a file."""
    return {re.sub(r'\s+(# )?', ' ', note) for note in NOTE.findall(path.read_text())}


def test_the_code_cites_each_rule_of_the_engine():
    """Each one is in the file that the table of the design page names, and nowhere else."""
    rules = layers.PAGE.read_text().partition('## Rules of the engine')[2].partition('\n## ')[0]
    table = re.findall(r'^\| (\d+) \| .* \| `(.*)` \|$', rules, re.M)
    assert [int(number) for number, _ in table] == [*range(1, len(table) + 1)] and len(table) > 10
    in_code = [
        (number, str(path.relative_to(layers.PACKAGE)))
        for path in layers.FILES.values()
        for number in re.findall(r'# Rule (\d+): ', path.read_text())
    ]
    assert sorted(in_code) == sorted(table)
    for path in layers.FILES.values():
        cited = {*re.findall(r'\brule (\d+)\b', path.read_text())}
        assert cited <= {number for number, _ in table}, path
