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
    """Run one command and return its exit status.

    Args:
        arguments: command name and its arguments; absent: those of the process.

    Returns:
        What the command returns; 0 for help and version; 2 if the command is missing or unknown.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    match list(arguments):
        case ["train", *rest]:
            from privssl.train import main as train

            return train(rest)
        case ["compare", *rest]:
            from privssl.compare.__main__ import main as compare

            return compare(rest)
        case ["reproduce", *rest]:
            from privssl.reproduce.__main__ import main as reproduce

            return reproduce(rest)
        case ["audit", *rest]:
            from privssl.audit.__main__ import main as audit

            return audit(rest)
        case ["predict", *rest]:
            from privssl.predict import main as predict

            return predict(rest)
        case ["evaluate", *rest]:
            from privssl.evaluate import main as evaluate

            return evaluate(rest)
        case ["generate", *rest]:
            from privssl.generate import main as generate

            return generate(rest)
        case ["export", *rest]:
            from privssl.export import main as export

            return export(rest)
        case ["schema", *rest]:
            from privssl.schema import main as schema

            return schema(rest)
        case ["site", *rest]:
            from privssl.site.__main__ import main as site

            return site(rest)
        case ["doctor", *rest]:
            from privssl.doctor import main as doctor

            return doctor(rest)
        case ["-h" | "--help", *_]:
            sys.stdout.write(f"{USAGE}\n")  # at once: `| head` closes the pipe after a few lines
            return 0
        case ["--version", *_]:
            print(f"privssl {metadata.version('privssl')}")
            return 0
        case [unknown, *_]:
            near = get_close_matches(unknown, COMMANDS, n=1)
            advice = f" Did you mean {near[0]}?" if near else ""
            print(f"privssl: there is no command {unknown!r}.{advice}\n\n{USAGE}", file=sys.stderr)
        case _:
            print(USAGE, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
