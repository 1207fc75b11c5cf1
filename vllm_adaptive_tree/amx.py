import torch


def allow_amx() -> None:
    """Ask the operating system for AMX, where the CPU has it, for this process.

    vLLM leaves that to oneDNN. Where every matrix is so small that another library takes it, its AMX attention is
    the first to use the unit, and the process dies of an illegal instruction.
    """
    torch.cpu._init_amx()
