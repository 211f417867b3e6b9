"""Calculators: forms that run the course's own Python in the reader's browser.

    :::{calculator} memory
    :model: llama-3-8b
    :dp: 64
    :::

The options are the initial values of the form's fields, whose result the build computes;
`CALCULATORS` lists all fields. Without JavaScript, and in notebooks, the page shows the equivalent
shell command instead.

A page with a calculator loads a small script, static/calculator.js, and its style. When the reader
presses the button, that script loads Python (BUNDLE_PATH) and runs it in a web worker: the page
stays responsive, and a long computation can be stopped. The bundle contains

- Brython (brython.info), which compiles Python to JavaScript, from the package on PyPI, and the
  modules of its library that are needed;
- browser/calculators.py and all of the course's files that it imports, unchanged;
- browser/stand_ins/, replacements for library modules that are too large or not really used.

The bundle is one script that holds one string. Hence a page can load it from a disk, too, where a
browser lets no page fetch a file and no worker load one: calculators work in the offline archive.

Brython computes some 20 to 60 times slower than Python. (Pyodide is CPython itself, but has 6.4 MB
and is not on PyPI. MicroPython is as small as Brython and faster, but its dictionaries keep no
order, its sort is not stable, and it supports neither annotated fields nor all of the syntax: the
course's files would have to be changed for it.) One difference is known: a number exactly between
two printable ones, such as 0.125 with two digits, is rounded up, not to even.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from functools import cache
from html import escape
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from bs4 import BeautifulSoup
from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from shardlab import memory, pipeline
from shardlab.common import PACKAGES
from shardlab.common.machines import MACHINES
from shardlab.common.shapes import PRESETS

CODE = Path(memory.__file__).parents[2]
BROWSER = Path(__file__).parent / "browser"
sys.path.append(str(BROWSER))  # at its end, so that no file there shadows another module
BUNDLE_PATH = "_static/python/python.js"
# Modules of Brython's library, including their imports, without those that stand_ins replaces.
LIBRARY_MODULES = (
    *("__future__", "_collections", "_collections_abc", "_functools", "_json", "_locale"),
    *("_operator", "_py_abc", "_thread", "_weakref", "_weakrefset", "abc", "bisect", "collections"),
    *("functools", "itertools", "json", "json.encoder", "keyword", "math"),
    *("numbers", "operator", "reprlib", "sys", "time", "types"),
)


class Field(NamedTuple):
    """Field of a form: an option of the command, its meaning, and its default value."""

    name: str
    label: str
    default: str = ""
    choices: tuple[str, ...] = ()


MESH_ORDERS = ("dp,pp,tp", "dp,tp,pp", "pp,dp,tp", "pp,tp,dp", "tp,dp,pp", "tp,pp,dp")
CALCULATORS = {
    "memory": (
        "What a rank of a training job holds",
        (
            Field("model", "model", "", tuple(PRESETS)),
            Field("dp", "data-parallel degree", "1"),
            Field("zero", "ZeRO stage", "0", ("0", "1", "2", "3")),
            Field("tp", "tensor-parallel degree", "1"),
            Field("pp", "pipeline-parallel degree", "1"),
            Field("batch", "sequences on each rank", "1"),
            Field("seq", "tokens in a sequence; empty: the model’s longest, at most 8,192"),
            Field("recompute", "recomputation", "none", ("none", "selective", "full")),
            Field("precision", "precision", "bf16", tuple(memory.PRECISIONS)),
            Field("sequence_parallel", "sequence parallelism", "no", ("no", "yes")),
            Field("unit", "unit", "GB", ("GB", "GiB")),
        ),
    ),
    "schedule": (
        "Who works when in a pipeline",
        (
            Field("name", "schedule", "", pipeline.SCHEDULE_NAMES),
            Field("stages", "stages"),
            Field("microbatches", "micro-batches"),
            Field("chunks", "parts on each stage (interleaved only)"),
            Field("forward", "time of a forward", "1"),
            Field("backward_input", "time of its backward, of the input", "1"),
            Field("backward_weight", "time of its backward, of the weights", "1"),
            Field("hop", "time of a message", "0"),
        ),
    ),
    "mesh": (
        "Who is with whom in a mesh of ranks",
        (
            Field("dp", "copies of the model", "1"),
            Field("pp", "stages of a pipeline", "1"),
            Field("tp", "ranks that share each matrix", "1"),
            Field("node", "ranks of a node"),
            Field("order", "order, from the outermost in", "dp,pp,tp", MESH_ORDERS),
        ),
    ),
    "strategy": (
        "Which layout, for which model on which machines",
        (
            Field("model", "model", "", tuple(PRESETS)),
            Field("gpu", "GPU", "", tuple(MACHINES)),
            Field("gpus", "GPUs"),
            Field("seq", "tokens in a sequence; empty: the model’s longest, at most 8,192"),
            Field("batch", "sequences in a step; empty: some 4 million tokens"),
            Field("tokens", "tokens of the training; empty: no days"),
            Field("tp", "keep this tensor-parallel degree"),
            Field("pp", "keep this pipeline-parallel degree"),
            Field("zero", "keep this ZeRO stage"),
        ),
    ),
}
OPTION_NAMES = {field.name for _, fields in CALCULATORS.values() for field in fields}


# --- The directive ----------------------------------------------------------------------------


class CalculatorDirective(SphinxDirective):
    """Directive with a kind of CALCULATORS as argument; its options are the initial values."""

    required_arguments = 1
    option_spec = {name.replace("_", "-"): directives.unchanged for name in OPTION_NAMES}

    def run(self) -> list[nodes.Node]:
        """Return the form; raise an error for an option or a choice that the form does not have."""
        kind = self.arguments[0]
        if kind not in CALCULATORS:
            raise self.error(f"calculator={kind}: must be one of {', '.join(CALCULATORS)}")
        fields = {field.name: field for field in CALCULATORS[kind][1]}
        values = {name.replace("-", "_"): value for name, value in self.options.items()}
        for name, value in values.items():
            if name not in fields:
                raise self.error(f"option={name}: must be one of {', '.join(fields)}")
            if fields[name].choices and value not in fields[name].choices:
                allowed = ", ".join(fields[name].choices)
                raise self.error(f"{name}={value}: must be one of {allowed}")
        for path in find_course_modules().values():
            self.env.note_dependency(str(path))  # the result at the start depends on them
        try:
            return [nodes.raw("", render_form(kind, values), format="html")]
        except ValueError as error:
            raise self.error(str(error)) from None


def changed_values(kind: str, values: dict[str, str]) -> dict[str, str | bool]:
    """Return the values of a form that differ from the command's defaults."""
    changed: dict[str, str | bool] = {}
    for field in CALCULATORS[kind][1]:
        value = values.get(field.name, field.default)
        if value != field.default:
            changed[field.name] = True if field.choices == ("no", "yes") else value
    return changed


def render_form(kind: str, values: dict[str, str]) -> str:
    """Return the form with these values in its fields, and their result; its script shows both."""
    import calculators  # the file that the browser runs

    title, fields = CALCULATORS[kind]
    question = {"kind": kind, "given": changed_values(kind, values)}
    answer = calculators.answer_question(json.dumps(question)).replace("<", "\\u003c")
    found = json.loads(answer)
    if "error" in found:
        raise ValueError(found["error"])
    controls = "".join(_render_field(x, values.get(x.name, x.default)) for x in fields)
    return (
        f'<form class="calculator" data-kind="{kind}" aria-label="{escape(title)}" novalidate>\n'
        f'<p class="calculator-title">{escape(title)}</p>\n'
        '<p class="calculator-plain">Here is a form that runs the course’s Python in your browser; '
        "it needs JavaScript. In a terminal:</p>"
        f'<pre class="calculator-command">{escape(found["command"])}</pre>\n'
        f'<div class="calculator-fields" hidden>{controls}</div>\n'
        f'<script type="application/json">{answer}</script>\n'
        "</form>\n"
    )


def _render_field(field: Field, value: str) -> str:
    attributes = f'data-name="{field.name}" data-default="{escape(field.default)}"'
    label = f"<span>{escape(field.label)}</span>"
    if not field.choices:
        plain = 'autocomplete="off" autocapitalize="off" spellcheck="false"'
        return f'<label>{label}<input {attributes} value="{escape(value)}" {plain}></label>'
    choices = "".join(
        f"<option{' selected' if choice == value else ''}>{escape(choice)}</option>"
        for choice in field.choices
    )
    return f"<label>{label}<select {attributes}>{choices}</select></label>"


# --- What the browser runs --------------------------------------------------------------------


_LIST_MODULES = """\
import json, sys, calculators
for name in (*calculators.COMMAND_MODULES.values(), *calculators.LAZY_IMPORTS):
    __import__(name)
print(json.dumps({name: getattr(one, "__file__", None) for name, one in sys.modules.items()}))
"""


@cache
def find_course_modules() -> dict[str, Path]:
    """Return the course's modules that calculators import, and their files, from a subprocess."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (CODE, BROWSER)))}
    command = [sys.executable, "-c", _LIST_MODULES]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    loaded = sorted(json.loads(done.stdout).items())
    return {name: Path(path) for name, path in loaded if name.partition(".")[0] in PACKAGES}


WORKER_START = """\
self.__BRYTHON__ = { brython_path: "http://nowhere.invalid/" }; // a worker has no script's address
self.XMLHttpRequest = function () { throw new Error("Python here has no network"); };
"""
WORKER_END = """
__BRYTHON__.use_VFS = true;
__BRYTHON__.update_VFS(MODULES);
brython({ indexedDB: false });
__BRYTHON__.runPythonSource(`
from browser import self as worker
from calculators import answer_question
worker.answer = answer_question
`, "worker");
self.onmessage = (event) => self.postMessage(self.answer(event.data));
"""


_PAIRWISE = """
def pairwise(iterable):
 values = list(iterable)
 return zip(values, values[1:])
"""  # missing in Brython's itertools


def read_brython(name: str) -> str:
    """Return the text of a file in the package brython."""
    distribution = metadata.distribution("brython")
    return Path(str(distribution.locate_file(f"brython/data/{name}"))).read_text("utf-8")


def load_library() -> dict[str, Any]:
    """Return the library modules to include: name -> kind, source, imports."""
    text = read_brython("brython_stdlib.js")
    modules, _ = json.JSONDecoder().raw_decode(text[text.index("{") :])
    modules["itertools"][1] += _PAIRWISE
    return {name: modules[name] for name in LIBRARY_MODULES}


def build_bundle() -> str:
    """Return the script BUNDLE_PATH with all modules."""
    modules: dict[str, Any] = {"$timestamp": 0, **load_library()}
    for path in [BROWSER / "calculators.py", *sorted((BROWSER / "stand_ins").glob("*.py"))]:
        modules[path.stem] = [".py", path.read_text("utf-8"), []]
    for name, path in find_course_modules().items():
        package = [1] if path.name == "__init__.py" else []
        modules[name] = [".py", path.read_text("utf-8"), [], *package]
    end = WORKER_END.replace("MODULES", json.dumps(modules, ensure_ascii=False))
    worker = WORKER_START + read_brython("brython.js") + end
    licences = (BROWSER / "LICENSES.txt").read_text("utf-8")
    held = json.dumps(worker, ensure_ascii=False)
    return f"/*!\n{licences}*/\nself.coursePython = {held};\n"


# --- In the build -----------------------------------------------------------------------------


def add_assets(app: Sphinx, body: BeautifulSoup) -> None:
    """Let a page with calculators, and no other page, load their script and style."""
    if body.find("form", class_="calculator"):
        if not hasattr(app, "calculator_python"):
            app.calculator_python = build_bundle()
        stamp = hashlib.sha256(app.calculator_python.encode()).hexdigest()[:8]
        attributes = {"data-python": f"{BUNDLE_PATH.removeprefix('_static/')}?v={stamp}"}
        app.add_js_file("calculator.js", loading_method="defer", **attributes)
        app.add_css_file("calculator.css")


def write_bundle(app: Sphinx) -> None:
    """Write BUNDLE_PATH if a page of this build or of an earlier one needs it."""
    path = Path(app.outdir, BUNDLE_PATH)
    text = getattr(app, "calculator_python", None)
    if text is None and path.is_file():
        text = build_bundle()
    if text is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
