"""That alerts and dashboard ask for what is measured, fire when they should, and are explained."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import promql_parser
import pytest
import yaml

from rte.agent import UNREADY
from rte.metrics import METRICS
from rte.model import FaultClass
from rte.problems import DO
from tests.test_deploy import markdown_table

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "alerts.md"
RULES = yaml.safe_load((ROOT / "deploy" / "examples" / "alerts.yaml").read_text())["spec"]
DASHBOARD = json.loads((ROOT / "deploy" / "examples" / "dashboard.json").read_text())
CASES = ROOT / "tests" / "data" / "alerts.yaml"
ALERTS = {rule["alert"]: rule for group in RULES["groups"] for rule in group["rules"]}
# Labels that a scrape adds, by podmonitor.yaml, and metrics that are not ours.
SCRAPED = {"node", "pod", "job"}
OTHERS = {"up": set[str](), "process_resident_memory_bytes": set[str]()}
# Labels of which all values are known.
VALUES = {
    "subject": set(DO),
    "severity": {str(each) for each in FaultClass},
    "health": {"healthy", *map(str, FaultClass)},
    "kind": {"NodeResourceTopology", "GPUFabric", "Node"},
}


def samples() -> dict[str, set[str]]:
    """Names as scraped, with their labels."""
    found = dict(OTHERS)
    for metric in METRICS:
        labels = set(metric.labels)
        found[metric.name] = labels
        if metric.type in ("summary", "histogram"):
            found |= {f"{metric.name}_{end}": labels for end in ("sum", "count")}
        if metric.type == "histogram":
            found[f"{metric.name}_bucket"] = labels | {"le"}
    return found


SAMPLES = samples()


class Selected(NamedTuple):
    names: tuple[str, ...]
    matchers: tuple[tuple[str, str], ...]


def selected(expression: str) -> Iterator[Selected]:
    """The series that an expression asks for. Raises ValueError for one that is no PromQL."""
    found: list[promql_parser.VectorSelector] = []

    def visit(node: promql_parser.Expr) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)
        elif isinstance(node, promql_parser.MatrixSelector):
            found.append(node.vector_selector)
        return True

    promql_parser.walk(promql_parser.parse(expression), visit)
    for node in found:
        matchers = tuple((m.name, m.value) for m in node.matchers.matchers)
        names = tuple(n for name, value in matchers if name == "__name__" for n in value.split("|"))
        yield Selected(
            names or (str(node.name),), tuple(pair for pair in matchers if pair[0] != "__name__")
        )


def expressions() -> dict[str, str]:
    found = {name: rule["expr"] for name, rule in ALERTS.items()}
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            text = target["expr"].replace("$__rate_interval", "5m").replace("$node", ".*")
            found[f"{panel['title']} {target['refId']}"] = text
    return found


@pytest.mark.parametrize(("name", "expression"), expressions().items(), ids=list(expressions()))
def test_what_is_asked_for_is_measured(name: str, expression: str) -> None:
    asked = tuple(selected(expression))
    assert asked, name
    for series in asked:
        for metric in series.names:
            assert metric in SAMPLES, f"{name}: there is no {metric}"
            for label, value in series.matchers:
                assert label in SAMPLES[metric] | SCRAPED, f"{name}: {metric} has no {label}"
                assert value in VALUES.get(label, {value}), f"{name}: {label} is never {value!r}"


def test_every_label_that_a_message_quotes_is_kept_by_its_expression() -> None:
    for name, rule in ALERTS.items():
        texts = " ".join(rule["annotations"].values())
        quoted = set(re.findall(r"\$labels\.(\w+)", texts))
        kept = re.search(r"by \(([^)]*)\)", rule["expr"])
        assert kept is None or quoted <= {word.strip() for word in kept[1].split(",")}, name


def test_each_alert_has_its_section_and_each_section_its_alert() -> None:
    told = re.findall(r"^### (Rte\w+)$", DOCUMENT.read_text(), re.MULTILINE)
    assert told == list(ALERTS)
    for name, rule in ALERTS.items():
        assert rule["annotations"]["runbook"] == f"docs/alerts.md#{name.lower()}"
        assert rule["labels"]["severity"] in ("critical", "warning", "info")


def test_each_problem_has_its_row_and_something_to_do() -> None:
    rows = {row["subject"].strip("`"): row for row in markdown_table(DOCUMENT, "## Problems")}
    assert list(rows) == list(DO)
    unready = {subject for subject, row in rows.items() if row["not ready"] == "yes"}
    assert unready == UNREADY | {"publication", "plugin"}
    assert all(DO.values())
    assert all(row["what to do"] for row in rows.values())


def test_each_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    well, *cases = yaml.safe_load(CASES.read_text())["tests"]
    assert {test["alertname"] for test in well["alert_rule_test"]} == ALERTS.keys()
    firing = {
        name
        for case in cases
        for test in case.get("promql_expr_test", ())
        for sample in test["exp_samples"]
        if 'alertstate="firing"' in sample["labels"]
        for name in re.findall(r'alertname="(\w+)"', sample["labels"])
    }
    assert firing == ALERTS.keys()


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool, of Prometheus, is not here")
def test_prometheus_itself_fires_them_so(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(RULES))
    shutil.copy(CASES, tmp_path)
    done = subprocess.run(
        ["promtool", "test", "rules", CASES.name],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
