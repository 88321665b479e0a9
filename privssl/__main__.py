"""The installed command: ``privssl train ...`` is ``python -m privssl.train ...``, and so on.

A command is imported when it is called, so that ``privssl --help`` does not wait for torch.
"""

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import metadata

COMMANDS = {
    "train": "train one classifier from a config file",
    "compare": "run several configs on the same splits and seeds; one table, one plot",
    "predict": "classify new rows with a finished run",
    "evaluate": "measure a finished run on labelled rows",
    "export": "write the classifier of a finished run as ONNX or torch.export",
    "reproduce": "run cells of published tables and keep what was measured",
    "audit": "check the ledger and the privacy claim of a finished run",
    "generate": "write labelled synthetic rows made by the generator of a finished run",
    "schema": "write a JSON schema of the config, for editors",
    "site": "serve the rows of one site to a coordinator",
    "doctor": "check the installation",
}
USAGE = "usage: privssl COMMAND [ARGUMENT ...]\n\ncommands:\n{}\n\n{}".format(
    "\n".join(f"  {name:<9}  {text}" for name, text in COMMANDS.items()),
    "`privssl COMMAND --help` says more about one command.",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status.

    ``arguments``: the command's name and its own; by default those of the process.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    match arguments[:1]:
        case ["train"]:
            from privssl.train import main as command
        case ["compare"]:
            from privssl.compare.__main__ import main as command
        case ["predict"]:
            from privssl.predict import main as command
        case ["evaluate"]:
            from privssl.evaluate import main as command
        case ["export"]:
            from privssl.export import main as command
        case ["reproduce"]:
            from privssl.reproduce.__main__ import main as command
        case ["audit"]:
            from privssl.audit.__main__ import main as command
        case ["generate"]:
            from privssl.generate import main as command
        case ["schema"]:
            from privssl.schema import main as command
        case ["site"]:
            from privssl.site.__main__ import main as command
        case ["doctor"]:
            from privssl.doctor import main as command
        case ["-h" | "--help"]:
            sys.stdout.write(f"{USAGE}\n")  # unbuffered: `| head` closes the pipe after a few lines
            return 0
        case ["--version"]:
            print(f"privssl {metadata.version('privssl')}")
            return 0
        case [unknown]:
            near = get_close_matches(unknown, COMMANDS, n=1)
            advice = f" Did you mean {near[0]}?" if near else ""
            print(f"privssl: there is no command {unknown!r}.{advice}\n\n{USAGE}", file=sys.stderr)
            return 2
        case _:
            print(USAGE, file=sys.stderr)
            return 2
    return command(arguments[1:])


if __name__ == "__main__":
    sys.exit(main())
