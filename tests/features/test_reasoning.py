"""Tool calls of models that reason first: their grammar begins after the reasoning."""

from dataclasses import replace

import pytest
from virtual_runs import FEATURE_LOAD, WITHOUT_BLANKS, check_feature
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionNamedFunction,
    ChatCompletionNamedToolChoiceParam,
    ChatCompletionToolsParam,
)
from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.deepseek_r1_reasoning_parser import DeepSeekR1ReasoningParser
from vllm.tool_parsers.utils import get_json_schema_from_tools

from vllm_semantic_sched.lab.device.answers import REASONING_FIELD

pytestmark = pytest.mark.engine

PARSER = "of_the_emulated_device"
TOOL = ChatCompletionToolsParam.model_validate(
    {
        "function": {
            "name": "page_doctor",
            "parameters": {
                "type": "object",
                "properties": {
                    "ward": {"enum": ["A", "B", "C"]},
                    "why": {"type": "string", "maxLength": 20},
                },
                "required": ["ward", "why"],
                "additionalProperties": False,
            },
        }
    }
)
NAMED = ChatCompletionNamedToolChoiceParam(
    function=ChatCompletionNamedFunction(name=TOOL.function.name)
)
REASONING = 12  # tokens
END = "[/INST]"


class Parser(DeepSeekR1ReasoningParser):
    """vLLM's, with tokens that the vocabulary of the device's models has."""

    start_token = "[INST]"
    end_token = END


@pytest.fixture(autouse=True)
def parser(monkeypatch) -> None:
    monkeypatch.setitem(ReasoningParserManager.reasoning_parsers, PARSER, Parser)


def test_tool_calls_after_reasoning_are_the_same(models) -> None:
    """Of every fourth request, by vLLM's schema for the choice of the tool, named and required in
    turn. The reasoning may end in the middle of a step."""
    from transformers import AutoTokenizer

    model = models("llama-3.1-8b")
    end = AutoTokenizer.from_pretrained(str(model)).convert_tokens_to_ids(END)
    schemas = {
        number: get_json_schema_from_tools(choice, [TOOL], parallel_tool_calls=False)
        for number, choice in ((3, NAMED), (7, "required"))
    }
    reasons = {REASONING_FIELD: (REASONING, end)}
    load = [
        replace(request, schema=schemas[number % 8], extra=reasons)
        if number % 8 in schemas
        else request
        for number, request in enumerate(FEATURE_LOAD)
    ]
    settings = WITHOUT_BLANKS["structured_outputs_config"] | {"reasoning_parser": PARSER}
    shown = check_feature(
        load,
        model=model,
        options={"structured_outputs_config": settings},
        drafts=2,
        runner=2,
    )
    for run in shown:
        calls = [run.records[request.name] for request in load if request.schema]
        ended = [call for call in calls if call.reason == "stop"]
        assert len(ended) > len(calls) / 2
        assert all(call.tokens.index(end) == REASONING - 1 for call in ended)
