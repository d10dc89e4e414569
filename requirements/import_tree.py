# SPDX-License-Identifier: Apache-2.0
"""Lays the import package out in one folder of links, as installing it does, for tools that only read paths (mypy)."""

import argparse
import shutil
from pathlib import Path

import tomllib


def lay_out(root: Path, target: Path) -> None:
    """Link every folder of ``[tool.scikit-build.wheel.packages]`` below ``root`` to its import name below ``target``."""
    settings = tomllib.loads((root / "pyproject.toml").read_text())
    packages: dict[str, str] = settings["tool"]["scikit-build"]["wheel"]["packages"]
    shutil.rmtree(target, ignore_errors=True)
    for name, folder in sorted(packages.items()):
        destination = target / name
        destination.mkdir(parents=True, exist_ok=True)
        for entry in sorted((root / folder).iterdir()) if (root / folder).is_dir() else []:
            if entry.name not in ("__pycache__", "csrc"):
                (destination / entry.name).symlink_to(entry.resolve())


def main() -> None:
    """Lay out from the command line, in the project's root: ``import_tree.py TARGET``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    lay_out(Path.cwd(), parser.parse_args().target)


if __name__ == "__main__":
    main()
