# SPDX-License-Identifier: Apache-2.0
"""Builds our CUDA libraries with nvcc on first use, one for each state of their sources, and finds built ones."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

NVCC_FLAGS = (
    "-std=c++17",
    "-O3",
    "-gencode=arch=compute_90a,code=sm_90a",
    "-Xcompiler=-fPIC,-Wall",
    "-shared",
    "-cudart=static",
)
STATUS = Path(__file__).parent / "csrc" / "status.cuh"
"""How a library's C interface reports errors; to be borrowed."""


class LibraryUnavailableError(RuntimeError):
    """No built library and no way to build one; the message says which was missing."""


def find_nvcc() -> str | None:
    """nvcc of $CUDA_HOME, or the one on PATH."""
    home = os.environ.get("CUDA_HOME")
    candidate = shutil.which("nvcc", path=os.path.join(home, "bin")) if home else None
    return candidate or shutil.which("nvcc")


def cache_folder() -> Path:
    """Where built libraries lie: $TOKENSPEED_KERNEL_CACHE, or tokenspeed-plugin/kernels in the user's cache folder."""
    chosen = os.environ.get("TOKENSPEED_KERNEL_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tokenspeed-plugin" / "kernels"


@dataclass(frozen=True)
class CudaSources:
    """The sources of one library for Hopper: its name, the folder whose `api.cu` includes all the others, and macros.

    `borrowed` are files of other folders that they include, by their relative path.
    """

    name: str
    folder: Path
    defines: tuple[str, ...] = ()
    borrowed: tuple[Path, ...] = ()

    @property
    def flags(self) -> tuple[str, ...]:
        """What nvcc is called with, but for the files."""
        return (*NVCC_FLAGS, *(f"-D{name}" for name in self.defines))

    def source_hash(self) -> str:
        """Hash of every source file and flag that the library depends on."""
        digest = hashlib.sha256("\0".join(self.flags).encode())
        for path in (*sorted(self.folder.glob("*.cu*")), *self.borrowed):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
        return digest.hexdigest()[:16]

    def library_path(self) -> Path:
        """The built library's file for these sources, whether it exists or not."""
        return cache_folder() / f"{self.name}-{self.source_hash()}.so"

    def build(self, target: Path | None = None, extra_flags: tuple[str, ...] = ()) -> str:
        """Compiles to `target` (default: the cache), atomically; returns the compiler's report.

        Raises:
            LibraryUnavailableError: no nvcc, or it failed; the message carries its output.
        """
        nvcc = find_nvcc()
        if nvcc is None:
            raise LibraryUnavailableError("nvcc was found neither under $CUDA_HOME nor on PATH")
        path = target or self.library_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            output = Path(folder) / "library.so"
            command = [nvcc, *self.flags, *extra_flags, "-o", str(output), str(self.folder / "api.cu")]
            done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own sources
            if done.returncode != 0:
                raise LibraryUnavailableError(f"nvcc failed with status {done.returncode}:\n{done.stdout}{done.stderr}")
            os.replace(output, path)
        return done.stdout + done.stderr

    def unavailable_reason(self) -> str | None:
        """Why the library cannot be had on this machine; None if it can."""
        if self.library_path().exists() or find_nvcc() is not None:
            return None
        return f"{self.library_path()} does not exist and nvcc was found neither under $CUDA_HOME nor on PATH"

    def built(self) -> Path:
        """The library's file, built first if need be.

        Raises:
            LibraryUnavailableError: see `build`.
        """
        path = self.library_path()
        if not path.exists():
            self.build(path)
        return path
