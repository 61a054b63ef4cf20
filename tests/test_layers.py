"""Imports go one way, and each heavy library has one door (shared/design.md, the package's table).

Read from the source: imports inside functions and under TYPE_CHECKING count.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "qerl"
LAYERS = {
    1: (
        "config run_folder rewards statistics nvfp4 noise adapter correction groups alarms "
        "kernels _compat".split()
    ),
    2: ("checkpoint", "data", "linear", "metrics", "policy", "rollout"),
    3: ("arguments", "parity", "sampler", "trainer"),
    4: ("train", "evaluate", "compare", "check", "report"),
}
LAYER_OF = {name: layer for layer, names in LAYERS.items() for name in names}
# The only modules that may import a library.
DOORS = {
    "vllm": {"rollout", "_compat"},
    "datasets": {"data"},
    "peft": {"linear", "policy"},
    "trl": {"arguments", "trainer"},
    "safetensors": {"adapter", "checkpoint"},
    "triton": {"kernels"},
    "compressed_tensors": {"checkpoint"},
    "llmcompressor": set(),
    "matplotlib": {"report"},
    "math_verify": {"rewards"},
}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def module_of(path: Path) -> str:
    """The part of the package that a file belongs to: rollout for qerl/rollout/engine.py."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Every dotted name that a file imports, with `from a import b` as a.b; relative ones too."""
    package = ["qerl", *path.relative_to(PACKAGE).parts[:-1]]
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*above, *filter(None, [node.module])])
            names |= {f"{origin}.{alias.name}" for alias in node.names}
    return names


def ours(path: Path) -> set[str]:
    """The parts of the package that a file imports, its own left out."""
    parts = {name.split(".")[1] for name in imported(path) if name.startswith("qerl.")}
    return (parts & set(LAYER_OF)) - {module_of(path)}


def test_every_module_has_a_layer():
    assert {module_of(path) for path in FILES} == set(LAYER_OF)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_from_its_own_layer_or_below(path):
    layer = LAYER_OF[module_of(path)]
    above = {name for name in ours(path) if LAYER_OF[name] > layer}
    assert not above
    if layer == 4:
        assert not {name for name in ours(path) if LAYER_OF[name] == 4}, "nobody imports a program"


def test_there_is_no_cycle():
    needs = {name: set() for name in LAYER_OF}
    for path in FILES:
        needs[module_of(path)] |= ours(path)
    while free := [name for name, others in needs.items() if not others]:
        for name in free:
            del needs[name]
        needs = {name: others - set(free) for name, others in needs.items()}
    assert not needs


@pytest.mark.parametrize("library", DOORS)
def test_a_library_is_imported_by_its_doors_alone(library):
    users = {
        module_of(path)
        for path in FILES
        if any(name.split(".")[0] == library for name in imported(path))
    }
    assert users <= DOORS[library]


def test_third_party_code_is_patched_in_compat_alone():
    """An attribute set on something imported from elsewhere is a patch."""
    for path in FILES:
        tree = ast.parse(path.read_text())
        foreign = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                module = getattr(node, "module", None) or node.names[0].name
                if not module.startswith("qerl") and not getattr(node, "level", 0):
                    foreign |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        patched = {
            ast.unparse(target)
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Attribute)
            and isinstance(target.value, ast.Name)
            and target.value.id in foreign
        }
        assert not patched or module_of(path) == "_compat", (path, patched)
