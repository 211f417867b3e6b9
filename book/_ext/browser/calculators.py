"""Calculators of a page: the course's own commands, called with a form's values.

The reader's browser runs this file and its imports, and any Python can run it as well: a value is
the text in its field, and a bad value gets the command's own error message.
"""

import json
import sys

COMMAND_MODULES = {
    "memory": "shardtools.commands.memory",
    "schedule": "shardtools.commands.schedule",
    "mesh": "shardtools.commands.mesh",
    "strategy": "shardtools.strategy.command",
}
LAZY_IMPORTS = "shardlab.memory", "shardlab.mesh.groups"  # imported in functions


class OptionCollector:
    """Substitute for argparse's parsers: collects a command's options and their defaults."""

    def __init__(self):
        self.values = {}
        self.kinds = {}

    def add_parser(self, name, **settings):
        """Return this object as the command's parser."""
        return self

    def add_mutually_exclusive_group(self):
        """Return this object: a form has one option of the group, like any other option."""
        return self

    def add_argument(self, name, **settings):
        """Add an option with its default and its type."""
        flag = settings.get("action") == "store_true"
        key = name.lstrip("-").replace("-", "_")
        self.values[key] = settings.get("default", False if flag else None)
        self.kinds[key] = settings.get("type", lambda value: value)

    def set_defaults(self, command):
        """Set the function that runs the command."""
        self.run = command


class TextStream:
    """Output stream that collects text in place of a terminal."""

    encoding = "utf-8"

    def __init__(self):
        self.text = ""

    def write(self, text):
        """Append text."""
        self.text += text

    def flush(self):
        """Do nothing: the stream has no buffer."""

    def isatty(self):
        """Return False: the stream is no terminal."""
        return False


def run_command(name, values):
    """Return the parsed output of `python -m shardlab <name> --json`; ValueError as there."""
    __import__(COMMAND_MODULES[name])
    options = OptionCollector()
    module = sys.modules[COMMAND_MODULES[name]]
    getattr(module, "add_plan" if name == "strategy" else "add_command")(options)
    for key in values:
        if key not in options.values:
            raise ValueError(f"option={key}: must be one of {', '.join(options.values)}")
    chosen = OptionCollector()  # any object with attributes
    values = {key: options.kinds[key](value) for key, value in values.items()}
    chosen.__dict__ = {**options.values, **values, "json": True}
    stdout, sys.stdout = sys.stdout, TextStream()
    try:
        options.run(chosen)
        return json.loads(sys.stdout.text)
    finally:
        sys.stdout = stdout


def command_line(name, values):
    """Return the equivalent shell command: `name` is positional, all other values are options."""
    words = ["python -m shardlab", "strategy plan" if name == "strategy" else name]
    for key, value in values.items():
        option = "--" + key.replace("_", "-")
        if value is True:
            words.append(option)
            continue
        plain = value and all(c.isalnum() or c in "-_.,+:/" for c in value)
        value = value if plain else "'" + value.replace("'", "'\\''") + "'"
        words += [value] if key == "name" else [option, value]
    return " ".join(words)


# --- The calculators: each returns a summary in a sentence, and its tables --------------------


# Of a GPU's memory, as `strategy.usable_memory` has it: the browser needs seconds to import that.
USABLE_SHARE = 0.927


def calculate_memory(values):
    """Return the bytes of one rank, part by part, and the GPUs with room for them."""
    from shardlab.common.machines import MACHINES
    from shardlab.memory import format_bytes

    values = dict(values)
    unit = values.pop("unit", "GB")
    format_bytes(0, unit)
    found = run_command("memory", values)
    parts = "parameters", "gradients", "optimizer", "activations", "buffers"
    rows = [[part, format_bytes(found[part], unit)] for part in parts]
    rows.append(["total", format_bytes(found["total"], unit)])
    rows.append(["most at one moment", format_bytes(found["peak"], unit)])
    if found["host"]:
        rows.append(["in the host’s memory", format_bytes(found["host"], unit)])
    gpus = sorted(MACHINES.values(), key=lambda gpu: gpu.memory)
    room = {gpu.name: 1 for gpu in gpus if found["peak"] <= USABLE_SHARE * gpu.memory}
    summary = f"On each rank {format_bytes(found['peak'], unit)} at the fullest moment. "
    summary += f"GPUs with room for it: {', '.join(room) or 'none'}."
    return {"summary": summary, "head": ["on each rank", "bytes"], "rows": rows}


def calculate_schedule(values):
    """Return a pipeline's step time, bubble and peak activations, and its timeline."""
    found = run_command("schedule", values)
    held = " ".join(f"{peak:.4g}" for peak in found["peak_activations"])
    rows = [
        ["bubble", f"{100 * found['bubble']:.2f} % of the cost"],
        ["cost", f"{found['cost']:.6g}"],
        ["held at most, by stage", f"{held} micro-batches"],
    ]
    named = f"{found['schedule']}, {found['stages']} stages, {found['microbatches']} micro-batches"
    summary = f"{named}: bubble {100 * found['bubble']:.1f} %."
    picture = {"spans": found["timeline"], "chunks": found["chunks"]}
    head = ["a step", "of all stages"]
    return {"summary": summary, "head": head, "rows": rows, "picture": picture}


def calculate_mesh(values):
    """Return the groups along each axis; a bar marks the end of a node."""
    found = run_command("mesh", values)
    node, rows = found["node"], []
    for axis, groups in found["groups"].items():
        name = found["said"][axis].partition(": ")[0]
        for group in groups:
            words = ""
            for place, rank in enumerate(group):
                before = group[place - 1] if place else rank
                words += (" | " if before // node != rank // node else " ") + str(rank)
            rows.append([name, words.strip()])
    summary = ". ".join(found["said"].values()) or "One rank is alone along every axis"
    head = ["along", "together; | where a message leaves its node"]
    answer = {"summary": f"{summary}.", "head": head, "rows": rows}
    few = 1 < found["ranks"] <= 64
    return {**answer, "picture": _draw_panels(found)} if few else answer


COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#8C8C8C")


def _draw_panels(found):
    """Return the lesson's picture (`shardlab.mesh.picture`) as SVG shapes."""
    from shardlab.mesh.groups import lay_out_panels

    drawn = lay_out_panels(found["ranks"], found["node"], found["groups"], found["said"])
    size, ink, shapes = drawn.cell_size, {"stroke": "currentColor"}, []
    for x, y, text, place in drawn.labels:
        shapes.append(["text", {"x": x, "y": y + 4, "text-anchor": place}, text])
    for x, y, wide, high in drawn.frames:
        frame = {"x": x, "y": y, "width": wide, "height": high, "fill": "none"}
        shapes.append(["rect", {**frame, **ink, "stroke-opacity": 0.5}, ""])
    for begin, end, y, leaves in drawn.links:
        line = {"x1": begin, "x2": end, "y1": y, "y2": y, **ink}
        shapes.append(["line", {**line, "stroke-dasharray": "4 3" if leaves else "none"}, ""])
    for x, y, rank in drawn.cells:
        cell = {"x": x, "y": y, "width": size, "height": size, "stroke": "#222"}
        shapes.append(["rect", {**cell, "fill": COLORS[rank % 8]}, ""])
        style = "fill:#fff" if rank % 8 == 0 else "fill:#000"
        middle = {"x": x + size / 2, "y": y + 16, "text-anchor": "middle", "style": style}
        shapes.append(["text", middle, str(rank)])
    return {"shapes": shapes, "wide": drawn.width, "high": drawn.height}


def calculate_strategy(values):
    """Return the fastest layouts that fit, and why no others do."""
    found = run_command("strategy", values)
    best = found["best"]
    named = {"days": "days", "gpu_hours": "GPU hours"}
    extra = [name for name in named if name in best[0]]
    rows = []
    for one in best:
        row = [one["layout"], f"{one['micro_batch']} × {one['microbatches']}"]
        row += [f"{one[name] / 1e9:.1f}" for name in ("reserved_bytes", "free_bytes")]
        row += [f"{one['seconds']:.4g}", f"{one['tokens_per_second']:,.0f}"]
        row += [f"{100 * one['mfu']:.0f} %", *(f"{one[name]:,.1f}" for name in extra)]
        rows.append([*row, one["waits_for"]])
    head = ["layout", "b × m", "GB used", "GB free", "s a step", "tokens/s", "MFU"]
    head += [*(named[name] for name in extra), "waits for"]
    ruled = [f"{many} ruled out: {why}" for why, many in found["ruled_out"].items()]
    fit = f"{found['fit']} layouts fit" if found["fit"] != 1 else "One layout fits"
    summary = f"First is {best[0]['layout']}, {best[0]['seconds']:.3g} s a step. {fit}"
    warnings = [f"Warning: {words}" for words in found["warnings"]]
    summary = " ".join(f"{words}." for words in ["; ".join([summary, *ruled]), *warnings])
    return {"summary": summary, "head": head, "rows": rows}


CALCULATORS = {
    "memory": calculate_memory, "schedule": calculate_schedule, "mesh": calculate_mesh,
    "strategy": calculate_strategy,
}  # fmt: skip


def answer_question(question):
    """Answer {"kind", "given"}, as JSON; "error" in place of a result if the command refuses."""
    asked = json.loads(question)
    kind, given = asked["kind"], asked["given"]
    try:
        found = CALCULATORS[kind](given)
    except ValueError as error:
        found = {"error": str(error)}
    return json.dumps({**found, "command": command_line(kind, given)})
