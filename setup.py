"""Addresses in what GitHub's workflow builds: the repository, and README's links, which elsewhere stay relative."""

import os
import re
from pathlib import Path

from setuptools import setup

README, urls = Path("README.md").read_text(), {}
if name := os.environ.get("GITHUB_REPOSITORY"):
    urls["Repository"] = repository = f"{os.environ['GITHUB_SERVER_URL']}/{name}"
    reference = os.environ["GITHUB_REF_NAME"]
    README = re.sub(
        r"(!?)(\[[^\]]*\]\()(?!\w+:|#)",
        lambda link: f"{link[1]}{link[2]}{repository}/{'raw' if link[1] else 'blob'}/{reference}/",
        README,
    )
setup(long_description=README, long_description_content_type="text/markdown", project_urls=urls)
