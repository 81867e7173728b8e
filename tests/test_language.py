"""The language: forms that PyTorch's own documentation does without, counted per 1,000 words."""
import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

import torchgpipe
from tests.devices import cpu_only

pytestmark = cpu_only('it reads files')

ROOT = Path(torchgpipe.__file__).parent.parent
PAGES = sorted([ROOT / 'README.md', *(page for page in ROOT.glob('docs/**/*.md')
                                      if '_build' not in page.parts)])
SOURCES = sorted(file for folder in ('torchgpipe', 'benchmarks', 'tests', 'docs')
                 for file in (ROOT / folder).rglob('*.py') if '_build' not in file.parts)

#: Bounds of pages, and of docstrings and comments: forms per 1,000 words, long sentences of all.
PAGE_FORMS, PAGE_LONG = 1, 0.01
CODE_FORMS, CODE_LONG = 19.7, 0.0153

#: "What" is counted outside questions only.
FORMS = re.compile(r'\b(?:that of|those of|nobody|somebody|whoever|can not|what)\b', re.I)

#: Fenced blocks, comments of HTML, and mathematics.
NOT_PROSE = re.compile(r'^(`{3,}).*?^\1$|<!--.*?-->|\$\$.*?\$\$', re.M | re.S)

#: A sentence ends at a mark before white space; so does a cell, an item or a paragraph.
END = re.compile(r'(?<=[.!?])["”’)*_]*\s+|\n\s*\n|\||'
                 r'\n\s*(?:[-*+]|\d+\.|#+|:\w+.*?:)\s')


def sentences(text):
    """Return the sentences of prose: code is one word, a link is its text."""
    text = NOT_PROSE.sub('\n\n', text)
    text = re.sub(r'``[^`]*``|`[^`]*`', 'code', text)
    text = re.sub(r'!?\[([^\]]*)\]\([^)]*\)', r'\1', text)
    text = re.sub(r'\be\.g\.|\bi\.e\.', 'eg', text)
    return [part for part in (' '.join(part.split()) for part in END.split(text) if part) if part]


def words(sentence):
    """Return the words of a sentence: each has a letter."""
    return re.findall(r"[^\W\d_][\w'’-]*", sentence)


def forms(sentence):
    """Return the counted forms in a sentence."""
    return [form for form in FORMS.findall(sentence)
            if form.lower() != 'what' or not sentence.rstrip('"*_)').endswith('?')]


def newest(page):
    """Return the text of a page; of the changelog, the newest entry."""
    entries = re.split(r'^(?=## )', page.read_text(), flags=re.M)
    return ''.join(entries[:2] if page.name == 'changelog.md' else entries)


def prose(file):
    """Return the docstrings and comments of a file of Python."""
    text = file.read_text()
    docstrings = [ast.get_docstring(node) for node in ast.walk(ast.parse(text)) if isinstance(
        node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))]
    comments = [(token.start[0], token.string.lstrip('#: '))
                for token in tokenize.generate_tokens(io.StringIO(text).readline)
                if token.type == tokenize.COMMENT]
    joined, last = '', -1
    for line, comment in comments:  # Comments of lines in a row are one text.
        joined += ('\n' if line == last + 1 else '\n\n') + comment
        last = line
    return '\n\n'.join([*filter(None, docstrings), joined])


def measure(texts):
    """Return forms per 1,000 words, and the share of sentences over 30 words."""
    found = [sentence for text in texts for sentence in sentences(text)]
    lengths = [len(words(sentence)) for sentence in found]
    long = sum(length > 30 for length in lengths)
    return 1000 * sum(len(forms(sentence)) for sentence in found) / sum(lengths), long / len(found)


def test_pages_are_in_plain_english():
    count, long = measure(map(newest, PAGES))
    assert count <= PAGE_FORMS and long <= PAGE_LONG


def test_docstrings_and_comments_do_not_get_worse():
    count, long = measure(map(prose, SOURCES))
    assert count <= CODE_FORMS and long <= CODE_LONG


@pytest.mark.parametrize('text, found, long', [
    ('Return what is left of those of others.', 2, 0),
    ('What is a bubble? (What is it?)', 0, 0),
    ('`what` it cannot do:\n\n```python\nwhat\n```\n\n| nobody | can not |\n|---|---|', 2, 0),
    ('word ' * 31 + 'end. ' + 'word ' * 30 + 'end.\n- ' + 'word ' * 30 + '| a', 0, 2),
    ('[What](what.md) <!-- what --> is **that of**', 2, 0)])
def test_forms_and_long_sentences_are_found(text, found, long):
    parts = list(sentences(text))
    assert sum(len(forms(part)) for part in parts) == found
    assert sum(len(words(part)) > 30 for part in parts) == long


def test_prose_of_python_is_docstrings_and_comments():
    assert prose(Path(__file__)).startswith('The language: forms that')
    assert '"What" is counted outside' in prose(Path(__file__))
    assert 'PAGES' not in prose(Path(__file__))
