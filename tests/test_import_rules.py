"""What the parts may know of each other (ARCHITECTURE.md: rules of knowledge)."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "ss_device": ROOT / "ss_device",
    "ss_convert": ROOT / "convert/ss_convert",
    "ss_executor": ROOT / "runtime/ss_executor",
    "ss_runtime": ROOT / "runtime/ss_runtime",
}
TORCH = {"torch", "transformers", "peft", "accelerate", "datasets"}
WITH_TORCH = ("reference", "training", "evaluation")
MORE = {
    "command_line.py": {"rich"},
    "outputs.py": {"filelock"},
    "tokenizer_file.py": {"tokenizers"},
    "template_process.py": {"jinja2"},
    "hub.py": {"huggingface_hub"},
}


def modules():
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            yield pytest.param(package, path, id=str(path.relative_to(ROOT)))


def imported(path: Path, everywhere: bool) -> set[str]:
    """Top-level names a module imports: when it is loaded, or `everywhere` in functions as well."""
    tree = ast.parse(path.read_text())
    found: set[str] = set()
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module.partition(".")[0])
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if not everywhere and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        pending.extend(ast.iter_child_nodes(node))
    return found


def foreign(names: set[str]) -> set[str]:
    return {n for n in names if n not in sys.stdlib_module_names and n not in PACKAGES}


@pytest.mark.parametrize(("package", "path"), list(modules()))
def test_module_imports_what_its_place_allows(package, path):
    place = path.relative_to(PACKAGES[package]).parts
    everywhere, at_load = imported(path, everywhere=True), imported(path, everywhere=False)
    if package == "ss_device" and place[0] not in WITH_TORCH:
        allowed = {"numpy", "safetensors", "msgspec"} | MORE.get(place[0], set())
        assert foreign(everywhere) <= allowed
        assert not everywhere & {"ss_convert", "ss_runtime"}
    if package == "ss_device":
        assert not everywhere & {"mlx", "coremltools", "ss_convert", "ss_executor"}
    if package == "ss_convert":
        assert not everywhere & (TORCH | {"mlx"})
    if package == "ss_executor":
        assert not everywhere & (TORCH | {"mlx", "ss_convert", "ss_device", "ss_runtime"})
    if package == "ss_runtime":
        assert not at_load & (TORCH | {"coremltools", "ss_executor"})
        assert "ss_convert" not in everywhere


def test_executor_shares_no_code_with_the_builder():
    """Neither imports the other, so that a mistake in one is seen by the other."""
    assert "ss_executor" not in set().union(
        *(imported(path, everywhere=True) for path in (PACKAGES["ss_convert"] / "coreml").rglob("*.py"))
    )


def test_no_module_named_utils():
    for folder in PACKAGES.values():
        assert not list(folder.rglob("utils*"))


def loaded_after(code: str) -> set[str]:
    """Top-level modules of a fresh interpreter after `code`."""
    program = f"import sys\n{code}\nprint(*sorted({{n.partition('.')[0] for n in sys.modules}}))"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(result.stdout.split())


CORE = (
    "adapter application architecture bundle config conversation decoding files json_lines names outputs "
    "strict_json trace tree prompt_lookup sampling command_line"
)


@pytest.mark.parametrize(
    ("code", "forbidden"),
    [
        (
            "\n".join(f"import ss_device.{name}" for name in CORE.split()),
            TORCH | {"mlx", "coremltools", "tokenizers"},
        ),
        ("import ss_device", TORCH | {"mlx", "coremltools", "numpy", "safetensors", "rich"}),
        ("from ss_device import load_adapter, train_adapter", TORCH | {"mlx", "coremltools"}),
        (
            "import ss_device.training.command as c; c.build_parser()",
            TORCH | {"mlx", "coremltools", "ss_convert", "ss_runtime"},
        ),
        ("import ss_executor", TORCH | {"mlx", "coremltools", "ss_device", "ss_runtime"}),
        ("import ss_convert.mlx.weights", TORCH | {"mlx", "coremltools"}),
        ("from ss_convert import convert", TORCH | {"mlx", "coremltools", "numpy", "rich"}),
        ("import ss_convert.command", TORCH | {"mlx", "coremltools"}),
        ("import ss_runtime.mlx.loading, ss_runtime.generation", TORCH | {"coremltools", "ss_convert"}),
        ("import ss_runtime.commands.generate", TORCH | {"mlx", "coremltools", "ss_convert"}),
        ("import ss_runtime.commands.bench", TORCH | {"mlx", "coremltools", "ss_convert"}),
        ("import ss_runtime.commands.serve", TORCH | {"mlx", "coremltools", "ss_convert", "starlette"}),
        ("import ss_runtime.commands.validate", TORCH | {"mlx", "coremltools", "ss_convert"}),
    ],
)
def test_loading_a_part_does_not_load_what_it_must_not_need(code, forbidden):
    assert not loaded_after(code) & forbidden


# An import hook that behaves as if a package were not installed.
HIDE = """
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in {names!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Hidden())
"""


def test_core_ml_builder_works_without_torch_and_mlx():
    hidden = HIDE.format(names=sorted(TORCH | {"mlx"}))
    assert not loaded_after(hidden + "import ss_convert.coreml.convert") & {"torch", "mlx"}


def test_mlx_generation_works_without_torch_and_coremltools():
    hidden = HIDE.format(names=sorted(TORCH | {"coremltools"}))
    loaded = loaded_after(hidden + "import ss_runtime.mlx.loading, ss_runtime.commands.generate")
    assert "mlx" in loaded


def project_imports() -> dict[str, set[str]]:
    """Module → the project's modules that it imports anywhere, in functions and for type checkers too."""
    paths = {module_name(path): path for folder in PACKAGES.values() for path in folder.rglob("*.py")}
    found: dict[str, set[str]] = {name: set() for name in paths}
    for name, path in paths.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for node in ast.walk(ast.parse(path.read_text())):
            targets: list[str] = []
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    above = package.split(".")[: len(package.split(".")) - node.level + 1]
                    base = ".".join([*above, *filter(None, [node.module])])
                targets = [f"{base}.{alias.name}" for alias in node.names] + [base]
            found[name] |= {target for target in targets if target in paths and target != name}
    # A package's own file hands names on; who imports a module of it does not depend on the rest.
    return {n: {t for t in targets if not is_package(paths[t])} for n, targets in found.items()}


def module_name(path: Path) -> str:
    root = next(folder for folder in PACKAGES.values() if path.is_relative_to(folder))
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_package(path: Path) -> bool:
    return path.name == "__init__.py"


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a loop; [] where there is none."""
    left = dict(graph)
    while free := [name for name, targets in left.items() if not targets & left.keys()]:
        for name in free:
            del left[name]
    return sorted(left)


def test_no_modules_import_each_other():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == ["a", "b", "c", "d"]
    assert circle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    graph = project_imports()
    assert len(graph) > 200 and circle(graph) == []
