"""Openness: how densely the code of each folder of the package is written.

Code is open if a line does one thing and a name says it. :data:`BOUNDS` has a line per folder, and
its numbers may only fall: ``python -m tests.project.test_openness`` prints the numbers of today.
"""

import ast
import io
import tokenize
from collections import Counter
from typing import NamedTuple

import pytest

from tests.project.test_layers import layers

#: Identifiers that name nothing.
WORDS = {
    *'alike beside each found given here known looks'.split(),
    *'made others own said them there those told'.split(),
}

COMPREHENSIONS = ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp
FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef
DOCUMENTED = ast.Module, ast.ClassDef, *FUNCTIONS

#: The nodes that count as a branch of their function.
BRANCHES = (
    ast.Assert,
    ast.BoolOp,
    ast.ExceptHandler,
    ast.For,
    ast.If,
    ast.IfExp,
    ast.Match,
    ast.Try,
    ast.While,
    ast.With,
    ast.comprehension,
)

#: Tokens that are no code.
LAYOUT = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}


#: Since Python 3.12, f-strings have tokens within. Here they are one token.
FSTRING_START = getattr(tokenize, 'FSTRING_START', None)
FSTRING_END = getattr(tokenize, 'FSTRING_END', None)


class Counts(NamedTuple):
    """The counts of some files, all of them without docstrings and comments.

    Attributes:
        tokens: The number of Python's tokens.
        per_line: Tokens per line of code, rounded up to a tenth.
        comprehensions: Of lists, sets and dictionaries, and generator expressions.
        nested_comprehensions: Comprehensions that contain another one.
        packed_functions: Functions with four comprehensions or more.
        nested_conditionals: Expressions ``a if b else c`` that contain another one.
        words: Identifiers that name nothing, such as ``each``.
        branching_functions: Functions with more than 15 branches.
    """

    tokens: int
    per_line: float
    comprehensions: int
    nested_comprehensions: int
    packed_functions: int
    nested_conditionals: int
    words: int
    branching_functions: int


#: The largest counts of each folder of the package, in the order of :class:`Counts`. "." has the
#: files outside of folders.
BOUNDS = """
.             10542     6.7      26       0       0       0       0       0
balance         439     6.4       2       0       0       0       0       0
base          11151     7.1      23       0       0       0       2       0
distributed   42217     8.5     152       1       2       0       0       0
dry_run       10741     9.0      76       8       5       0     125       1
engine        42208     7.5     103       0       0       0       0       0
legacy         3619     7.4      11       0       1       0       0       0
model         14684     8.6      51       0       0       0      33       0
plan          41613     8.8     275       0      18       0     275       4
schedule       5683     7.2      19       0       0       0       0       0
sequential    29942     8.5     229       0      16       0     490       4
shard         27836     8.2      72       0       0       0       1       0
skip           3417     6.7       4       0       0       0       0       0
testing        6228     8.5      47       0       1       0      44       0
timeline       5879     9.3      44       0       2       0      18       0
trainer       23300     8.5      52       0       0       0       0       0
"""


def docstring_lines(tree):
    """Return the lines of a file that are in docstrings."""
    lines = set()
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            lines.update(range(docstring.lineno, docstring.end_lineno + 1))
    return lines


def nodes_of(function):
    """Yield the nodes of a function, without the nodes of functions and classes within it."""
    nodes = [*ast.iter_child_nodes(function)]
    while nodes:
        node = nodes.pop()
        yield node
        if not isinstance(node, (ast.ClassDef, *FUNCTIONS)):
            nodes.extend(ast.iter_child_nodes(node))


def contains(node, types):
    """Return whether a node contains another one of these types."""
    return any(isinstance(inner, types) for inner in ast.walk(node) if inner is not node)


def tokens_of(source):
    """Yield the tokens of a file's code, without docstrings and comments."""
    in_docstrings = docstring_lines(ast.parse(source))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT and token.start[0] not in in_docstrings:
            yield token


def code_lines(tokens):
    """Return the lines that some tokens are on."""
    lines = set()
    for token in tokens:
        lines.update(range(token.start[0], token.end[0] + 1))
    return lines


def count_tokens(source, counts):
    """Add the tokens, the lines of code and the words of a file to the counts."""
    tokens = [*tokens_of(source)]
    counts['lines'] += len(code_lines(tokens))
    open_fstrings = 0
    for token in tokens:
        open_fstrings -= token.type == FSTRING_END
        is_in_fstring = open_fstrings > 0
        open_fstrings += token.type == FSTRING_START
        if is_in_fstring or token.type == FSTRING_END:
            continue
        counts['tokens'] += 1
        counts['words'] += token.type == tokenize.NAME and token.string in WORDS


def count_nodes(source, counts):
    """Add the comprehensions, conditionals and functions of a file to the counts."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, COMPREHENSIONS):
            counts['comprehensions'] += 1
            counts['nested_comprehensions'] += contains(node, COMPREHENSIONS)
        elif isinstance(node, ast.IfExp):
            counts['nested_conditionals'] += contains(node, ast.IfExp)
        elif isinstance(node, FUNCTIONS):
            nodes = [*nodes_of(node)]
            comprehensions = sum(isinstance(inner, COMPREHENSIONS) for inner in nodes)
            branches = sum(isinstance(inner, BRANCHES) for inner in nodes)
            counts['packed_functions'] += comprehensions >= 4
            counts['branching_functions'] += branches > 15


def count(sources):
    """Return the counts of some files.

    >>> count(['"A."' + chr(10) + 'each = [x for x in a]  # b'])
    Counts(tokens=9, per_line=9.0, comprehensions=1, ..., words=1, branching_functions=0)
    """
    counts = Counter()
    for source in sources:
        count_tokens(source, counts)
        count_nodes(source, counts)
    tenths = -(-10 * counts['tokens'] // max(1, counts['lines']))
    counts['per_line'] = tenths / 10
    return Counts(*(counts[name] for name in Counts._fields))


def folders():
    """Return the counts of each folder of the package."""
    sources = {}
    for path in layers.FILES.values():
        folder, *name = path.relative_to(layers.PACKAGE).parts
        sources.setdefault(folder if name else '.', []).append(path.read_text())
    return {folder: count(texts) for folder, texts in sorted(sources.items())}


def parse(table):
    """Return the counts of each folder in a table of the form of :data:`BOUNDS`."""
    bounds = {}
    for row in table.split('\n'):
        if row:
            folder, *numbers = row.split()
            bounds[folder] = Counts(*map(float, numbers))
    return bounds


def above(counts, bounds):
    """Return the folder, the name, the count and the bound of each count that is too large."""
    return [
        (folder, name, number, bound)
        for folder in counts
        for name, number, bound in zip(Counts._fields, counts[folder], bounds[folder])
        if number > bound
    ]


@pytest.mark.slow
def test_each_folder_is_at_least_as_open_as_before():
    assert above(folders(), parse(BOUNDS)) == []


@pytest.mark.slow
def test_bounds_have_the_folders_of_the_package():
    assert folders().keys() == parse(BOUNDS).keys()


@pytest.mark.slow
def test_a_larger_count_would_be_found():
    counts = folders()
    for name in Counts._fields:
        lower = counts['engine']._replace(**{name: getattr(counts['engine'], name) - 0.1})
        (place,) = above(counts, {**counts, 'engine': lower})
        assert place[:2] == ('engine', name)


NESTED = """
def f(x):
    a = [y for y in [z for z in x]]
    b = {y for y in x} | {y: y for y in x}.keys()
    return a if a else b if b else None
"""


def test_nested_expressions_and_packed_functions_are_counted():
    counts = count([NESTED])
    assert counts.comprehensions == 4
    assert counts.nested_comprehensions == 1
    assert counts.packed_functions == 1
    assert counts.nested_conditionals == 1
    assert counts.branching_functions == 0
    assert count([NESTED.replace('return', 'assert a\n    ' * 10 + 'return')])[-1] == 1


def test_an_f_string_is_one_token():
    assert count(["f'{each} {a!r:>{b}}' + 'c'\n"])[:2] == (3, 3.0)
    assert count(["f'{each}'\n"]).words == 0


def test_docstrings_and_comments_do_not_count():
    plain = 'class A:\n    x = 1\n'
    documented = 'class A:\n    """A\n    each."""\n    # each\n    x = 1\n'
    assert count([plain]) == count([documented])


if __name__ == '__main__':
    for folder, counts in folders().items():
        print(f'{folder:11}', *(f'{number:7}' for number in counts))
