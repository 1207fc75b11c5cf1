"""Figures of a step on their way to the front end, metrics, records and the alarm."""
