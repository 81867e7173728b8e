"""Write the table of import layers into the design page: which file imports from which.

A file's layer is one above the highest layer that it imports from. Run it after a change of
imports: ``python docs/layers.py``.
"""

import ast
import re
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / 'torchgpipe'
PAGE = Path(__file__).resolve().parent / 'design.md'
TABLE = re.compile(r'(?<=<!-- import layers -->\n).*?(?=<!-- end of import layers -->)', re.S)


def module(path: Path) -> str:
    """Return a file's name within the package: ``skip.portal``, and ``skip`` for a folder's."""
    parts = path.relative_to(PACKAGE.parent).with_suffix('').parts
    return '.'.join(parts).removesuffix('.__init__').removeprefix('torchgpipe.')


FILES = {module(path): path for path in sorted(PACKAGE.glob('**/*.py'))}


@cache
def imports(path: Path) -> set[str]:
    """Return the modules of the package that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or '').startswith('torchgpipe'):
            base = node.module.partition('.')[2]
            names = {f'{base}.{alias.name}'.lstrip('.') for alias in node.names}
            found |= {name if name in FILES else base or 'torchgpipe' for name in names}
        elif isinstance(node, ast.Import):
            found |= {
                alias.name.partition('.')[2]
                for alias in node.names
                if alias.name.startswith('torchgpipe')
            }
        assert not getattr(node, 'level', 0), f'a relative import in {path}'
    return found & set(FILES)


def layers(graph: dict[str, set[str]]) -> dict[str, int]:
    """Return the layer of each module.

    >>> layers({'a': {'b', 'c'}, 'b': {'c'}, 'c': set()})
    {'a': 2, 'b': 1, 'c': 0}
    >>> layers({'a': {'b'}, 'b': {'a'}})
    Traceback (most recent call last):
    ValueError: a cycle of imports: a, b, a
    """

    @cache
    def layer(name: str) -> int:
        return max((climb(name, below) + 1 for below in graph[name]), default=0)

    path: list[str] = []

    def climb(name: str, below: str) -> int:
        path.append(name)
        if below in path:
            cycle = [*path[path.index(below) :], below]
            raise ValueError('a cycle of imports: ' + ', '.join(cycle))
        result = layer(below)
        path.pop()
        return result

    return {name: layer(name) for name in graph}


def graph() -> dict[str, set[str]]:
    """Return the modules of the package that each module imports."""
    return {name: imports(path) - {name} for name, path in FILES.items()}


def table() -> str:
    """Return the table, highest layer first, with the first line of each file."""
    found = layers(graph())
    rows = ['| layer | files |', '|---|---|']
    for k in sorted(set(found.values()), reverse=True):
        names = sorted(name for name, layer in found.items() if layer == k and '__' not in name)
        cells = [f'`{name}`: {idea(FILES[name])}' for name in names]
        rows.append(f'| {k} | ' + '<br>'.join(cells) + ' |')
    return '\n'.join(rows) + '\n'


def idea(path: Path) -> str:
    """Return the first line of a file's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring, path
    return docstring.splitlines()[0].rstrip('.')


if __name__ == '__main__':
    PAGE.write_text(TABLE.sub(lambda match: table(), PAGE.read_text()))
