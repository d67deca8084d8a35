"""Change one line at a time and see whether the tests notice.

    python experiments/reliability/mutations.py [--only NAME] [--jobs N] [--again]
    python experiments/reliability/mutations.py --draw 100 --coverage .coverage

mutations.jsonl lists the mutants: a module, the text to replace and its replacement, and the test that
failed. Those without a result are run in a copy of the repository. A mutant that survives is a fault that
no test detects: it gets a test, or a reason in `why`.

`--draw` adds mutants at random lines, half of them in modules that have none. `--coverage` names the data
of `pytest --cov=bert_jax --cov-context=test`, from which a mutant without a test gets the tests to run:
those that execute its line, then the files of these tests.
"""

import argparse
import ast
import collections
import concurrent.futures
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
RESULTS = pathlib.Path(__file__).with_name("mutations.jsonl")
SECONDS = 900  # a mutant whose tests run longer is killed, and counts as noticed
OPERATORS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "/", ast.Mod: "//",
    ast.Pow: "*", ast.BitAnd: "|", ast.BitOr: "&", ast.And: "or", ast.Or: "and",
}  # fmt: skip


def path_of(module: str) -> pathlib.Path:
    """Return the file of a module, relative to the repository."""
    return pathlib.Path("bert_jax", *module.split(".")).with_suffix(".py")


def replacement(node: ast.AST) -> tuple[ast.AST, str] | None:
    """Return the part of a syntax node to replace, and its new text."""
    match node:
        case ast.Compare(left, [operator], [right]) | ast.BinOp(left, operator, right):
            sides = left, OPERATORS.get(type(operator)), right
        case ast.BoolOp(operator, [left, right]):
            sides = left, OPERATORS[type(operator)], right
        case ast.UnaryOp(ast.Not(), operand):
            return node, ast.unparse(operand)
        case ast.Constant(bool(value)):
            return node, str(not value)
        case ast.Constant(int(value) | float(value)):
            return node, str(value + 1)
        case ast.If(test) | ast.IfExp(test) | ast.While(test):
            return test, f"not ({ast.unparse(test)})"
        case ast.Return(value) if value and not isinstance(value, ast.Constant):
            return value, "None"
        case ast.Expr(ast.Call()):
            return node, "pass"
        case _:
            return None
    left, operator, right = sides
    return operator and (node, f"({ast.unparse(left)}) {operator} ({ast.unparse(right)})")


def candidates(module: str) -> list[dict[str, str]]:
    """Return the single-line mutants of a module, without those of annotations and messages."""
    text = (ROOT / path_of(module)).read_text()
    lines, mutants = text.splitlines(), []

    def visit(node):
        if isinstance(node, ast.Raise | ast.JoinedStr):
            return
        if mutant := replacement(node):
            part, new = mutant
            line = lines[part.lineno - 1]
            if part.lineno == part.end_lineno and line.isascii() and text.count(line) == 1:
                mutated = line[: part.col_offset] + new + line[part.end_col_offset :]
                mutants.append({"module": module, "old": line, "new": mutated})
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "returns", "decorator_list"):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        visit(child)

    visit(ast.parse(text))
    return mutants


def draw(number: int, seed: int, known: set[str]) -> list[dict[str, str]]:
    """Return random mutants, half of them in modules without one, from all packages in turn."""
    rng, drawn = random.Random(seed), []
    pools = {True: collections.defaultdict(list), False: collections.defaultdict(list)}
    for path in sorted((ROOT / "bert_jax").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT / "bert_jax").with_suffix("").parts)
        pools[module in known][module.rpartition(".")[0]].extend(candidates(module))
    for pool in pools.values():
        first = len(drawn)
        while len(drawn) < first + number // 2:
            for package in sorted(filter(pool.get, pool)):
                drawn.append(pool[package].pop(rng.randrange(len(pool[package]))))
        del drawn[first + number // 2 :]
    return drawn


def tests_of(mutant: dict, coverage: str) -> list[list[str]]:
    """Return lists of tests to run one after the other: that which failed before, or by coverage."""
    if mutant.get("by"):
        return [[mutant["by"]]]
    if not os.path.exists(coverage):
        raise SystemExit(f"{mutant['module']}: no test is known, and {coverage} does not exist")
    from coverage import CoverageData

    data = CoverageData(coverage)
    data.read()
    path = ROOT / path_of(mutant["module"])
    (measured,) = (
        name for name in data.measured_files() if name.endswith(str(path_of(mutant["module"])))
    )
    line = path.read_text().partition(mutant["old"])[0].count("\n") + 1
    contexts = data.contexts_by_lineno(measured).get(line, [])
    tests = sorted({context.partition("|")[0] for context in contexts} - {""})
    return [tests, sorted({test.partition("::")[0] for test in tests})] if tests else []


def run(mutant: dict, coverage: str) -> dict:
    """Return a mutant with its result: the test that notices it, or None."""
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder)
        ignored = shutil.ignore_patterns(".*", "build")
        shutil.copytree(ROOT, copy, dirs_exist_ok=True, ignore=ignored)
        path = copy / path_of(mutant["module"])
        path.write_text(path.read_text().replace(mutant["old"], mutant["new"]))
        for tests in tests_of(mutant, coverage):
            command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", *tests]
            environment = {**os.environ, "PYTHONPATH": folder}
            try:
                done = subprocess.run(
                    command, cwd=copy, env=environment, capture_output=True, text=True,
                    timeout=SECONDS, check=False,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                return {**mutant, "by": tests[0]}
            failed = [
                line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))
            ]
            if failed:
                return {**mutant, "by": failed[0].partition(" ")[2].partition(" - ")[0]}
            if done.returncode != 0:
                raise SystemExit(f"{mutant['module']}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return {**mutant, "by": None}


def main() -> None:
    """Draw mutants, or run those that have no result yet."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="module")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--again", action="store_true", help="run also those with a result")
    parser.add_argument("--draw", type=int, metavar="N", help="add N mutants at random lines")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--coverage", default=str(ROOT / ".coverage"))
    options = parser.parse_args()
    mutants = [json.loads(line) for line in RESULTS.read_text().splitlines()]

    def save():
        RESULTS.write_text("".join(json.dumps(mutant) + "\n" for mutant in mutants))

    if options.draw:
        mutants += draw(options.draw, options.seed, {mutant["module"] for mutant in mutants})
        save()
        return
    for mutant in mutants:
        if mutant["old"] not in (ROOT / path_of(mutant["module"])).read_text():
            raise SystemExit(f"{mutant['module']} has no {mutant['old']!r}: correct {RESULTS.name}")
    chosen = [
        i
        for i, mutant in enumerate(mutants)
        if options.only in mutant["module"] and (options.again or "by" not in mutant)
    ]
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        results = {pool.submit(run, mutants[i], options.coverage): i for i in chosen}
        for future in concurrent.futures.as_completed(results):
            mutant = mutants[results[future]] = future.result()
            print(
                f"{mutant['module']}: {mutant['new'].strip()}: {mutant['by'] or 'NOT NOTICED'}",
                flush=True,
            )
            save()


if __name__ == "__main__":
    main()
