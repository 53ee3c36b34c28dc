"""Turns a result of ``python -m cutegemm bench --json`` into the README's table.

    python benchmarks/make_readme_table.py            rewrite the README
    python benchmarks/make_readme_table.py --check    exit 1 if the README is not what the result says

The table stands between <!-- bench:begin --> and <!-- bench:end -->. Needs the standard library only.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
DEFAULT_RESULT = HERE / "results" / "h200_bf16.json"
DEFAULT_README = HERE.parent / "README.md"
BASELINE = "cublas"
TITLES = {
    "cublas": "cuBLAS",
    "deepgemm": "DeepGEMM",
    "quack": "QuACK",
    "quack-tuned": "QuACK tuned",
    "triton": "Triton",
}


class TableError(Exception):
    """The result or the README is not of the form needed; the message says which and how."""


def table(result: Mapping[str, Any]) -> str:
    """Markdown of a whole result: a sentence on how it was taken, a row per shape, the geometric means."""
    shapes = result["shapes"]
    names = list(dict.fromkeys(name for shape in shapes for name in shape["implementations"]))
    ours = [name for name in names if any(_is_ours(shape, name) for shape in shapes)]
    if not ours:
        raise TableError("the result holds no measurement of cutegemm")
    name = ours[0]
    others = [other for other in names if other not in ours and other != BASELINE]
    heads = ["M x N x K", "µs", "TFLOP/s", "GB/s", "of the floor", "cuBLAS µs", "times cuBLAS"]
    heads += [TITLES.get(other, other) for other in others]
    lines = [_line(heads), _line(["---", *["---:"] * (len(heads) - 1)])]
    lines += [_shape_line(shape, name, others) for shape in shapes]
    means = result["geomean_times_faster_than_cublas"]
    lines.append(
        _line(["**geomean**", *[""] * 5, *(_cell(means.get(one), ".3f") for one in (name, *others))])
    )
    return f"{_caption(result, shapes, others)}\n\n" + "\n".join(lines)


def _caption(result: Mapping[str, Any], shapes: Sequence[Mapping[str, Any]], others: Sequence[str]) -> str:
    gpu, first = result["gpu"], shapes[0]
    bytes_per_s, flops_per_s = (result["ceilings"][key] for key in ("copy_bytes_per_s", "flops_per_s"))
    worst = max(
        (row["relative_error"] for shape in shapes for row in shape["implementations"].values()
         if row["ours"] and row["relative_error"] is not None),
        default=None,
    )  # fmt: skip
    also = f" The last {len(others)} columns are other libraries' ratios in the same run." if others else ""
    return (
        f"{gpu['name']}, driver {gpu['driver']}, {result['date'][:10]}; {first['a_dtype']} in, "
        f"{first['out_dtype']} out, A {first['a_major']}-major, B {first['b_major']}-major. "
        f"{result['method']['text']}. Floor: the larger of bytes over {bytes_per_s / 1e12:.2f} TB/s and "
        f'operations over {flops_per_s / 1e12:.0f} TFLOP/s. "times cuBLAS" is cuBLAS\'s time over '
        f"cutegemm's.{also} Largest relative error against float32: {_cell(worst, '.1e')}."
    )


def _is_ours(shape: Mapping[str, Any], name: str) -> bool:
    row = shape["implementations"].get(name)
    return row is not None and row["ours"]


def _shape_line(shape: Mapping[str, Any], name: str, others: Sequence[str]) -> str:
    rows = shape["implementations"]
    row, baseline = rows.get(name), rows.get(BASELINE)
    cells = [f"{shape['m']} x {shape['n']} x {shape['k']}"]
    for key, form in (("us", ".2f"), ("tflops", ".0f"), ("gb_per_s", ".0f"), ("share_of_floor", ".0%")):
        cells.append(_of(row, key, form))
    cells.append(_of(baseline, "us", ".2f"))
    cells += [_of(rows.get(one), "times_faster_than_cublas", ".3f") for one in (name, *others)]
    return _line(cells)


def _of(row: Mapping[str, Any] | None, key: str, form: str) -> str:
    if row is None:
        return "-"
    return "failed" if row["failure"] is not None else _cell(row[key], form)


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def with_table(readme: str, text: str) -> str:
    """The README with the table between its markers replaced; TableError unless each marker is there once."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1 or readme.index(BEGIN) > readme.index(END):
        raise TableError(f"the README must hold {BEGIN} and, after it, {END}, once each")
    before, rest = readme.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: written, or up to date. 1: --check found a difference. 2: nothing to work with."""
    parser = argparse.ArgumentParser(description="Write the benchmark table into the README.")
    parser.add_argument("result", nargs="?", type=Path, default=DEFAULT_RESULT, help="JSON of the bench")
    parser.add_argument("--readme", type=Path, default=DEFAULT_README)
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 if the table is not current"
    )
    args = parser.parse_args(arguments)
    try:
        text = table(json.loads(args.result.read_text(encoding="utf-8")))
        before = args.readme.read_text(encoding="utf-8")
        after = with_table(before, text)
    except (OSError, ValueError, TableError) as error:
        print(f"cannot make the table: {error}", file=sys.stderr)
        return 2
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        print(f"{args.result} is no result of this bench: {type(error).__name__} {error}", file=sys.stderr)
        return 2
    if args.check:
        if before != after:
            print(f"the table of {args.readme.name} is not what {args.result.name} says; run without --check")
        return int(before != after)
    args.readme.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
