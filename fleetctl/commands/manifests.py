"""`fleetctl manifests`: plain YAML for a Kubernetes cluster, without Helm."""

from __future__ import annotations

import json

import click

PARTS = ("crds", "controller", "fleet")


@click.command()
@click.argument("parts", nargs=-1, type=click.Choice(PARTS), metavar="[crds] [controller] [fleet]")
@click.option("--image", required=True, metavar="NAME:TAG", help="Image of controller, routers and workers.")
@click.option("--namespace", default="pdfleet-system", show_default=True, help="Of the controller.")
@click.option("--etcd", default="etcd:2379", show_default=True, metavar="HOST:PORT", help="Of the fleet.")
@click.option("--nats", default="nats://nats:4222", show_default=True, metavar="URL", help="Of the fleet.")
@click.option("--replicas", type=click.IntRange(1, 5), default=2, show_default=True, help="Controllers.")
@click.option("--name", default="demo", show_default=True, help="Of the fleet.")
@click.option(
    "--model", default="smollm2", show_default=True, help="What the fleet serves, as seen in a pod."
)
@click.option("--served-model-name", default="", help="What clients call it; the model's own by default.")
@click.option(
    "--pull-secret",
    "pull_secrets",
    multiple=True,
    metavar="NAME",
    help="Secret to pull the image with, in the namespace of who uses it; several times for several.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: a List.")
def manifests(
    parts: tuple[str, ...],
    image: str,
    namespace: str,
    etcd: str,
    nats: str,
    replicas: int,
    name: str,
    model: str,
    served_model_name: str,
    pull_secrets: tuple[str, ...],
    as_json: bool,
) -> None:
    """Print what a Kubernetes cluster needs before its first fleet, definitions and controller; or the parts
    named.

    \b
    fleetctl manifests --image IMAGE | kubectl apply --server-side -f -
    fleetctl manifests fleet --image IMAGE --etcd HOST:PORT --nats URL | kubectl apply -f -
    """
    # Its YAML takes a moment to import, and other commands do not need it.
    from deploy.controller.crd import definitions
    from deploy.controller.install import example, installation
    from deploy.controller.yaml_text import to_yaml

    # No fleet among them: kubectl does not know its kind before it has applied the definition.
    chosen = parts or PARTS[:2]
    objects = []
    if "controller" in chosen:
        installed = installation(image, namespace, replicas, pull_secrets)
        kind = "CustomResourceDefinition"
        objects += [one for one in installed if "crds" in chosen or one["kind"] != kind]
    elif "crds" in chosen:
        objects += definitions()
    if "fleet" in chosen:
        served = served_model_name or model.rstrip("/").rpartition("/")[2]
        objects.append(example(image, name, model, served, pull_secrets, etcd, nats))
    if as_json:
        click.echo(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))
    else:
        click.echo(to_yaml(objects), nl=False)
