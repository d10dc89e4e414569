# SPDX-License-Identifier: Apache-2.0
"""Holds the rooms apart: who may import whom, where vLLM's private names may appear, and how long a file may be."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "tokenspeed_plugin"
ROOMS = ("tokenspeed_plugin", "entry_points", "scheduler_fsm", "kv_flat", "kernels", "placement")
# "About 300"; a CUDA kernel keeps its whole pipeline in one file and gets a third more.
MAX_LINES = {".cu": 400, ".cuh": 400}
MAX_LINES_OTHERWISE = 330
CODE_SUFFIXES = {".py", ".h", ".cpp", ".cu", ".cuh"}
STANDARD = set(sys.stdlib_module_names)

# Room -> top-level modules it may import beside the standard library and itself.
OUTSIDE = {
    "tokenspeed_plugin": {"pluggy", "pydantic", "numpy"},
    "tokenspeed_plugin/host": {"vllm"},
    "tokenspeed_plugin/cli": {"typer", "rich"},
    "entry_points": {"fastapi", "prometheus_client"},
    "scheduler_fsm": {"numpy"},
    "kv_flat": {"numpy"},
    "kv_flat/cli": {"typer", "matplotlib"},
    "kernels": {"torch", "triton", "cutlass", "cuda", "numpy", "pydantic"},
    "kernels/cli": {"typer", "rich"},
    "placement": {"torch", "numpy", "pydantic"},
    "placement/cli": {"typer", "rich"},
}
# Room -> sub-packages of ours it may import.
INSIDE = {
    "tokenspeed_plugin": {"host", "hooks", "cli", "settings", "availability", "flag_carrier"},
    "tokenspeed_plugin/cli": {"kernels", "kv_flat", "placement"},
    "entry_points": {
        "host",
        "hooks",
        "settings",
        "availability",
        "flag_carrier",
        "entry_points",
        "scheduler_fsm",
        "kv_flat",
    },
    "scheduler_fsm": {"scheduler_fsm", "kv_flat", "host", "hooks", "settings"},
    "kv_flat": {"kv_flat", "host"},
    "kernels": {"kernels", "hooks", "settings"},
    "kernels/engine": {"host"},
    "placement": {"placement", "kernels", "host", "hooks", "settings"},
}


def python_files(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def code_files() -> list[Path]:
    folders = (*ROOMS, "tests", "benchmarks", "demo")
    return sorted(p for f in folders for p in (ROOT / f).rglob("*") if p.suffix in CODE_SUFFIXES)


def absolute_module(path: Path, node: ast.ImportFrom) -> str:
    """The module of an import statement, relative ones resolved."""
    if node.level == 0:
        return node.module or ""
    folders = path.relative_to(ROOT).parent.parts
    package = folders if folders[0] == PACKAGE else (PACKAGE, *folders)
    return ".".join((*package[: len(package) - node.level + 1], *([node.module] if node.module else [])))


def imported_modules(path: Path) -> set[str]:
    """Dotted names of all modules that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = absolute_module(path, node)
            found |= {f"{module}.{a.name}" for a in node.names} if module == PACKAGE else {module}
    return found


def sub_rooms(path: Path) -> list[str]:
    parts = path.relative_to(ROOT).parts
    return ["/".join(parts[:n]) for n in range(1, len(parts))]


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_the_table_allows(room: str) -> None:
    wrong = []
    for path in python_files(room):
        allowed = set().union(*(OUTSIDE.get(name, set()) for name in sub_rooms(path)))
        siblings = set().union(*(INSIDE.get(name, set()) for name in sub_rooms(path)))
        for module in imported_modules(path):
            top, _, rest = module.partition(".")
            ours = rest.partition(".")[0]
            ours_allowed = top == PACKAGE and (ours in siblings or ours in {"", "__version__"})
            if not (ours_allowed or top in STANDARD or top in allowed):
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert wrong == []


def test_the_table_names_every_room_that_is_packaged() -> None:
    packaged = re.findall(
        r'^"tokenspeed_plugin[^"]*" = "([^"]+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    assert set(packaged) == set(ROOMS)


def test_only_host_names_vllm_modules() -> None:
    """Also as strings: a dotted path in a string is an import by another name."""
    pattern = re.compile(r"['\"`]vllm\.[a-z_0-9.]+[:.][A-Za-z_]+")
    wrong = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for room in ROOMS
        for path in python_files(room)
        if "tokenspeed_plugin/host" not in sub_rooms(path)
        for match in pattern.finditer(path.read_text())
        if not match.group().strip("'\"`").startswith(("vllm.tokenspeed_plugin", "vllm.general_plugins"))
    ]
    assert wrong == []


def test_importing_the_host_package_imports_nothing_of_vllm() -> None:
    for name in ("__init__.py", "check.py", "registration.py", "patches.py", "engine_gate.py", "config_gate.py"):
        tree = ast.parse((ROOT / "tokenspeed_plugin/host" / name).read_text())
        top_level = [n for n in tree.body if isinstance(n, (ast.Import, ast.ImportFrom))]
        modules = {getattr(n, "module", None) or n.names[0].name for n in top_level}
        assert not any(m.partition(".")[0] == "vllm" for m in modules), name
        assert f"{PACKAGE}.host.names" not in modules, name


def test_files_stay_short() -> None:
    too_long = {
        str(path.relative_to(ROOT)): lines
        for path in code_files()
        if (lines := len(path.read_text().splitlines())) > MAX_LINES.get(path.suffix, MAX_LINES_OTHERWISE)
    }
    assert too_long == {}


def test_every_source_file_starts_with_its_licence() -> None:
    wrong = [
        str(p.relative_to(ROOT))
        for p in code_files()
        if not p.read_text().startswith(
            ("# SPDX-License-Identifier: Apache-2.0\n", "// SPDX-License-Identifier: Apache-2.0\n")
        )
    ]
    assert wrong == []
