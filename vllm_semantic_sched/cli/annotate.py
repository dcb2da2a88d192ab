"""Serve level and expected output length of texts to gateways, over HTTP.

POST /annotate takes {"text": "..."} or an OpenAI request and answers with the urgency level, the
expected output tokens, the provisional reading (probabilities of levels and length buckets), and
the headers and body fields for LiteLLM, llm-d, Dynamo and SMG. It keeps no state and reads with the
instant reader alone. It has no authentication: keep it on the gateway's own network.
"""

import argparse

from vllm_semantic_sched.cli.arguments import failing, positive
from vllm_semantic_sched.engine.startup.settings import DEFAULT_POLICY


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the policy to read with, and the address to listen on."""
    add = parser.add_argument
    add("--policy", default=DEFAULT_POLICY, help="name or path (default: %(default)s)")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=positive, default=8090, help="port to listen on (default: %(default)s)")


@failing(ImportError, OSError, ValueError)
def run(args: argparse.Namespace) -> None:
    """Serve until interrupted; 1 if policy, model or address cannot be used."""
    from aiohttp import web

    from vllm_semantic_sched.fleet.annotate.annotator import Annotator, make_app

    web.run_app(make_app(Annotator.load(args.policy)), host=args.host, port=args.port)
