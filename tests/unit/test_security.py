"""Attacks on a training by a real other user of the machine, and forged messages."""

import hashlib
import json
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from manynodes.base import atomic, signing, tree
from manynodes.base.environment import Environment, variable
from manynodes.base.errors import Refusal
from manynodes.base.provenance import now
from manynodes.launching import gpus
from manynodes.programs.folders import Folders, prepare
from manynodes.programs.rank import staged_here, tell_staged, told_staged
from manynodes.programs.task import Task
from manynodes.ranks import preflight
from manynodes.ranks.preflight import RankReport
from programs import SCRIPTS, MakesFolder, program, train_command
from trainings import RUN, Training
from waiting import until

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(variable("secret"), "0123456789abcdef" * 4)
    return os.environ[variable("secret")]


@pytest.fixture
def everybodys(open_folder: Path) -> Iterator[Path]:
    """A folder that the second user can reach; pytest's own are closed to others."""
    folder = open_folder / f"second-user-{os.getpid()}"
    folder.mkdir(mode=0o755)
    yield folder
    shutil.rmtree(folder)


def as_nobody(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run Python code as the second user, who may be unable to read this Python; it is loaded
    before.
    """
    torch = ", torch.distributed" if "torch." in code else ""
    load = f"import base64, os, pickle, sys, time{torch}\n"
    become = f"os.setgroups([])\nos.setresgid(*[{NOBODY}] * 3)\nos.setresuid(*[{NOBODY}] * 3)\n"
    command = [sys.executable, "-c", load + become + textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)


def test_a_value_is_taken_only_from_who_has_the_secret_and_only_as_what_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    message = signing.signed("preflight/1", b"here")
    assert signing.verified("preflight/1", message) == b"here"
    forged = bytes(32) + b"here"
    for what, received in (
        ("preflight/2", message),
        ("preflight/1", forged),
        ("preflight/1", message[:-1]),
        ("preflight/1", b""),
    ):
        with pytest.raises(Refusal, match="is not signed with this job's secret"):
            signing.verified(what, received)
    monkeypatch.setenv(variable("secret"), "another" * 10)
    with pytest.raises(Refusal, match="is not signed"):
        signing.verified("preflight/1", message)


@pytest.mark.parametrize("secret", ["", "short"])
def test_without_a_secret_nothing_is_exchanged(
    monkeypatch: pytest.MonkeyPatch, secret: str
) -> None:
    monkeypatch.setenv(variable("secret"), secret)
    with pytest.raises(
        Refusal,
        match=(
            "LAUNCH_SECRET is not set, or shorter than 32 characters: start the processes "
            "with launch.py"
        ),
    ):
        signing.signed("x", b"")


def test_where_a_node_has_its_inputs_only_its_first_process_can_say(tmp_path: Path) -> None:
    """In a results folder that a group may write to."""
    secret, planted = signing.new_secret(), {"packed": "/planted", "data": "/planted"}
    contract, task = Environment(secret=secret), Task((), tmp_path, {}, data=tmp_path)
    where = (contract, Folders(tmp_path))
    message, _, _ = staged_here(replace(task, data=None), *where, 0, print)
    message.write_text(json.dumps(planted))
    assert told_staged(message, secret) is None
    tell_staged(message, planted, signing.new_secret())
    assert told_staged(message, secret) is None
    tell_staged(message, planted, secret)
    assert told_staged(message.with_name("1-other.json"), secret) is None
    # A task without a packed environment has none.
    assert staged_here(task, *where, 1, print)[2] == {"data": Path("/planted")}


def test_a_tree_of_tensors_comes_back_as_it_was() -> None:
    shared = torch.arange(6.0).reshape(2, 3)
    given = {
        "a": [1, 0.1, None, True, "é"],
        7: {"x": shared, "y": shared.T, "z": torch.tensor(3)},
        "half": torch.ones(2).bfloat16(),
    }
    found = tree.decode(tree.encode(given))
    assert found["a"] == given["a"]
    assert all(torch.equal(found[7][name], given[7][name]) for name in "xyz")
    assert found["half"].dtype == torch.bfloat16
    assert tree.encode(given) == tree.encode(given)


def test_what_ranks_exchange_is_never_unpickled(tmp_path: Path) -> None:
    for content in (
        pickle.dumps(MakesFolder(tmp_path / "ran")),
        b"",
        b"\xff" * 100,
        tree.encode({"a": torch.ones(9)})[:-4],
    ):
        with pytest.raises(ValueError, match="not a tree"):
            tree.decode(content)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("forged", [b"{}", b"00", b'{"rank": 1}'.hex().encode(), b"\xff\xfe"])
def test_a_forged_report_ends_the_preflight_and_is_not_believed(forged: bytes) -> None:
    store = HashStore()
    store.set("preflight/1", forged.decode("latin-1"))
    report = RankReport(0, 0, "n1", "10.0.0.1", "cpu", "", "", 1, 1, "0")
    with pytest.raises(Refusal, match="preflight/1: the received value is not"):
        preflight.join(store, report, 2, timedelta(seconds=5))


# Everybody who reaches the port of torch's store can read and write all of it.
ATTACK = """
from datetime import timedelta
dist = torch.distributed
port, wait = int(sys.argv[1]), timedelta(seconds=20)
store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=wait, wait_for_workers=False)
class Bomb:
    def __reduce__(self):
        return os.system, ("touch " + sys.argv[2],)
while not (keys := [key for key in store.list_keys() if "torch.rendezvous." in key]):
    time.sleep(0.05)
for _ in range(100):
    state = bytes(32 * (sys.argv[3] == "signed")) + pickle.dumps(Bomb())
    store.set(keys[0].removeprefix("/"), base64.b64encode(state).decode())
    time.sleep(0.05)
"""


@pytest.mark.faults
@needs_root
@pytest.mark.parametrize("kind", ["stock", "signed"])
def test_another_user_at_the_port_of_a_rendezvous_runs_nothing(
    everybodys: Path, tmp_path: Path, kind: str
) -> None:
    """With torch's own c10d rendezvous the attack succeeds, which proves the attack."""
    ran = everybodys / "ran-by-the-agent"
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    start = ["-m", "torch.distributed.run"] if kind == "stock" else [str(SCRIPTS / "torchrun.py")]
    backend = "c10d" if kind == "stock" else "c10d-signed"
    # One of two nodes never connects: the agent waits, and reads the state repeatedly.
    options = [
        "--nnodes=2",
        f"--rdzv-backend={backend}",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        "--rdzv-id=x",
        "--max-restarts=0",
        "--rdzv-conf=is_host=1,join_timeout=60",
        "--local-addr=127.0.0.1",
        f"--log-dir={tmp_path}",
    ]
    agent = subprocess.Popen(
        [sys.executable, *start, *options, "--no-python", "true"], stderr=subprocess.PIPE, text=True
    )
    try:
        until(lambda: is_open(port))
        done = as_nobody(ATTACK, port, ran, kind)
        assert done.returncode == 0 or "Broken pipe" in done.stderr or "reset" in done.stderr, (
            done.stderr
        )
        if kind == "stock":
            assert ran.exists(), "the attack itself does not work any more"
            assert ran.stat().st_uid == 0
        else:
            assert agent.wait() != 0
            assert agent.stderr is not None
            assert "is not signed with this job's secret" in agent.stderr.read()
            assert not ran.exists()
    finally:
        agent.kill()
        agent.wait()
        ran.unlink(missing_ok=True)


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def listening(pids: list[int]) -> list[str]:
    """The addresses at which these processes listen, in hexadecimal."""
    own = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                own.add(str(descriptor.readlink()))
            except OSError:
                continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                found.append(fields[1].partition(":")[0])
    return found


@needs_root
@pytest.mark.parametrize(
    "launcher",
    [
        "torchrun",
        pytest.param("torchrun-c10d", marks=pytest.mark.faults),
        pytest.param("accelerate", marks=pytest.mark.faults),
    ],
)
def test_on_one_machine_nothing_listens_beyond_loopback_and_the_secret_is_on_no_command_line(
    digits: Path, tmp_path, launcher
) -> None:
    run = json.dumps(RUN | {"epochs": 1_000_000, "nodes": 2})
    output = tmp_path / "out"
    command = [
        sys.executable,
        str(SCRIPTS / "launch.py"),
        "--launcher",
        launcher,
        "--nodes",
        "2",
        "--rank-logs",
        str(tmp_path / "logs"),
        "--",
        *train_command(run, digits, output),
    ]
    without = {name: value for name, value in os.environ.items() if name != variable("secret")}
    launch = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=without
    )
    ours: list[int] = []
    try:
        until(lambda: (output / "metrics.csv").exists() or launch.poll() is not None)
        # Whatever a launch starts has the arguments of train.py in its own.
        started = [
            path
            for path in Path("/proc").glob("[0-9]*")
            if str(output).encode() in read(path / "cmdline")
        ]
        ours = [int(path.name) for path in started if b"LAUNCH_SECRET" in environment(path)]
        assert len(ours) >= 4
        # There is enough to see of them while they do nothing.
        for pid in ours:
            os.kill(pid, signal.SIGSTOP)
        addresses = listening(ours)
        # 127.0.0.1, in the order of the machine's bytes.
        assert addresses
        assert set(addresses) == {"0100007F"}
        (secret,) = {
            re.search(rb"LAUNCH_SECRET=(\w+)", environment(Path(f"/proc/{pid}")))[1] for pid in ours
        }
        assert len(secret) == 64
        assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if secret in read(path)]
        (private,) = {
            re.search(rb"LAUNCH_STORE=([^\0]+)/ranks", environment(Path(f"/proc/{pid}")))[
                1
            ].decode()
            for pid in ours
        }
        said = as_nobody("print(os.listdir(sys.argv[1]))", private)
        assert "PermissionError" in said.stderr
    finally:
        for pid in ours:
            os.kill(pid, signal.SIGCONT)
        launch.terminate()
        launch.wait()
    assert not Path(private).exists()


def environment(process: Path) -> bytes:
    return read(process / "environ")


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@needs_root
def test_a_scratch_that_is_another_user_s_or_open_to_all_is_not_used(
    digits: Path, everybodys: Path
) -> None:
    scratch = everybodys / "scratch"
    scratch.mkdir()
    cases = {
        (NOBODY, 0o755): "belongs to another user, who could replace staged data",
        (
            0,
            0o777,
        ): "everybody may rename files in it; ask its administrator for the sticky bit",
        (NOBODY, 0o1777): "belongs to another user",
    }
    for (owner, mode), reason in cases.items():
        os.chown(scratch, owner, owner)
        scratch.chmod(mode)
        done = program("stage", "--data", digits, "--scratch", scratch)
        assert done.returncode == 0, done.stderr
        assert "warning: using the shared copy" in done.stdout
        assert reason in done.stdout
    os.chown(scratch, 0, 0)
    scratch.chmod(0o1777)
    # The second user was there first, with a folder of our name.
    made = as_nobody("os.mkdir(sys.argv[1])", scratch / f"ddp-data-{os.getuid()}")
    assert made.returncode == 0, made.stderr
    assert (
        "belongs to somebody else"
        in program("stage", "--data", digits, "--scratch", scratch).stdout
    )
    (scratch / f"ddp-data-{os.getuid()}").rmdir()
    assert "fresh" in program("stage", "--data", digits, "--scratch", scratch).stdout


@needs_root
def test_another_user_cannot_exchange_the_copy_between_check_and_read(
    digits: Path, everybodys: Path
) -> None:
    """He tries again and again, in a scratch with a sticky bit."""
    scratch = everybodys / "scratch"
    scratch.mkdir()
    scratch.chmod(0o1777)
    program("stage", "--data", digits, "--scratch", scratch)
    (copy,) = (
        path for path in (scratch / f"ddp-data-{os.getuid()}").glob("digits-*") if path.is_dir()
    )
    attack = """
        folder, file = sys.argv[1:]
        rename = lambda: os.rename(folder, folder + "x")
        for _ in range(1000):
            for deed in (rename, lambda: open(file, "w"), lambda: os.listdir(folder)):
                try:
                    deed()
                    sys.exit("succeeded")
                except PermissionError:
                    pass
        """
    done = as_nobody(attack, copy.parent, copy / "train_images.npy")
    assert done.returncode == 0, done.stderr


def test_a_link_in_place_of_a_log_or_a_temporary_file_leads_to_no_other_file(
    tmp_path: Path,
) -> None:
    """Where a group may write to the results; it puts them there after ours have been removed."""
    mine, own = tmp_path / "mine", tmp_path / "own.py"
    mine.write_text("mine")
    own.write_text("print('theirs')")
    for name in ("node=None.log", "train.log"):
        (tmp_path / "logs").mkdir(exist_ok=True)
        (tmp_path / "logs" / name).symlink_to(mine)
    done = program("supervise", "--rank-logs", tmp_path / "logs", "--", own)
    assert done.returncode == 1
    assert "node=None.log: Too many levels of symbolic links; it is a link" in done.stderr
    options = ["--launcher", "none", "--log", tmp_path / "logs/train.log", "--", own]
    done = program("launch", *options)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "train.log: Too many levels of symbolic links; it is a link" in done.stderr
    with atomic.replacing(tmp_path / "text") as path:
        (temporary,) = tmp_path.glob(f".text.*{atomic.TEMPORARY}")
        temporary.unlink()
        temporary.symlink_to(mine)
        path.write_text("theirs")
    assert mine.read_text() == "mine"


def test_a_link_in_place_of_a_folder_of_a_run_empties_nothing(tmp_path: Path) -> None:
    home, own = tmp_path / "home", tmp_path / "own.py"
    own.write_text("")
    for name in ("saved/mine", "printed/mine", "started/mine", "metrics.csv", "epoch=0001/mine"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("mine")
    before = sorted(home.rglob("*"))
    for name in ("state", "state/saved", "work", "evaluation", "outputs", "state/checkpoints"):
        run = tmp_path / name.replace("/", "-")
        (run / name).parent.mkdir(parents=True)
        (run / name).symlink_to(home)
        options = ["--launcher", "none", "--state", run / "state", "--output", run]
        done = program("launch", *options, "--", sys.executable, own)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        assert f"/{name} is a link, which may lead to anybody's files; remove" in done.stderr
    # The state of the built-in trainer, which has no --output.
    done = program("launch", "--launcher", "none", "--state", tmp_path / "state/state", "--", own)
    assert "/state is a link, which may lead to anybody's files; remove" in done.stderr
    assert sorted(home.rglob("*")) == before


def test_what_a_link_in_place_of_a_run_leads_to_is_removed_only_if_it_is_of_this_run(
    tmp_path: Path,
) -> None:
    run, there, attempt = tmp_path / "run", tmp_path / "there", {"started": now()}
    there.mkdir()
    run.symlink_to(there)
    request = {"sources_sha256": "", "data_sha256": None, "files_sha256": None, "directory": None}
    assert not prepare(Folders(run), {"lr": 1}, request, "fresh", attempt)
    assert not prepare(Folders(run), {"lr": 1}, request, "fresh", attempt)
    # With other values it is judged by `resume`, as in any folder.
    assert not prepare(Folders(run), {"lr": 2}, request, "fresh", attempt)
    (there / "work/mine").write_text("mine")
    (there / "state/request.json").unlink()
    with pytest.raises(Refusal, match="run is a link to files that are not known as this run's"):
        prepare(Folders(run), {"lr": 1}, request, "fresh", attempt)
    assert (there / "work/mine").read_text() == "mine"


@needs_root
def test_another_user_who_was_there_first_claims_no_gpu_of_ours(
    everybodys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "MEMORY", everybodys)
    everybodys.chmod(0o1777)
    gpu, usual = "MIG-GPU-0/1/2", everybodys / f"manynodes-gpus-{os.getuid()}"
    made = as_nobody("os.mkdir(sys.argv[1])", usual)
    assert made.returncode == 0, made.stderr
    with ExitStack() as first, ExitStack() as second, socket.socket(socket.AF_UNIX) as held:
        # Names without a file are anybody's.
        held.bind(f"\0manynodes-{os.getuid()}-{gpu}")
        assert gpus.claim(gpu, first)
        assert not gpus.claim(gpu, second)
        # Where the name is free again, a claim of before holds.
        usual.rmdir()
        assert not gpus.claim(gpu, second)
        assert usual.stat().st_uid == os.getuid()
    with ExitStack() as claims:
        assert gpus.claim(gpu, claims)


def test_data_that_were_replaced_with_their_hashes_are_not_trained_on(
    digits: Path, tmp_path: Path
) -> None:
    data = Path(shutil.copytree(digits, tmp_path / "data"))
    path = data / "train_labels.npy"
    content = bytearray(path.read_bytes())
    content[-1] = (content[-1] + 1) % 10
    path.write_bytes(content)
    manifest = data / "manifest.json"
    before = hashlib.sha256((digits / "train_labels.npy").read_bytes()).hexdigest()
    assert before in manifest.read_text()
    # The file's own hash; the hash of its content decides.
    manifest.write_text(manifest.read_text().replace(before, hashlib.sha256(content).hexdigest()))
    training = Training(tmp_path / "out", data)
    assert training.end() == 1
    assert training.said.endswith(
        "train_labels.npy is not the digits of its manifest: its SHA-256 differs; "
        "delete its folder and fetch the data again\n"
    )
    assert not (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("reader", ["watch", "difference", "events"])
def test_who_looks_at_an_experiment_runs_no_code_that_it_names(tmp_path, reader) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'was-run')!r}, 'w')\nNet = print\n")
    folder = tmp_path / "results/evil"
    folder.mkdir(parents=True)
    for dataset in ("digits", "own"):
        record = {"model": f"{tmp_path}/evil.py:Net", "dataset": {"name": dataset}}
        (folder / "experiment.json").write_text(json.dumps(record | {"experiment": "evil"}))
        arguments = {"watch": ["--once"], "events": ["--once"], "difference": [folder]}[reader]
        done = program(reader, folder, *arguments)
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "was-run").exists()
