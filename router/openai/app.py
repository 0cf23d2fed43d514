"""The FastAPI app: models, health, readiness, version, metrics and the OpenAPI page."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from fleet.errors import FleetError, NotFound, Unavailable
from router.openai.errors import MethodNotAllowed, ModelNotFound, error_body, error_headers
from router.openai.messages import ChatBody, CompletionBody

if TYPE_CHECKING:
    from router.openai.asgi import Ingress


def admin_app(ingress: Ingress, version: str) -> FastAPI:
    """Routes beside the two that carry the load; those are described here and served elsewhere."""
    app = FastAPI(title="pdfleet", version=version or "0")
    created = int(time.time())

    def model_object(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "pdfleet",
            "max_model_len": ingress.context(name),
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """Models that can be asked now."""
        return {"object": "list", "data": [model_object(name) for name in ingress.served()]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        if model not in ingress.served():
            raise ModelNotFound(model, ingress.served())
        return model_object(model)

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Answers as long as the event loop turns."""
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        """Whether a request could be served now, end to end."""
        why = "the router is leaving" if ingress.draining else ingress.spine.ready()
        if why is not None:
            raise Unavailable(why)
        return {"status": "ready"}

    @app.get("/version")
    async def shown_version() -> dict[str, str]:
        return {"version": version}

    @app.get("/metrics")
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(await ingress.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.exception_handler(FleetError)
    async def fleet_error(request: Request, error: FleetError) -> Response:
        headers = {name.decode(): value.decode() for name, value in error_headers(error)}
        return Response(error_body(error), error.http_status, headers, "application/json")

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        if error.status_code == 405:
            allowed = (error.headers or {}).get("allow") or (error.headers or {}).get("Allow") or "GET"
            return await fleet_error(request, MethodNotAllowed(request.method, request.url.path, allowed))
        return await fleet_error(request, NotFound(f"there is no route {request.url.path[:200]}"))

    _describe(app)
    return app


def _describe(app: FastAPI) -> None:
    """Puts the two raw routes into the OpenAPI document."""
    bodies = {"/v1/chat/completions": ChatBody, "/v1/completions": CompletionBody}
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = plain()
            schemas, components = msgspec.json.schema_components(
                bodies.values(), ref_template="#/components/schemas/{name}"
            )
            document.setdefault("components", {}).setdefault("schemas", {}).update(components)
            for path, schema in zip(bodies, schemas, strict=True):
                document["paths"][path] = {
                    "post": {
                        "operationId": path.removeprefix("/v1/").replace("/", "_"),
                        "requestBody": {
                            "required": True,
                            "content": {"application/json": {"schema": schema}},
                        },
                        "responses": {
                            "200": {
                                "description": "The answer; server-sent events if stream is true.",
                                "content": {"application/json": {}, "text/event-stream": {}},
                            },
                            "4XX": {"description": "The request is refused; error says why."},
                        },
                    }
                }
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
