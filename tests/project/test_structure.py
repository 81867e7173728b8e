"""The structure of the package: names of files and classes, and the share of imports."""

import ast
from collections import Counter

import pytest

from tests.project.test_layers import layers
from tests.project.test_openness import code_lines, tokens_of

PATHS = [*layers.FILES.values()]


def repeated(names):
    """Return the names that occur several times.

    >>> repeated(['a', 'b', 'a'])
    ['a']
    """
    return [name for name, number in Counter(names).items() if number > 1]


def lines_of(source):
    """Return the numbers of lines of code, and of imports among them.

    >>> lines_of('"A."' + chr(10) + 'import a' + chr(10) + '# b' + chr(10) + 'c = 1')
    (2, 1)
    """
    imports = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for line in range(node.lineno, node.end_lineno + 1)
    }
    return len(code_lines(tokens_of(source))), len(imports)


def test_no_two_files_have_one_name():
    assert not repeated(path.stem for path in PATHS if not path.stem.startswith('__'))


def test_no_two_classes_have_one_name():
    assert not repeated(
        node.name.lstrip('_')
        for path in PATHS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )


@pytest.mark.slow
def test_imports_are_a_small_part_of_the_code():
    code, imports = map(sum, zip(*(lines_of(path.read_text()) for path in PATHS)))
    assert imports <= 0.08 * code
