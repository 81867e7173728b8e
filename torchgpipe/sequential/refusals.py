"""Errors of a conversion: the line of the user's code, the reason and the fixes."""

import ast
import linecache
import os
import sys
import warnings
from collections.abc import Iterable
from functools import cache, lru_cache
from traceback import walk_stack, walk_tb
from types import FrameType, ModuleType, TracebackType

import torch
from torch import nn
from torch.utils import checkpoint

import torchgpipe
from torchgpipe.sequential.leaf_modules import holds_most

_OTHERS = tuple(
    os.path.dirname(os.path.abspath(str(package.__file__))) + os.sep
    for package in (torch, torchgpipe)
)


#: The fix if a program fills an object that is not a structure of tensors.
NO_CACHE = (
    'if it is a cache for the next token, as of Hugging Face, go without it: '
    'model.config.use_cache = False, or use_cache=False in the call. Else let it be a '
    'dataclass, or name the submodule that has to do with it as a leaf: '
    'to_sequential(model, sample, leaves=[…])'
)

#: The fix if a hook passes on a tensor of a module that is not looked into.
OF_HOOKS = (
    'if hooks hand it on, as those for output_attentions=True of Hugging Face, let the '
    'module that gives it be looked into: without leaves=[…] for it, and without dropout '
    'of attention, by attn_pdrop=0, attention_dropout=0 or attention_probs_dropout_prob=0 '
    'in the config, so that its program is the same in both modes'
)

_CAUSAL = '. Or, if it has a causal mask, call it with is_causal=True beside that'
#: The fixes if PyTorch compares a mask with a causal one, or searches the end of a padding mask.
#: Keys are the class that does so, and whether it compares.
OF_MASKS = {
    (nn.TransformerEncoder, True): f'{_CAUSAL}; nn.Transformer, with src_is_causal=True',
    (nn.TransformerDecoder, True): '. Or, if it has a causal mask, call it with '
    'tgt_is_causal=True beside that, as nn.Transformer',
    (nn.TransformerEncoder, False): '. Or make it with enable_nested_tensor=False, as '
    'nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)',
}


class ConversionError(ValueError):
    """A module cannot be converted; the message has the line, the reason and the fix."""


class NeedsLeaf(Exception):
    """Modules of some classes have to be leaves: the recording starts again.

    Its arguments are the reason and the classes.
    """


def refused(
    root: nn.Module,
    why: str,
    line: str,
    inner: str | None,
    hint: str = '',
    more: str = '',
    first: str = '',
) -> ConversionError:
    """Return the error that a module cannot be converted.

    Args:
        inner: The name of the innermost submodule at fault, ``None`` for the model itself.
        hint: A fix instead of the usual one, which is a leaf.
        more: Another fix in addition.
        first: Another fix, to be tried before.
    """
    module = root.get_submodule(inner or '')
    # A leaf with nearly all of the model would not help.
    if not hint and inner and not holds_most(module, root, 0.9):
        leaf = _of_its_kind(root, inner)
        hint = (
            f'name it as a leaf, to_sequential(model, sample, leaves=[{leaf!r}]), which is '
            'called as one module; or write that part of it as a layer, a submodule, and name '
            'that'
        )
    elif not hint:
        hint = (
            'write that part of the model as a layer, a submodule, and name it as a leaf: '
            'to_sequential(model, sample, leaves=[…])'
        )
    if first:
        hint = f'{first}. Otherwise {hint}'
    what = f"'{inner}' ({type(module).__name__})" if inner else type(module).__name__
    return ConversionError(f'{what} cannot be converted: {why}\n\n{line}\n\nWay out: {hint}{more}')


def _of_its_kind(root: nn.Module, name: str) -> str:
    """Return the name of a submodule, or a pattern for all of its class with other numbers."""
    parts = name.split('.')
    kind = type(root.get_submodule(name))
    others = [other.split('.') for other, module in root.named_modules() if type(module) is kind]
    alike = []
    for other in others:
        differing = [(a, b) for a, b in zip(other, parts) if a != b]
        if len(other) == len(parts) and all(a.isdigit() and b.isdigit() for a, b in differing):
            alike.append(other)
    pattern = '.'.join(
        '*' if {*numbers} != {part} else part for part, *numbers in zip(parts, *alike)
    )
    return pattern if pattern.strip('*.') else name


def line_of() -> str:
    """Return the innermost running line outside of PyTorch and of this package."""
    return _described(walk_stack(sys._getframe(1)))


def line_of_error(traceback: TracebackType | None) -> str:
    """Return the innermost line outside of PyTorch and of this package that raised an error."""
    return _described([*walk_tb(traceback)][::-1])


def in_one_line(where: str) -> str:
    """Return the description of a line of code, and its text, in one line."""
    return where.strip().replace('\n    ', ': ')


def is_of_torch(frame: FrameType) -> bool:
    """Return whether a frame runs code of PyTorch."""
    return frame.f_code.co_filename.startswith(_OTHERS[0])


def is_within(name: str) -> bool:
    """Return whether a function with a given name runs now."""
    return any(frame.f_code.co_name == name for frame, _ in walk_stack(sys._getframe(1)))


def is_from_checkpoint(error: BaseException) -> bool:
    """Return whether an error comes from code that ``torch.utils.checkpoint`` runs."""
    return any(
        frame.f_code.co_filename == checkpoint.__file__
        for frame, _ in walk_tb(error.__traceback__)
    )


def is_of_others(frame: FrameType) -> bool:
    """Return whether a frame runs code of PyTorch or of this package."""
    return _is_file_of_others(frame.f_code.co_filename)


@cache
def _is_file_of_others(file: str) -> bool:
    return os.path.abspath(file).startswith(_OTHERS)


def _described(lines: Iterable[tuple[FrameType, int]]) -> str:
    for frame, number in lines:
        if not is_of_others(frame):
            file = frame.f_code.co_filename
            text = linecache.getline(file, number, frame.f_globals).strip()
            return f'  {file}, line {number}, in {frame.f_code.co_name}\n    {text}'
    return '  (not in Python code outside of PyTorch)'


def makes_a_message(frame: FrameType) -> bool:
    """Return whether a text that is made in a frame is only shown or dropped.

    The text must be an argument of a statement that calls a known function, such as
    ``torch._assert(ok, f'got {x.shape}')``. Any other function may use it for a look-up.
    """
    statement = _statement(frame)
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call):
        return False
    function = _named_by(call.func, frame)
    shown = next((k for each, k in _SHOWS if each is function), None)
    if shown is None:
        return False
    others = call.args[:shown] + [each.value for each in call.keywords if each.arg != 'message']
    return not any(map(_may_make_text, others))


#: Functions that show or drop a text, and the position of their first text argument.
_SHOWS = ((torch._assert, 1), (warnings.warn, 0), (print, 0))


def _may_make_text(expression: ast.expr) -> bool:
    for each in ast.walk(expression):
        if (
            isinstance(each, (ast.JoinedStr, ast.Mod))
            or (isinstance(each, ast.Name) and each.id in ('str', 'repr', 'format'))
            or (isinstance(each, ast.Attribute) and each.attr == 'format')
        ):
            return True
    return False


def only_raises(frame: FrameType) -> bool:
    """Return whether the opposite value of a boolean in a frame would only raise an error.

    Examples are ``assert x.min() >= 0``, ``if x.min() < 0: raise …``, and ``torch._check``.
    """
    if is_within('_check_with'):
        return True
    statement = _statement(frame)
    if not isinstance(statement, ast.Assert) and not (
        isinstance(statement, ast.If)
        and not statement.orelse
        and [*map(type, statement.body)] == [ast.Raise]
    ):
        return False
    # A condition of several booleans may be the same with other values of these.
    return not any(
        isinstance(each, (ast.BoolOp, ast.IfExp, ast.comprehension, ast.In, ast.NotIn))
        or (isinstance(each, ast.Compare) and len(each.ops) > 1)
        or (isinstance(each, ast.Name) and each.id in ('all', 'any'))
        for each in ast.walk(statement.test)
    )


def _statement(frame: FrameType) -> ast.stmt | None:
    """Return the innermost statement that runs, if it does not share its line with another."""
    line = frame.f_lineno or 0
    around = [
        each
        for each in _statements(frame.f_code.co_filename)
        if each.lineno <= line <= (each.end_lineno or 0)
    ]
    first = max((statement.lineno for statement in around), default=0)
    inner = [statement for statement in around if statement.lineno == first]
    return inner[0] if len(inner) == 1 else None


@lru_cache(maxsize=8)
def _statements(file: str) -> list[ast.stmt]:
    try:
        tree = ast.parse(''.join(linecache.getlines(file)))
    except SyntaxError:  # A cell of a notebook may not be pure Python.
        return []
    return [each for each in ast.walk(tree) if isinstance(each, ast.stmt)]


def _named_by(name: ast.expr, frame: FrameType) -> object:
    """Return the global or the attribute of a module that a name refers to, if it does."""
    if isinstance(name, ast.Name):
        code = frame.f_code
        if name.id in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
            return None
        return frame.f_globals.get(name.id, frame.f_builtins.get(name.id))
    if isinstance(name, ast.Attribute):
        owner = _named_by(name.value, frame)
        if isinstance(owner, ModuleType):
            return getattr(owner, name.attr, None)
        return None
    return None
