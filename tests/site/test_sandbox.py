"""Behind the sandbox: what is allowed can be had, what is not cannot, and each has its control."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from privssl.site import sandbox

pytestmark = pytest.mark.skipif(not sandbox.version(), reason="this kernel has no Landlock")


def run(code: str, *flags: object) -> subprocess.CompletedProcess[str]:
    """Python code behind a sandbox; without one where there are no flags."""
    python = [sys.executable, "-c", code]
    wall = [sys.executable, "-m", "privssl.site.sandbox", *map(str, flags), "--"] if flags else []
    root = Path(__file__).parents[2]
    return subprocess.run(
        [*wall, *python], capture_output=True, text=True, check=False, cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own").mkdir()
    (tmp_path / "rows.npz").write_text("patient 4711")
    return tmp_path / "own"


def tries(own: Path) -> Sequence[tuple[str, str]]:
    secret, pid = own.parent / "rows.npz", os.getpid()
    return [
        ("read a file", f"open({str(secret)!r}).read()"),
        ("list a folder", f"__import__('os').listdir({str(own.parent)!r})"),
        ("write a file", f"open({str(own.parent / 'new')!r}, 'w')"),
        ("remove a file", f"__import__('os').unlink({str(secret)!r})"),
        ("look into memory", f"open('/proc/{pid}/mem', 'rb')"),
        ("look into the environment", f"assert open('/proc/{pid}/environ').read()"),
        ("go by a child", f"__import__('subprocess').run(['cat', {str(secret)!r}], check=True)"),
    ]


@pytest.mark.parametrize("number", range(7))
def test_what_is_not_allowed_is_refused_behind_the_sandbox_and_possible_without(
    own: Path, number: int
) -> None:
    what, code = tries(own)[number]
    if "environment" in what and os.geteuid() == 0:
        pytest.skip("root may read the environment of any process (CAP_PERFMON)")
    behind = run(code, "--write", own)
    assert behind.returncode != 0, what
    refused = ("Permission denied", "Operation not permitted", "exit status 1", "AssertionError")
    assert any(text in behind.stderr for text in refused), behind.stderr
    assert "4711" not in behind.stdout + behind.stderr
    assert run(code).returncode == 0, what  # the control


def test_the_own_folder_and_what_is_given_can_be_used(own: Path) -> None:
    key = own.parent / "key"
    key.write_text("of the node")
    code = (
        f"from pathlib import Path; p = Path({str(own)!r}) / 'a'; p.mkdir(); "
        f"(p / 'f').write_text('x'); (p / 'f').rename(p / 'g'); print(open({str(key)!r}).read()); "
        "import socket, ssl, json, subprocess; subprocess.run(['true'], check=True)"
    )
    done = run(code, "--write", own, "--read", key)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "of the node\n" and (own / "a" / "g").read_text() == "x"


def test_what_the_sandbox_does_not_close_is_what_the_docs_say_it_does_not(own: Path) -> None:
    """Landlock knows nothing of these; docs/deploy.md names them, and another user closes them."""
    secret, path = own.parent / "rows.npz", own.parent / "service"
    with socket.socket(socket.AF_UNIX) as service:
        service.bind(str(path))
        service.listen()
        for code in (
            f"assert os.stat({str(secret)!r}).st_size == 12",
            f"os.chmod({str(secret)!r}, 0o644)",
            f"assert open('/proc/{os.getpid()}/statm').read()",
            f"socket.socket(1).connect({str(path)!r})",
            f"resource.prlimit({os.getpid()}, resource.RLIMIT_CORE)",
        ):
            done = run(f"import os, socket, resource; {code}", "--write", own)
            assert done.returncode == 0, (code, done.stderr)
    secret.chmod(0o600)


@pytest.mark.skipif(sandbox.version() < 6, reason="signals pass the fence before Linux 6.12")
def test_signals_do_not_cross_the_sandbox(own: Path) -> None:
    code = f"import os; os.kill({os.getpid()}, 0)"
    assert "Operation not permitted" in run(code, "--write", own).stderr
    assert run(code).returncode == 0


def test_the_socket_can_be_reached(own: Path) -> None:
    path = own.parent / "door"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        heard: list[bytes] = []

        def answer() -> None:
            with listener.accept()[0] as wire:
                heard.append(wire.recv(9))

        waits = threading.Thread(target=answer)
        waits.start()
        code = f"import socket; s = socket.socket(1); s.connect({str(path)!r}); s.send(b'knock')"
        assert run(code, "--write", own).returncode == 0
        waits.join(120)
    assert heard == [b"knock"]


def test_what_is_behind_the_sandbox_ends_with_whoever_asked_for_it(own: Path) -> None:
    note = f"open({str(own / 'pid')!r}, 'w').write(str(os.getpid()))"
    wait = f"import os, time; {note}; time.sleep(600)"
    fenced = [sys.executable, "-m", "privssl.site.sandbox", "--write", str(own)]
    for flags in ([], ["--parent"]):
        (own / "pid").unlink(missing_ok=True)
        code = (
            f"import os, subprocess; flags = {flags} + [str(os.getpid())] * {len(flags)}; "
            f"subprocess.run([*{fenced}, *flags, '--', {sys.executable!r}, '-c', {wait!r}])"
        )
        parent = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2])
        assert soon(lambda: (own / "pid").exists() and (own / "pid").read_text() != "")
        child = int((own / "pid").read_text())
        parent.kill()
        parent.wait()
        if flags:
            assert soon(lambda child=child: not runs(child))  # type: ignore[misc]
        else:  # the control
            time.sleep(0.3)
            assert runs(child)
            os.kill(child, signal.SIGKILL)


def soon(true: Callable[[], bool]) -> bool:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        if true():
            return True
        time.sleep(0.01)
    return False


def runs(process: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False


def test_a_command_does_not_start_where_the_sandbox_cannot_stand(own: Path) -> None:
    done = run("print('runs')", "--write", own / "nowhere")
    assert done.returncode == 2 and "was not started" in done.stderr and done.stdout == ""
