"""Prompts of the demo, in the style of Python's standard library, on which the bundled pair was trained."""

import re

PROMPTS = (
    '''"""Utilities to walk a directory tree."""

import os
import sys

def walk_files(top, followlinks=False):
    """Generate the names of all files below the directory top.

''',
    '''class LRUCache:
    """A mapping that forgets the least recently used item.

    """

    def __init__(self, maxsize=128):
''',
    """The "for" statement
*******************

The "for" statement is used to iterate over the elements of a sequence
(such as a string, tuple or list) or other iterable object:

""",
    '''class ProtocolError(Exception):
    """Indicates an HTTP protocol error."""

    def __init__(self, url, errcode, errmsg, headers):
''',
    """Calls
*****

A call calls a callable object (e.g., a *function*) with a possibly
empty series of *arguments*:

""",
    """def main():
    import argparse

    parser = argparse.ArgumentParser()
    parser.add_argument(""",
    """try:
    from _thread import RLock
except ImportError:
    RLock = None

""",
    '''    def read(self, size=-1):
        """Read up to size bytes from the object and return them.

''',
)


def parse(text: str) -> tuple[str, ...]:
    """Prompts of a file: blocks between lines of three dashes, or one per line where there is no such line."""
    blocks = re.split(r"\n?^---[ \t]*$\n?", text.removesuffix("\n"), flags=re.MULTILINE)
    return tuple(prompt for prompt in (blocks if len(blocks) > 1 else text.splitlines()) if prompt.strip())
