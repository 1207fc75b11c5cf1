"""Training of gates, the small models that decide while a tree is drafted: examples, their files, and training."""
