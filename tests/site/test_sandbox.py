"""The sandbox: allowed actions work, forbidden ones fail; each has a control outside of it."""

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


def run_code(code: str, *flags: object) -> subprocess.CompletedProcess[str]:
    """Run Python code in a sandbox with these flags, or without a sandbox if there are none."""
    python = [sys.executable, "-c", code]
    sandbox_command = (
        [sys.executable, "-m", "privssl.site.sandbox", *map(str, flags), "--"] if flags else []
    )
    root = Path(__file__).parents[2]
    return subprocess.run(
        [*sandbox_command, *python], capture_output=True, text=True, check=False, cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip


@pytest.fixture
def own_folder(tmp_path: Path) -> Path:
    (tmp_path / "own").mkdir()
    (tmp_path / "rows.npz").write_text("patient 4711")
    return tmp_path / "own"


def forbidden_actions(own_folder: Path) -> Sequence[tuple[str, str]]:
    secret, pid = own_folder.parent / "rows.npz", os.getpid()
    return [
        ("read a file", f"open({str(secret)!r}).read()"),
        ("list a folder", f"__import__('os').listdir({str(own_folder.parent)!r})"),
        ("write a file", f"open({str(own_folder.parent / 'new')!r}, 'w')"),
        ("remove a file", f"__import__('os').unlink({str(secret)!r})"),
        ("look into memory", f"open('/proc/{pid}/mem', 'rb')"),
        ("look into the environment", f"assert open('/proc/{pid}/environ').read()"),
        (
            "use a child process",
            f"__import__('subprocess').run(['cat', {str(secret)!r}], check=True)",
        ),
    ]


@pytest.mark.parametrize("number", range(7))
def test_each_forbidden_action_fails_in_the_sandbox_and_works_outside(
    own_folder: Path, number: int
) -> None:
    what, code = forbidden_actions(own_folder)[number]
    if "environment" in what and os.geteuid() == 0:
        pytest.skip("root may read the environment of any process (CAP_PERFMON)")
    inside = run_code(code, "--write", own_folder)
    assert inside.returncode != 0, what
    refused = ("Permission denied", "Operation not permitted", "exit status 1", "AssertionError")
    assert any(text in inside.stderr for text in refused), inside.stderr
    assert "4711" not in inside.stdout + inside.stderr
    assert run_code(code).returncode == 0, what  # the control


def test_sandboxed_code_can_use_its_folder_and_the_files_given_to_it(own_folder: Path) -> None:
    key = own_folder.parent / "key"
    key.write_text("of the node")
    code = (
        f"from pathlib import Path; p = Path({str(own_folder)!r}) / 'a'; p.mkdir(); "
        f"(p / 'f').write_text('x'); (p / 'f').rename(p / 'g'); print(open({str(key)!r}).read()); "
        "import socket, ssl, json, subprocess; subprocess.run(['true'], check=True)"
    )
    done = run_code(code, "--write", own_folder, "--read", key)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "of the node\n" and (own_folder / "a" / "g").read_text() == "x"


def test_sandboxed_code_can_do_what_the_docs_list_as_not_prevented(own_folder: Path) -> None:
    """Landlock cannot prevent these; docs/deploy.md names them. A separate user prevents them."""
    secret, path = own_folder.parent / "rows.npz", own_folder.parent / "service"
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
            done = run_code(f"import os, socket, resource; {code}", "--write", own_folder)
            assert done.returncode == 0, (code, done.stderr)
    secret.chmod(0o600)


@pytest.mark.skipif(sandbox.version() < 6, reason="Landlock cannot block signals before Linux 6.12")
def test_sandboxed_code_cannot_signal_other_processes(own_folder: Path) -> None:
    code = f"import os; os.kill({os.getpid()}, 0)"
    assert "Operation not permitted" in run_code(code, "--write", own_folder).stderr
    assert run_code(code).returncode == 0


def test_sandboxed_code_can_connect_to_the_sites_socket(own_folder: Path) -> None:
    path = own_folder.parent / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        received: list[bytes] = []

        def accept_one() -> None:
            with listener.accept()[0] as connection:
                received.append(connection.recv(9))

        waiting = threading.Thread(target=accept_one)
        waiting.start()
        code = f"import socket; s = socket.socket(1); s.connect({str(path)!r}); s.send(b'hello')"
        assert run_code(code, "--write", own_folder).returncode == 0
        waiting.join(120)
    assert received == [b"hello"]


def test_a_sandboxed_process_ends_with_its_parent_if_asked_to(own_folder: Path) -> None:
    write_pid = f"open({str(own_folder / 'pid')!r}, 'w').write(str(os.getpid()))"
    wait = f"import os, time; {write_pid}; time.sleep(600)"
    sandboxed = [sys.executable, "-m", "privssl.site.sandbox", "--write", str(own_folder)]
    for flags in ([], ["--parent"]):
        (own_folder / "pid").unlink(missing_ok=True)
        code = (
            f"import os, subprocess; flags = {flags} + [str(os.getpid())] * {len(flags)}; "
            f"subprocess.run([*{sandboxed}, *flags, '--', {sys.executable!r}, '-c', {wait!r}])"
        )
        parent = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2])
        assert becomes_true(
            lambda: (own_folder / "pid").exists() and (own_folder / "pid").read_text() != ""
        )
        child = int((own_folder / "pid").read_text())
        parent.kill()
        parent.wait()
        if flags:
            assert becomes_true(lambda child=child: not is_running(child))  # type: ignore[misc]
        else:  # the control
            time.sleep(0.3)
            assert is_running(child)
            os.kill(child, signal.SIGKILL)


def becomes_true(true: Callable[[], bool]) -> bool:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        if true():
            return True
        time.sleep(0.01)
    return False


def is_running(process: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False


def test_a_command_is_not_started_if_the_sandbox_cannot_be_set_up(own_folder: Path) -> None:
    done = run_code("print('runs')", "--write", own_folder / "nowhere")
    assert done.returncode == 2 and "was not started" in done.stderr and done.stdout == ""
