"""What a user may get wrong on the command line: a message, a status, and never a traceback."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tests.cli import invoke
from tilefold.cli import commands
from tilefold.cli.application import COMMANDS, OF_FUNCTIONS, loaded, look_early
from tilefold.errors import TilefoldError

GOOD = """
import torch

def softmax(x):
    return torch.softmax(x, -1)

def softmax_inputs():
    return (torch.randn(5, 33),)

def product(a, b):
    return a @ b

def product_inputs():
    return torch.randn(3, 4), torch.randn(3, 4)

def misspelt(x):
    return torch.sotfmax(x, -1)

def misspelt_inputs():
    return (torch.randn(3, 4),)

def broken(x):
    raise ValueError("not today")

def broken_inputs():
    return torch.randn(3)

def raising(x):
    return x.exp()

def raising_inputs():
    return torch.randn(3)["a"]

def number():
    return 3

def number_inputs():
    return ()

def empty(x):
    return x.amax(-1)

def empty_inputs():
    return torch.randn(3, 0)

def sparse(x):
    return x @ x

def sparse_inputs():
    return torch.eye(3).to_sparse()

def sparse_exp(x):
    return x.exp()

sparse_exp_inputs = sparse_inputs

def leaving(x):
    raise SystemExit(4)

def leaving_inputs():
    return torch.randn(3)

def complex_numbers(x):
    return torch.softmax(x, -1)

def complex_numbers_inputs():
    return torch.randn(3, 5, dtype=torch.complex64)

def too_large(x):
    return x * torch.ones(()).expand(10**8, 10**6)

def too_large_inputs():
    return torch.randn(10**6)

class Odd(BaseException):
    pass

def odd(x):
    raise Odd("done")

def odd_inputs():
    return torch.randn(3)

anonymous = lambda x: x.exp()
anonymous_inputs = lambda: torch.randn(3)
other = lambda x: x.exp()

class Model(torch.nn.Module):
    def forward(self, x):
        return x.exp()

constant = 3
builtin = torch.exp
"""
FILES = {
    "good.py": GOOD,
    "syntax.py": "def f(x):\n    return x +\n",
    "tabs.py": "def f(x):\n\treturn x\n        return x\n",
    "null.py": "x = 1\0\n",
    "latin.py": b"x = '\xe9\xff'\n",
    "binary.py": bytes(range(256)) * 8,
    "imports.py": "import no_such_package_at_all\ndef f(x):\n    return x\n",
    "raises.py": "def g():\n    return 1 / 0\ng()\n",
    "leaves.py": "raise SystemExit(3)\n",
    "odd.py": "class E(BaseException): pass\nraise E('done')\n",
    "folder.py/inside": "",
    "control.py": "def f(x):\n    return x + \x1b[31mred\x07\n",
    "says.py": "raise ValueError('\\x1b[31mred')\n",
    "empty.py": "",
    "text.txt": "hello\n",
    "image.bin": bytes(range(256)),
}

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs a plain file that cannot be read")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return tmp_path


def refused(words, message, status=2):
    result = invoke(words)
    assert result.exit_code == status, result.output
    assert "Traceback" not in result.output and re.search(message, result.output.replace("\n", " ")), result.output


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("good.py", "not FILE:FUNCTION"),
        ("good.py:", "not FILE:FUNCTION"),
        (":softmax", "not FILE:FUNCTION"),
        ("good.py:not a name", "not FILE:FUNCTION"),
        ("absent.py:f", "no such file"),
        (".:f", "not a file"),
        ("good.py:absent", "has no function absent .*its functions: .*softmax"),
        ("good.py:constant", "has no function constant"),
        ("good.py:Model", "Model is a class"),
        ("good.py:builtin", "no arguments for exp"),
        ("empty.py:f", "its functions: none"),
        ("text.txt:f", "not a Python file"),
        ("image.bin:f", "not a Python file"),
        ("syntax.py:f", r"syntax.py is no Python: .* at .*syntax.py:2: return x \+"),
        ("tabs.py:f", "tabs.py is no Python"),
        ("null.py:f", "null.py"),
        ("latin.py:f", "latin.py"),
        ("binary.py:f", r"binary.py is no Python: [^@]*null bytes\s*$"),
        ("control.py:f", r"control.py is no Python: .* at .*control.py:2: return x \+ \\x1b\[31mred\\x07"),
        ("says.py:f", r"says.py cannot be imported: ValueError: \\x1b\[31mred"),
        ("imports.py:f", "cannot be imported: ModuleNotFoundError: .*no_such_package_at_all.* at .*imports.py:1"),
        ("raises.py:f", "cannot be imported: ZeroDivisionError: .* at .*raises.py:2: return 1 / 0"),
        ("odd.py:f", "cannot be imported: E: done +at .*odd.py:2: raise E"),
        ("folder.py:f", "error: not a file: folder.py"),
        ("leaves.py:f", "ends the program when it is imported"),
        ("good.py:raising", r"raising_inputs\(\) fails: .* at .*good.py:\d+: return torch.randn"),
        ("good.py:product", "fails on these arguments: RuntimeError.*reduction dim.* at .*good.py:11"),
        ("good.py:broken", "not today|cannot be captured"),
        ("good.py:number", "computes nothing on tensors"),
        ("good.py:empty", "^error: the function fails on these arguments: RuntimeError.*zero-size dimension"),
        (
            "good.py:sparse",
            r"cannot be captured whole: Attempted to wrap sparse Tensor +at .*good.py:\d+: return x @ x",
        ),
        (
            "good.py:complex_numbers",
            r"^error: the function fails on these arguments: NotImplementedError: .* 'ComplexFloat' +at .*good.py:\d+",
        ),
        ("good.py:too_large", "^error: .*fails on these arguments: RuntimeError: .*(allocate|storage)"),
        ("good.py:odd", r"Odd: done.* at .*good.py:\d+: raise Odd"),
        ("good.py:leaving", r"the user's code ends the program +at .*good.py:\d+: raise SystemExit"),
        ("good.py:other", r"no arguments for other +hint.*define other_inputs\(\)"),
    ],
)
def test_functions_that_cannot_be_explained(target, message):
    refused(["explain", target], message)


def test_torchs_table_of_kernels_is_left_out():
    """A page of "registered at ...", behind what the error says."""
    result = invoke(["explain", "good.py:sparse_exp"])
    assert "arguments from the 'SparseCPU' backend." in result.output and "registered" not in result.output
    assert len(result.output) < 700


def test_a_function_without_a_name_has_that_of_the_file():
    assert invoke(["explain", "good.py:anonymous"]).exit_code == 0


@pytest.mark.parametrize("command", ["verify", "plan"])
@pytest.mark.parametrize("target", ["good.py:broken", "good.py:product", "syntax.py:f", "good.py:raising"])
def test_other_commands_say_so_as_well(command, target):
    refused([command, target], "error: .*(good|syntax).py")


@pytest.mark.parametrize("command", ["explain", "verify", "plan"])
def test_what_the_function_itself_gets_wrong_is_said_by_every_command(command):
    refused([command, "good.py:misspelt"], r"fails on these arguments: AttributeError: module 'torch' has no .*sotfmax")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("x=f32[", "not a tensor or a number"),
        ("x=f32[2,3", "not a tensor or a number"),
        ("x=f32[-1]", "not a tensor or a number"),
        ("x=f31[2]", "unknown dtype"),
        ("x=i64[2]", "needs a positive bound"),
        ("x=i64[2] < 0", "needs a positive bound"),
        ("x=i8[2] < 1000", "i8 holds no number beyond 127"),
        ("x=i64[2] < 99999999999999999999999", "i64 holds no number beyond"),
        ("x=f32[2] < 3", "only integer tensors take a bound"),
        ("x=f32[99999999999]", "GiB to make; this machine has"),
        ("x=f32[1000000, 1000000, 1000000]", "GiB to make|2\\^80"),
        ("x=f32[" + "9" * 400 + "]", "more than 2\\^80 bytes"),
        ("x=f32[2], x=f32[2]", "not a new argument name: 'x'"),
        ("x=f32[2], f32[2]", "by position after one by name"),
        ("=f32[2]", "not a new argument name"),
        ("y=f32[2]", r"do not fit softmax\(x\)"),
        ("f32[2], f32[2]", r"do not fit softmax\(x\)"),
        ("", r"do not fit softmax\(x\)"),
        ("x=hello", "not a tensor or a number"),
    ],
)
def test_arguments_that_cannot_be_made(args, message):
    refused(["explain", "good.py:softmax", "--args", args], message)


@pytest.mark.parametrize("seed", ["-1", "x", str(2**80)])
def test_seeds_are_numbers(seed):
    refused(["explain", "good.py:softmax", "--seed", seed], "seed")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["verify"], "verify needs FILE:FUNCTION or --suite"),
        (["verify", "good.py:softmax", "--suite", "cascades"], "verify takes FILE:FUNCTION or --suite, not both"),
        (["verify", "good.py:softmax", "--suite"], "Option '--suite' requires an argument"),
        (["verify", "--suite", "absent"], "no suite 'absent'.*cascades, blocks"),
        (["explain", "good.py:softmax", "--device", "tpu"], "no kernels are made for 'tpu'.*cpu or cuda"),
        (["plan", "good.py:softmax", "--machine", "a100"], "no machine 'a100'.*this or h100 or h200 or nominal"),
        (["plan", "good.py:softmax", "--machine", "h100", "--device", "cpu"], "no machine 'h100' with --device cpu"),
        (["tune", "good.py:softmax", "--effort", "all"], "no effort 'all'|no CUDA device|none .torch.cuda"),
        (["run", "image.bin"], "image.bin is not UTF-8 text"),
        (["bench", "absent.py"], "no such file: absent.py"),
        (["bench", "folder.py"], "not a file: folder.py"),
    ],
)
def test_options_that_do_not_fit(words, message):
    refused(words, message)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_a_full_disk_is_no_defect():
    refused(["explain", "good.py:softmax", "--html", "/dev/full"], "error: .*No space left on device")


@pytest.mark.parametrize("page", ["no/such/folder/page.html", ".", "good.py/page.html"])
def test_pages_that_cannot_be_written(page):
    refused(["explain", "good.py:softmax", "--args", "f32[3, 5]", "--html", page], "error: .*(No such|directory|Not a)")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "neither a formula nor a file"),
        ("absent.fold", "neither a formula nor a file"),
        (".", "neither a formula nor a file"),
        ("image.bin", "image.bin is no text"),
        pytest.param("/proc/self/mem", "cannot read /proc/self/mem: ", marks=linux),
        ("text.txt", "not a statement: 'hello'"),
        ("good.py", "error: "),
        ("=", "not an expression"),
        ("m = ", "not an expression"),
        ("m = max[] x", "names the dims that it reduces"),
        ("m = max[1] x[1]", "names the dims that it reduces"),
        ("m = max[l]", "not an expression"),
        ("m = max[l]\nx[l]", "not an expression: ''.* hint: a statement is a line"),
        ("m = sum[l] x[l]*" + "9" * 5000, "not an expression: 'x.{199}': Exceeds the limit (?!.*hint)"),
        ("m = sum[l] x[l]**99999999999999999999", "a whole number of more than 64 bits"),
        ("m = sum[l] x[l] - 9223372036854775808", "a whole number of more than 64 bits"),
        ("m = sum[l,l] x[l]", "l is named twice: 'm = sum"),
        ("m[i, i] = sum[l] x[i, l]", "i is named twice: 'm"),
        ("lambda = sum[l] x[l]", "lambda is a word of Python: 'lambda"),
        ("m[l] = max[l] x[l]", "m keeps l, which it reduces"),
        ("m = max[l] x[l", "never closed"),
        ("m = max[l] x[l] @ y[l]", "not part of the expression language"),
        ("m = max[l] x[l]; t = sum[k] x[k]", "t reduces over k"),
        ("1m = max[l] x[l]", "1m is no name"),
        ("m = sum[l] f(x[l])", "unknown function f"),
        ("m = sum[l] exp(x[l], 3)", "takes 1 argument"),
        ("m = max[l] x[l]; m = sum[l] x[l]", "m is defined twice: 'm = sum"),
        ("m = max[l] x[l] + m", r"m is defined by itself: 'm = max"),
        ("y[l] = y[l] + 1; m = max[l] y[l]", "y is defined by itself: 'y"),
        ("y[l] = m + 1; m = max[l] y[l]", "m is used before it is defined: 'y"),
        ("s, s = argmax[l] x[l]", "s is defined twice"),
        ("a, b = sum[l] x[l]", "sum has one result"),
        ("a[r], b[r], c[r] = topk[l; r] x[l]", "topk has two results"),
        ("a, b = x", "a map has one result"),
        ("l = sum[l] x[l]", "l is a dim and a result"),
        ("y[l] = x[l]", "no reduction in the formula"),
        ("m = sum[l] " + "-" * 5000 + "x[l]", "not an expression"),
        ("m = sum[l] " + "(" * 5000 + "x[l]" + ")" * 5000, "not an expression"),
        ("".join(f"y{i + 1}[l] = y{i}[l] * y{i}[l];" for i in range(99)) + "m = sum[l] y99[l]", "grows beyond"),
    ],
)
def test_formulas_that_are_none(text, message):
    refused(["derive", text], message)


#: Python 3.12 limits calls between C and Python by itself, whatever the recursion limit is.
TERMS = 150 if sys.version_info[:2] == (3, 12) else 500


@pytest.mark.parametrize(
    "text",
    [
        re.search(r'"(.*)"', COMMANDS["derive"][1])[1],  # the help's own example
        "s[r], i[r] = topk[l; r] x[l]; t[r] = topk[l; r] y[l]",
        "m = sum[l] x[l]/size(l); v = sum[l] (x[l]-m)**2/size(l)",  # RedFuser eq. 44
        "M = sum[l] m[l]; c[e] = sum[l] m[l]*x[l,e]/M; J[e] = sum[l] m[l]*(x[l,e]-c[e])**2",  # RedFuser eq. 45
        "m = sum[l] " + "+".join(["x[l]"] * TERMS),
        "m = sum[l] x[l]**10**999999",
    ],
)
def test_formulas_that_are_some(text):
    result = invoke(["derive", text])
    assert result.exit_code == 0, result.output
    assert "proof" in result.stdout and "FAILED" not in result.stdout


def test_a_defect_of_ours_says_so_and_where_its_traceback_is(monkeypatch):
    def fails(text):
        raise KeyError("x")

    monkeypatch.setattr(commands.formula, "derive", fails)
    monkeypatch.setattr("tilefold.cli.friendly.user_line", lambda err: None)
    result = invoke(["derive", "s = sum[l] x[l]"])
    assert result.exit_code == 3 and "Traceback" not in result.output
    assert result.stderr.startswith("internal error: KeyError: 'x'") and "not a mistake of yours" in result.stderr
    report = Path(re.search(r"this file: (\S+)", result.stderr)[1])
    text = report.read_text()
    report.unlink()
    assert "Traceback" in text and f"tilefold {metadata.version('tilefold')}" in text


def test_a_file_that_closes_the_output_is_no_defect(monkeypatch):
    closed = io.StringIO()
    closed.close()

    def fails(text):
        closed.write(text)

    monkeypatch.setattr(commands.formula, "derive", fails)
    monkeypatch.setattr("tilefold.cli.friendly.user_line", lambda err: None)
    monkeypatch.setattr(sys, "__stdout__", closed)
    result = invoke(["derive", "s = sum[l] x[l]"])
    assert result.exit_code == 2 and "closed the standard output" in result.stderr


@pytest.mark.parametrize("words", [["derive"], ["explain"], ["melt"], ["cache", "melt"], ["explain", "a:b", "--melt"]])
def test_wrong_words_are_usage_errors(words):
    result = invoke(words)
    assert result.exit_code == 2 and "Traceback" not in result.output and "Usage" in result.output


def test_the_version_is_the_packages():
    result = invoke(["--version"])
    assert result.exit_code == 0 and result.stdout.startswith(f"tilefold {metadata.version('tilefold')} (torch ")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_all_is_the_help_of_each(name):
    place, line = COMMANDS[name]
    found = loaded(place)
    if name != "cache":
        assert found.__doc__.splitlines()[0] == line
    result = invoke([name, "--help"])
    assert result.exit_code == 0 and line[:40] in " ".join(result.stdout.split())


@pytest.mark.parametrize("command", OF_FUNCTIONS)
@pytest.mark.parametrize(
    ("word", "message"), [("absent.py:f", "no such file: absent.py"), ("good", "not FILE:FUNCTION")]
)
def test_a_mistyped_file_is_said_before_torch_is_loaded(command, word, message):
    code = "import sys; from tilefold.cli import app; sys.argv = ['tilefold', *sys.argv[1:]]\ntry: app()\n"
    code += "finally: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, command, word], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and message in done.stderr and done.stdout == "False\n"


@pytest.mark.parametrize(
    "words",
    [
        ["explain", "good.py:softmax"],
        ["explain", "absent.py:f", "--help"],
        ["explain", "--html", "absent.html", "good.py:f"],
        ["tune", "library"],
        ["verify", "--suite", "cascades"],
        ["derive", "absent"],
        ["explain"],
        [],
    ],
)
def test_other_words_are_looked_at_later(words):
    look_early(words)


def test_help_needs_neither_torch_nor_time():
    code = "import sys; from tilefold.cli import app; sys.argv = ['tilefold', sys.argv[1]]\ntry: app()\nfinally: "
    code += "import resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_utime, 'torch' in sys.modules)"
    for word in ("--help", "--version"):
        done = subprocess.run(
            [sys.executable, "-c", code, word], capture_output=True, text=True, check=True, env=dict(os.environ)
        )
        *_, seconds, torch = done.stdout.split()
        assert torch == "False" and float(seconds) < 0.5


def test_errors_of_tilefold_are_errors_of_users():
    assert issubclass(TilefoldError, Exception) and not issubclass(TilefoldError, OSError)
