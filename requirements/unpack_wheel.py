# SPDX-License-Identifier: Apache-2.0
"""Unpacks a wheel without its binaries: enough of a vLLM built for GPUs to drive its scheduler on a CPU."""

import argparse
import shutil
import zipfile
from pathlib import Path

BINARY_SUFFIXES = (".so", ".cubin", ".fatbin", "/vllm-rs")


def unpack(wheel: Path, target: Path) -> None:
    """Unpack ``wheel`` into ``target``; an interrupted run leaves nothing under that name."""
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith(BINARY_SUFFIXES)]
        archive.extractall(partial, names)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)


def main() -> None:
    """Unpack from the command line: ``unpack_wheel.py WHEEL TARGET``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("target", type=Path)
    arguments = parser.parse_args()
    unpack(arguments.wheel, arguments.target)


if __name__ == "__main__":
    main()
