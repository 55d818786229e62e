"""Reads the command line of ``lmlive`` and does what it says.

Results go to stdout, everything else to stderr: a failed command says there in one line what to do next.
"""

import argparse
import io
import json
import math
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NoReturn

from lmlive._version import __version__
from lmlive.cli.absence import no_answer, no_server
from lmlive.cli.health import complaints
from lmlive.cli.summary import summarize
from lmlive.clock import MonotonicClock
from lmlive.config import ServerConfig, WorkerConfig
from lmlive.errors import ConfigError, InvalidArgument, LMLiveError, RequestTimeout, ServerUnavailable
from lmlive.protocol.handshake import is_refusal
from lmlive.protocol.messages import Clear, Ping, Reap, Status, parse_reply
from lmlive.protocol.verbs import Verb
from lmlive.server.asker import Asker

OK: Final = 0
REFUSED: Final = 1
USAGE: Final = 2
UNHEALTHY: Final = 4
INTERRUPTED: Final = 130

DEFAULT_TIMEOUT: Final = 2.0
LATER: Final = ("top", "events", "doctor", "bench")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and give its exit status; wrong usage leaves with SystemExit 2, as argparse does."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["serve"]:
        return _serve(arguments[1:])
    if arguments and arguments[0] in LATER:
        return _fail(USAGE, f"{arguments[0]} is not in this build")
    options = _parse(arguments, os.environ)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names come from workers, terminals from anywhere
    try:
        return _run(options)
    except LMLiveError as error:
        return _explain(error, options)
    except BrokenPipeError:  # whoever read us has enough, as in "lmlive status | head"
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        return OK
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(options: argparse.Namespace) -> int:
    keys = options.config.read_keys(options.url)
    with Asker(options.url, MonotonicClock(), keys) as asker:
        asker.hello(options.timeout)
        run: Callable[[Asker, argparse.Namespace], int] = options.run
        status = run(asker, options)
    sys.stdout.flush()
    return status


def _explain(error: LMLiveError, options: argparse.Namespace) -> int:
    """Say what went wrong and what to do next, and give the exit status."""
    match error:
        case InvalidArgument():
            return _fail(USAGE, f"{options.url_source}: {error.message}")
        case ConfigError():
            return _fail(USAGE, error.message)
        case ServerUnavailable() if is_refusal(error):
            return _fail(REFUSED, error.message)
        case ServerUnavailable():
            return _fail(REFUSED, no_server(options.url))
        case RequestTimeout():
            return _fail(REFUSED, no_answer(options.url, error.message))
        case _:
            return _fail(REFUSED, f"refused by {options.url}: {type(error).__name__}: {error}")


def _serve(arguments: list[str]) -> NoReturn:
    """Become the server: the same flags, signals and exit status as ``python -m lmlive.server``."""
    sys.argv[1:] = arguments
    runpy.run_module("lmlive.server", run_name="__main__", alter_sys=True)
    sys.exit(OK)


def _ping(asker: Asker, options: argparse.Namespace) -> int:
    answer = asker.ask(Verb.PING, Ping(None).to_payload(), options.timeout)
    parse_reply(Verb.PING, answer.payload)
    status = _status_of(asker, options)
    milliseconds = f"{answer.seconds * 1000:.2f}"
    epoch = f"{answer.header.epoch:016x}"
    if options.json:
        _print_json({"ping_ms": float(milliseconds), "epoch": epoch})
    else:
        print(f"pong {milliseconds} ms epoch={epoch}")
    return _judge(status)


def _status(asker: Asker, options: argparse.Namespace) -> int:
    status = _status_of(asker, options)
    if options.json:
        _print_json(status)
    else:
        print(summarize(status))
    return _judge(status)


def _reap(asker: Asker, options: argparse.Namespace) -> int:
    request = Reap(options.instance_id, options.generation)
    reaped = parse_reply(Verb.REAP, asker.ask(Verb.REAP, request.to_payload(), options.timeout).payload)
    if options.json:
        _print_json({"instance_id": str(options.instance_id), "reaped": reaped})
    elif reaped:
        print(f"reaped {options.instance_id}")
    if reaped:
        return OK
    generation = "" if options.generation is None else f" with generation {options.generation}"
    return _fail(REFUSED, f"no instance {options.instance_id}{generation} is registered: see lmlive status")


def _clear(asker: Asker, options: argparse.Namespace) -> int:
    answer = asker.ask(Verb.CLEAR, Clear(options.model).to_payload(), options.timeout)
    chunks = parse_reply(Verb.CLEAR, answer.payload)
    if options.json:
        _print_json({"chunks": chunks})
    else:
        print(f"cleared {chunks} chunks")
    return OK


def _status_of(asker: Asker, options: argparse.Namespace) -> dict[str, object]:
    status = parse_reply(Verb.STATUS, asker.ask(Verb.STATUS, Status().to_payload(), options.timeout).payload)
    return status if isinstance(status, dict) else {}


def _judge(status: dict[str, object]) -> int:
    found = complaints(status)
    for complaint in found:
        _fail(UNHEALTHY, complaint)
    return UNHEALTHY if found else OK


def _print_json(document: object) -> None:
    print(json.dumps(document))


def _fail(code: int, message: str) -> int:
    printable = "".join(letter if letter.isprintable() else "?" for letter in message)
    print(f"lmlive: {printable}", file=sys.stderr)
    return code


class _Parser(argparse.ArgumentParser):
    """A parser whose refusals are one line, in the form of all others."""

    def error(self, message: str) -> NoReturn:
        """Say it and leave."""
        sys.exit(_fail(USAGE, f"{message.removeprefix('argument ')}; see {self.prog} --help"))


def _parse(arguments: Sequence[str], environ: Mapping[str, str]) -> argparse.Namespace:
    parser = _Parser(
        prog="lmlive",
        description="Asks a running lmlive server, or starts one.",
        epilog="Exit status: 0 ok, 1 no answer or refused, 2 wrong usage, 4 reached but unhealthy.",
    )
    parser.add_argument("--version", action="version", version=f"lmlive {__version__}")
    _add_common(parser, default_of=lambda default: default)
    common = _Parser(add_help=False)
    _add_common(common, default_of=lambda _: argparse.SUPPRESS)  # given before the command or after it
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    commands.add_parser("serve", help="start a server; takes the flags of python -m lmlive.server", add_help=False)
    commands.add_parser("ping", help="send one PING", parents=[common]).set_defaults(run=_ping)
    commands.add_parser("status", help="show what the server knows", parents=[common]).set_defaults(run=_status)
    reap = commands.add_parser("reap", help="remove an instance, whatever it does", parents=[common])
    reap.add_argument(
        "instance_id", type=_unsigned("instance_id"), metavar="INSTANCE_ID", help="as lmlive status shows it"
    )
    reap.add_argument("--generation", type=_unsigned("generation"), metavar="N", help="only if it still has this one")
    reap.set_defaults(run=_reap)
    clear = commands.add_parser("clear", help="drop stored chunks", parents=[common])
    clear.add_argument("--model", metavar="M", help="only those of one model")
    clear.set_defaults(run=_clear)
    for name in LATER:
        commands.add_parser(name, help="not in this build", add_help=False)

    options = parser.parse_args(arguments)
    if options.command == "serve":
        parser.error("serve comes first, and takes the server's own flags")
    if options.command in LATER:
        parser.error(f"{options.command} is not in this build")
    options.url, options.url_source = _address(parser, options.url, environ)
    try:
        options.config = WorkerConfig(
            curve_secret_key=options.curve_secret_key, curve_server_key=options.curve_server_key, environ=environ
        )
    except ConfigError as error:
        parser.error(str(error))
    return options


def _add_common(parser: argparse.ArgumentParser, *, default_of: Callable[[object], object]) -> None:
    parser.add_argument(
        "--url",
        metavar="URL",
        default=default_of(None),
        help="the server's address; without it LMLIVE_URL, else the socket in the default run dir",
    )
    parser.add_argument("--json", action="store_true", default=default_of(False), help="print JSON")
    parser.add_argument(
        "--timeout",
        type=_seconds,
        metavar="SECONDS",
        default=default_of(DEFAULT_TIMEOUT),
        help=f"patience with each answer ({DEFAULT_TIMEOUT:g})",
    )
    parser.add_argument(
        "--curve-server-key",
        metavar="FILE|KEY",
        default=default_of(None),
        help="public key of a tcp:// server that has one; without it LMLIVE_CURVE_SERVER_KEY",
    )
    parser.add_argument(
        "--curve-secret-key",
        metavar="FILE",
        default=default_of(None),
        help="our own certificate, where the server knows who may come; without it LMLIVE_CURVE_SECRET_KEY",
    )


def _address(parser: argparse.ArgumentParser, given: str | None, environ: Mapping[str, str]) -> tuple[str, str]:
    """Give the server's address, and what says so."""
    if given is not None:
        return given, "--url"
    if url := environ.get("LMLIVE_URL"):
        return url, "LMLIVE_URL"
    run_dir = environ.get("LMLIVE_RUN_DIR") or None
    source = "XDG_RUNTIME_DIR" if run_dir is None else "LMLIVE_RUN_DIR"
    try:
        return ServerConfig(run_dir=run_dir, environ=environ).bind_urls[0], source
    except ConfigError as error:
        parser.error(f"{source}: {error}, or give --url" if error.fields["field"] == "run_dir" else str(error))


def _unsigned(name: str) -> Callable[[str], int]:
    def read(given: str) -> int:
        if not (given.isascii() and given.isdigit() and int(given) < 2**64):
            raise argparse.ArgumentTypeError(f"{name} is {given!r} but must be a decimal number from 0 to 2**64 - 1")
        return int(given)

    return read


def _seconds(given: str) -> float:
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"timeout is {given!r} but must be a number of seconds above 0, at most a day")
    return seconds
