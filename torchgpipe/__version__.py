"""The version of this package; the changelog's newest release matches it."""

__version__ = '0.35.1'
