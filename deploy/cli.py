"""The `foretoken` command."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import textwrap
from collections.abc import Callable

from backend.version import VERSION
from deploy.other_options import ServeParser

EPILOG = """\
first steps:
  foretoken demo                              a server with the bundled model, an answer, and all is stopped again
  foretoken serve                             a server that stays; Ctrl-C ends it
  foretoken complete "def read_lines(path):"  from another shell: an answer as it is made
  foretoken bench                             how fast it answers, and what speculation brings

`foretoken COMMAND --help` shows a command's options and examples; docs/ has the rest.
"""
PAGES = {
    "serve": (
        "start a server",
        "Checks what the server needs, renders a model repository for a model and starts tritonserver on it. Without options: the bundled model, "
        "with its drafter. Each option is also a key of --config's file. Options of vLLM's, SGLang's and FastDeploy's serve commands are "
        "understood, or it is said what differs.",
        """\
examples:
  foretoken serve
  foretoken serve DIR --port 8080
  foretoken serve --model DIR --speculative-config '{"method": "suffix"}'
  foretoken serve --config server.yaml --dry-run
  foretoken serve --model DIR --speculative-config '{"method": "mtp", "num_speculative_tokens": 3, "model": "DRAFTER"}'
""",
    ),
    "complete": (
        "complete a prompt on a running server",
        "Streams the completion of a prompt to the terminal, and says how fast it came and how many drafts were accepted.",
        """\
examples:
  foretoken complete "def read_lines(path):"
  foretoken complete --max-tokens 256 --stop $'\\n\\n\\n' < prompt.txt
  foretoken complete --temperature 0.8 --seed 7 --speculative '{"num_speculative_tokens": 0}' "import os"
""",
    ),
    "chat": (
        "talk to a running server",
        "A conversation with a model that has a chat template (the bundled one completes code only). An empty line, or the end of input, leaves it.",
        'examples:\n  foretoken chat\n  foretoken chat --url 127.0.0.1:8001 --temperature 0.7 "Who are you?"\n',
    ),
    "gateway": (
        "OpenAI's interface and a page, in front of a running server",
        "Serves /v1/completions, /v1/chat/completions, /v1/responses, /v1/models, /tokenize, /detokenize, /health and /metrics, and at / a page to "
        "try it.",
        """\
examples:
  foretoken gateway
  foretoken gateway --url 127.0.0.1:8001 --port 8080 --api-keys keys.txt
""",
    ),
    "bench": ("measure a running server: latency, throughput, goodput, acceptance", "", ""),
    "demo": (
        "start a server, stream an answer, stop it",
        "Shows that all works here: starts a real server on free ports, completes a prompt without and with speculation, stops the server.",
        "",
    ),
    "inspect": (
        "say what a model is, and whether it can be served",
        "Prints family, parameters, how weights are stored, memory for a length and a batch, drafters that it brings, and how it is served; or why "
        "it cannot be. Nothing is loaded.",
        "examples:\n  foretoken inspect DIR\n  foretoken inspect FILE.gguf --max-model-len 8192 --batch 32 -tp 2\n"
        "  foretoken inspect DRAFTER --target DIR\n",
    ),
    "quantize": (
        "write a model with its weights in 8 or 4 bits",
        "Rounds the weights of a model or drafter as `serve --quantization` does when it loads one, and writes them in formats of "
        "compressed-tensors, which `serve` and other servers read.",
        """\
examples:
  foretoken quantize DIR OUT --quantization wint4
  foretoken quantize DIR OUT --quantization '{"dense_quant_type": "fp8", "moe_quant_type": "wint4"}'
""",
    ),
    "convert": (
        "make a model folder of a GGUF file",
        "Writes the model of a GGUF file as a Hugging Face folder: weights, config.json, tokenizer. `serve --model FILE.gguf` does so by itself, "
        "once, into the user's cache.",
        "examples:\n  foretoken convert FILE.gguf OUT\n  foretoken convert FILE.gguf OUT --dtype bfloat16\n",
    ),
    "token-map": (
        "choose the tokens that a model drafter may draft",
        "Writes the token ids that texts have most, for `draft_token_map` in --speculative-config: a drafter's head then scores these alone, "
        "which takes it as much less time. Texts like the answers that are to be served are best.",
        """\
examples:
  foretoken token-map DIR --data chats.jsonl CODE/ --size 32768 --out tokens.json
  foretoken serve DIR --speculative-config '{"method": "mtp", "draft_token_map": "tokens.json"}'
""",
    ),
    "train": ("train a drafter for a model: mtp, eagle3, dflash, dspark, medusa, hydra, mlp_speculator", "", ""),
}
"""Of each command: its line in the list, its description, its examples."""
TRAIN = "train"
"""It needs torch, and reads its own options."""


Run = Callable[[argparse.Namespace], int]


def make_parser(command: str | None = None) -> argparse.ArgumentParser:
    """Of all commands but `train`; or with the options of one, whose parts alone are imported."""
    raw = argparse.RawDescriptionHelpFormatter
    description = "Speculative decoding of large language models on NVIDIA Triton Inference Server."
    parser = argparse.ArgumentParser(prog="foretoken", description=description, epilog=EPILOG, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"foretoken {VERSION}", help="print it and end")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=ServeParser)
    pages = {name: commands.add_parser(name, help=line, description=text, epilog=end) for name, (line, text, end) in PAGES.items()}
    for name, page in pages.items():
        page.formatter_class = raw
        page.description = textwrap.fill(page.description or "", 100)
        if name != TRAIN and (command not in PAGES or name == command):
            page.set_defaults(run=_add_options(name, page))
    return parser


def _add_options(command: str, page: argparse.ArgumentParser) -> Run:
    """Adds a command's options and returns what runs it."""
    if command == "serve":
        from deploy import launcher, options

        options.add_arguments(page)
        return launcher.serve
    if command in ("complete", "chat"):
        from client import cli

        cli.add_arguments(page)
        return cli.complete if command == "complete" else cli.chat
    if command == "gateway":
        from client.gateway import cli as gateway

        gateway.add_arguments(page)
        return gateway.run
    if command == "bench":
        from client.bench import cli as bench
        from training.heldout import list_heldout

        bench.add_arguments(page, list(list_heldout().values()))  # code that the bundled model has not seen
        return bench.run
    if command == "demo":
        from deploy import demo

        demo.add_arguments(page)
        return demo.run
    from deploy import model_commands

    add, run = {
        "inspect": (model_commands.add_inspect_arguments, model_commands.inspect),
        "quantize": (model_commands.add_quantize_arguments, model_commands.quantize),
        "convert": (model_commands.add_convert_arguments, model_commands.convert),
        "token-map": (model_commands.add_token_map_arguments, model_commands.write_token_map),
    }[command]
    add(page)
    return run


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that is not UTF-8 gets what it can show
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # what is no text is refused where the request is made, as in arguments
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # an exception amid imports becomes errors of theirs
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        run = find_command(argv)
    finally:
        signal.signal(signal.SIGINT, handler)
    try:
        status = run()
        print(end="", flush=True)
        return status
    except KeyboardInterrupt:
        return 130
    except OSError:
        if (ended := end_output(argv[0])) is None:
            raise
        return ended


def find_command(argv: list[str]) -> Callable[[], int]:
    """What these words run, which returns the exit status. Raises SystemExit for wrong ones."""
    if argv[:1] == [TRAIN]:
        from training import command

        return lambda: command.main(argv[1:])
    args = make_parser(argv[0] if argv else None).parse_args(argv)
    args.argv = argv[1:]
    return lambda: args.run(args)


def end_output(command: str) -> int | None:
    """The exit status where standard output takes no more, which is said unless who read it has gone (`| head`); else None."""
    try:
        print(flush=True)  # a line: what failed is kept for another try with a buffer alone (PYTHONUNBUFFERED)
        return None
    except OSError as error:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())  # what is left would be written at the end of the process
        if isinstance(error, BrokenPipeError):
            return 128 + signal.SIGPIPE
        print(f"foretoken {command}: standard output: {error.strerror}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
