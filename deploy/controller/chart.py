"""The parts of the Helm chart that are made from code: definitions and the controller. Pure."""

from __future__ import annotations

import re

from deploy.controller.crd import definitions
from deploy.controller.install import installation
from deploy.controller.yaml_text import to_yaml

_NOTE = "# Made by `make crds` from deploy/controller/install.py.\n"
_VALUES = {
    "VALUE-IMAGE": "{{ .Values.image.repository }}:{{ .Values.image.tag }}",
    "VALUE-NAMESPACE": "{{ .Release.Namespace }}",
}
_WHERE_SET = {
    "imagePullSecrets": "image.pullSecrets",
    "nodeSelector": "controller.nodeSelector",
    "tolerations": "controller.tolerations",
}


def chart_files() -> dict[str, str]:
    """Path in the chart → text."""
    found = {f"crds/{one['spec']['names']['plural']}.yaml": to_yaml([one]) for one in definitions()}
    made = installation("VALUE-IMAGE", "VALUE-NAMESPACE")
    left_out = ("Namespace", "CustomResourceDefinition", "PriorityClass")
    controller = [one for one in made if one["kind"] not in left_out]
    deployment = controller[-1]
    deployment["spec"]["replicas"] = "VALUE-REPLICAS"
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    container["resources"] = "VALUE-RESOURCES"
    deployment["spec"]["template"]["spec"] |= {name: f"VALUE-{name}" for name in _WHERE_SET}
    text = to_yaml(controller)
    for name, value in _VALUES.items():
        text = text.replace(name, value)
    text = text.replace("VALUE-REPLICAS", "{{ .Values.controller.replicas }}")
    text = text.replace("VALUE-RESOURCES", "{{ toJson .Values.controller.resources }}")
    for name, value in _WHERE_SET.items():
        # Left out where it is not set, as plain manifests leave it out.
        line = re.compile(rf"^( *)({name}): VALUE-{name}$", re.MULTILINE)
        with_it = rf"\1{{{{- with .Values.{value} }}}}\n\1\2: {{{{ toJson . }}}}\n\1{{{{- end }}}}"
        text, times = line.subn(with_it, text)
        assert times == 1, name
    found["templates/controller.yaml"] = _NOTE + text
    classes = to_yaml([one for one in made if one["kind"] == "PriorityClass"])
    found["templates/priorities.yaml"] = (
        f"{_NOTE}{{{{- if .Values.priorityClasses }}}}\n{classes}{{{{- end }}}}\n"
    )
    return found
