"""Shell files as commands: what is literal is read, all else is open, in linear time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
from counted_work import LINEAR, cpu_growth
from every import every
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import RecipeError
from launcher.importing.join import import_files
from launcher.importing.shell import read_script

LINE = "torchrun run_clm.py --do_train --model_name_or_path a/b --dataset_name c/d"


def words(text: str) -> list[str]:
    """The words of the last command, with `?` before those that are open."""
    return [f"{'?' * word.open}{word.text}" for word in read_script(text).commands[-1]]


@every(
    ("text", "wanted"),
    [
        ("a b \\\n  c", ["a", "b", "c"]),
        ("a b\\\nc \\", ["a", "bc"]),
        ("a \\\r\n b", ["a", "b"]),
        ("a 'b c' \"d e\"f\\ g", ["a", "b c", "d ef g"]),
        ("a 'it\"s' \"it's\" '$X' \\$X", ["a", 'it"s', "it's", "$X", "$X"]),
        ("a \"\" ''", ["a", "", ""]),
        ('a "\\"b\\"" "c\\d"', ["a", '"b"', "c\\d"]),
        ("a # b\n", ["a"]),
        ("a#b c", ["a#b", "c"]),
        ("M=x/y\na $M ${M}z", ["a", "x/y", "x/yz"]),
        ("A='-x 1'\na $A \"$A\"", ["a", "-x", "1", "-x 1"]),
        ('A=""\na $A "$A" b', ["a", "", "b"]),
        ('A=1; B="$A $A"\na $B', ["a", "1", "1"]),
        ("export A=1\na $A", ["a", "1"]),
        ("if true; then :; fi\nA=1\na $A", ["a", "1"]),
        ('A=(-x "1 2" # c\n -y)\na "${A[@]}" b', ["a", "-x", "1 2", "-y", "b"]),
        ("a > log 2>&1 b", ["a", "b"]),
        ('a >"my log" b 2>/dev/null', ["a", "b"]),
        ("a <<EOF && x\nit's $(\nEOF\nd", ["d"]),
        ("M=1\nM=2\na $M", ["a", "?$M"]),
        ("a $M\nM=1\n", ["a", "?$M"]),
        ("a $(pwd)/b `date`", ["a", "?$(pwd)/b", "?`date`"]),
        ('a "x$(b "$(c)")y"', ["a", '?x$(b "$(c)")y']),
        ("M=1\na ${M:-8} ${M%.*} ${#M} $1 $@", ["a", "?${M:-8}", "?${M%.*}", "?${#M}", "?$1", "?$@"]),
        ('A="-x $N"\na $A', ["a", "?$A"]),
        ("a --p=<your_port> $'b'", ["a", "?--p=<your_port>", "?$b"]),
        ("M=1 a $M", ["M=1", "a", "?$M"]),
    ],
)
def test_words_of_a_script(text: str, wanted: list[str]) -> None:
    assert words(text) == wanted


def test_words_have_the_lines_that_they_begin_on() -> None:
    text = "x 'a\nb' \\\n c\ncat <<E\n1\n2\nE\nM='1\n'\nd $M"
    assert [[word.line for word in command] for command in read_script(text).commands] == [
        [1, 1, 3],
        [4],
        [10, 10],
    ]


@pytest.mark.parametrize("text", ["a 'b", 'a\nb "c', "a $(b", "a ${b", "a `b", "A=(b"])
def test_what_is_not_closed_is_an_error_with_its_line(text: str) -> None:
    with pytest.raises(RecipeError) as caught:
        read_script(text, "run.sh")
    (problem,) = caught.value.problems
    assert (problem.code, problem.line) == ("import-unreadable", text.count("\n") + 1)


@given(st.text(alphabet="aif$'\"\\\n #<>&|;(){}`=-1@[]", max_size=60))
def test_any_text_is_read_to_its_end_or_refused(text: str) -> None:
    try:
        commands = read_script(text).commands
    except RecipeError:
        return
    assert all(command for command in commands)
    assert all(1 <= word.line <= text.count("\n") + 1 for command in commands for word in command)


@pytest.mark.parametrize(
    "text",
    [
        lambda size: ("# " + "python " * 28) * (size // 200) + "\n",
        lambda size: "# python python\n" * (size // 16),
        lambda size: "".join(f"A{at}=1\n" for at in range(size // 10)),
        lambda size: "A=1\n" * (size // 4),
        lambda size: (
            "A0=xx\n" + "".join(f'A{at}="$A{at - 1}$A{at - 1}$A{at - 1}"\n' for at in range(1, size // 30))
        ),
        lambda size: (
            "A0=(x x)\n"
            + "".join(f'A{at}=("${{A{at - 1}[@]}}" "${{A{at - 1}[@]}}")\n' for at in range(1, size // 40))
        ),
        lambda size: "(" * (size // 2),
        lambda size: "a $(b) " * (size // 7) + "\n",
    ],
    ids=["comment", "comments", "assignments", "same", "growing", "arrays", "brackets", "computed"],
)
def test_large_files_take_linear_time(text: Callable[[int], str], tmp_path: Path) -> None:
    def written(size: int) -> str:
        (tmp_path / f"{size}.sh").write_text(f"{text(size)}\n{LINE}\n")
        return str(tmp_path / f"{size}.sh")

    assert import_files([written(40_000)]).taken["model.name_or_path"].value == "a/b"
    assert cpu_growth(lambda path: import_files([path]), written, 40_000) < LINEAR


@pytest.mark.parametrize("many", ["$(", '"$(', "${", "'", "<<E "])
def test_hostile_files_take_linear_time(many: str) -> None:
    def read(text: str) -> None:
        with contextlib.suppress(RecipeError):
            read_script(text)

    assert cpu_growth(read, lambda size: many * (size // len(many)), 49_999) < LINEAR
