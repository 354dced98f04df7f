"""The dashboard and the alert rules are sound, and ask for what the daemon measures only."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest

from tlcache.daemon.broadcast import Broadcast
from tlcache.daemon.history import History
from tlcache.daemon.index import Index
from tlcache.daemon.jobs import Jobs
from tlcache.daemon.metrics import Metrics

PLACE = Path(__file__).parents[1] / "examples/monitoring"
DASHBOARD = json.loads((PLACE / "dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]


def _metrics() -> dict[str, set[str]]:
    """Every name that the daemon says, and its labels."""
    events = Broadcast()
    service = SimpleNamespace(
        events=events, index=Index(events), history=History(), followers=[], agents=list
    )
    families = list(Metrics(service, Jobs(events)).collect())
    return {
        family.name + {"counter": "_total", "info": "_info"}.get(family.type, ""): (
            {"version"} if family.type == "info" else set(family._labelnames)
        )
        for family in families
    }


METRICS = _metrics()
SCRAPED = {"instance", "job"}


def promtool(*arguments) -> str:
    if shutil.which("promtool") is None:
        pytest.skip("no promtool here")
    done = subprocess.run(
        ["promtool", *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rules() -> list[str]:
    """The expressions of the alert rules, by the indentation that they have in the file."""
    text = (PLACE / "alerts.yml").read_text()
    found = re.findall(r"^        expr: (?:\|\n((?:          .*\n)+)|(.*)\n)", text, re.MULTILINE)
    return [block or line for block, line in found]


def test_promtool_takes_the_rules_and_they_do_what_their_tests_say():
    assert f"{len(rules())} rules found" in promtool("check", "rules", PLACE / "alerts.yml")
    promtool("test", "rules", PLACE / "alerts_test.yml")
    promtool("check", "config", PLACE / "prometheus.yml")


def test_promtool_takes_every_expression_of_the_dashboard(tmp_path):
    lines = ["groups:", "  - name: dashboard", "    rules:"]
    for number, expression in enumerate(EXPRESSIONS):
        plain = expression.replace("$__rate_interval", "5m").replace("$instance", "a")
        lines += [f"      - record: panel:{number}", f"        expr: {json.dumps(plain)}"]
    (tmp_path / "rules.yml").write_text("\n".join(lines) + "\n")
    promtool("check", "rules", tmp_path / "rules.yml")


@pytest.mark.parametrize("expression", [*EXPRESSIONS, *rules()])
def test_an_expression_asks_for_metrics_and_labels_that_there_are(expression):
    names = set(re.findall(r"\btlcache_\w+", expression))
    assert names and names <= set(METRICS)
    known = SCRAPED.union(*(METRICS[name] for name in names))
    asked = set(re.findall(r"(\w+)=~?\"", expression))
    for grouped in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression):
        asked |= set(re.split(r",\s*", grouped))
    assert asked <= known


def test_every_metric_is_shown_or_watched():
    text = " ".join([*EXPRESSIONS, *rules()])
    assert set(re.findall(r"\btlcache_\w+", text)) == set(METRICS)


def test_every_alert_says_what_to_do_and_how_bad_it_is():
    text = (PLACE / "alerts.yml").read_text()
    alerts = text.split("      - alert: ")[1:]
    assert len(alerts) == len(rules())
    for alert in alerts:
        assert re.search(r"severity: (info|warning|critical)\b", alert)
        assert re.search(r"^          summary: .", alert, re.MULTILINE)
        assert re.search(r"^          action: .", alert, re.MULTILINE)
        assert alert.split("\n")[0] in (PLACE / "alerts_test.yml").read_text()


def test_panels_have_names_of_their_own_and_do_not_overlap():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    titles = [panel["title"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids) and len(set(titles)) == len(titles)
    for one, other in combinations((panel["gridPos"] for panel in DASHBOARD["panels"]), 2):
        apart = (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
        assert apart and one["x"] + one["w"] <= 24


def test_panels_take_the_data_source_and_variables_that_the_dashboard_offers():
    offered = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    for panel in PANELS:
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["fieldConfig"]["defaults"]["unit"]
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD))) - {"__rate_interval", "__all"}
    assert used == offered
