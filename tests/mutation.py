"""Breaks the core in one place at a time and sees whether a test notices.

python -m tests.mutation [--count 60] [--seed 0] [--only NUMBERS]

A mutant is a copy of the repository in which one comparison, number, condition, operator, returned
value or statement is another. Whoever changes tests compares the score before and after, with the
same seed; survivors show what no test looks at.
"""

import argparse
import ast
import itertools
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

_ROOT = pathlib.Path(__file__).parent.parent
# What is broken, and who looks at it: the quickest first.
_STEP = ["tests/test_loss_scale_optimizer.py", "tests/step", "tests/test_inner_optimizers.py"]
_CALLS = [
    *("tests/step/test_step_calls.py", "tests/step/test_grad_scaler_calls.py"),
    "tests/step/test_contract.py",
]
_VARIABLES = ["tests/variables/test_casts.py", "tests/variables", "tests/layers"]
_TESTS = {
    "keras_mp/step/gradients.py": ["tests/step/test_gradients.py", *_STEP, "tests/replicas"],
    "keras_mp/step/finiteness.py": [
        *("tests/step/test_gradients.py", "tests/step/test_overflows.py"),
        *(*_STEP, "tests/replicas"),
    ],
    "keras_mp/step/replicas.py": ["tests/test_all_reduce_optimizer.py", *_STEP, "tests/replicas"],
    "keras_mp/step/strategies.py": ["tests/test_all_reduce_optimizer.py", *_STEP, "tests/replicas"],
    "keras_mp/step/loss_scales.py": ["tests/step/test_loss_scale.py", *_STEP],
    "keras_mp/step/schedule.py": ["tests/step/test_loss_scale.py", *_STEP],
    "keras_mp/step/scaled_step.py": ["tests/step/test_skipped_steps.py", *_STEP, "tests/replicas"],
    "keras_mp/step/overflow.py": ["tests/step/test_overflows.py", *_STEP],
    "keras_mp/step/skip_warnings.py": ["tests/step/test_skipped_steps.py", *_STEP],
    "keras_mp/step/skip_report.py": ["tests/step/test_overflows.py", *_STEP, "tests/replicas"],
    "keras_mp/step/scaler.py": [
        *("tests/test_grad_scaler.py", "tests/step/test_grad_scaler_calls.py"),
        *("tests/step/test_skipped_steps.py", *_STEP),
    ],
    "keras_mp/step/record.py": [*_CALLS, "tests/test_grad_scaler.py", *_STEP],
    "keras_mp/step/optimizer_calls.py": [*_CALLS[::2], *_STEP],
    "keras_mp/step/grad_scaler_calls.py": [*_CALLS[1:], "tests/test_grad_scaler.py"],
    "keras_mp/variables/autocast_variable.py": _VARIABLES,
    "keras_mp/variables/casts.py": _VARIABLES,
    "keras_mp/losses.py": [
        *("tests/test_losses.py", "tests/support/test_softmax_and_cross_entropy.py"),
        "tests/kernels",
    ],
}
_SECONDS = 3600  # for what does not end any more

_SWAPS = [
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Eq, ast.NotEq),
    (ast.Is, ast.IsNot),
    (ast.In, ast.NotIn),
    (ast.And, ast.Or),
    (ast.Add, ast.Sub),
    (ast.Mult, ast.Div),
]
_OTHER = {a: b for pair in _SWAPS for a, b in (pair, pair[::-1])}
_OTHER |= {ast.Pow: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult}


class Mutant(NamedTuple):
    """One change of one place: a node's line and columns, and what it becomes."""

    module: str
    line: int
    start: int
    end_line: int
    end: int
    new: str


def find(module: str) -> Iterator[Mutant]:
    """All mutants of a module."""
    pending = [ast.parse((_ROOT / module).read_text())]
    while pending:
        node = pending.pop()
        # Texts of errors, and what is no code, are no business of the tests.
        if isinstance(node, (ast.Raise, ast.JoinedStr, ast.arg)):
            continue
        if isinstance(node, (ast.If, ast.While)) and not isinstance(node.test, ast.Compare):
            yield _mutant(module, node.test, f"not ({ast.unparse(node.test)})")
        for new in _changes(node):
            yield _mutant(module, node, new)
        if isinstance(node, ast.AnnAssign):
            pending += [node.value] if node.value else []
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            defaults = node.args.defaults if isinstance(node, ast.FunctionDef) else []
            pending += [*node.body, *defaults]
        else:
            pending += ast.iter_child_nodes(node)


def _mutant(module: str, node: ast.AST, new: str) -> Mutant:
    place = (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)
    return Mutant(module, *place, f"({new})" if isinstance(node, ast.expr) else new)


def _changes(node: ast.AST) -> Iterator[str]:
    """What a node may become instead."""
    match node:
        case ast.Compare(left, [op], [right]) if type(op) in _OTHER:
            yield ast.unparse(ast.Compare(left, [_OTHER[type(op)]()], [right]))
        case ast.BoolOp(op, values):
            yield ast.unparse(ast.BoolOp(_OTHER[type(op)](), values))
        case ast.BinOp(left, op, right) if type(op) in _OTHER:
            yield ast.unparse(ast.BinOp(left, _OTHER[type(op)](), right))
        case ast.UnaryOp(ast.Not(), operand):
            yield ast.unparse(operand)
        case ast.IfExp(test, body, orelse):
            yield ast.unparse(ast.IfExp(test, orelse, body))
        case ast.Constant(bool() as value):
            yield str(not value)
        case ast.Constant(int() | float() as value):
            yield str(value + 1)
        case ast.Return(ast.expr() as value) if not isinstance(value, ast.Constant):
            yield "return None"
        case ast.Expr(ast.Call()) | ast.AugAssign() | ast.Delete():
            yield "pass"
        case ast.Assign([ast.Attribute() | ast.Subscript()]):
            yield "pass"


def broken(mutant: Mutant) -> tuple[bytes, str]:
    """The module with the change; the change as a person reads it."""
    lines = (_ROOT / mutant.module).read_bytes().splitlines(keepends=True)
    first, last = mutant.line - 1, mutant.end_line - 1
    changed = lines[first][: mutant.start] + mutant.new.encode() + lines[last][mutant.end :]
    old = b" ".join(line.strip() for line in lines[first : last + 1])
    text = f"{mutant.module}:{mutant.line}: {old.decode()}  ->  {changed.decode().strip()}"
    return b"".join([*lines[:first], changed, *lines[last + 1 :]]), text


def judge(mutant: Mutant | None) -> str:
    """Runs the tests that look at a module with the change; returns what noticed it.

    Without a change it only looks whether the tests can be found.
    """
    every = ["--collect-only", *itertools.chain(*_TESTS.values())]
    files = _TESTS[mutant.module] if mutant else every
    command = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *dict.fromkeys(files)]
    with tempfile.TemporaryDirectory() as folder:
        hidden = shutil.ignore_patterns(".*", "__pycache__")
        shutil.copytree(_ROOT, folder, ignore=hidden, dirs_exist_ok=True)
        if mutant:
            (pathlib.Path(folder) / mutant.module).write_bytes(broken(mutant)[0])
        try:
            done = subprocess.run(
                [sys.executable, *command],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": folder},
                capture_output=True,
                text=True,
                timeout=_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return f"did not end in {_SECONDS} seconds"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    # Without a test that failed it is the import of keras_mp, or the process has died.
    return "" if not done.returncode else failed[1] if failed else f"status {done.returncode}"


def main() -> None:
    """Tries a sample of all mutants and says which nobody noticed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--count", type=int, default=60, help="how many (default: 60)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of a run before")
    arguments = parser.parse_args()
    everything = [mutant for module in _TESTS for mutant in find(module)]
    sample = random.Random(arguments.seed).sample(everything, arguments.count)
    print(f"{len(sample)} of {len(everything)} mutants, seed {arguments.seed}", flush=True)
    if error := judge(None):
        raise RuntimeError(error)
    numbers = arguments.only or range(len(sample))
    survived = 0
    for number in numbers:
        killer = judge(sample[number])
        survived += not killer
        print(f"{number}  {broken(sample[number])[1]}\n    {killer or 'SURVIVED'}", flush=True)
    print(f"{len(numbers) - survived} of {len(numbers)} were noticed.")


if __name__ == "__main__":
    main()
