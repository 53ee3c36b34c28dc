"""The README's Python is run as far as it goes without a GPU."""

import ast
import re
from pathlib import Path

import pytest
import torch

import cutegemm

README = Path(__file__).resolve().parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def declarations(block: str) -> list[ast.Assign]:
    """The assignments of a block that make a Gemm or a GemmConfig."""
    made = ("cutegemm.compile", "cutegemm.GemmConfig")
    return [
        node
        for node in ast.parse(block).body
        if isinstance(node, ast.Assign)
        if isinstance(node.value, ast.Call) and ast.unparse(node.value.func) in made
    ]


def needs_a_gpu(call: ast.Call) -> bool:
    """Tuning does, at the declaration."""
    return any(ast.unparse(keyword) == "config='autotune'" for keyword in call.keywords)


def test_there_are_blocks_and_each_makes_something() -> None:
    assert len(BLOCKS) >= 2
    assert all(declarations(block) for block in BLOCKS)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_what_the_readme_declares_can_be_declared(block: str) -> None:
    names: dict[str, object] = {"cutegemm": cutegemm, "torch": torch}
    # What the declarations are made with.
    before = [node for node in ast.parse(block).body if isinstance(node, ast.ImportFrom | ast.FunctionDef)]
    exec(compile(ast.Module(before, []), "README.md", "exec"), names)
    for node in declarations(block):
        call = node.value
        assert isinstance(call, ast.Call)
        if needs_a_gpu(call):
            continue
        if ast.unparse(call.func) == "cutegemm.compile" and "target" not in {k.arg for k in call.keywords}:
            call.keywords.append(ast.keyword("target", ast.Constant("sm_90a")))
        module = ast.fix_missing_locations(ast.Module([node], []))
        exec(compile(module, "README.md", "exec"), names)
        gemm = names.get("gemm")
        if isinstance(gemm, cutegemm.Gemm):
            assert gemm.config.tile_m >= 64


def test_the_first_use_fits_five_lines() -> None:
    assert len([line for line in BLOCKS[0].splitlines() if line.strip()]) == 5


@pytest.mark.gpu
def test_the_first_use_runs() -> None:
    names: dict[str, object] = {}
    exec(compile(BLOCKS[0], "README.md", "exec"), names)
    d, a, w = (names[name] for name in ("d", "a", "w"))
    assert isinstance(d, torch.Tensor)
    assert isinstance(a, torch.Tensor)
    assert isinstance(w, torch.Tensor)
    torch.backends.cuda.matmul.allow_tf32 = False
    truth = torch.mm(a.float(), w.float().t())
    error = (d.float() - truth).norm() / truth.norm()
    torch_error = (torch.mm(a, w.t()).float() - truth).norm() / truth.norm()
    assert error <= 2 * torch_error


def test_the_commands_named_exist() -> None:
    text = README.read_text(encoding="utf-8")
    from cutegemm.cli import parser

    known = parser().format_help()
    for command in set(re.findall(r"python -m cutegemm (\w+)", text)):
        assert re.search(rf"^\s+{command}\b", known, re.MULTILINE), command
    targets = set(re.findall(r"^([a-z-]+):", (README.parent / "Makefile").read_text(), re.MULTILINE))
    for target in set(re.findall(r"(?:^    |`)make ([a-z-]+)", text, re.MULTILINE)):
        assert target in targets, target
