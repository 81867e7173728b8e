"""Kinds of devices, and that one file of the package asks for them."""

import ast

from tests.project.test_layers import layers

#: Files that may ask. On the way of each micro-batch `engine.streams` asks for the CPU by itself.
MAY_ASK = {'base.devices', 'engine.streams'}

KINDS = {'cpu', 'cuda', 'meta', 'mps', 'xpu'}


def names_a_kind(node):
    """Return whether an expression is the name of a kind, or several."""
    return (
        isinstance(node, ast.Constant)
        and node.value in KINDS
        or (isinstance(node, (ast.Tuple, ast.List, ast.Set)) and any(map(names_a_kind, node.elts)))
    )


def asks(node):
    """Return whether a part of a source asks for a kind of device by its name."""
    if isinstance(node, ast.Compare):
        return any(map(names_a_kind, (node.left, *node.comparators)))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr == 'startswith' and any(map(names_a_kind, node.args))
    return isinstance(node, ast.Attribute) and node.attr in {'cuda', 'is_cuda', 'mps', 'xpu'}


def questions(source):
    """Return the lines of a source in which it asks.

    >>> questions("x.device.type == 'cpu'"), questions('torch.cuda.synchronize()')
    ([1], [1])
    >>> questions("kind in ('cuda', 'xpu')"), questions("x.is_cpu or torch.device('cpu')")
    ([1], [])
    """
    return sorted(node.lineno for node in ast.walk(ast.parse(source)) if asks(node))


def test_no_other_file_asks_for_a_kind_of_device():
    for name in sorted({*layers.FILES} - MAY_ASK):
        assert not questions(layers.FILES[name].read_text())


def test_modules_that_may_ask_do():
    assert all(questions(layers.FILES[name].read_text()) for name in MAY_ASK)
