"""Notes on errors: what the one who catches an error can't see in it (PEP 678)."""
from typing import List

__all__ = ['add_note']


def add_note(error: BaseException, note: str) -> None:
    """Add a line that a traceback shows below the error."""
    # The method came with Python 3.11; before, the attribute is there for those who look.
    notes: List[str] = getattr(error, '__notes__', [])
    error.__notes__ = [*notes, note]  # type: ignore[attr-defined]
