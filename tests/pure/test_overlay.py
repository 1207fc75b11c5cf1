"""Errors of the overlay of another vLLM release when it cannot be made as that release requires."""

import pytest

from tests.next import overlay


def test_what_the_release_requires_and_is_not_here():
    lines = [
        "# common",
        "-r other.txt",
        "numpy",
        "numpy >= 1.0 # as here",
        "numpy < 1.0",
        "no-such-package >= 2; python_version >= '3'",
        "no-such-package-either; python_version < '3'",
    ]
    absent, others = overlay.unmet(lines)
    assert [str(one) for one in absent] == ["no-such-package>=2"]
    assert len(others) == 1
    assert others[0].startswith("numpy<1.0 (")


def test_without_a_network_it_says_where_to_put_the_archive(monkeypatch):
    def download(*_):
        raise RuntimeError("the sources of vLLM 9.9.9 cannot be fetched (ERROR: none); fetch them another way")

    monkeypatch.setattr(overlay, "download", download)
    with pytest.raises(RuntimeError, match=r"\(ERROR: none\); put vllm-9.9.9.tar.gz into .*\.next, and it"):
        overlay.archive("9.9.9")


def test_an_installed_build_for_gpus_lends_no_parts(monkeypatch):
    monkeypatch.setattr(overlay, "installed", lambda: ("vllm", "0.32.0"))
    with pytest.raises(RuntimeError, match=r"CPU build, and vllm 0\.32\.0 is another"):
        overlay.interpreter("9.9.9")
