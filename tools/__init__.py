"""Tools for maintainers; not in the wheel."""
