"""Writes everything under generated/: dashboards, rules and the kustomize base that carries them.

Run it from the repository: `python -m dashboards.generate` (needs grafana-foundation-sdk and PyYAML).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from . import alerts, fleet, instance, runbook
from .limits import LIMITS, Limits

if TYPE_CHECKING:
    from collections.abc import Mapping

FOLDER = Path(__file__).parent / "generated"
NOTE = "# Made by dashboards/generate.py from shim/telemetry/catalog.py and shim/verdict.py: edit those.\n"


class _Dumper(yaml.SafeDumper):
    """Long PromQL is not folded; multi-line PromQL stays readable, and items are indented under their key."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # PyYAML's signature  # noqa: ARG002, FBT001, FBT002  # PyYAML's signature
        super().increase_indent(flow, indentless=False)


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def to_yaml(content: Mapping[str, Any]) -> str:
    """YAML in the order given; the same input gives the same bytes."""
    body = yaml.dump(dict(content), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100_000)
    return NOTE + body


def rules(limits: Limits = LIMITS) -> str:
    """The rules file for Prometheus."""
    return to_yaml({"groups": alerts.groups(limits)})


def prometheus_rule() -> str:
    """The same for the Prometheus operator."""
    return to_yaml(
        {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "PrometheusRule",
            "metadata": {"name": "vllm-kv-shim", "labels": {"app.kubernetes.io/name": "vllm-kv-shim"}},
            "spec": {"groups": alerts.groups()},
        }
    )


BOARDS = ("fleet", "instance", "runbook")


def kustomization() -> str:
    """A base of its own: kustomize reads no file outside a base's folder."""
    return to_yaml(
        {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": ["alerts.prometheusrule.yaml"],
            "configMapGenerator": [
                {"name": f"vllm-kv-shim-{name}-dashboard", "files": [f"vllm-kv-shim-{name}.json={name}.json"]}
                for name in BOARDS
            ],
            "generatorOptions": {
                "disableNameSuffixHash": True,
                # The label that Grafana's sidecar (kube-prometheus-stack's default) looks for.
                "labels": {"grafana_dashboard": "1"},
                "annotations": {"grafana_folder": "vLLM"},
            },
        }
    )


def files() -> dict[str, str]:
    """Every generated file's text, by name."""
    from .board import render  # the rules can be made without Grafana's SDK  # noqa: PLC0415  # the rules can be made without Grafana's SDK

    return {
        "fleet.json": render(fleet.board()),
        "instance.json": render(instance.board()),
        "runbook.json": render(runbook.board()),
        "alerts.yaml": rules(),
        "alerts.prometheusrule.yaml": prometheus_rule(),
        "kustomization.yaml": kustomization(),
    }


def main() -> None:
    """Write what has changed, and say so."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in files().items():
        path = FOLDER / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            sys.stdout.write(f"wrote {name}\n")


if __name__ == "__main__":
    main()
