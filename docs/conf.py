"""Build the documentation: ``python -m sphinx -W -b html docs docs/_build``."""

import re

import torchgpipe

project = 'torchgpipe'
version = release = torchgpipe.__version__

extensions = ['myst_parser', 'sphinx.ext.autodoc', 'sphinx.ext.napoleon', 'sphinx.ext.doctest']
exclude_patterns = ['_build']

html_theme = 'furo'
html_title = f'torchgpipe {release}'
html_static_path = ['_static']
html_css_files = ['style.css']
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False

myst_heading_anchors = 3

autodoc_member_order = 'bysource'
autodoc_typehints = 'description'
autodoc_typehints_description_target = 'documented_params'
autodoc_default_options = {'members': True}
napoleon_use_ivar = True

modules = (
    'balance',
    'balance.blockpartition',
    'plan.balance',
    'balance.profile',
    'batchnorm',
    'checkpoint',
    'copy',
    'dependency',
    'microbatch',
    'phony',
    'pipeline',
    'plan',
    'schedule',
    'skip',
    'skip.layout',
    'skip.portal',
    'skip.tracker',
    'stream',
    'testing',
    'timeline',
    'worker',
)
doctest_global_setup = '\n'.join(
    [
        'import torch',
        'from torch import nn',
        'from torchgpipe import *',
        *(f'from torchgpipe.{module} import *' for module in modules),
    ]
)

# Every reference has to resolve, except references to other projects and to names that are not
# public.
nitpicky = True
nitpick_ignore_regex = [
    ('py:.*', r'(torch|typing|nn|_?queue|collections|contextlib|datetime|os)\..*'),
    ('py:class', r'torchgpipe\.(.*\.)?(T\w*|ThreadState|Workers|CPUStreamType|HasActions|Ranks)'),
    ('py:class', r'torchgpipe\.timeline\.metrics\.ReducingModel'),
    ('py:class', r'torchgpipe\.(plan|shard)\.(.*\.)?(Blocks|Measured|Writer)'),
    ('py:class', 'OutQueue|Figure|StorageReader|Future'),
]


def resolve(app, what, name, obj, options, lines):
    """Let docstrings say ``ts`` for ``torchgpipe.shard``, as its users do."""
    lines[:] = [
        re.sub(r':`(ts\.([\w.]+))`', r':`\1 <torchgpipe.shard.\2>`', line) for line in lines
    ]


def setup(app):
    """Be told of each docstring."""
    app.connect('autodoc-process-docstring', resolve)
