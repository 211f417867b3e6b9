"""What people give by mistake is refused by its name, in one sentence, by every technique alike."""

import contextlib
import copy
import importlib
import inspect
import io
import json
import math
import os
import re
import socket
import stat
import subprocess
import sys
import tempfile

import doors
import pytest
import torch
from commands import printed_to, ran

from shardlab import ranks
from shardlab.common import show
from shardtools import options
from shardtools.__main__ import COMMANDS
from shardtools.cluster.command import PARTS


class Strange:
    """An object of no kind that anybody knows."""

    def __repr__(self):
        return "Strange()"


def wrong(right):
    """What people give by mistake where `right` would be: of another kind, or no such number."""
    objects = [None, "x", [], Strange()]
    if isinstance(right, bool):
        return [*objects, 3]
    if isinstance(right, int):
        return [*objects, "1", True, 1.5, math.nan, math.inf, -1, 10**30]
    if isinstance(right, float):
        return [*objects, "1", True, math.nan, -1.0, 1e300, 10**400]
    if isinstance(right, dict) and not any(isinstance(v, int) for v in right.values()):
        return [*objects, 3, {"weight": 1}]
    if isinstance(right, str):
        return [None, 3, "x", [], Strange()]
    if isinstance(right, torch.nn.Module):
        return [*objects, 3, torch.nn.ReLU()]
    return [*objects, 3]


def is_fine(function, argument, value):
    """Whether it is no mistake: None by default, or as the table says."""
    signature = inspect.signature(getattr(function, "stands_for", function)).parameters
    if value is None and argument in signature and signature[argument].default is None:
        return True
    fine = doors.FINE.get((doors.called(function), argument), ())
    return any(type(value) is one or type(value) is type(one) and value == one for one in fine)


def complaints(rows):
    """Of every function, argument and mistake: what does not come as it is promised."""
    found, tried = [], 0
    for function, make in rows:
        name = doors.called(function)
        with contextlib.redirect_stdout(io.StringIO()):
            function(**make())  # a right call has to be one
        inner = doors.INNER.get(name)
        for argument in make():
            if inner is not None and (not inner or argument in inner):
                continue
            names = "|".join(re.escape(n) for n in (argument, doors.SAID.get(argument)) if n)
            for value in wrong(make()[argument]):
                if is_fine(function, argument, value):
                    continue
                tried += 1
                told = f"{name}({argument}={str(type(value)) if value == 10**400 else value!r})"
                try:
                    function(**{**make(), argument: value})
                except ValueError as error:
                    said = str(error)
                    named = re.search(rf"(?<!\w)({names}|both factors)(?!\w)", said)
                    if not named or not re.search(r"allowed|needs?\b|needed|have to|has ", said):
                        found.append(f"{told}: {said}")
                except Exception as error:
                    found.append(f"{told}: {type(error).__name__}: {error}")
                else:
                    found.append(f"{told}: nothing was raised")
    return found, tried


def test_every_door_refuses_wrong_numbers_by_name():
    found, tried = complaints(doors.numbers())
    assert not found, f"{len(found)} of {tried}:\n" + "\n".join(found)


def test_every_door_refuses_wrong_objects_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where "x" is written

    def tries(folder):
        return complaints(doors.objects(folder))

    ((found, tried),) = ranks.run(tries, 1, str(tmp_path), device="cpu")
    assert not found, f"{len(found)} of {tried}:\n" + "\n".join(found)


# --- Commands ---------------------------------------------------------------------------------

for module, _ in COMMANDS.values():
    importlib.import_module(module)  # once: the forks below have it all
for part in {*PARTS.values()}:
    importlib.import_module(f"shardtools.{part}")

FOLDER = "watch", "hang"  # ask for one before all else
PLACED = *FOLDER, "steps", "grade"  # which ask for a file or a folder
ALL = [[name] for name in COMMANDS if name != "cluster"] + [["cluster", part] for part in PARTS]
PRINT = {  # what prints something, and takes no time
    "list": [],
    **{f"{' '.join(command)} --help": [*command, "--help"] for command in ALL},
    "memory": ["memory", "--model", "gpt-2"],
    "memory json": ["memory", "--params", "1e9", "--json"],
    "schedule": ["schedule", "1f1b", "--stages", "2", "--microbatches", "2"],
    "mesh": ["mesh", "--dp", "2", "--node", "1"],
    "strategy": ["strategy", "--model", "gpt-2", "--gpu", "h100", "--gpus", "8", "--top", "1"],
    "status": ["cluster", "status", "--folder", "none"],
}


@pytest.mark.parametrize("arguments", PRINT.values(), ids=PRINT)
@pytest.mark.parametrize("output", ["/dev/full", None])
def test_output_that_cannot_be_written_is_one_line(tmp_path, arguments, output) -> None:
    status, err = printed_to(output, tmp_path, *arguments)
    assert status == 1
    assert err.count("\n") == 1 and "output cannot be written" in err
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", PRINT.values(), ids=PRINT)
def test_any_encoding_shows_what_a_command_says(tmp_path, arguments) -> None:
    shown, plain = tmp_path / "utf-8", tmp_path / "ascii"
    done = printed_to(shown, tmp_path, *arguments)
    assert printed_to(plain, tmp_path, *arguments, encoding="ascii") == done
    lines = shown.read_text("utf-8").splitlines()
    assert len(plain.read_text("ascii").splitlines()) == len(lines) > 0


def fresh(program, *arguments, **environment):
    """A Python of its own, which has nothing imported."""
    environment = {**os.environ, "PYTHONPATH": str(show.ROOT / "code"), **environment}
    command = [sys.executable, *program, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_a_terminal_of_the_plain_locale_gets_plain_characters() -> None:
    plain = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = fresh(["-m", "shardlab"], *PRINT["memory"], **plain)
    assert done.returncode == 0 and "1 x 1,024 tokens" in done.stdout and not done.stderr


def test_the_list_and_mistyped_commands_import_no_topic() -> None:
    program = (
        "import sys; from shardtools.__main__ import main\n"
        "assert main([]) == 0 and main(['memori']) == 2\n"
        "assert main(['cluster', 'run', '--at', 'nowhere', 'x.py']) == 2\n"
        "heavy = {'torch', 'numpy', 'psutil', 'yaml', 'shardlab.memory', 'shardcourse.build'}\n"
        "assert not heavy & {*sys.modules}, heavy & {*sys.modules}\n"
    )
    done = fresh(["-c", program])
    assert done.returncode == 0, done.stderr
    assert all(f"    {name} " in done.stdout for name in COMMANDS)
    assert done.stderr.count("\n") == 2 and "memory" in done.stderr


LACKING = {
    "torch": ["doctor"],
    "psutil": ["cluster", "watch", "none", "--pid", "1"],
    "matplotlib": ["schedule", "1f1b", "--stages", "2", "--microbatches", "2", "--svg", "none.svg"],
    "yaml": ["lesson", "none"],
}


@pytest.mark.parametrize("lacks", LACKING)
def test_what_is_not_installed_is_named_with_how_to_get_it(tmp_path, monkeypatch, lacks) -> None:
    monkeypatch.chdir(tmp_path)
    program = (
        f"import sys; sys.modules[{lacks!r}] = None\n"
        "from shardtools.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    done = fresh(["-c", program], *LACKING[lacks])
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert f"lacks {lacks}: " in done.stderr and "-m pip install " in done.stderr
    assert not any(tmp_path.iterdir())


PLAN = ["strategy", "--model", "gpt-2", "--gpu", "h100", "--gpus", "8"]
SMALL = ["schedule", "1f1b", "--stages", "2", "--microbatches", "2"]
HUGE, LONG = "1" + 30 * "0", 4001 * "1"
AT = ["cluster", "run", "--at"]
MEET = [*AT, "127.0.0.1:29400"]
WATCH = ["cluster", "watch", "none"]
MINE = [*WATCH, "--pid", "1"]  # one that there always is: a name of a test is the same everywhere
MISTAKES = {  # arguments: a word of the line that they get
    **{(*command, "--no-such"): "--no-such" for command in ALL if command[-1] not in PLACED},
    **{("cluster", part, "none", "--no-such"): "--no-such" for part in FOLDER},
    ("steps", "none.py", "--no-such"): "--no-such",
    ("grade", "none", "--no-such"): "--no-such",
    ("memory", "--modle", "gpt-2"): "did you mean --model?",
    ("memori",): "did you mean memory?",
    ("cluster", "wacth"): "did you mean watch?",
    ("cluster",): "part=''",
    ("line\nbreak",): "no such command",
    # Options that contradict each other.
    ("memory", "--params", "1e9", "--model", "gpt-2"): "--params and --model",
    **{
        ("mesh", "--dp", "2", "--node", "2", *more): f"{more[0]} with --node"
        for more in (["--steps", "9"], ["--zero", "1"], ["--budget", "1e9"], ["--untied"])
    },
    (*PLAN, "--json", "--explain"): "--explain with --json",
    (*PLAN, "--json", "--emit", "slurm"): "--emit with --json",
    (*PLAN, "--explain", "--emit", "slurm"): "--emit with --explain",
    (*PLAN, "--explain", "--top", "3"): "--top with --explain",
    (*PLAN, "--price", "2"): "--price",
    (*PLAN, "--compile", "eager"): "compile='eager': allowed with --profile torchtitan",
    (*PLAN, "--profile", "torchtitan", "--compile", "no"): "compile='no': allowed are 'eager'",
    (*PLAN, "--zero", "7"): "zero=7: allowed are whole numbers, 0 to 3",
    ("strategy", "--case", "a", "--rates", "b", "--gpus", "8"): "--gpus with --case",
    ("strategy", "--fit", "a", "--rates", "b", "--json"): "--json with --fit",
    ("strategy", "--measure", "--rates", "b", "--tp", "2"): "--tp with --measure",
    ("strategy", "--predict", "a", "--fit", "b", "--rates", "c"): "--fit and --predict",
    ("parity", "plain.py"): "scripts='plain.py': needed are",
    ("grade", "none"): "folder='none': allowed are folders",
    ("grade", ".", "--part", "zeros"): "part='zeros': allowed are data_parallel",
    ("grade", ".", "--seed", "-1"): "seed=-1: allowed are whole numbers, 0",
    ("grade", ".", "--seed", "much"): "seed='much': allowed are whole numbers, 0",
    ("grade", ".", "--junitxml", ""): "junitxml='': allowed",
    ("steps", "none.py"): "file='none.py': allowed are scripts",
    ("parity", "none.py", "--", "true"): "plain='none.py': there is no such script",
    ("parity", "--draws", "0", "none.py", "--", "true"): "draws=0: allowed",
    ("parity", "--folder", "", __file__, "--", "true"): "folder='': allowed",
    ("gpu", "--limit", "soon"): "limit='soon': allowed are whole numbers, 1 or more",
    # What is not there, or is something else.
    ("gpu", "tiny"): "no such lesson: tiny; allowed are",
    ("record", "zero", "tiny"): "no such lesson: tiny; allowed are",
    ("doctor", "--ranks", "0"): "ranks=0: allowed",
    ("doctor", "--folder", "/nowhere/at/all"): "folder='/nowhere/at/all': allowed",
    ("doctor", "--needs", "much"): "needs='much': allowed",
    ("doctor", "--timeout", "-1"): "timeout=-1.0: allowed",
    ("doctor", "--timeout", "1e18"): "timeout=1e+18: allowed",
    ("doctor", "--machine", "tpu"): "machine='tpu': allowed",
    ("doctor", "--device", "tpu"): "device='tpu': allowed",
    (*MEET, "--ranks", "0", __file__): "ranks=0: allowed are whole numbers, 1",
    (*MEET, "--ranks", "", __file__): "ranks='': allowed are whole numbers, 1 or more",
    (*MEET, "--ranks", "1000000", __file__): "ranks=1000000: allowed are whole numbers, 1 to 1,000",
    (*MEET, "--restarts", "-1", __file__): "restarts=-1: allowed are whole numbers, 0 or more",
    (*MEET, "--nodes", "2:1", __file__): "nodes=2:1: allowed are LEAST:MOST",
    (*MEET, "--nodes", "two", __file__): "nodes='two': allowed are LEAST:MOST",
    (*MEET, "--patience", "0", __file__): "patience=0.0: allowed are numbers above 0",
    (*MEET, "--patience", "soon", __file__): "patience='soon': allowed are numbers of seconds",
    (*MEET, "--logs", __file__, __file__): "this is a file; allowed is a folder",
    (*MEET, "missing.py"): "script='missing.py': there is no such file",
    (*AT, "node1", __file__): "at='node1': allowed is HOST:PORT",
    (*AT, "node1:70000", __file__): "at='node1:70000': allowed is HOST:PORT",
    (*AT, "::1:29400", __file__): "at='::1:29400': allowed is HOST:PORT",
    (*AT, "no.such.host.invalid:1", __file__): "allowed are hosts that have an address",
    (*WATCH,): "pid=None, job=None",
    (*WATCH, "--draw"): "samples",
    (*WATCH, "--pid", "one"): "pid='one'",
    (*WATCH, "--pid", "1", "--job", "2"): "one of the two",
    (*WATCH, "--pid", "4194305"): "processes that run here",
    (*WATCH, "--pid", str(10**18)): "processes that run here",
    (*WATCH, "--job", "987656"): "no ranks",
    (*MINE, "--every", "often"): "every='often'",
    (*MINE, "--every", "0"): "every=0",
    (*MINE, "--every", "inf"): "every=inf",
    # Numbers that nothing has.
    **{("memory", "--params", "1e9", "--dp", n): "dp=" for n in (HUGE, LONG, "1" + LONG)},
    **{(*PLAN, "--seq", n): "seq=" for n in (HUGE, LONG, "1" + LONG)},
    **{("mesh", "--hidden", n): "hidden=" for n in (HUGE, LONG)},
    **{("doctor", "--ranks", n): "ranks=" for n in (HUGE, LONG)},
}


@pytest.mark.parametrize(
    ("arguments", "word"),
    MISTAKES.items(),
    ids=[repr(" ".join(arguments))[:60] for arguments in MISTAKES],
)
def test_a_mistake_gets_one_line(capsys, arguments, word) -> None:
    status, out, err = ran(capsys, *arguments)
    assert status == 2 and out == ""
    assert err.count("\n") == 1 and word in err and len(err) < 500, err
    assert not os.path.exists(WATCH[-1])


# --- Files and folders that commands write and read --------------------------------------------

PUBLISHED = show.ROOT / "code/shardtools/strategy/published"
RUN = ["cluster", "run", "--at", "127.0.0.1:29400"]
SITE = show.ROOT / "code/shardtools/cluster/sites/cloud-pyxis.yml"
FIT = ["strategy", "--profile", "nanotron", "--fit", str(PUBLISHED / "sweep.csv")]
FILES = {
    "svg": [*SMALL, "--svg"],
    "rates": [*FIT, "--rates"],
}
FOLDERS = {
    "folder": ["cluster", "up", "--folder"],
    "logs": [*RUN, str(PUBLISHED.parent / "core.py"), "--logs"],  # never started
    "out": ["gpu", "--out"],
    "into": ["cluster", "files", "--site", str(SITE), "--into"],
}
NO_NAMES = ["", "line\nbreak", "tab\t", "\x1b[31mred", "~nobody_of_that_name/x", "nul\0"]


def command_line(name, path):
    """The command with an option for a file or folder of that name."""
    command = {**FILES, **FOLDERS}[name]
    if name == "logs":  # what stands behind a script is the script's
        return [*command[:-2], "--logs", str(path), command[-2]]
    return [*command, str(path)]


@pytest.mark.parametrize("given", NO_NAMES, ids=repr)
@pytest.mark.parametrize("name", [*FILES, *FOLDERS])
def test_what_is_no_name_is_refused(capsys, tmp_path, name, given) -> None:
    before = sorted(show.ROOT.iterdir())
    status, out, err = ran(capsys, *command_line(name, given))
    assert status == 2 and out == "" and err.count("\n") == 1, err
    assert f"{name}={given!r}: allowed" in err
    assert sorted(show.ROOT.iterdir()) == before


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_cannot_be_made_is_refused(capsys, tmp_path, name) -> None:
    (tmp_path / "file").write_text("mine")
    for given in ("/proc/x", tmp_path / "file", tmp_path / "file/x", tmp_path / ("x" * 300)):
        status, out, err = ran(capsys, *command_line(name, given))
        if name == "folder" and status == 1:
            pytest.skip("no Slurm here, and without it nothing is written")
        assert err.count("\n") == 1, err
        assert status == 2 and out == "" and f"{name}='{given}': " in err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def is_there(path):
    """What a name stands for, told from all else."""
    found = os.lstat(path)
    return stat.S_IFMT(found.st_mode), found.st_rdev, found.st_ino


def special(kind, path):
    """Make what is no plain file; false where this user may not."""
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
    elif kind == "link":
        path.with_name("device").mkdir()
        path.symlink_to("device")
    elif kind == "circle":
        path.symlink_to(path)
    else:
        try:
            os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))  # a /dev/null of the test's
        except PermissionError:
            return False
    return True


@pytest.mark.parametrize("kind", ["folder", "fifo", "socket", "link", "circle", "device"])
@pytest.mark.parametrize("name", FILES)
def test_nothing_takes_the_place_of_what_is_no_plain_file(
    capsys, tmp_path_factory, name, kind
) -> None:
    folder = tmp_path_factory.mktemp("x")  # short: a socket's name has few characters
    path = folder / "there"
    if not special(kind, path):
        pytest.skip("only root makes devices")
    names, before = sorted(folder.iterdir()), is_there(path)
    status, out, err = ran(capsys, *command_line(name, path))
    assert status == 2 and out == "" and err.count("\n") == 1, err
    assert f"{name}='{path}': allowed are files" in err
    assert is_there(path) == before and sorted(folder.iterdir()) == names


def test_a_file_is_written_whole_or_not_at_all(capsys, tmp_path, monkeypatch) -> None:
    path, link = tmp_path / "timeline.svg", tmp_path / "link.svg"
    path.write_text("old")
    path.chmod(0o600)
    link.symlink_to(path.name)

    def full(figure, part, alt):
        part.write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(show, "svg", full)
    status, _, err = ran(capsys, *SMALL, "--svg", str(link))
    assert status == 2 and err.count("\n") == 1 and "No space left" in err
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 2
    monkeypatch.undo()
    assert ran(capsys, *SMALL, "--svg", str(link))[0] == 0
    assert link.is_symlink() and path.read_text("utf-8").startswith("<svg")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and len(list(tmp_path.iterdir())) == 2


def test_a_file_that_takes_the_output_is_not_replaced(tmp_path) -> None:
    out = tmp_path / "out"
    for name in (out, "/dev/stdout"):
        status, err = printed_to(out, tmp_path, *SMALL, "--svg", str(name))
        assert status == 2 and err.count("\n") == 1 and "svg=" in err
    assert out.read_bytes() == b"" and [*tmp_path.iterdir()] == [out]
    out.unlink()
    with tempfile.TemporaryFile(dir=tmp_path) as nameless:
        name = f"/proc/self/fd/{nameless.fileno()}"
        with pytest.raises(ValueError, match=f"svg='{name}': allowed are files"):
            options.written("svg", name, lambda path: path.write_text("new"))
    assert not any(tmp_path.iterdir())


NO_JSON = {
    "deep": "[" * 100_000,
    "deep objects": '{"a":' * 100_000,
    "digits": f"[{LONG}]",
    "more digits": f"[1{LONG}]",
    "10^30": f'[{{"id": 1, "config": {{"layers": {HUGE}}}}}]',
    "infinite": "[1e999]",
    "no number": "[NaN]",
    "nothing": "",
    "half": '[{"id": 1, "con',
    "another": "[3]",
    "null": "null",
    "numbers for objects": '{"profile": [], "rates": [], "id": [], "config": []}',
}
READ = {
    "case": ["strategy", "--rates", str(PUBLISHED / "rates_megatron.json"), "--case"],
    "fit": ["strategy", "--profile", "megatron", "--rates", "never.json", "--fit"],
    "rates": ["strategy", "--model", "gpt-2", "--gpu", "h100", "--gpus", "8", "--rates"],
}


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("text", NO_JSON.values(), ids=NO_JSON)
def test_what_is_no_json_of_ours_is_refused(capsys, tmp_path, monkeypatch, name, text) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "given.json"
    for content in (text.encode(), b"\xff" + text.encode()):
        path.write_bytes(content)
        status, out, err = ran(capsys, *READ[name], str(path))
        assert status == 2 and out == "" and err.count("\n") == 1 and len(err) < 500, err
        assert f"{name}='{path}': allowed are" in err
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("given", ["/", "/dev/zero", "/nowhere/x.json", *NO_NAMES], ids=repr)
def test_what_cannot_be_read_is_refused(capsys, tmp_path, monkeypatch, name, given) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = ran(capsys, *READ[name], given)
    assert status == 2 and out == "" and err.count("\n") == 1 and f"{name}=" in err, err
    assert not any(tmp_path.iterdir())


WRONG = [[], {}, [[]], "", "x", -1, 0.5, 1e30, 1e300, 1e-300, 10**17, True, None, "7" * 50]
CASE = {
    "layers": 24, "hidden": 2304, "heads": 24, "ffn": 9216, "seq": 2048, "vocab": 51_200, "mbs": 1,
    "tp": 2, "pp": 4, "dp": 4, "cp": 2, "vp": 2, "microbatches": 4, "n_gpus": 64, "gpu": "A100",
    "gpu_mem_gb": 80, "per_node": 8, "precision": "fp16", "recompute": "full", "zero": 1,
    "kv_heads": 8, "mlp": "swiglu", "attention": "flash", "sequence_parallel": True,
    "stages": "equal", "schedule": "interleaved", "gbs": 16,
}  # fmt: skip


TODAY = {
    "named": "qwen3-30b-a3b", "seq": 4096, "mbs": 1, "tp": 2, "pp": 4, "dp": 4, "cp": 2, "vpp": 2,
    "ep": 8, "etp": 1, "gpus": 64, "gpu": "gb200", "dtype": "mxfp8", "engine": "megatron",
    "recompute": "moe_act+layernorm", "gbs": 16, "compile": True,
}  # fmt: skip
OLD = READ["case"]
ENGINES = ["strategy", "--rates", str(PUBLISHED / "rates_engines.json"), "--case"]
FILE = {"file": None, "layers": 2, "hidden": 64, "heads": 2, "seq": 64, "gpu": "h100"}


@pytest.mark.parametrize("case, words", [(CASE, OLD), (TODAY, ENGINES)], ids=["old", "today"])
def test_a_wrong_value_of_a_case_is_noted_beside_it(capsys, tmp_path, case, words) -> None:
    path = tmp_path / "cases.json"
    changed = [case | {key: wrong} for key in case for wrong in WRONG]
    changed += [FILE | {"file": wrong} for wrong in WRONG if not isinstance(wrong, str)]
    path.write_text(json.dumps([{"id": 0, "config": c} for c in [case, *changed]]))
    status, out, err = ran(capsys, *words, str(path))
    assert status == 0 and err == ""
    found = json.loads(out)
    assert found[0]["seconds"] and len(found) == 1 + len(changed)
    for bad, one in zip(changed, found[1:], strict=True):
        assert (one["seconds"] is None) == bool(one["note"]), (bad, one)
        assert "\n" not in one["note"] and len(one["note"]) < 300, (bad, one)
    noted = [c for c, one in zip(changed, found[1:], strict=True) if one["note"]]
    for key in set(case) - {"precision", "sequence_parallel", "stages"}:  # words, a yes, a list
        assert all(case | {key: wrong} in noted for wrong in ([], {}, [[]])), key


def test_a_wrong_value_of_rates_is_refused(capsys, tmp_path) -> None:
    path = tmp_path / "rates.json"
    good = json.loads((PUBLISHED / "rates_megatron.json").read_text("utf-8"))
    good["machine"] = {
        "name": "A100", "memory": 8e10, "per_node": 8, "inside": 3e11, "between": 2.5e10,
        "flops": 3.12e14, "bandwidth": 2e12, "processors": 108, "fp8": None, "best": 0.9,
    }  # fmt: skip
    kept = ["--tp", "1", "--pp", "1", "--dp", "8", "--zero", "1", "--micro-batch", "1"]
    places = [("profile",), ("rates",), ("machine",), ("rates", "node"), ("rates", "node", "value")]
    places += [("rates", "node", "spread"), ("rates", "node", "origin")]
    places += [("machine", field) for field in good["machine"]]
    for place in places:
        for wrong in WRONG:
            changed = copy.deepcopy(good)
            inner = changed
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = wrong
            path.write_text(json.dumps(changed))
            status, _, err = ran(capsys, *READ["rates"], str(path), *kept)
            assert status in (0, 2) and err.count("\n") == (status == 2), (place, wrong, err)
            if isinstance(wrong, list | dict) and place[-1] != "origin":
                assert status == 2, (place, wrong)


def test_a_wrong_published_time_is_no_time(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    cases = json.loads((PUBLISHED / "megatron.json").read_text("utf-8"))
    good = [case for case in cases if "fwd_ms" in (case.get("published") or {})][:2]
    for key in ("fwd_ms", "published"):
        for wrong in (*WRONG, 0):
            changed = copy.deepcopy(good)
            inner = changed[0] if key == "published" else changed[0]["published"]
            inner[key] = wrong
            (tmp_path / "cases.json").write_text(json.dumps(changed))
            status, _, err = ran(capsys, *READ["fit"], "cases.json")
            assert status == 0 and err == "", (key, wrong, err)
