"""The `foretoken` command."""

from __future__ import annotations

import argparse
import sys


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="foretoken", description="Speculative decoding on NVIDIA Triton Inference Server.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="start a server", description="Renders a model repository for a model and starts tritonserver on it.")
    complete = commands.add_parser("complete", help="complete a prompt on a running server")
    chat = commands.add_parser("chat", help="talk to a running server")
    gateway = commands.add_parser("gateway", help="OpenAI's interface and a page, in front of a running server")
    demo = commands.add_parser("demo", help="start a server, stream an answer, stop it")
    commands.add_parser("train-mtp", help="train a drafter for a model", add_help=False)
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["train-mtp"]:  # needs torch, as nothing else here does
        from training import train_mtp

        return train_mtp.main(argv[1:])
    # Each part is imported when it is asked for: the client needs no torch, the launcher no gRPC.
    from deploy import launcher

    launcher.add_arguments(serve)
    serve.set_defaults(run=launcher.serve)
    from client import cli

    cli.add_arguments(complete)
    cli.add_arguments(chat)
    complete.set_defaults(run=cli.complete)
    chat.set_defaults(run=cli.chat)
    from client.gateway import cli as gateway_cli

    gateway_cli.add_arguments(gateway)
    gateway.set_defaults(run=gateway_cli.run)
    from deploy import demo as demonstration

    demonstration.add_arguments(demo)
    demo.set_defaults(run=demonstration.run)
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
