"""The documentation: its code runs, its links lead somewhere, its pictures are up to date."""

import configparser
import contextlib
import importlib.util
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import torchgpipe
from tests.project.refusals import REFUSALS, UNWRAPPED
from torchgpipe.trainer.launch import launch

ROOT = Path(torchgpipe.__file__).parent.parent
PAGES = sorted(
    [
        *ROOT.glob('*.md'),
        *(page for page in ROOT.glob('docs/**/*.md') if '_build' not in page.parts),
    ]
)
#: Pages whose programs run without `--whole`.
QUICK = ['README.md', 'docs/guide/first.md']
BLOCK = re.compile(r'^```(\S*)[^\n]*\n(.*?)^```$', re.M | re.S)


def name(page):
    """Return a page's name as tests show it."""
    return str(page.relative_to(ROOT))


def blocks(text):
    """Yield blocks: language, code, line, and the text that follows at once, if any."""
    found = list(BLOCK.finditer(text))
    for block, after in zip(found, [*found[1:], None]):
        follows = after is not None and not text[block.end() : after.start()].strip()
        expected = after[2] if follows and after[1] == 'text' else None
        yield block[1], block[2], text[: block.start()].count('\n') + 1, expected


def execute(code, line, page):
    """Run Python in a module of its own, and return its output."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile('\n' * line + code, page, 'exec'), sys.modules['page'].__dict__)
    return printed.getvalue()


def shell(command):
    """Run a command with this environment's programs, and return its output."""
    if found := re.fullmatch(r'torchrun --standalone --nproc-per-node (\d) (.*)\n', command):
        return ranks(int(found[1]), found[2].split())
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ['PATH']])
    return subprocess.run(
        command,
        shell=True,
        check=True,
        text=True,
        stdout=subprocess.PIPE,
        env={**os.environ, 'PATH': path, 'OMP_NUM_THREADS': '1'},
    ).stdout


def ranks(world, argv):
    """Run a program as ``torchrun`` does, but in processes that have imported torch already."""
    Path('printed.txt').unlink(missing_ok=True)
    launch(program, os.getcwd(), argv, world=world)
    return Path('printed.txt').read_text()


def program(attempt, folder, argv):
    """Be a rank of it."""
    os.chdir(folder)
    with open('printed.txt', 'a') as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
    sys.argv, sys.path[:0] = argv, [folder]
    runpy.run_path(argv[0], run_name='__main__')


def matches(text, expected):
    """Compare except for white space. "…" in the expected text stands for anything."""
    parts = [re.escape(' '.join(part.split())) for part in expected.split('…')]
    return re.fullmatch('.*'.join(parts), ' '.join(text.split())) is not None


def run(text, page):
    """Run a page in this folder, block by block, and compare its output.

    Python that starts with a comment like ``# train.py`` is a file of that name, which a command
    further down runs. Other programs that the command runs may print logs around the file's
    output.
    """
    for language, code, line, expected in blocks(text):
        if language == 'python' and (file := re.match(r'# (\w+\.py)\n', code)):
            Path(file[1]).write_text(code)
        elif language == 'python':
            printed = execute(code, line, page)
            assert expected is None or matches(printed, expected), f'{page}:{line}: {printed}'
        elif language == 'sh' and set(code.split()) & set(os.listdir()):
            printed = shell(code)
            assert matches(printed, f'…{expected or ""}…'), f'{page}:{line}: {printed}'


@pytest.fixture
def empty(tmp_path, monkeypatch):
    """Be in an empty folder, with an empty module for a page's names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, 'page', ModuleType('page'))


@pytest.mark.parametrize(
    'page',
    [pytest.param(page, marks=() if name(page) in QUICK else pytest.mark.slow) for page in PAGES],
    ids=name,
)
def test_the_code_of_a_page_runs(page, empty):
    run(page.read_text(), name(page))


def test_no_guide_has_more_than_2500_words():
    guides = [page for page in PAGES if page.parent.name == 'guide']
    assert len(guides) > 20
    assert {name(page) for page in guides if len(page.read_text().split()) > 2500} == set()


#: A page with a file and a command that runs it: the file's output, between two lines of logs.
LOGS = """```python
# a.py
print('[log] begin', 1, 'end', '[log]', sep='\\n')
```

```sh
python a.py
```

```text
begin
%s
end
```
"""


@pytest.mark.parametrize(
    'text',
    [
        '```python\nprint(1)\n```\n\n```text\n2\n```\n',
        '```python\nprint(1, 2)\n```\n\n```text\n1 …3\n```\n',
        '```python\nundefined\n```\n',
        LOGS % 2,
    ],
)
def test_code_that_is_wrong_would_be_found(text, empty):
    with pytest.raises((AssertionError, NameError)):
        run(text, 'page')


@pytest.mark.parametrize(
    'text',
    [
        '```python\nprint(1, 2)\n```\n\n```text\n1\n2\n```\n',
        '```python\nprint(1, 2)\n```\n\n```text\n… 2\n```\n',
        LOGS % 1,
    ],
)
def test_output_that_the_page_elides_may_be_anything(text, empty):
    run(text, 'page')


ERRORS = re.findall(
    r'^\| `(\w+Error: .*?)` \| (.*) \|$',
    (ROOT / 'docs/reference/restrictions.md').read_text(),
    re.M,
)

#: Those that PyTorch raises, and words in its own way.
PYTORCHS = [k for k, (_, way_out) in enumerate(ERRORS) if way_out.startswith("PyTorch's own")]


def raised_by(program):
    """Return the error of a program, as Python shows it."""
    with pytest.raises(Exception) as raised:
        program()
    return f'{raised.type.__name__}: {raised.value}'


@pytest.mark.slow
def test_an_error_is_quoted_as_it_is():
    for k in range(len(ERRORS)):
        error, quoted = raised_by(REFUSALS[k]), ERRORS[k][0]
        if k in PYTORCHS:
            assert error == raised_by(UNWRAPPED[PYTORCHS.index(k)])
        else:
            assert matches(error, f'{quoted}…')


def test_an_error_of_pytorch_s_own_has_the_way_out_in_a_note():
    for k in PYTORCHS:
        with pytest.raises(Exception) as raised:
            REFUSALS[k]()
        assert [note for note in raised.value.__notes__ if not note.startswith('in partition')]


def test_all_errors_are_tried():
    assert len(ERRORS) == len(REFUSALS) > 40 and len(PYTORCHS) == len(UNWRAPPED) > 0


def slugs(page):
    """Return the anchors of a page's headings."""
    headings = re.findall(r'^#+ (.*)$', BLOCK.sub('', page.read_text()), re.M)
    return {re.sub(r'[^\w -]', '', heading.lower()).replace(' ', '-') for heading in headings}


def broken(text, page):
    """Return the relative links of a page's text that lead nowhere."""
    return [
        link
        for link in re.findall(r'\]\((?!https?:)([^)]*)\)', BLOCK.sub('', text))
        if not leads_somewhere(*link.partition('#')[::2], page)
    ]


def leads_somewhere(path, anchor, page):
    """Return whether there is such a file, and such a heading in it."""
    target = page.parent / path if path else page
    return target.exists() and (not anchor or anchor in slugs(target))


def test_links_lead_somewhere():
    for page in PAGES:
        assert broken(page.read_text(), page) == []


def test_a_link_that_leads_nowhere_would_be_found():
    text = (
        '[a](#licence) [b](NOTHING.md) [c](README.md#nothing) [d](https://x.org) '
        '[e](#nothing) [f](docs/design.md#streams)'
    )
    assert broken(text, ROOT / 'README.md') == ['NOTHING.md', 'README.md#nothing', '#nothing']


def same(english, korean):
    """Return whether two READMEs have the same blocks, links, figures and sections."""

    def facts(text):
        plain = BLOCK.sub('', text)
        return (
            BLOCK.findall(text),
            re.findall(r'\d+\.\d+ ×', plain),
            len(re.findall('^#', plain, re.M)),
            sorted(set(re.findall(r'\]\(((?!README).*?)\)', plain))),
        )

    return facts(english) == facts(korean)


def test_both_readmes_say_the_same():
    english, korean = ((ROOT / name).read_text() for name in ('README.md', 'README.ko.md'))
    assert same(english, korean)
    (figure,) = re.findall(r'\d+\.\d+ ×', korean)[:1]
    for old, new in (
        (figure, '1.234 ×'),
        ('chunks=4', 'chunks=8'),
        ('\n## ', '\n'),
        ('docs/why.md', 'docs/design.md'),
    ):
        assert not same(english, korean.replace(old, new, 1))


def losses(text):
    """Return the losses that a text has, one per line."""
    return [float(loss) for loss in re.findall(r'^step \d+: loss (.*)$', text, re.M)]


def test_the_readme_s_examples_learn_and_both_tools_print_the_same_losses():
    text = (ROOT / 'README.md').read_text()
    printed = [losses(expected) for *_, expected in blocks(text) if expected]
    example, torchgpipe_, pipelining = printed
    for run in printed:
        assert len(run) > 2
        assert run == sorted(run, reverse=True)
    assert example[-1] < example[0] / 10
    assert torchgpipe_ == pipelining


@pytest.mark.slow
def test_pictures_equal_the_script_s_output(tmp_path):
    pictures = ROOT / 'docs/pictures'
    subprocess.run([sys.executable, pictures / 'draw.py', tmp_path], check=True)
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert drawn == {path.name: path.read_text() for path in pictures.glob('*.svg')}
    assert len(drawn) > 1


def commands(page):
    """Return the shell blocks of a page."""
    return [code.strip() for language, code, _, _ in blocks(page.read_text()) if language == 'sh']


@pytest.mark.slow
def test_the_commands_for_contributors():
    page = commands(ROOT / 'docs/contributing.md')
    setup, test, whole, mutants, ci, releases, build = page
    extras = re.search(r"pip install -e '\.\[(.*)\]' -c constraints.txt", setup)[1].split(',')
    metadata = configparser.ConfigParser()
    metadata.read(ROOT / 'setup.cfg')
    assert set(extras) <= set(metadata['options.extras_require'])
    assert ' passed' in shell(f'{test} -q -p no:cacheprovider')
    script = (ROOT / ci).read_text()
    assert f"pip install -e '.[{','.join(extras)}]' -c constraints.txt" in script
    (readme,) = (command for command in commands(ROOT / 'README.md') if 'pytest' in command)
    assert readme.rpartition(' && ')[2] in script
    assert whole in script and releases in script
    assert importlib.util.find_spec(mutants.split()[2])
    assert build.replace('html', '"$builder"') in script
