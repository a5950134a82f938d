"""Whatever stands on the command line or in a recipe: settings that read back, or a line a mistake with exit code 2."""

import os
import time
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import main
from utils.config import arguments
from utils.config.settings import UserError, all_settings, flag_of

OFTEN = settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
SECONDS = 20  # far more than any answer takes, far less than a bomb
LONGEST_LINE = 1000
OPTIONS = [option for _, option in all_settings()]
IN_RECIPE = [option for option in OPTIONS if option.metadata["in_recipe"]]
FLAGS = [flag_of(option.name) for option in OPTIONS]


def answer(argv):
    """The settings, or None and the mistakes: lines that can be printed, in bounded time."""
    began = time.monotonic()
    try:
        result = arguments.parse(argv)
        lines = []
    except UserError as error:
        result = None
        lines = error.mistakes
        assert lines
    assert time.monotonic() - began < SECONDS
    for line in lines:
        assert line.strip() and len(line) < LONGEST_LINE + 2 * max(map(len, argv)), line
        " ".join(line.split()).encode()
    return result, lines


def reads_back(args, tmp_path):
    """Whether the saved recipe gives the same settings."""
    (tmp_path / "again.yaml").write_text(arguments.as_recipe(args, "main.py"), encoding="utf-8")
    again = arguments.parse(["--config", str(tmp_path / "again.yaml")]).values()
    values = args.values()
    return all(again[option.name] == values[option.name] for option in IN_RECIPE)


# ------------------------------------------------------------------------------------ command line

NUMBERS = [
    *"1e400 0x10 1_000 1e-400 -0 +3 1. .5 nan -inf 1e5 1,5 1:30 --3 ½ 2147483648 -2147483649 1e308 4.9e-324".split(),
    *"0.30000000000000004 True None null \u0661\u0662 \uff11".split(),
    *(" 3 ", "3\n", "1" + "0" * 400, "9" * 5000),
]
TEXTS = [
    *"%s %(prog)s {} @file - -- = ' \\ ../.. ~ $HOME * !!python/object:x off on no \U0001f600 \ufeff \udcff".split(),
    *("", " ", "\0", "a\0", "a\nb", "\u2028", "\x1b[31m", "x" * 10_000, "lr: 1 # x"),
]
# Each of these is read as another one above is.
ALIKE = {*".5 -2147483649 4.9e-324 1e308 -inf null \uff11 {} ~ * off no = ' -".split(), "3\n", "a\0", " ", "\ufeff"}
CASES = [pytest.param(value, marks=pytest.mark.thorough) if value in ALIKE else value for value in (*NUMBERS, *TEXTS)]
SIGNS = st.characters(exclude_categories=("Cs",))  # named by categories, since finding a codec's takes seconds
values = st.one_of(
    st.sampled_from(NUMBERS),
    st.sampled_from(TEXTS),
    st.text(SIGNS, max_size=8),
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from([choice for option in OPTIONS for choice in option.metadata["choices"] or ()]),
)
words = st.one_of(
    st.sampled_from([*FLAGS, "-b", "-w", "-a", "-o", "-e", "-h1", "--no-compile"]),
    values,
    st.builds("{}={}".format, st.sampled_from(FLAGS), values),
)


def without_help(argv):
    return not any(word in ("-h", "--help") or word.startswith("--h") for word in argv)


@OFTEN
@given(argv=st.lists(words, max_size=8).filter(without_help))
def test_any_words_are_taken_and_read_back_or_are_told_in_lines(tmp_path, argv):
    result, _ = answer(argv)
    assert result is None or reads_back(result, tmp_path)


KINDS = {}  # settings that read a value and check it by the same function, whatever its bounds and choices
for option in OPTIONS:
    check, choices, *rest = map(option.metadata.get, ("check", "choices", "many", "type", "words", "verbatim", "bare"))
    KINDS.setdefault((getattr(check, "__qualname__", ""), bool(choices), *rest), []).append(option)


@pytest.mark.parametrize(
    "every", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["two of each kind", "all"]
)
@pytest.mark.parametrize("value", CASES, ids=lambda value: ascii(value)[:20])
def test_settings_answer_every_number_and_text_above(value, every, tmp_path):
    place = sorted((*NUMBERS, *TEXTS), key=ALIKE.__contains__).index(value)  # first those that run by default
    two = [kind[at % len(kind)] for kind in KINDS.values() for at in (2 * place, 2 * place + 1)]
    read = set()  # what the value has become: one setting of each kind is saved and read
    for option in OPTIONS if every else two:
        flag = flag_of(option.name)
        result, _ = answer([f"{flag}={value}"])
        if result is None or (kind := repr(result.values()[option.name])) in read:
            continue
        assert reads_back(result, tmp_path), flag
        read.add(kind)


# ---------------------------------------------------------------------------------------- recipes


def of_recipe(data, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(data if isinstance(data, bytes) else data.encode("utf-8", "surrogatepass"))
    return answer(["--config", str(path)])


def doubling(levels, first, inner):
    return f"a0: &a0 {first}\n" + "".join(
        f"a{n}: &a{n} {inner.format(f'*a{n - 1}', f'*a{n - 1}')}\n" for n in range(1, levels)
    )


def doubling_value(levels):
    text = "x"
    for n in range(levels):
        text = f"[&a{n} [{text}], *a{n}]"
    return f"lr: {text}\n"


TOUCH = "os.mkdir ['attacked']"
REFUSED = {  # beside those of tests/utils/config/test_argument_mistakes.py
    "billion laughs": doubling(40, "[lol, lol]", "[{}, {}]"),
    "billion laughs in a value": doubling_value(60),
    "billion laughs of merges": doubling(30, "{x: 1, y: 2}", "{{<<: [{}, {}]}}"),
    "merge into itself": "lr: &a {<<: *a}",
    "mapping in itself": "&a {lr: *a}",
    "deep": "{a: " * 5000,
    "huge": "# " + "x" * 10**7 + "\nlr: 1",
    "many keys": "".join(f"k{n}: 1\n" for n in range(5000)),
    "large hexadecimal": "seed: 0x" + "f" * 5000,
    "large binary": "lr: 0b" + "1" * 50_000,
    "large decimal": "seed: " + "9" * 5000,
    "sixties": "epochs: " + ":".join(["1"] * 3000),
    "large key": "? 0x" + "f" * 800 + "\n: 1",
    "infinite": "lr: 1e400",
    "int of nothing": "seed: !!int ''",
    "float of nothing": "lr: !!float ''",
    "bool of a word": "nesterov: !!bool perhaps",
    "no date": "name: 2001-99-99",
    "date": "name: 2001-01-01",
    "bytes": "name: !!binary aGVsbG8=",
    "set": "!!set {lr, epochs}",
    "pairs": "!!pairs [lr: 1]",
    "python object": f"!!python/object/apply:{TOUCH}",
    "python object in a value": f"lr: !!python/object/new:{TOUCH}",
    "python tuple": "augment: !!python/tuple [flip]",
    "own tag": "%TAG ! tag:example.org,2000:\n---\nlr: !number 1",
    "other version": "%YAML 9.9\n---\nlr: 1",
    "unknown alias": "lr: *nothing",
    "no key": "? \n: 1",
    "NUL": "lr: \0",
    "tab": "lr:\t- 1",
    "not UTF-8": b"name: caf\xe9\n",
    "UTF-16 of half a character": b"\xff\xfel\0r",
    "half a surrogate": "datapath: \ud800",
    "escaped surrogate": 'datapath: "\\udcff"\ndataname: folder',
    "binary file": bytes(range(256)) * 10,
}


@pytest.mark.parametrize("name", REFUSED)
def test_hostile_recipe_is_told_in_lines_at_once(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    result, lines = of_recipe(REFUSED[name], tmp_path)
    assert result is None and all(str(tmp_path / "recipe.yaml") in line for line in lines)
    assert os.listdir(tmp_path) == ["recipe.yaml"]


def test_anchors_and_merges_of_a_sane_size_are_fine(tmp_path):
    result, _ = of_recipe("<<: {lr: 0.3, momentum: &m 0.5}\nlabel-smoothing: *m\n", tmp_path)
    assert (result.optimisation.lr, result.optimisation.momentum, result.loss.label_smoothing) == (0.3, 0.5, 0.5)


scalars = st.one_of(
    st.sampled_from(NUMBERS),
    st.sampled_from(["!!int ''", "&a 1", "*a", "[1, [2]]", "{a: 1}", "[]", "'", "|", "? x", ""]),
    st.text(SIGNS, max_size=6),
    st.floats().map(str),
    st.booleans().map(str),
)
lines_of_recipe = st.lists(st.tuples(st.sampled_from([option.name for option in OPTIONS]), scalars), max_size=5)


@OFTEN
@given(lines=lines_of_recipe)
def test_any_values_in_a_recipe_are_taken_and_read_back_or_are_told_in_lines(tmp_path, lines):
    result, _ = of_recipe("".join(f"{name}: {value}\n" for name, value in lines), tmp_path)
    assert result is None or reads_back(result, tmp_path)


@settings(OFTEN, max_examples=40)  # some 200 lines each time
@given(place=st.floats(0, 1), mask=st.integers(1, 255))
def test_a_saved_configuration_with_a_wrong_byte_is_taken_or_told_in_lines(tmp_path, place, mask):
    data = bytearray(arguments.as_recipe(arguments.parse(["--lr", "0.5"]), "main.py --lr 0.5").encode())
    data[int(place * (len(data) - 1))] ^= mask
    of_recipe(bytes(data), tmp_path)


def test_a_recipe_that_is_no_file_is_one_line(tmp_path):
    path = tmp_path / "recipe.yaml"
    for make in (
        os.mkdir,
        os.mkfifo,
        *(partial(os.symlink, target) for target in ("recipe.yaml", "none", "/dev/zero")),
    ):
        make(path)
        _, (line,) = answer(["--config", str(path)])
        assert "--config" in line and "no such recipe" in line
        path.rename(tmp_path / f"{len(list(tmp_path.iterdir()))}")


def test_the_program_prints_a_line_a_mistake_and_ends_with_2(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text("lr: 0x" + "f" * 5000 + "\nepochs: [[1]]\nbogus: 1\n")
    assert main.main(["--config", "recipe.yaml", "--seed", "1e400", "--name", "a\nb\x1b", "\u0661", "--x=\udcff"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 7
    assert all(line.startswith("main.py: ") for line in err.splitlines())
    assert os.listdir(tmp_path) == ["recipe.yaml"]
