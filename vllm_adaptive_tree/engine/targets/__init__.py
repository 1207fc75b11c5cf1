"""Targets: families that are served, layers, states and vocabulary that a draft reads."""
