"""The certificate of the start-up check."""

from types import SimpleNamespace

import pytest
import torch


@pytest.mark.parametrize("library", [True, False])
def test_the_device_of_a_certificate(library: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With NVML and without it, as in some containers; PyTorch has no public call for the driver's version."""
    from vllm.utils import import_utils

    from vllm_adaptive_tree.engine.self_check import certificate

    class NVMLError(Exception):
        pass

    def init() -> None:
        if not library:
            raise NVMLError("not found")

    nvml = SimpleNamespace(NVMLError=NVMLError, nvmlInit=init, nvmlShutdown=lambda: None)
    nvml.nvmlSystemGetDriverVersion = lambda: "580.159.04"
    monkeypatch.setattr(import_utils, "import_pynvml", lambda: nvml)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    found = certificate.device()
    assert (found["device"], found["capability"]) == ("NVIDIA H200", [9, 0])
    assert found["driver"] == ("580.159.04" if library else "unknown: not found")
