"""The short form of `make docs-run`: the pages' commands that start no engine, typed as they stand."""

import re
import sys
from pathlib import Path

from tests.docs_run import HEAVY, LEFT_OUT, SHORTER, Walk, commands
from tests.documents import PAGES, all_blocks


def test_what_starts_no_engine(tmp_path: Path) -> None:
    walk = Walk(Path(sys.executable).parent, tmp_path, short=True)
    lines = [line for page in PAGES for line in walk.page(page)]
    assert [str(line) for line in lines if line.failed] == []
    assert sum(not line.left_out for line in lines) >= 9


def test_each_rule_is_of_a_command() -> None:
    typed = [command for block in all_blocks("bash") for command in commands(block)]
    assert [rule for rule in (HEAVY, *LEFT_OUT) if not any(re.search(rule, one) for one in typed)] == []
    used = set()
    for command in typed:
        for rule, other in SHORTER.items():
            if re.search(rule, command):
                used.add(rule)
                command = re.sub(rule, other, command)
    assert used == SHORTER.keys()


def test_a_command_that_fails_is_seen(tmp_path: Path) -> None:
    walk = Walk(Path(sys.executable).parent, tmp_path, short=True)
    assert walk.run("true") == ""
    assert "exit code 3: it is\n broken" in walk.run("printf 'it is\\n broken'; exit 3")
    assert walk.run("NAME=value") == "" == walk.run('test "$NAME" = value')
