"""House rules checked on the syntax tree: size, width, words, promises in the documentation.

Raising a threshold here is a decision about the code, not a way to make this pass.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
MAX_PARAMETERS = 10
DOCUMENTED_SHARE = 1.0  # of public functions, methods and classes of the package: a docstring
ANNOTATED_SHARE = 1.0  # of public functions and methods of the package: every parameter and the result

# The text is about the product: how it was made, and where, is of no use to its reader.
FOREIGN_WORDS = (
    "session",
    "sub-agent",
    "subagent",
    "claude",
    "anthropic",
    "chatgpt",
    "copilot",
    "/work/",
    "issue #",
)
# Third-party names that contain one of them, as they stand in code.
FOREIGN_WORDS_ALLOWED = ('scope="session"', "sessionstart", "sessionfinish")

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "cutegemm"
PYTHON_FOLDERS = ("cutegemm", "tests", "examples", "benchmarks", "tools")
THIS = Path(__file__).resolve()

Function = ast.FunctionDef | ast.AsyncFunctionDef


def python_files(*folders: str) -> list[Path]:
    """Every Python file below the folders."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def tree_of(path: Path) -> ast.Module:
    """The file's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def where(path: Path, node: ast.AST) -> str:
    """``file:line name`` of a definition, or ``file:line`` of a statement."""
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)} {getattr(node, 'name', '')}".rstrip()


def functions(tree: ast.AST) -> Iterator[Function]:
    """Every function and method, nested ones too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def length(function: Function) -> int:
    """Lines of a function, its docstring and decorators left out."""
    assert function.end_lineno is not None
    first = function.lineno
    lines = function.end_lineno - first + 1
    if ast.get_docstring(function) is not None:
        docstring = function.body[0]
        assert docstring.end_lineno is not None
        lines -= docstring.end_lineno - docstring.lineno + 1
    return lines


def parameters(function: Function) -> list[ast.arg]:
    """The parameters a caller gives: without self and cls."""
    spec = function.args
    every = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, *filter(None, (spec.vararg, spec.kwarg))]
    return [argument for argument in every if argument.arg not in ("self", "cls")]


def is_overload(function: Function) -> bool:
    """Whether it is a typing.overload signature."""
    return any(ast.unparse(decorator).endswith("overload") for decorator in function.decorator_list)


def public_definitions(path: Path) -> Iterator[ast.ClassDef | Function]:
    """Public classes, functions and methods of public classes of one module of the package."""
    if any(part.startswith("_") and part != "__init__.py" for part in path.relative_to(PACKAGE).parts):
        return
    pending: list[ast.stmt] = list(tree_of(path).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node
            pending.extend(node.body)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            if not is_overload(node):
                yield node
        elif isinstance(node, ast.If | ast.Try):
            pending.extend(node.body)


def overrides(path: Path) -> set[int]:
    """Lines of methods of a class with bases whose docstring the base carries (same name in a base here)."""
    classes = {node.name: node for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef)}
    lines = set()
    for node in classes.values():
        inherited = {
            method.name
            for base in node.bases
            if (parent := classes.get(ast.unparse(base).split("[")[0])) is not None
            for method in parent.body
            if isinstance(method, ast.FunctionDef) and ast.get_docstring(method)
        }
        lines |= {m.lineno for m in node.body if isinstance(m, ast.FunctionDef) and m.name in inherited}
    return lines


def test_there_is_something_to_check() -> None:
    assert len(python_files("cutegemm")) >= 3
    assert sum(1 for path in python_files("cutegemm") for _ in public_definitions(path)) >= 10


def test_no_file_outgrows_one_sitting() -> None:
    sizes = {
        path: len(path.read_text(encoding="utf-8").splitlines()) for path in python_files(*PYTHON_FOLDERS)
    }
    assert not {where(p, tree_of(p)): n for p, n in sizes.items() if n > MAX_FILE_LINES}


def test_no_function_outgrows_a_screen() -> None:
    too_long = {
        where(path, function): length(function)
        for path in python_files(*PYTHON_FOLDERS)
        for function in functions(tree_of(path))
        if length(function) > MAX_FUNCTION_LINES
    }
    assert not too_long


def test_no_function_takes_a_shopping_list() -> None:
    too_wide = {
        where(path, function): len(parameters(function))
        for path in python_files(*PYTHON_FOLDERS)
        for function in functions(tree_of(path))
        if len(parameters(function)) > MAX_PARAMETERS
    }
    assert not too_wide


def test_every_module_says_what_it_is() -> None:
    assert not [
        where(p, tree_of(p)) for p in python_files(*PYTHON_FOLDERS) if not ast.get_docstring(tree_of(p))
    ]


def test_public_things_are_documented() -> None:
    missing, total = [], 0
    for path in python_files("cutegemm"):
        inherited = overrides(path)
        for node in public_definitions(path):
            total += 1
            if ast.get_docstring(node) is None and node.lineno not in inherited:
                missing.append(where(path, node))
    assert 1 - len(missing) / total >= DOCUMENTED_SHARE, missing


def test_public_functions_are_annotated() -> None:
    missing, total = [], 0
    for path in python_files("cutegemm"):
        for node in public_definitions(path):
            if isinstance(node, ast.ClassDef):
                continue
            total += 1
            if node.returns is None or any(argument.annotation is None for argument in parameters(node)):
                missing.append(where(path, node))
    assert 1 - len(missing) / total >= ANNOTATED_SHARE, missing


def test_no_error_is_swallowed() -> None:
    swallowed = [
        where(path, node)
        for path in python_files(*PYTHON_FOLDERS)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ExceptHandler)
        if node.type is None or all(isinstance(statement, ast.Pass) for statement in node.body)
    ]
    assert not swallowed


def test_the_package_validates_by_exceptions() -> None:
    """``python -O`` drops asserts; a check or a side effect in one would vanish with it."""
    asserts = [
        where(path, node)
        for path in python_files("cutegemm")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Assert)
    ]
    assert not asserts


def test_kernel_files_keep_their_annotations_evaluated() -> None:
    """CuTe DSL reads annotations at run time; the future import would turn them into strings."""
    postponed = [
        where(path, node)
        for path in python_files("cutegemm")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ImportFrom) and node.module == "__future__"
        if any(alias.name == "annotations" for alias in node.names)
    ]
    assert not postponed


@pytest.mark.parametrize("architecture", ["hopper", "blackwell"])
def test_the_layers_hold(architecture: str) -> None:
    """Kernel folders know neither torch nor each other."""
    other = {"hopper": "blackwell", "blackwell": "hopper"}[architecture]
    wrong = []
    for path in python_files(f"cutegemm/{architecture}"):
        for node in ast.walk(tree_of(path)):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            if any(n.split(".")[0] == "torch" or n.startswith(f"cutegemm.{other}") for n in names):
                wrong.append(where(path, node))
    assert not wrong


def documents() -> list[Path]:
    """Every Markdown file that is part of the project."""
    folders = ("docs", "tests", "benchmarks", "examples")
    return sorted([ROOT / "README.md", *(path for name in folders for path in (ROOT / name).rglob("*.md"))])


def cited_paths(text: str) -> set[str]:
    """Relative file paths named in a Markdown text: in backquotes, or as link targets."""
    in_quotes = re.findall(r"`([A-Za-z0-9_.-]+(?:/[A-Za-z0-9_.-]+)+/?)`", text)
    in_links = [t for t in re.findall(r"\]\(([^)#\s]+)\)", text) if "://" not in t]
    named = re.findall(r"`([A-Za-z0-9_-]+\.(?:py|md|toml|json))`", text)
    return {*in_quotes, *in_links, *named}


def test_cited_files_exist() -> None:
    everything = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if ".venv" not in path.parts]
    dead = []
    for document in documents():
        for cited in cited_paths(document.read_text(encoding="utf-8")):
            places = (ROOT / cited, document.parent / cited, PACKAGE / cited)
            bare_name = "/" not in cited and any(path.endswith(f"/{cited}") for path in everything)
            if not (any(place.exists() for place in places) or bare_name):
                dead.append(f"{document.relative_to(ROOT)}: {cited}")
    assert not dead


def test_the_path_finder_finds() -> None:
    text = "see `cutegemm/no_such.py`, [there](docs/x.md), [out](https://a.b/c.md), `Makefile`, `a/b`, `x.py`"
    assert cited_paths(text) == {"cutegemm/no_such.py", "docs/x.md", "a/b", "x.py"}


def test_the_product_speaks_of_itself_only() -> None:
    texts = [
        *python_files(*PYTHON_FOLDERS),
        *documents(),
        ROOT / "Makefile",
        ROOT / "pyproject.toml",
        ROOT / ".ci/run",
    ]
    found = []
    for path in texts:
        if path == THIS:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            plain = line.lower()
            for allowed in FOREIGN_WORDS_ALLOWED:
                plain = plain.replace(allowed, "")
            found += [f"{path.relative_to(ROOT)}:{number} {word}" for word in FOREIGN_WORDS if word in plain]
    assert not found


def test_the_measure_of_a_function_counts_its_code() -> None:
    source = '@cache\ndef f(\n    a,\n    b,\n):\n    """One.\n\n    Two.\n    """\n    return a\n'
    (function,) = functions(ast.parse(source))
    assert length(function) == 5
    assert [argument.arg for argument in parameters(function)] == ["a", "b"]
