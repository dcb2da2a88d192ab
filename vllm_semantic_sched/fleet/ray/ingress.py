"""Ray's OpenAI ingress with complete answers to refused requests."""

from collections.abc import Awaitable

from fastapi import Request
from ray.llm._internal.serve.core.configs.openai_api_models import (
    ChatCompletionRequest,
    CompletionRequest,
    OpenAIHTTPException,
)
from ray.llm._internal.serve.core.ingress.ingress import OpenAiIngress
from starlette.responses import JSONResponse, Response

from vllm_semantic_sched.policy.overload.refusal import Refusal


class UrgencyIngress(OpenAiIngress):
    """Answers a refused request with its status, Retry-After and an error body with a stable code,
    where Ray's own ingress gives the status alone."""

    async def chat(self, body: ChatCompletionRequest, request: Request) -> Response:
        """Called by FastAPI for `/v1/chat/completions`."""
        return await _refused_or(super().chat(body, request))

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        """Called by FastAPI for `/v1/completions`."""
        return await _refused_or(super().completions(body, request))


async def _refused_or(answer: Awaitable[Response]) -> Response:
    try:
        return await answer
    except OpenAIHTTPException as error:
        refusal = Refusal.from_text(error.type)
        if refusal is None:
            raise
        return JSONResponse(
            refusal.body(), status_code=refusal.code.status, headers=refusal.headers()
        )
