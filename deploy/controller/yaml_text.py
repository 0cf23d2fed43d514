"""Objects as YAML that people read: keys in the order given, nothing by reference. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import yaml

from fleet.cluster import Object


class _Plain(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def to_yaml(objects: Iterable[Object]) -> str:
    return yaml.dump_all(
        objects, Dumper=_Plain, sort_keys=False, width=110, allow_unicode=True, explicit_start=True
    )
