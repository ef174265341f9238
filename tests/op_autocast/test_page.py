"""The page about op autocast: its programs run, and its table is the package's."""

import pathlib
import re

from keras_mp.kernels import cast_policy

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "autocast.md").read_text()


def table():
    """The table of operations in Markdown."""
    groups = {}
    for op, row in cast_policy.ROWS.items():
        groups.setdefault(row, []).append(f"`{op}`")
    rows = ["| policy | operations | why |", "| -- | -- | -- |"]
    rows += [f"| {row.policy} | {', '.join(ops)} | {row.why} |" for row, ops in groups.items()]
    return "\n".join(rows)


def test_the_programs_print_what_the_page_says(capsys):
    names = {}
    expected = []
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        expected += re.findall(r"print\(.*\)  # (.*)$", block, re.MULTILINE)
        exec(compile(block, "autocast.md", "exec"), names)
    assert capsys.readouterr().out.splitlines() == expected
    assert len(expected) == 3


def test_the_table_is_that_of_the_package():
    assert table() in PAGE
    for policy, meaning in cast_policy.POLICIES.items():
        assert f"- **{policy}**: {meaning}" in PAGE
