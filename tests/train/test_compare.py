from __future__ import annotations

import pytest
from rich.console import Console

from train import compare
from train.chart import draw_comparison
from train.compare import Condition
from train.record import Evaluation, Result


def condition(name: str, fresh: list[int | None], seconds: float = 1.0, busy: float = 0.9):
    results = []
    for value in fresh:
        summary = {
            "reached": value is not None,
            "fresh_to_target": value,
            "wall_s_to_target": None if value is None else seconds,
            "steps": 10,
            "value": 0.9,
            "busy_fraction": busy,
        }
        looks = [Evaluation(1, n, n, 1.0, 0.1, 1.0, n / 5000) for n in (1000, 4000)]
        results.append(Result(summary, looks))
    return Condition(name, results)


def text(*conditions: Condition) -> str:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(compare.table(conditions, "title"))
    return capture.get()


def test_table():
    shown = text(condition("no echo", [3000, 4000, 5000]), condition("echo", [1000, None, 2000]))
    assert "4,000 ± 1,000    1.00" in shown
    assert "1,500 ± 707    0.38" in shown
    assert "3/3" in shown
    assert "2/3" in shown
    assert "nan" not in text(condition("no echo", [1]), condition("echo", [None]))


def test_the_verdict_says_where_echo_does_not_help():
    base = condition("no echo", [4000, 4000], seconds=2.0)
    helps = compare.verdict(base, condition("e", [2000, 3000], seconds=1.0))
    assert helps == "e: 0.62 times the fresh examples, 0.50 times the seconds."
    slower = compare.verdict(base, condition("e", [2000, 3000], seconds=3.0))
    assert "0.62 times the fresh examples, 1.50 times the seconds (echo does not help" in slower
    assert "1.25 times the fresh examples (echo does not help" in compare.verdict(
        base, condition("e", [5000, 5000])
    )
    assert "no fair comparison" in compare.verdict(base, condition("e", [2000, None]))


def test_why_gives_what_was_measured():
    assert "90% of the time" in compare.why(condition("no echo", [1]))
    assert "1.11 times as fast at most: these small" in compare.why(condition("no echo", [1]))
    assert compare.why(condition("no echo", [1], busy=0.25)).endswith("4.00 times as fast at most.")


@pytest.mark.parametrize("fresh", [[2000, 3000], [None, None]])
def test_picture(tmp_path, fresh):
    conditions = [condition("no echo", [4000, 4500]), condition("e", fresh), condition("f", [1])]
    draw_comparison(tmp_path / "demo.png", conditions, "title", 0.8)
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
