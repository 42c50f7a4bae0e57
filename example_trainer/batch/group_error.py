"""What every reader of a group raises: a leaf, so that the readers of single fields need not know
the reader of the whole.
"""

from __future__ import annotations


class GroupError(ValueError):
    """A group does not hold what the wire promises. The message names the field."""
