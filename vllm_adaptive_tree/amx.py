"""Enable the CPU's matrix unit (AMX) for this process."""

import torch


def allow_amx() -> None:
    """Ask the operating system for AMX permission; does nothing on a CPU without AMX.

    vLLM leaves this to oneDNN. With matrices so small that oneDNN is never called, vLLM's AMX attention would be the
    first to use the unit, and the process would die of an illegal instruction.
    """
    torch.cpu._init_amx()
