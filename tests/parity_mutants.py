"""Mutants of the course's cores: one small change at one place in the code, drawn from a seed.

The change is made in the syntax tree of a file of CORES, and put into the existing functions, so
that modules that imported them run it. Only places that a row of ROWS executes are changed.

Whether a mutant matters is judged without parity: the gradients and weights of each rank's
optimizer are compared in float64 with the same row without the change. A difference of more than
CHANGED, relative to a tensor's size, is a change.
"""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from parity_programs import (
    CLIP,
    GPT2,
    LLAMA,
    SPARSE,
    UNTIED,
    make_parallel_program,
    make_plain_program,
    make_row,
    name_plain_program,
)

from shardlab import ranks
from shardlab.layout import Layout
from shardtools.parity.core import Matcher
from shardtools.parity.programs import build_report, match_program, record_program
from shardtools.parity.record import Record

MIN_CHANGE = 1e-9  # relative; float64 rounds at 1e-16, and every row's noise is far smaller
TIMEOUT_S = 20  # time limit of a mutant: a longer one hangs
CORES = {  # topic -> the files that a step executes
    "data_parallel": ("data_parallel.core", "data_parallel.buckets"),
    "zero": ("zero.core", "zero.flat", "zero.units", "zero.wrapper"),
    "tensor_parallel": ("tensor_parallel.core", "tensor_parallel.cross_entropy",
                        "tensor_parallel.gather", "tensor_parallel.overlap"),
    "sequence_parallel": ("sequence_parallel.core",),
    "context_parallel": ("context_parallel.core", "context_parallel.kernel",
                         "context_parallel.layout", "context_parallel.ulysses"),
    "experts": ("experts.core",),
    "pipeline": ("pipeline.core", "pipeline.deferred", "pipeline.parts", "pipeline.builders"),
    "mesh": ("mesh.core", "mesh.groups"),
}  # fmt: skip
FLOAT64 = {"dtype": torch.float64, "steps": 2}
BUCKETS = {"bucket_bytes": 20_000, "first_bytes": 4_000}
ROWS = {
    "data_parallel": (
        make_row("data", GPT2, Layout(dp=2, microbatches=2), options=BUCKETS, **FLOAT64, **CLIP),
        make_row("data", GPT2, Layout(dp=2), options={"way": "parameters"}, **FLOAT64),
        make_row("data", GPT2, Layout(dp=2), options={"way": "buckets"}, **FLOAT64),
    ),
    "zero": tuple(
        make_row("zero", config, Layout(dp=2, zero=stage), **FLOAT64, **CLIP)
        for stage, config in ((1, LLAMA), (2, GPT2), (3, GPT2))
    ),
    "tensor_parallel": tuple(
        make_row("tensor", config, Layout(tp=2), **FLOAT64, **CLIP) for config in (GPT2, LLAMA)
    ),
    "sequence_parallel": tuple(
        make_row("tensor", config, Layout(tp=2, sequence_parallel=True), **FLOAT64, **CLIP)
        for config in (GPT2, LLAMA)
    ),
    "context_parallel": tuple(
        make_row("context", GPT2, Layout(cp=2), options={"way": way, "layout": layout}, **FLOAT64)
        for way, layout in (("ring", "zigzag"), ("ring", "contiguous"), ("ulysses", "zigzag"))
    ),
    "experts": (make_row("experts", SPARSE, Layout(dp=2, ep=2), **FLOAT64, **CLIP),),
    "pipeline": (
        make_row("pipeline", GPT2, Layout(pp=2, schedule="1f1b", microbatches=4), **FLOAT64),
        make_row("pipeline", replace(UNTIED, layers=4),
            Layout(pp=2, schedule="zb-v", microbatches=4, chunks=2), **FLOAT64),
    ),
    "mesh": (
        make_row("mesh", GPT2, Layout(tp=2, pp=2, microbatches=2), **FLOAT64, **CLIP),
        make_row("mesh", LLAMA, Layout(dp=2, tp=2, zero=1, sequence_parallel=True),
                 **FLOAT64, **CLIP),
    ),
}  # fmt: skip


# The changes: each returns a changed node, or None if it does not apply.

Change = Callable[[ast.AST], "ast.AST | None"]


def parse_expression(text: str) -> ast.AST:
    return ast.parse(text, mode="eval").body


def _get_call_name(node: ast.AST) -> str:
    function = node.func if isinstance(node, ast.Call) else None
    return getattr(function, "attr", getattr(function, "id", ""))


def remove_call(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return ast.Pass()
    return None


def replace_by_argument(node: ast.AST) -> ast.AST | None:
    simple = isinstance(node, ast.Call) and node.args and len(node.args) + len(node.keywords) > 1
    if simple and isinstance(node.args[0], ast.Name) and _get_call_name(node)[:1].islower():
        return node.args[0]
    return None


def change_factor(node: ast.AST) -> ast.AST | None:
    """Keep only the left factor of a product or quotient, or double a returned value."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div):
        return node.left
    if isinstance(node, ast.Return) and isinstance(node.value, ast.BinOp):
        return ast.Return(ast.BinOp(node.value, ast.Mult(), ast.Constant(2)))
    return None


def remove_scaling(node: ast.AST) -> ast.AST | None:
    return ast.Pass() if isinstance(node, ast.AugAssign) else None


def swap_sign(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        other = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
        return ast.BinOp(node.left, other, node.right)
    return None


def swap_mean_and_sum(node: ast.AST) -> ast.AST | None:
    other = {"sum": "mean", "mean": "sum", "amax": "mean", "max": "min"}.get(_get_call_name(node))
    if other and isinstance(node.func, ast.Attribute):
        return ast.Call(ast.Attribute(node.func.value, other, ast.Load()), node.args, node.keywords)
    return None


def add_offset(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return ast.Constant(node.value + 1)
    return None


def swap_branches(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.If | ast.IfExp):
        return type(node)(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
    return None


def change_comparison(node: ast.AST) -> ast.AST | None:
    pairs = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq}
    if isinstance(node, ast.Compare) and (other := pairs.get(type(node.ops[0]))):
        return ast.Compare(node.left, [other(), *node.ops[1:]], node.comparators)
    return None


def replace_rank(node: ast.AST) -> ast.AST | None:
    who = isinstance(node, ast.Name) and node.id in ("rank", "stage")
    return ast.Constant(0) if who and isinstance(node.ctx, ast.Load) else None


def replace_group(node: ast.AST) -> ast.AST | None:
    given = isinstance(node, ast.keyword) and node.arg == "group"
    if given and ast.unparse(node.value).endswith("group"):
        return ast.keyword("group", parse_expression("__import__('parity_mutants').OWN_GROUP[0]"))
    return None


def drop_iteration(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.For):
        every = parse_expression(f"[*({ast.unparse(node.iter)})][:-1]")
        return ast.For(node.target, every, node.body, node.orelse)
    return None


def flip_flag(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return ast.Constant(not node.value)
    return None


CHANGES: tuple[Change, ...] = (
    remove_call, replace_by_argument, change_factor, remove_scaling, swap_sign,
    swap_mean_and_sum, add_offset, swap_branches, change_comparison, replace_rank, replace_group,
    drop_iteration, flip_flag,
)  # fmt: skip
OWN_GROUP: list[dist.ProcessGroup] = []  # this rank's own group


@dataclass(frozen=True)
class Mutant:
    module: str
    function: str  # qualified name
    number: int  # index of the node in ast.walk of the function
    change: int  # index in CHANGES
    row: tuple[str, int]  # key of ROWS

    def __str__(self) -> str:
        function = find_functions(self.module)[self.function]
        old = [*ast.walk(parse_function(function))][self.number]
        new = CHANGES[self.change](copy.deepcopy(old))
        said = [
            " ".join(ast.unparse(ast.fix_missing_locations(x)).split())[:90] for x in (old, new)
        ]
        where = f"{self.module}:{function.__code__.co_firstlineno}"
        return f"{CHANGES[self.change].__name__} in {where} {self.function}: {said[0]} -> {said[1]}"


def find_functions(name: str) -> dict[str, FunctionType]:
    module, found = importlib.import_module(f"shardlab.{name}"), {}

    def collect_functions(owner: ModuleType | type) -> None:
        for value in vars(owner).values():
            for inner in ("__func__", "fget", "func"):  # methods of classes, and properties
                value = getattr(value, inner, value)
            if isinstance(value, type):
                if value.__module__ == module.__name__ and value is not owner:
                    collect_functions(value)
                continue
            code = getattr(value := inspect.unwrap(value), "__code__", None)
            if code is not None and code.co_filename == module.__file__:
                found[value.__qualname__] = value

    collect_functions(module)
    return {q: f for q, f in found.items() if "<" not in q and not f.__name__.startswith("check")}


def parse_function(function: FunctionType) -> ast.FunctionDef:
    lines = Path(function.__code__.co_filename).read_text("utf-8")
    first = function.__code__.co_firstlineno
    for node in ast.walk(ast.parse(lines)):
        if isinstance(node, ast.FunctionDef):
            begin = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if begin == first and node.name == function.__name__:
                return node
    raise AssertionError(function)


def find_sites(name: str, ran: set[tuple[str, int]]) -> Iterator[tuple[str, int, int]]:
    """Yield function, node and change of each mutant of a module in the executed lines."""
    for qualified, function in find_functions(name).items():
        node, left = parse_function(function), set()
        nodes = [*ast.walk(node)]
        for each in nodes:
            if isinstance(each, ast.Raise | ast.Assert) or _get_call_name(each).startswith("check"):
                left |= {id(x) for x in ast.walk(each)}
            if isinstance(each, ast.If) and isinstance(each.body[0], ast.Raise):
                left |= {id(each), *(id(x) for x in ast.walk(each.test))}
            if isinstance(each, ast.Expr) and _get_call_name(each.value).startswith("check"):
                left.add(id(each))
        for part in (node.args, node.returns, *node.decorator_list):
            left |= {id(x) for x in ast.walk(part)} if part is not None else set()
        file = function.__code__.co_filename
        for number, each in enumerate(nodes):
            if id(each) in left or (file, getattr(each, "lineno", 0)) not in ran:
                continue
            for change, make in enumerate(CHANGES):
                if make(copy.deepcopy(each)) is not None:
                    yield qualified, number, change


class ReplaceNode(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST):
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        return ast.copy_location(self.new, node) if node is self.old else self.generic_visit(node)


def compile_mutant(mutant: Mutant) -> CodeType:
    function = find_functions(mutant.module)[mutant.function]
    file = function.__code__.co_filename
    whole = ast.parse(Path(file).read_text("utf-8"))
    mine = parse_function(function)
    for node in ast.walk(whole):
        if isinstance(node, ast.FunctionDef) and node.lineno == mine.lineno:
            old = [*ast.walk(node)][mutant.number]
            ReplaceNode(old, CHANGES[mutant.change](copy.deepcopy(old))).visit(node)
    code = compile(ast.fix_missing_locations(whole), file, "exec", dont_inherit=True)
    return next(c for c in _walk_codes(code) if c.co_qualname == mutant.function)


def _walk_codes(code: CodeType) -> Iterator[CodeType]:
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield const
            yield from _walk_codes(const)


# Runs


class StepRecorder:
    def __init__(self, watch: Any):
        self.watch, self.kept = watch, []

    def __call__(self, model: Any, optimizer: Any) -> Any:
        models = model if isinstance(model, list) else [model]
        named = {f"{n} {name}": p for n, m in enumerate(models) for name, p in m.named_parameters()}

        def save_step(*_: Any) -> None:
            found = [(name, p.grad, p.detach()) for name, p in named.items()]
            self.kept += [(n, None if g is None else g.clone(), w.clone()) for n, g, w in found]

        self.watch(model, optimizer)
        optimizer.register_step_pre_hook(save_step)
        optimizer.register_step_post_hook(save_step)
        return model


def measure_distance(one: list, other: list) -> float:
    if [n for n, *_ in one] != [n for n, *_ in other]:
        return float("inf")
    worst = 0.0
    for (_, *mine), (_, *theirs) in zip(one, other, strict=True):
        for x, y in zip(mine, theirs, strict=True):
            if (x is None) != (y is None) or (x is not None and x.shape != y.shape):
                return float("inf")
            if x is not None and x.numel():
                gap, size = (x - y).norm().item(), y.norm().item()
                worst = max(worst, gap / max(size, 1e-30)) if gap == gap else float("inf")
    return worst


def get_rows(topics: Iterable[str] = CORES) -> dict[tuple[str, int], Any]:
    return {(topic, n): one for topic in topics for n, one in enumerate(ROWS[topic])}


Result = tuple[Matcher, list]


def run_on_rank(key: tuple[str, int], records: dict[str, Record]) -> Result:
    one, ends = get_rows()[key], []

    def record_and_train(watch: Any) -> None:
        ends.append(StepRecorder(watch))
        make_parallel_program(one)(ends[0])

    matcher = match_program(record_and_train, records[name_plain_program(one)])
    return matcher, ends[0].kept


def run_controls(topics: Iterable[str]) -> tuple[dict, dict, dict]:
    """Return the plain programs' records, each row's results by rank, and its executed lines."""
    rows = get_rows(topics)
    plains = {name_plain_program(one): one for one in rows.values()}
    (records,) = ranks.run(
        lambda: {name: record_program(make_plain_program(one)) for name, one in plains.items()},
        1,
        device="cpu",
    )
    names = {name for each in CORES.values() for name in each}
    files = {importlib.import_module(f"shardlab.{name}").__file__ for name in names}
    results, lines = {}, {}
    for size in sorted({one.ranks for one in rows.values()}):
        mine = [key for key, one in rows.items() if one.ranks == size]

        def run_rows(mine: list = mine) -> dict:
            return {key: (run_on_rank(key, records), trace_lines(key, files)) for key in mine}

        each = ranks.run(run_rows, size, device="cpu", timeout=600, show=False)
        for key in mine:
            results[key] = [one[key][0] for one in each]
            lines[key] = set().union(*(one[key][1] for one in each))
    return records, results, lines


def trace_lines(key: tuple[str, int], files: set[str]) -> set[tuple[str, int]]:
    ran: set[tuple[str, int]] = set()

    def trace_frame(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            ran.add((frame.f_code.co_filename, frame.f_lineno))
        return trace_frame

    sys.settrace(trace_frame)
    try:
        make_parallel_program(get_rows()[key])(lambda *_: None)
    finally:
        sys.settrace(None)
    return ran


def get_topic(seed: int) -> str:
    return [*CORES][seed % len(CORES)]


def draw_mutants(seeds: Iterable[int], lines: dict[tuple[str, int], set]) -> list[Mutant]:
    """Draw a different mutant for each seed, in executed lines, equally many for each core."""
    possible: dict[str, list[Mutant]] = defaultdict(list)
    for (topic, number), ran in sorted(lines.items()):
        for module in CORES[topic]:
            possible[topic] += [
                Mutant(module, *s, (topic, number)) for s in find_sites(module, ran)
            ]
    found: list[Mutant] = []
    for seed in seeds:
        r, topic = Random(seed), get_topic(seed)
        # Draw a change first, then its place: whole numbers are more frequent than all else.
        of_change = defaultdict(list)
        for mutant in possible[topic]:
            of_change[mutant.change].append(mutant)
        had = {replace(mutant, row=("", 0)) for mutant in found}
        mutant = r.choice(of_change[r.choice(sorted(of_change))])
        while replace(mutant, row=("", 0)) in had:
            mutant = r.choice(of_change[r.choice(sorted(of_change))])
        found.append(mutant)
    return found


def run_mutant(mutant: Mutant, records: dict) -> list[Result] | str:
    def run_changed() -> Result:
        OWN_GROUP[:] = [dist.new_subgroups(1)[0]]
        find_functions(mutant.module)[mutant.function].__code__ = compile_mutant(mutant)
        return run_on_rank(mutant.row, records)

    size = get_rows()[mutant.row].ranks
    try:
        return ranks.run(run_changed, size, device="cpu", timeout=TIMEOUT_S, show=False)
    except ranks.RankError as error:
        return f"crashes or hangs: {' '.join(str(error).split())[:200]}"


@dataclass
class Verdict:
    mutant: Mutant
    kind: str  # "ended", "changes nothing", "told all the same", "found" or "missed"
    words: str  # text of the report
    change: float  # see `away`


def judge_mutants(seeds: Iterable[int]) -> tuple[list[Verdict], dict[tuple[str, int], Any]]:
    """Return the verdict on each seed's mutant, and the controls' reports."""
    records, right, lines = run_controls({get_topic(seed): None for seed in seeds})
    rows = get_rows()

    def make_report(key: tuple[str, int], results: list[Result]) -> Any:
        try:
            return build_report(
                records[name_plain_program(rows[key])], [matcher for matcher, _ in results]
            )
        except ValueError as error:  # other names or steps: the mutant is found
            return error

    found = []
    for mutant in draw_mutants(seeds, lines):
        result = run_mutant(mutant, records)
        if isinstance(result, str):
            found.append(Verdict(mutant, "ended", result, 0.0))
            continue
        pairs = zip(result, right[mutant.row], strict=True)
        far = max(measure_distance(mine, theirs) for (_, mine), (_, theirs) in pairs)
        told = make_report(mutant.row, result)
        told_of = isinstance(told, ValueError) or not told.is_equal
        kind = "found" if told_of else "missed"
        kind = kind if far > MIN_CHANGE else "told all the same" if told_of else "changes nothing"
        found.append(Verdict(mutant, kind, str(told), far))
    return found, {key: make_report(key, result) for key, result in right.items()}
