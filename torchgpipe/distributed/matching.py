"""Match a checkpoint with a model and its optimizer; report the differences."""
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

__all__ = ['check_model', 'check_optimizer']

#: So many are named at most.
_MOST = 5

#: What schedulers of learning rates add to the options of an optimizer.
_SCHEDULERS = {'initial_lr', 'max_lr', 'min_lr', 'base_momentum', 'max_momentum', 'swa_lr'}


def check_model(here: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """See that a checkpoint has the parameters and buffers of a model, in these shapes.

    Args:
        here: The shapes of the model.
        saved: Those of the checkpoint.

    Raises:
        ValueError: It does not; all ranks raise it.
    """
    _check_names('the checkpoint is of another model', 'model', here, saved)
    others = [f'{name!r} is {saved[name]}, and not {shape}' for name, shape in here.items()
              if saved[name] != shape]
    if others:
        raise ValueError(f'the checkpoint is of a model of other sizes: in it {_some(others)}; '
                         'make the model as it was made before')


def check_optimizer(here: Collection[str], options: set[str], saved: Mapping[str, Collection[str]]
                    ) -> None:
    """See that a checkpoint is of an optimizer of these parameters.

    Args:
        here: Their names, of all ranks.
        options: The options of its groups.
        saved: The options that the checkpoint has, for each parameter.

    Raises:
        ValueError: It is not; all ranks raise it.
    """
    if not saved:
        raise ValueError('the checkpoint was saved without an optimizer: load it without one, or '
                         'save it with one')
    _check_names('the checkpoint is of an optimizer of other parameters', 'optimizer', here, saved)
    there = {key for each in saved.values() for key in each}
    missing, others = options - there - _SCHEDULERS, there - options - _SCHEDULERS
    # Releases of PyTorch differ in one of them only.
    if missing and others:
        raise ValueError('the checkpoint is of an optimizer of another type: it has '
                         f'{sorted(others)}, but this one {sorted(missing)}')


def _check_names(what: str, of: str, here: Collection[str], saved: Collection[str]) -> None:
    missing = [name for name in here if name not in saved]
    others = [name for name in saved if name not in here]
    if missing or others:
        parts = [f'it misses {_some(_with_close(missing, others))}'] if missing else []
        if others:
            parts.append(f'the {of} does not have {_some(_with_close(others, missing))}')
        raise ValueError(f'{what}: {"; ".join(parts)}')


def _with_close(names: list[str], others: list[str]) -> list[str]:
    """Name names with others that are like them, where there are few."""
    return [repr(name) + ''.join(f' (like {each!r})' for each in get_close_matches(
        name, others[:1000], 1)) for name in names[:_MOST]] + names[_MOST:]


def _some(texts: Iterable[str]) -> str:
    found = [*texts]
    more = f' and {len(found) - _MOST} more' if len(found) > _MOST else ''
    return ', '.join(found[:_MOST]) + more
