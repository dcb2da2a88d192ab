"""List, explain and check policies, and make a running server reload its policy."""

import argparse

from vllm_semantic_sched.cli.arguments import Failure, add_server_arguments, failing
from vllm_semantic_sched.cli.console import describe_keys
from vllm_semantic_sched.operate.client import AdminClient, AdminError, send_hangup
from vllm_semantic_sched.policy.config import AUTO, Policy, load_policy
from vllm_semantic_sched.policy.config.files import resolve_config, shipped_names, summary_of
from vllm_semantic_sched.policy.config.section import PolicyError
from vllm_semantic_sched.policy.profile.formula import load_profile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions list, keys, check, show and reload."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("list", help="the shipped policies, and names of engine profiles")
    actions.add_parser("keys", help="every key of a policy file with default and meaning")
    for name, text in (("check", "check a policy"), ("show", "print a policy file")):
        action = actions.add_parser(name, help=text)
        action.add_argument("policy", help="name of a shipped policy, or path of a YAML file")
    reload = actions.add_parser("reload", help="make a running server read its policy file again")
    add_server_arguments(reload, required=False)
    reload.add_argument(
        "--pid",
        type=int,
        help="instead of --server: process of the server or of an engine. Its engines get SIGHUP "
        "and log the result",
    )


@failing(PolicyError)
def run(args: argparse.Namespace) -> None:
    """Carry out an action; 1 if the policy is invalid or the server keeps its old one, 2 for
    invalid options."""
    if args.action == "reload":
        _reload(args)
    elif args.action == "list":
        names = shipped_names("policy")
        width = max(map(len, names))
        for name in names:
            print(f"{name:{width}}  {summary_of(name, 'policy')}")
        print("profiles:", AUTO, *shipped_names("profile"))
    elif args.action == "keys":
        print(describe_keys(Policy), end="")
    elif args.action == "show":
        print(resolve_config(args.policy, "policy").read_text(encoding="utf-8"), end="")
    else:
        policy = load_policy(args.policy)
        load_profile(policy.profile)
        print(f"{args.policy}: valid, base policy {policy.base}, {policy.levels} levels")
        if policy.without_effect:
            keys = ", ".join(policy.without_effect)
            print(f"warning: base: fcfs is vLLM's own scheduler; no effect: {keys}")


def _reload(args: argparse.Namespace) -> None:
    if (args.server is None) == (args.pid is None):
        raise Failure("give either --server or --pid", 2)
    engines = []
    try:
        if args.pid is None:
            engines = AdminClient(args.server, args.api_key).post("/policy/reload")["engines"]
        else:
            for process in send_hangup(args.pid):
                print(
                    f"engine process {process} reloads its policy; see its log and the metric "
                    "semsched:policy_reloads_total for the result"
                )
    except AdminError as error:
        raise Failure(f"not reloaded, the old policy stays in force:\n{error}") from error
    for number, report in enumerate(engines):
        changed = f"; changed: {', '.join(report['changed'])}" if report.get("changed") else ""
        print(
            f"engine {number}: {report['result']}, version {report['version']} "
            f"({report['fingerprint']}){changed}"
        )
