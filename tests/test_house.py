"""The rules of the house that no other tool checks: who imports whom, file sizes, hidden switches, docs.

All but the last read the sources without running them, so a rule also holds for code that no test imports.
"""

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Top to bottom: a package may import itself and those after it.
LAYERS = ["scripts", "jaxrunner", "models", "pallas_kernels"]
PACKAGES = LAYERS[1:]
LONGEST_FILE = 400
# The host half prepares a step without JAX, so it runs and is measured where there is none.
JAX = {"jax", "jaxlib", "flax", "chex", "optax", "orbax"}
HOST, DEVICE = "jaxrunner.batch", "jaxrunner.step"
# The only rooms with both doors: the runner, and the list of public names.
MEETING_PLACES = ("jaxrunner", "jaxrunner.runner")


def sources(root: Path, folders: list[str]) -> dict[str, Path]:
    """Every Python file under the given folders of `root`, by its module name."""
    found = {}
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, module: str) -> Iterator[str]:
    """Dotted names that a file imports, wherever in it. `from a import b` gives a and a.b: b can be a file."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) + 1 - node.level], *filter(None, [node.module])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def reachable(root: Path, package: str) -> dict[str, str]:
    """All that a package imports, itself or through other modules of the project; each with its importer."""
    files = sources(root, LAYERS)
    todo = [module for module in files if inside(module, package)]
    seen, reached = set(todo), dict[str, str]()
    while todo:
        module = todo.pop()
        for name in imports(files[module], module):
            reached.setdefault(name, module)
            if name in files and name not in seen:
                seen.add(name)
                todo.append(name)
    return reached


def wrong_way_imports(root: Path) -> list[str]:
    return [
        f"{module} imports {name}"
        for height, layer in enumerate(LAYERS)
        for module, path in sources(root, [layer]).items()
        for name in imports(path, module)
        if name in LAYERS[:height] or name.startswith(tuple(f"{above}." for above in LAYERS[:height]))
    ]


def breaches_of_the_host(root: Path) -> list[str]:
    """Imports that tie the host half to JAX, or host and device half to each other."""
    host, device = reachable(root, HOST), reachable(root, DEVICE)
    found = [f"{HOST} reaches {name} through {by}" for name, by in host.items() if name.split(".")[0] in JAX]
    found += [f"{HOST} reaches {name} through {by}" for name, by in host.items() if inside(name, DEVICE)]
    found += [f"{DEVICE} reaches {name} through {by}" for name, by in device.items() if inside(name, HOST)]
    for module, path in sources(root, ["jaxrunner"]).items():
        names = list(imports(path, module))
        both = all(any(inside(name, half) for name in names) for half in (HOST, DEVICE))
        if both and module not in MEETING_PLACES and not module.startswith("jaxrunner.runner."):
            found.append(f"{module} imports both {HOST} and {DEVICE}; only the runner does")
    return found


def long_files(root: Path) -> list[str]:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sources(root, LAYERS).values()}
    return [f"{path.relative_to(root)}: {lines} lines" for path, lines in lengths.items() if lines > LONGEST_FILE]


def hidden_switches(root: Path) -> list[str]:
    """Reads of environment variables, and `global`. Handing the environment to a child process is neither."""
    found = []
    for path in sources(root, PACKAGES).values():
        tree = ast.parse(path.read_text(encoding="utf-8"), path)
        handed_on = {
            id(value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Dict)
            for key, value in zip(node.keys, node.values, strict=True)
            if key is None
        }
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(value=ast.Name("os"), attr="environ" | "environb" | "getenv" | "getenvb"):
                    switch = id(node) not in handed_on
                case ast.ImportFrom(module="os", names=names):
                    switch = any(alias.name.startswith(("environ", "getenv")) for alias in names)
                case ast.Global():
                    switch = True
                case _:
                    switch = False
            if switch:
                found.append(f"{path.relative_to(root)}:{node.lineno}: {ast.unparse(node)}")
    return found


# Rounding up by these names; ``cdiv`` and ``-(-a // b)`` count blocks, words or programs, and pad nothing.
ROUNDING = {"ceil", "bit_length", "next_power_of_2", "next_power_of_two", "ceiling"}


def rounded_sizes(root: Path) -> list[str]:
    """Sizes rounded up outside jaxrunner.shapes: to a multiple, to a power of two, to the least that is enough.

    Models and kernels don't ask for padded shapes, they are given them: what a tile is rounded to is theirs.
    """
    found = []
    for module, path in sources(root, ["scripts", "jaxrunner"]).items():
        if inside(module, "jaxrunner.shapes"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), path)):
            match node:
                case ast.BinOp(op=ast.Mult(), left=left, right=right):
                    rounds = any(
                        (by := _divided_up(one)) is not None and ast.dump(by) == ast.dump(other)
                        for one, other in ((left, right), (right, left))
                    )
                case ast.Attribute(attr=name) | ast.Name(id=name):
                    rounds = name in ROUNDING
                case ast.Call(
                    func=ast.Name("min"), args=[ast.GeneratorExp(elt=element, generators=[ast.comprehension(ifs=ifs)])]
                ):
                    rounds = any(_at_least(test, element) for test in ifs)
                case _:
                    rounds = False
            if rounds:
                found.append(f"{path.relative_to(root)}:{node.lineno}: {ast.unparse(node)}")
    return found


def _divided_up(node: ast.expr) -> ast.expr | None:
    """b, where the node is -(-a // b) or cdiv(a, b)."""
    match node:
        case ast.UnaryOp(ast.USub(), ast.BinOp(ast.UnaryOp(ast.USub(), _), ast.FloorDiv(), by)):
            return by
        case ast.Call(ast.Name("cdiv"), [_, by]):
            return by
    return None


def _at_least(test: ast.expr, element: ast.expr) -> bool:
    """Whether the test is element >= something, or something <= element."""
    match test:
        case ast.Compare(left=left, ops=[ast.GtE()]):
            return ast.dump(left) == ast.dump(element)
        case ast.Compare(ops=[ast.LtE()], comparators=[right]):
            return ast.dump(right) == ast.dump(element)
    return False


CHECKS = [wrong_way_imports, breaches_of_the_host, long_files, hidden_switches, rounded_sizes]


@pytest.mark.parametrize("check", CHECKS)
def test_house_rule_holds(check):
    assert check(ROOT) == []


# Each with a breach, and the words that must name it.
BREACHES = [
    (
        wrong_way_imports,
        {"models/a.py": "from jaxrunner.protocol import X"},
        "models.a imports jaxrunner.protocol",
    ),
    (
        wrong_way_imports,
        {"pallas_kernels/a.py": "def f():\n    import models"},
        "pallas_kernels.a imports models",
    ),
    (wrong_way_imports, {"jaxrunner/a.py": "import scripts.demo"}, "jaxrunner.a imports scripts.demo"),
    (
        breaches_of_the_host,
        {"jaxrunner/batch/a.py": "import jax.numpy as jnp"},
        "jax.numpy through jaxrunner.batch.a",
    ),
    (
        breaches_of_the_host,
        {
            "jaxrunner/batch/a.py": "from ..b import x",
            "jaxrunner/b.py": "from . import c",
            "jaxrunner/c.py": "import chex",
        },
        "reaches chex through jaxrunner.c",
    ),
    (breaches_of_the_host, {"jaxrunner/step/a.py": "from jaxrunner import batch"}, "jaxrunner.step reaches"),
    (
        breaches_of_the_host,
        {"jaxrunner/batch/a.py": "from ..step.b import x", "jaxrunner/step/b.py": ""},
        "reaches jaxrunner.step.b through jaxrunner.batch.a",
    ),
    (
        breaches_of_the_host,
        {"jaxrunner/a.py": "import jaxrunner.batch.b\nimport jaxrunner.step.c"},
        "jaxrunner.a imports both",
    ),
    (long_files, {"scripts/a.py": "x = 1\n" * 401}, "scripts/a.py: 401 lines"),
    (hidden_switches, {"models/a.py": "import os\nx = os.environ['X']"}, "models/a.py:2"),
    (hidden_switches, {"jaxrunner/a.py": "import os\nx = os.getenv('X')"}, "jaxrunner/a.py:2"),
    (hidden_switches, {"jaxrunner/a.py": "from os import environ"}, "jaxrunner/a.py:1"),
    (hidden_switches, {"jaxrunner/a.py": "def f():\n    global x\n    x = 1"}, "jaxrunner/a.py:2"),
    (rounded_sizes, {"jaxrunner/a.py": "x = 8 * -(-n // 8)"}, "jaxrunner/a.py:1"),
    (rounded_sizes, {"scripts/a.py": "x = cdiv(n, s.size) * s.size"}, "scripts/a.py:1"),
    (rounded_sizes, {"jaxrunner/a.py": "import math\nx = math.ceil(n / 8)"}, "jaxrunner/a.py:2"),
    (rounded_sizes, {"jaxrunner/a.py": "x = 1 << (n - 1).bit_length()"}, "jaxrunner/a.py:1"),
    (rounded_sizes, {"jaxrunner/a.py": "x = min(s for s in sizes if s >= n)"}, "jaxrunner/a.py:1"),
    (rounded_sizes, {"jaxrunner/a.py": "x = min(s for s in sizes if n <= s)"}, "jaxrunner/a.py:1"),
]


@pytest.mark.parametrize("check, files, words", BREACHES)
def test_breach_is_named(tmp_path, check, files, words):
    write(tmp_path, files)
    assert any(words in line for line in check(tmp_path)), check(tmp_path)


def test_allowed_code_is_left_alone(tmp_path):
    write(
        tmp_path,
        {
            "scripts/demo.py": "import jaxrunner, models, pallas_kernels",
            "jaxrunner/__init__.py": "from .batch.a import x\nfrom .step.a import y",
            "jaxrunner/runner.py": "from jaxrunner.batch import a\nfrom jaxrunner import step",
            "jaxrunner/batch/a.py": "import numpy\nfrom ..shapes import b\nfrom ..protocol import c",
            "jaxrunner/step/a.py": "import jax\nimport models\nfrom ..shapes import b",
            "jaxrunner/shapes/a.py": "x = 8 * -(-n // 8)\n" * 400,
            "jaxrunner/b.py": "blocks = -(-tokens // size)\nbytes = -(-tokens // size) * page\nx = min(s for s in t)",
            "models/a.py": "import os\nchild = {**os.environ, 'TMPDIR': 'x'}",
        },
    )
    assert [line for check in CHECKS for line in check(tmp_path)] == []


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_public_names_are_documented():
    jaxrunner = importlib.import_module("jaxrunner")
    silent = []
    for name in jaxrunner.__all__:
        value = getattr(jaxrunner, name)
        if inspect.ismodule(value) or callable(value):
            text = (vars(value).get("__doc__") if isinstance(value, type) else value.__doc__) or ""
            # A dataclass without words of its own gets its signature as a docstring.
            if not text.strip() or text.startswith(f"{name}("):
                silent.append(name)
    assert silent == [], "public names without a docstring"
