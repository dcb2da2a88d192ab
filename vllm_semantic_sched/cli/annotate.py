"""Serve level and expected output length of texts to gateways, over HTTP.

POST /annotate takes {"text": "..."} or an OpenAI request and answers with the urgency level, the
expected output tokens, the provisional reading (probabilities of levels and length buckets), and
the headers and body fields for LiteLLM, llm-d, Dynamo and SMG. It keeps no state but the sessions
of a policy that has them, in memory. It reads with the predictor, as the server does, where torch
is installed; without it, or with --reader instant, with the instant reader alone, which is faster
and misses more. It has no authentication: keep it on the gateway's own network.
"""

import argparse

from vllm_semantic_sched.cli.arguments import failing, positive
from vllm_semantic_sched.engine.startup.settings import DEFAULT_POLICY


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the policy to read with, and the address to listen on."""
    add = parser.add_argument
    add("--policy", default=DEFAULT_POLICY, help="name or path (default: %(default)s)")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add(
        "--reader",
        choices=("predictor", "instant"),
        help="what decides the level (default: predictor, if torch is installed)",
    )
    add("--port", type=positive, default=8090, help="port to listen on (default: %(default)s)")


@failing(ImportError, OSError, ValueError)
def run(args: argparse.Namespace) -> None:
    """Serve until interrupted; 1 if policy, model or address cannot be used."""
    from aiohttp import web

    from vllm_semantic_sched.fleet.annotate.annotator import Annotator, load_reader, make_app

    annotator = Annotator.load(args.policy)
    reader = None if args.reader == "instant" else load_reader(annotator.policy)
    if reader is None and args.reader == "predictor":
        raise ValueError("--reader predictor: needs torch, and a policy that reads texts")
    if reader is None:
        print("Levels come from the instant reader, which misses more than the predictor.")
    web.run_app(make_app(annotator, reader), host=args.host, port=args.port)
