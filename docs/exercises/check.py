"""Judge the answers to a stage's exercises.

    python -m docs.exercises.check stage1
    python -m docs.exercises.check stage1 --solutions

The status is 0 if every answer is right.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from docs.exercises.properties import EXERCISES, Candidate, Property


def verdict(judge: Property, candidate: Candidate) -> str | None:
    """Give None for a right answer, else what is wrong with it in one line."""
    try:
        judge(candidate)
    except NotImplementedError:
        return "not written yet"
    except Exception as error:  # an answer may fail in any way; all of them are answers
        text = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
        notes = [note for note in getattr(error, "__notes__", []) if "Falsifying" in note]
        return "\n      ".join([reason, *(" ".join(note.split()) for note in notes[:1])])
    return None


def check(stage: str, *, solutions: bool = False) -> dict[str, str | None]:
    """Judge every exercise of a stage: None for each right answer."""
    where = "docs.exercises.solutions" if solutions else "docs.exercises"
    answers = importlib.import_module(f"{where}.{stage}")
    return {
        name: verdict(judge, getattr(answers, name)) for name, judge in EXERCISES[stage].items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; see the module docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m docs.exercises.check", description="Judge the answers to exercises."
    )
    parser.add_argument("stage", choices=sorted(EXERCISES))
    parser.add_argument("--solutions", action="store_true", help="judge the shipped solutions")
    parsed = parser.parse_args(arguments)
    verdicts = check(parsed.stage, solutions=parsed.solutions)
    for name, wrong in verdicts.items():
        print("right " if wrong is None else "wrong ", name)
        if wrong is not None:
            print("      ", wrong)
    right = sum(wrong is None for wrong in verdicts.values())
    print(f"{right} of {len(verdicts)} right")
    return 0 if right == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
