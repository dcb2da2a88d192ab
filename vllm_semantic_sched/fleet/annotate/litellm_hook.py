"""A hook for the LiteLLM proxy that adds the urgency level to requests for vLLM.

# urgency.py, beside the proxy's config.yaml with `litellm_settings: {callbacks: urgency.hook}`
from vllm_semantic_sched.fleet.annotate.litellm_hook import UrgencyHook
hook = UrgencyHook(models={"llama"})
"""

from collections.abc import Collection
from typing import Any

from litellm.integrations.custom_logger import CustomLogger

from vllm_semantic_sched.engine.guard import guarded
from vllm_semantic_sched.engine.http.request_context import SESSION_HEADER
from vllm_semantic_sched.fleet.annotate.annotator import Annotator
from vllm_semantic_sched.fleet.gateways import litellm_fields
from vllm_semantic_sched.policy.facts.job import LevelSource


class UrgencyHook(CustomLogger):
    """Adds `vllm_xargs.urgency` to requests for these models, unless the client has set it. Other
    providers refuse the field. The policy's levels must be the server's."""

    def __init__(self, models: Collection[str], policy: str = "ems") -> None:
        super().__init__()
        self._models = frozenset(models)
        self._annotator = Annotator.load(policy)

    async def async_pre_call_hook(
        self, user_api_key_dict: Any, cache: Any, data: dict[str, Any], call_type: str
    ) -> dict[str, Any]:
        """Called by LiteLLM before each request. Never raises; on an error `data` is unchanged."""
        self._add_level(data)
        return data

    @guarded(lambda self, data: None)
    def _add_level(self, data: dict[str, Any]) -> None:
        given = data.get("vllm_xargs") or {}
        if data.get("model") not in self._models:
            return
        request = data.get("proxy_server_request") or {}
        session = (request.get("headers") or {}).get(SESSION_HEADER.decode())
        turn = self._annotator.begin(data, session=session)
        if "urgency" in given and turn is None:
            return
        annotation = self._annotator.annotate(data, turn=turn)
        if "urgency" in given:  # the session knows it now
            return
        if annotation.reading is not None or annotation.source == LevelSource.SESSION.value:
            fields = litellm_fields(self._annotator.policy, annotation.level, annotation.tokens)
            data["vllm_xargs"] = {**given, **fields.body["vllm_xargs"]}
