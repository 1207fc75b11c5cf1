"""Grammars of requests along the branches of trees."""
