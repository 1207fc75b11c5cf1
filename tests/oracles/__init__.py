"""Oracles for the tests: small models, and exact distributions by enumeration."""

import torch

torch.set_num_threads(1)  # many small tensors
