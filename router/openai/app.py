"""The FastAPI app: models, health, readiness, version, metrics and the OpenAPI page."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from fleet.errors import BadRequest, FleetError, NotFound, Unavailable
from router.openai.dashboard import routes as dashboard
from router.openai.errors import MethodNotAllowed, ModelNotFound, error_body, error_headers
from router.openai.explain import add_routes
from router.openai.messages import ChatBody, CompletionBody
from router.openai.responses import ResponsesBody
from router.openai.tokens import DetokenizeBody, EmbeddingsBody, TokenizeBody

if TYPE_CHECKING:
    from router.openai.asgi import Ingress


def admin_app(ingress: Ingress, version: str) -> FastAPI:
    """Routes beside those that take bodies; those are described here and served elsewhere."""
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

    @app.get("/fleet/targets")
    async def targets() -> list[dict[str, object]]:
        """Where workers tell their figures, for http_sd of Prometheus."""
        return ingress.targets()

    @app.exception_handler(FleetError)
    async def fleet_error(request: Request, error: FleetError) -> Response:
        headers = {name.decode(): value.decode() for name, value in error_headers(error)}
        return Response(error_body(error), error.http_status, headers, "application/json")

    @app.exception_handler(RequestValidationError)
    async def bad_parameter(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        name = str(first["loc"][-1])
        return await fleet_error(request, BadRequest(f"{name}: {first['msg']}", param=name))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        if error.status_code == 405:
            allowed = (error.headers or {}).get("allow") or (error.headers or {}).get("Allow") or "GET"
            return await fleet_error(request, MethodNotAllowed(request.method, request.url.path, allowed))
        return await fleet_error(request, NotFound(f"there is no route {request.url.path[:200]}"))

    add_routes(app, ingress)
    dashboard.add_routes(app, ingress)
    _describe(app, ingress)
    return app


_RAW: dict[str, tuple[type, str]] = {
    "/v1/chat/completions": (ChatBody, "An answer to a conversation; server-sent events if stream is true."),
    "/v1/completions": (CompletionBody, "Prompts continued; server-sent events if stream is true."),
    "/v1/responses": (ResponsesBody, "As a chat, in the newer shape; server-sent events if stream is true."),
    "/v1/embeddings": (EmbeddingsBody, "Always refused: these models have none."),
    "/tokenize": (TokenizeBody, "Tokens of a prompt or of a conversation."),
    "/detokenize": (DetokenizeBody, "Text of tokens."),
}
"""Routes that FastAPI does not serve."""


def _describe(app: FastAPI, ingress: Ingress) -> None:
    """Puts the raw routes, the shape of errors and the need of a key into the OpenAPI document."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = plain()
            schemas, components = msgspec.json.schema_components(
                [body for body, _ in _RAW.values()], ref_template="#/components/schemas/{name}"
            )
            document.setdefault("components", {}).setdefault("schemas", {}).update(components)
            document["components"]["schemas"]["Error"] = _ERROR
            for (path, (_, meaning)), schema in zip(_RAW.items(), schemas, strict=True):
                document["paths"][path] = {"post": _operation(path, meaning, schema)}
            refused = {"$ref": "#/components/schemas/Error"}
            for operations in document["paths"].values():
                for operation in operations.values():
                    operation["responses"].pop("422", None)  # FastAPI's guess: no such status is sent
                    operation["responses"]["default"] = {
                        "description": "The request is refused or failed; error says why.",
                        "content": {"application/json": {"schema": refused}},
                    }
            if ingress.wants_keys:
                bearer = {"type": "http", "scheme": "bearer"}
                document["components"]["securitySchemes"] = {"key": bearer}
                document["security"] = [{"key": []}]
                for path in ingress.open_paths & document["paths"].keys():
                    document["paths"][path]["get"]["security"] = []
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def _operation(path: str, meaning: str, schema: dict[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": path.strip("/").removeprefix("v1/").replace("/", "_"),
        "summary": meaning,
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {},
    }
    if path != "/v1/embeddings":
        content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
        if path.startswith("/v1/"):
            content["text/event-stream"] = {"schema": {"type": "string"}}
        operation["responses"]["200"] = {"description": "The answer.", "content": content}
    return operation
