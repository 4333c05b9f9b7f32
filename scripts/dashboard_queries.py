#!/usr/bin/env python3
"""Runs every query of a Grafana dashboard in a Prometheus, and checks the alerts that the Prometheus has.

    scripts/dashboard_queries.py PROMETHEUS_URL DASHBOARD

A query has to be valid and to have a result, unless `EMPTY` says why it has none at the hosts of monitoring-check.sh. No alert
may fail, and only those in `CAUSED` may wait to fire or fire. Prints the queries that do not fit; exit 1 if there are any.
"""

import json
import re
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

# Metrics without samples there, with the reason.
EMPTY = {
    "seikan_port_mapping_active": "there is no router",
    "seikan_forwarded_datagrams_total": "the path is direct",
    "seikan_forwarded_dropped_datagrams_total": "the path is direct",
    "seikan_peer_dropped_packets_total": "packets without a route belong to no peer",
    "seikan_gateway_device_dropped_packets_total": "nothing but multicast of the device is dropped, if it sends any",
    "seikan_gateway_refused_packets_total": "all packets are for the device or the host",
}
# Alerts that the traffic of monitoring-check.sh causes.
CAUSED = {"SeikanDrops"}
# Values that Grafana fills in.
VARIABLES = {"$__rate_interval": "10s", "$instance": ".*", "$interface": ".*", "$peer": ".*"}
# Scrapes before the queries run, one a second.
SCRAPES = 12
PATIENCE_S = 60


class Prometheus:
    def __init__(self, url):
        self.url = url

    def get(self, path, **parameters):
        """Returns the data of an answer; raises ValueError with the reason if there is none."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            try:
                reason = json.loads(text)["error"]
            except (ValueError, KeyError, TypeError):
                # While it starts, it answers in plain text.
                reason = text.strip()
            raise ValueError(reason) from error

    def query(self, expression):
        return self.get("query", query=expression)["result"]

    def wait(self):
        """Waits until each target has been scraped often enough."""
        until, state = time.monotonic() + PATIENCE_S, ""
        while time.monotonic() < until:
            try:
                scrapes = [float(s["value"][1]) for s in self.query("sum_over_time(up[5m])")]
                if len(scrapes) == 3 and min(scrapes) >= SCRAPES:
                    return
                state = f"scrapes of each target: {scrapes}"
            except (OSError, ValueError) as error:
                state = str(error)
            time.sleep(0.5)
        sys.exit(f"no {SCRAPES} scrapes of each target within {PATIENCE_S} s; {state}")


def filled_in(text):
    for name, value in VARIABLES.items():
        text = text.replace(name, value)
    return text


def panels(dashboard):
    for panel in dashboard["panels"]:
        yield panel
        yield from panel.get("panels", [])


def fault_of_query(prometheus, expression):
    try:
        result = prometheus.query(expression)
    except ValueError as error:
        return f"invalid: {error}"
    if not result and not any(metric in expression for metric in EMPTY):
        return "no result"
    return None


def fault_of_variable(prometheus, variable):
    """A list of values comes from labels of series, or from a query and a regular expression with named groups."""
    query = filled_in(variable["query"]["query"])
    if found := re.fullmatch(r"label_values\((.*), (\w+)\)", query):
        values = [series.get(found[2]) for series in prometheus.get("series", **{"match[]": found[1]})]
    elif found := re.fullmatch(r"query_result\((.*)\)", query):
        values = []
        pattern = re.compile(variable["regex"].strip("/g").replace("(?<", "(?P<"))
        for series in prometheus.query(found[1]):
            labels = ",".join(f'{name}="{value}"' for name, value in series["metric"].items())
            groups = [match.groupdict() for match in pattern.finditer(labels)]
            values.append(all(any(group[name] for group in groups) for name in ("text", "value")))
    else:
        return f"unknown: {query}"
    return None if values and all(values) else f"values {values} of {query}"


def main(url, path):
    prometheus, dashboard = Prometheus(url), json.load(open(path))
    prometheus.wait()
    faults, queries = [], 0
    for panel in panels(dashboard):
        for target in panel.get("targets", []):
            queries += 1
            expression = filled_in(target["expr"])
            if fault := fault_of_query(prometheus, expression):
                faults.append(f"{panel['title']}: {fault}: {expression}")
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query" and (fault := fault_of_variable(prometheus, variable)):
            faults.append(f"variable {variable['name']}: {fault}")
    rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    for rule in rules:
        if rule["health"] != "ok" or (rule["state"] != "inactive" and rule["name"] not in CAUSED):
            faults.append(f"alert {rule['name']}: {rule['health']}, {rule['state']}, {rule.get('lastError')}")
    for fault in faults:
        print(fault, file=sys.stderr)
    print(f"monitoring: {queries} queries and {len(rules)} alerts evaluated, {len(faults)} faults")
    sys.exit(1 if faults or not queries or not rules else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
