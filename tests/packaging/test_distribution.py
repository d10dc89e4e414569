# SPDX-License-Identifier: Apache-2.0
"""Wheel and source archive carry what they should and nothing else."""

import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import tokenspeed_plugin

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ["entry_points", "host", "kernels", "kv_flat", "placement", "scheduler_fsm"]


@pytest.fixture(scope="module")
def wheel_names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def run_installed(installed: Path, code: str) -> str:
    """Run ``code`` with the wheel's files on the path and this environment's packages, but not its editable install."""
    paths = [str(installed), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    prelude = f"import sys; sys.path[:0] = {paths!r}\n"
    command = [sys.executable, "-I", "-S", "-c", prelude + code]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_wheel_installs_one_top_level_package(wheel_names: list[str]) -> None:
    version = tokenspeed_plugin.__version__
    assert {name.split("/")[0] for name in wheel_names} == {
        "tokenspeed_plugin",
        f"tokenspeed_plugin-{version}.dist-info",
    }


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_is_in_the_wheel(wheel_names: list[str], room: str) -> None:
    assert f"tokenspeed_plugin/{room}/__init__.py" in wheel_names


def test_the_wheel_carries_type_marker_license_and_one_extension(wheel_names: list[str]) -> None:
    assert "tokenspeed_plugin/py.typed" in wheel_names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel_names)
    extensions = [name for name in wheel_names if name.endswith(".so")]
    assert [name.split(".")[0] for name in extensions] == ["tokenspeed_plugin/scheduler_fsm/_core"]


def test_the_wheel_carries_no_source_of_the_core(wheel_names: list[str]) -> None:
    suffixes = (".cpp", ".h", "CMakeLists.txt", ".a", ".pyc")
    core = ("tokenspeed_plugin/kv_flat/", "tokenspeed_plugin/scheduler_fsm/")
    assert [name for name in wheel_names if name.startswith(core) and name.endswith(suffixes)] == []


def test_gpu_kernels_travel_as_source(wheel_names: list[str]) -> None:
    """They are compiled where they run: the wheel carries every CUDA file of the repository."""
    in_repository = {f"tokenspeed_plugin/{path.relative_to(ROOT)}" for path in (ROOT / "kernels").rglob("*.cu*")}
    assert in_repository
    assert {name for name in wheel_names if name.endswith((".cu", ".cuh"))} == in_repository


def test_vllm_is_asked_for_by_extras_only(metadata: Message) -> None:
    requirements = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    plain = {requirement.name for requirement in requirements if requirement.marker is None}
    assert plain == {"numpy", "pluggy", "pydantic", "rich", "typer"}
    assert set(metadata.get_all("Provides-Extra", [])) == {"vllm", "cpu", "mooncake", "blackwell", "pictures", "dev"}
    assert metadata["License-Expression"] == "Apache-2.0"


def test_version_of_package_metadata_and_core_agree(installed: Path, metadata: Message) -> None:
    code = (
        "import tokenspeed_plugin, tokenspeed_plugin.scheduler_fsm._core as core\n"
        "print(tokenspeed_plugin.__file__, tokenspeed_plugin.__version__, core.core_version)"
    )
    place, python_version, core_version = run_installed(installed, code).split()
    assert Path(place).is_relative_to(installed)
    assert python_version == core_version == metadata["Version"] == tokenspeed_plugin.__version__


def test_entry_points_of_the_wheel_resolve(installed: Path) -> None:
    code = (
        "from importlib.metadata import distribution\n"
        "for entry in distribution('tokenspeed-plugin').entry_points:\n"
        "    print(entry.group, entry.name, callable(entry.load()))"
    )
    assert set(run_installed(installed, code).splitlines()) == {
        "vllm.endpoint_plugins tokenspeed True",
        "vllm.general_plugins tokenspeed True",
        "console_scripts tokenspeed-plugin True",
    }


def test_importing_the_package_leaves_vllm_and_torch_alone(installed: Path) -> None:
    code = (
        "import tokenspeed_plugin, tokenspeed_plugin.entry_points.general, tokenspeed_plugin.scheduler_fsm\n"
        "print(sorted({'vllm', 'torch'} & set(sys.modules)))"
    )
    assert run_installed(installed, code) == "[]"


def test_the_source_archive_is_complete_and_clean(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {
        "pyproject.toml",
        "CMakeLists.txt",
        "LICENSE",
        "README.md",
        "scheduler_fsm/csrc/bindings/module.cpp",
    } <= names
    assert {name.split("/")[0] for name in names} & {".venv", ".cache", "build", "dist"} == set()
