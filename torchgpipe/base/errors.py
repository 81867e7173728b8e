"""Errors: notes with their source, and messages that several files share."""

__all__ = ['add_note', 'changed_input', 'nested', 'other_path']


def add_note(error: BaseException, note: str) -> None:
    """Add a line that a traceback shows below the error (PEP 678)."""
    # `add_note` came with Python 3.11. Before, only the attribute is set.
    notes: list[str] = getattr(error, '__notes__', [])
    try:
        error.__notes__ = [*notes, note]  # type: ignore[attr-defined]
    except Exception:
        pass  # Attributes of this exception cannot be set. It is more important than the note.


def other_path(difference: str) -> RuntimeError:
    """Return the error for a recomputation that differs from the first pass."""
    return RuntimeError(
        'the recomputation of a checkpointed micro-batch took another path than its first pass: '
        f'{difference}. Gradients would be wrong. Let the layers do the same in both passes '
        "(torchgpipe.is_recomputing() tells them apart), or use checkpoint='never'.")


def changed_input(input: object) -> str:
    """Return the error message for a checkpointed call that changed its input in place.

    It is used if the layer is not known.
    """
    return ('the input of a checkpointed micro-batch, or a skip tensor that it popped, was '
            "changed in place; change a copy instead (inplace=False), or use checkpoint='never'")


def nested() -> RuntimeError:
    """Return the error for a nested tensor that a checkpoint does not support."""
    return RuntimeError(
        'a checkpointed micro-batch cannot make a nested tensor again: PyTorch takes the ragged '
        'size of each new one for another size, and has no sizes for the layout torch.strided. '
        'Let a layer make it that is kept out of recomputation, torchgpipe.no_recompute(layer), '
        "with layout=torch.jagged; or use checkpoint='never' for the partitions that it is in.")
