"""Pages to look at, and a reader that takes them apart as a browser would."""

from __future__ import annotations

from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path

from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import Schedule
from piper_ray.report.page.render import page_html, write_page
from piper_ray.report.page.subject import Subject, report_subject
from piper_ray.workloads.formats.plans import PlanClaims

_VOID = frozenset({"meta", "link", "br", "hr", "img", "input", "wbr"})
_CLOSED_THEMSELVES = frozenset({"g", "path", "rect", "use", "image", "circle", "line"})


class Page(HTMLParser):
    """What a page holds: figures by name, rows of its tables, texts of its sections, tags and attributes.

    A tag that is not closed, or closes another, is an AssertionError.
    """

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.figures: dict[str, list[float]] = defaultdict(list)
        self.tables: dict[str, list[dict[str, float]]] = {}
        self.texts: dict[str, str] = defaultdict(str)
        self.attributes: list[tuple[str, str, str]] = []
        self.tags: set[str] = set()
        self.ids: list[str] = []
        self.title = ""
        self._open: list[str] = []
        self._section = ""
        self._table = ""
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.tags.add(tag)
        self.attributes += [(tag, name, value) for name, value in found.items()]
        if "id" in found:
            self.ids.append(found["id"])
        if tag not in _VOID:
            self._open.append(tag)
        if tag == "section":
            self._section = found.get("id", "")
        elif tag == "table":
            self._table = found["id"]
            self.tables[self._table] = []
        elif tag == "tr" and self._table:
            self.tables[self._table].append({})
        elif tag == "data":
            value = float(found["value"])
            self.figures[found["class"]].append(value)
            if self._table:
                self.tables[self._table][-1][found["class"]] = value

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in _CLOSED_THEMSELVES, tag
        self.handle_starttag(tag, attrs)
        self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        if tag == "table":
            self.tables[self._table] = [row for row in self.tables[self._table] if row]
            self._table = ""
        elif tag == "section":
            self._section = ""

    def handle_data(self, data: str) -> None:
        if "title" in self._open and "svg" not in self._open:
            self.title += data
        if self._open and self._open[-1] != "style":
            self.texts[self._section] += data

    def figure(self, name: str) -> float:
        """The one on top."""
        return self.figures[name][0]


def subject(
    instance: Instance, plan: Plan, schedule: Schedule | str = "2bw", claims: PlanClaims | None = None
) -> Subject:
    return report_subject(instance, plan, Schedule.of(schedule), claims or PlanClaims())


def page(instance: Instance, plan: Plan, schedule: Schedule | str = "2bw", claims: PlanClaims | None = None) -> Page:
    return Page(page_html(subject(instance, plan, schedule, claims)))


def written(path: Path, instance: Instance, plan: Plan, schedule: Schedule | str = "2bw") -> Path:
    write_page(subject(instance, plan, schedule), path)
    return path
