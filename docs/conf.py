"""Build the documentation: ``python -m sphinx -W -b html docs docs/_build``."""
import torchgpipe

project = 'torchgpipe'
author = 'the torchgpipe contributors'
version = release = torchgpipe.__version__

extensions = ['myst_parser', 'sphinx.ext.autodoc', 'sphinx.ext.napoleon', 'sphinx.ext.doctest']
exclude_patterns = ['_build']

html_theme = 'furo'
html_title = f'torchgpipe {release}'
html_static_path = ['_static']
html_css_files = ['style.css']
html_show_sphinx = False
html_copy_source = False

myst_heading_anchors = 3

autodoc_member_order = 'bysource'
autodoc_typehints = 'description'
autodoc_typehints_description_target = 'documented_params'
autodoc_default_options = {'members': True}
napoleon_use_ivar = True

doctest_global_setup = 'import torch\nfrom torch import nn'

# Every reference has to resolve, but those to what is documented elsewhere, and to what is not public.
nitpicky = True
nitpick_ignore_regex = [
    ('py:.*', r'(torch|typing|nn|_?queue|collections)\..*'),
    ('py:class', r'torchgpipe\.(.*\.)?(T\w*|Ambient|Snapshot|Quiet|Workers|CPUStreamType)'),
]
