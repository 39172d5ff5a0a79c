"""What every source raises."""

from __future__ import annotations


class SourceError(Exception):
    """A text or folder that no machine can be read from: where, what is wrong, what to do."""
