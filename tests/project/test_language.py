"""The language: forms that PyTorch's own documentation avoids, counted per 1,000 words."""

import ast
import io
import re
import tokenize

import pytest

from tests.project.test_docs import BLOCK, PAGES, ROOT

SOURCES = sorted(
    file
    for folder in ('torchgpipe', 'benchmarks', 'tests', 'docs')
    for file in (ROOT / folder).rglob('*.py')
    if '_build' not in file.parts
)

#: The most forms per 1,000 words, and the largest share of long sentences. Both may only fall.
MOST_FORMS, MOST_LONG = 1, 0.01

FORMS = re.compile(r'\b(?:that of|those of|nobody|somebody|whoever|can not|what)\b', re.I)

#: A sentence ends at a mark before white space; so does a cell, an item or a paragraph.
END = re.compile(r'(?<=[.!?])["”’)*_]*\s+|\n\s*\n|\||\n\s*-\s')

#: Code in docstrings: doctests up to a blank line, and lines indented further than their "::".
DOCTEST = re.compile(r'^ *>>>.*?(?=\n *\n|\Z)', re.M | re.S)
LITERAL = re.compile(r'^( *)(.*::)\n(?: *\n|\1 +\S.*(?:\n|\Z))+', re.M)


def sentences(text):
    """Return the sentences of prose: code is one word, a link is its text."""
    text = re.sub(r'<!--.*?-->', '', BLOCK.sub('\n', text), flags=re.S)
    text = re.sub(r'``[^`]*``|`[^`]*`', 'code', text)
    text = re.sub(r'!?\[([^\]]*)\]\([^)]*\)', r'\1', text)
    return [part for part in (' '.join(part.split()) for part in END.split(text)) if part]


def words(sentence):
    """Return the words of a sentence: each has a letter."""
    return re.findall(r"[^\W\d_][\w'’-]*", sentence)


def is_long(sentence):
    """Return whether a sentence has more than 30 words."""
    return len(words(sentence)) > 30


def forms(sentence):
    """Return the counted forms in a sentence. A question may have "what"."""
    return [
        form
        for form in FORMS.findall(sentence)
        if form.lower() != 'what' or not sentence.rstrip('"*_)').endswith('?')
    ]


def newest(page):
    """Return the text of a page; of the changelog, the newest entry."""
    entries = re.split(r'^(?=## )', page.read_text(), flags=re.M)
    return ''.join(entries[:2] if page.name == 'changelog.md' else entries)


def prose(file):
    """Return the docstrings and comments of a file of Python, without examples."""
    text = file.read_text()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [
        ast.get_docstring(node) or ''
        for node in ast.walk(ast.parse(text))
        if isinstance(node, documented)
    ]
    comments = [
        (token.start[0], token.string)
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    ]
    joined, last = '', -1
    for line, comment in comments:  # Comments on consecutive lines are one text.
        joined += ('\n' if line == last + 1 else '\n\n') + comment
        last = line
    return without_examples('\n\n'.join([*docstrings, joined]))


def without_examples(text):
    """Return a docstring without its code."""
    return LITERAL.sub(r'\1\2\n\n', DOCTEST.sub('', text))


def measure(texts):
    """Return sentences with forms, forms per 1,000 words, and the share of long sentences."""
    found = [sentence for text in texts for sentence in sentences(text)]
    counted = [sentence for sentence in found if forms(sentence)]
    rate = 1000 * sum(map(len, map(forms, counted))) / sum(map(len, map(words, found)))
    return counted, rate, sum(map(is_long, found)) / len(found)


def test_a_page_is_in_plain_english():
    for page in PAGES:
        counted, rate, _ = measure([newest(page)])
        assert rate <= MOST_FORMS, counted


def test_few_sentences_of_pages_are_long():
    assert measure(map(newest, PAGES))[2] <= MOST_LONG


@pytest.mark.slow
def test_docstrings_and_comments_are_in_plain_english():
    _, rate, long = measure(map(prose, SOURCES))
    assert rate <= MOST_FORMS and long <= MOST_LONG


def test_forms_and_long_sentences_are_found():
    for text, found, long in [
        ('Return what is left of those of others.', 2, 0),
        ('What is a bubble? (What is it?) **What is "that"?**', 0, 0),
        ('`what` and ``what``:\n\n```python\nwhat\n```\n\n| nobody | can not |\n|---|---|', 2, 0),
        ('```sh\necho ` what\n```', 0, 0),
        ('word ' * 31 + 'end. ' + 'word ' * 29 + 'end.\n- ' + 'word ' * 31 + '| a', 0, 2),
        (
            'word ' * 20
            + '\n- '
            + 'word ' * 20
            + '(end.) '
            + 'word ' * 20
            + '\n\n'
            + 'word ' * 20,
            0,
            0,
        ),
        ('[What](what.md) <!-- what --> is **that of**', 2, 0),
    ]:
        parts = sentences(text)
        assert sum(map(len, map(forms, parts))) == found
        assert sum(map(is_long, parts)) == long


def test_prose_of_python_is_docstrings_and_comments(tmp_path):
    file = tmp_path / 'file.py'
    file.write_text('"""A."""\nx = "what"  # b\n# c\n\n# d\ndef f():\n    """E\n    f."""\n')
    assert sentences(prose(file)) == ['A.', 'E f.', '# b # c', '# d']


def test_examples_in_docstrings_are_code():
    text = 'A::\n\n    what\n\nB\n    C::\n\n        what\n    D\n\n>>> what\nwhat\n\nE'
    assert without_examples(text).split() == ['A::', 'B', 'C::', 'D', 'E']
