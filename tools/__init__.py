"""For maintainers; not in the wheel."""
