"""Renames private names of TensorFlow and Keras, one at a time, as a release of theirs may do.

python -m benchmarks.acceptance.renamed_names [--keras 2] [names]

It links the installed packages into a folder, and renames one name of docs/private_names.md there
wherever their Python code has it. Then it runs `core_program` with keras_mp, and without it: a name
whose loss Keras itself does not survive is left out.
"""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = {"3": ("tensorflow", "keras"), "2": ("tensorflow", "tf_keras")}
_OTHERS = {"3": "Keras 2", "2": "Keras 3"}


class Copy:
    """A linked copy of the installed packages, in which names can be renamed.

    Args:
        folder: path of an empty folder on the disk of the packages, or else links are symbolic.
        packages: their names.
    """

    def __init__(self, folder: pathlib.Path, packages: tuple[str, ...]) -> None:
        self.folder = folder
        self._texts: dict[pathlib.Path, str] = {}
        for package in packages:
            spec = next(
                pathlib.Path(path) / package
                for path in sys.path
                if (pathlib.Path(path) / package / "__init__.py").exists()
            )
            shutil.copytree(
                spec,
                folder / package,
                copy_function=_link,
                ignore=shutil.ignore_patterns("include"),
            )
            for path in (folder / package).rglob("*.py"):
                self._texts[path] = path.read_text(errors="surrogateescape")

    def renamed(self, name: str) -> Iterator[int]:
        """Yields the number of files in which a name was renamed, and puts them back after."""
        word = re.compile(rf"\b{re.escape(name)}\b")
        changed = {
            path: word.sub(f"{name}_of_another_release", text)
            for path, text in self._texts.items()
            if name in text and word.search(text)
        }
        for path, text in changed.items():
            path.unlink()
            path.write_text(text, errors="surrogateescape")
        try:
            yield len(changed)
        finally:
            for path in changed:
                path.unlink()
                path.write_text(self._texts[path], errors="surrogateescape")


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        os.symlink(source, target)


def names(keras: str) -> list[str]:
    """Returns the names of the table that this Keras concerns, without the modules they are in."""
    sections = (ROOT / "docs/private_names.md").read_text().split("\n## ")[1:]
    ours = [each for each in sections if not each.startswith(_OTHERS[keras])]
    paths = re.findall(r"^- `(.*?)`: ", "\n".join(ours), re.MULTILINE)
    return sorted({path.rpartition(".")[2] for path in paths})


def _run(copy: Copy, keras: str, *arguments: str) -> str:
    environment = {
        **os.environ,
        "TF_USE_LEGACY_KERAS": str(int(keras == "2")),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": os.pathsep.join([str(copy.folder), str(ROOT)]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-m", "benchmarks.acceptance.core_program", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if ": " in line]
    return "\n".join(lines) or f"import: {done.stderr.strip().splitlines()[-1:]}"


def main() -> int:
    """Renames each name in turn and prints what fails then."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.acceptance.renamed_names", description=__doc__
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--keras", choices=["2", "3"], default="3")
    parser.add_argument("--folder", type=pathlib.Path, help="on the disk of the packages")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        copy = Copy(pathlib.Path(folder), PACKAGES[given.keras])
        for name in given.names or names(given.keras):
            for count in copy.renamed(name):
                if not count:
                    outcome = "not in the Python code of the packages"
                else:
                    outcome = _run(copy, given.keras)
                    if re.search(r"^(?!warning)[^:]*: (?!passed)", outcome, re.MULTILINE):
                        plain = _run(copy, given.keras, "--plain")
                        outcome += f"\nwithout keras_mp:\n{plain}"
            bad = [line for line in outcome.splitlines() if not line.endswith(": passed")]
            print(f"{name}:", *(bad or ["passed"]), sep="\n    ", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
