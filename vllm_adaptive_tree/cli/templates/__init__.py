"""Modules that `new-method` copies, with other names."""
