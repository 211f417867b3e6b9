"""What a grading came to: as text, as JSON, and as JUnit's XML, for any grading system."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import groupby
from xml.etree import ElementTree

from .core import Grade, Result

_NO_XML = re.compile("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def lines(grade: Grade) -> Iterator[str]:
    """A line for the part, and for each case that failed what it looks like."""
    count = f"{grade.passed} of {len(grade.results)} cases"
    yield f"{'✓' if grade.passed == len(grade.results) else '✗'} {grade.part}: {count}"
    failed = (result for result in grade.results if not result.passed)
    for message, alike in groupby(failed, lambda result: result.message):
        one, *more = (result.case for result in alike)
        first, *rest = message.splitlines()
        yield f"  {one.words}: {first}"
        yield from (f"    {line}" for line in rest)
        if more:
            numbers = ", ".join(str(case.number) for case in more)
            yield f"  case{'s' * (len(more) > 1)} {numbers}: the same"


def as_json(grades: list[Grade]) -> str:
    """All cases, with what each sent and was allowed to send. Its seed is left out."""
    parts = [
        {
            "name": grade.part,
            "passed": grade.passed,
            "total": len(grade.results),
            "seconds": round(grade.seconds, 2),
            "cases": [_entry(result) for result in grade.results],
        }
        for grade in grades
    ]
    whole = {key: sum(part[key] for part in parts) for key in ("passed", "total")}
    return json.dumps({**whole, "parts": parts}, indent=1) + "\n"


def _entry(result: Result) -> dict[str, object]:
    def pair(both: tuple[float, float] | None) -> dict[str, int] | None:
        return both and {"sent": round(both[0]), "allowed": round(both[1])}

    return {
        "case": result.case.number,
        "hidden": result.case.hidden,
        "words": result.case.words,
        "passed": result.passed,
        "message": result.message,
        "bytes": pair(result.bytes),
        "messages": pair(result.messages),
        "seconds": round(result.seconds, 2),
    }


def as_junit(grades: list[Grade]) -> str:
    """A test suite for each part, a test for each case."""
    root = ElementTree.Element("testsuites", name="engine")
    for grade in grades:
        total = len(grade.results)
        counts = {"tests": total, "failures": total - grade.passed, "errors": 0, "skipped": 0}
        numbers = {name: str(number) for name, number in counts.items()}
        suite = ElementTree.SubElement(
            root, "testsuite", name=grade.part, time=f"{grade.seconds:.2f}", **numbers
        )
        for result in grade.results:
            test = ElementTree.SubElement(
                suite,
                "testcase",
                classname=grade.part,
                name=result.case.words,
                time=f"{result.seconds:.2f}",
            )
            if not result.passed:
                text = _NO_XML.sub("?", result.message)
                failure = ElementTree.SubElement(test, "failure", message=text.splitlines()[0])
                failure.text = text
    ElementTree.indent(root)
    return ElementTree.tostring(root, "unicode", xml_declaration=False) + "\n"
