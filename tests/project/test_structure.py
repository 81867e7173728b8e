"""The structure of the package: names of files and classes, and the share of imports."""

import ast
import io
import tokenize
from collections import Counter

from tests.devices import cpu_only
from tests.project.test_layers import layers

pytestmark = cpu_only('it reads files')

PATHS = [*layers.FILES.values()]

#: Names of classes, functions or modules that have a docstring.
DOCUMENTED = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef

#: Tokens that are not code.
OTHERS = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


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
    tree = ast.parse(source)
    code = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in OTHERS
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            code -= {*range(node.body[0].lineno, node.body[0].end_lineno + 1)}
    imports = {
        line
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for line in range(node.lineno, node.end_lineno + 1)
    }
    return len(code), len(imports)


def test_no_two_files_have_one_name():
    assert not repeated(path.stem for path in PATHS if not path.stem.startswith('__'))


def test_no_two_classes_have_one_name():
    assert not repeated(
        node.name.lstrip('_')
        for path in PATHS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )


def test_imports_are_a_small_part_of_the_code():
    code, imports = map(sum, zip(*(lines_of(path.read_text()) for path in PATHS)))
    assert imports <= 0.08 * code
