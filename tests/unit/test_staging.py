"""One verified copy per node, for any number of processes and any obstacle."""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard

from manynodes.base.errors import Refusal
from manynodes.data import staging, unpacking
from manynodes.data.files import collect, read_files
from manynodes.data.folder import DataFolder
from manynodes.data.unpacking import ARCHIVE, COMPLETE, unpacked_here
from manynodes.experiment.environment_here import EnvironmentHere
from programs import SCRIPTS, in_namespace, program, shell


@pytest.fixture
def data(digits: Path, tmp_path: Path) -> Path:
    """A data folder that this test may damage."""
    return Path(shutil.copytree(digits, tmp_path / "data"))


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


def test_copied_once_then_reused(data, scratch) -> None:
    first, second = (
        staging.stage(DataFolder.read(data), [str(scratch)]),
        staging.stage(DataFolder.read(data), [str(scratch)]),
    )
    assert (first.status, second.status) == ("fresh", "reused")
    assert first.path == second.path
    assert first.bytes == sum(path.stat().st_size for path in Path(first.path).glob("*.npy"))
    assert not DataFolder.read(data).at(Path(first.path)).damaged_files()


def test_a_damaged_copy_is_made_again(data, scratch) -> None:
    copy = Path(staging.stage(DataFolder.read(data), [str(scratch)]).path) / "test_images.npy"
    for damage in (
        lambda: copy.write_bytes(copy.read_bytes()[:-1] + b"!"),
        lambda: copy.write_bytes(b""),
        copy.unlink,
    ):
        damage()
        assert staging.stage(DataFolder.read(data), [str(scratch)]).status == "fresh"
        assert staging.stage(DataFolder.read(data), [str(scratch)]).status == "reused"


def test_a_file_that_became_executable_is_so_in_the_copy_that_is_reused(scratch, tmp_path) -> None:
    solver, folder = tmp_path / "solver", tmp_path / "files"
    solver.write_text("#!/bin/sh\n")
    for status, mode in (("fresh", 0o644), ("reused", 0o755)):
        solver.chmod(mode)
        staged = staging.stage(collect([solver], folder, "x-files"), [str(scratch)])
        assert staged.status == status
        assert os.access(Path(staged.path, "solver"), os.X_OK) == bool(mode & 0o100)


@pytest.mark.parametrize("before", [None, "{}"])
def test_a_copy_that_is_reused_has_the_manifest_of_today(data, scratch, tmp_path, before) -> None:
    """Programs read the names of the classes there, which are no part of the hash of the data."""
    copy = Path(staging.stage(DataFolder.read(data), [str(scratch)]).path)
    renamed = Path(shutil.copytree(data, tmp_path / "renamed"))
    manifest = json.loads((renamed / "manifest.json").read_text())
    manifest["class_names"] = [f"new {name}" for name in manifest["class_names"]]
    (renamed / "manifest.json").write_text(json.dumps(manifest))
    if before:
        (copy / "manifest.json").write_text(before)
    else:
        (copy / "manifest.json").unlink()
    assert staging.stage(DataFolder.read(renamed), [str(scratch)]).status == "reused"
    assert json.loads((copy / "manifest.json").read_text()) == manifest


def test_the_first_usable_scratch_is_taken(data, scratch, monkeypatch) -> None:
    monkeypatch.setenv("NODE_SCRATCH", str(scratch))
    monkeypatch.delenv("NOT_SET_HERE", raising=False)
    staged = staging.stage(
        DataFolder.read(data), ["$NOT_SET_HERE/x", "/does/not/exist", "$NODE_SCRATCH", "/tmp"]
    )
    assert staged.status == "fresh"
    assert Path(staged.path).is_relative_to(scratch)


def test_a_scratch_without_locks_is_passed_over(data, scratch, tmp_path, monkeypatch) -> None:
    """As Lustre is if it is mounted without flock."""
    (without := tmp_path / "without").mkdir()

    def flock(descriptor: int, _how: int) -> None:
        if str(without) in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    staged = staging.stage(DataFolder.read(data), [str(without), str(scratch)])
    assert staged.status == "fresh"
    assert Path(staged.path).is_relative_to(scratch)
    staged = staging.stage(DataFolder.read(data), [str(without)])
    assert staged.status == "fallback"
    assert "this file system has no locks" in staged.reason


def test_no_scratch_means_the_shared_copy_with_the_reason(data) -> None:
    staged = staging.stage(DataFolder.read(data), ["/does/not/exist", "/proc"])
    assert (staged.status, staged.path) == ("fallback", str(data))
    assert staged.reason.startswith("/does/not/exist: no such folder; /proc/ddp-data-")
    assert (
        staging.stage(DataFolder.read(data), []).reason == "no scratch folder is set on this node"
    )


def test_a_scratch_folder_that_others_can_write_to_is_not_trusted(data, scratch) -> None:
    mine = scratch / f"ddp-data-{os.getuid()}"
    mine.mkdir()
    mine.chmod(0o777)
    assert "others may write to it" in staging.stage(DataFolder.read(data), [str(scratch)]).reason
    mine.rmdir()
    mine.symlink_to(data)
    assert "others may write to it" in staging.stage(DataFolder.read(data), [str(scratch)]).reason


def test_a_full_scratch_falls_back_and_keeps_nothing(data, tmp_path) -> None:
    # A real file system of 2 MB in a mount namespace of its own, where 5.5 MB are to be staged.
    full = tmp_path / "full"
    full.mkdir()
    inside = (
        f"mount -t tmpfs -o size=2m tmpfs {full} && "
        f"{shell('stage', '--data', data, '--scratch', full)} && find {full}"
    )
    done = in_namespace(inside)
    assert done.returncode == 0, done.stderr
    said, *found = done.stdout.splitlines()
    assert f"fallback {data}, 5.5 MB" in said
    assert "warning: using the shared copy, because" in said
    assert re.search(r"2\.\d MB free, the data need 5\.5 MB", said)
    assert [path for path in found if not path.endswith(".lock")] == [
        str(full),
        f"{full}/ddp-data-0",
    ]


def test_a_scratch_that_fills_up_in_mid_copy_falls_back_and_is_the_one_that_is_named(
    data, tmp_path
) -> None:
    # Room for the lock and for as many bytes as the data have, but a file takes whole pages: the
    # last one finds none.
    full = tmp_path / "full"
    full.mkdir()
    pages = -(-sum(path.stat().st_size for path in data.glob("*.npy")) // 4096)
    stage = shell("stage", "--data", data, "--scratch", full)
    inside = f"mount -t tmpfs -o size={(pages + 1) * 4}k tmpfs {full} && {stage} && find {full}"
    done = in_namespace(inside)
    assert done.returncode == 0, done.stderr
    said, *found = done.stdout.splitlines()
    assert f"fallback {data}, 5.5 MB" in said
    mine = f"{full}/ddp-data-0"
    assert said.endswith(
        f"because {mine}: No space left on device; free some space there and try again"
    )
    assert [path for path in found if not path.endswith(".lock")] == [str(full), mine]


def test_a_read_only_scratch_falls_back(data, scratch) -> None:
    inside = (
        f"mount -t tmpfs -o ro tmpfs {scratch} && "
        f"{shell('stage', '--data', data, '--scratch', scratch)}"
    )
    done = in_namespace(inside)
    assert done.returncode == 0, done.stderr
    assert f"fallback {data}, 5.5 MB" in done.stdout
    assert (
        f"because {scratch}/ddp-data-0: Read-only file system; choose a folder that "
        "can be written to" in done.stdout
    )


def test_a_damaged_shared_copy_is_refused_wherever_it_is_read(data, scratch) -> None:
    (data / "train_labels.npy").write_bytes(b"not what was fetched")
    for folders in ([str(scratch)], []):
        with pytest.raises(
            Refusal,
            match="train_labels.npy missing or changed since fetched; fetch the data again",
        ):
            staging.stage(DataFolder.read(data), folders)
    (data / "train_labels.npy").unlink()
    with pytest.raises(
        Refusal, match="train_labels.npy missing or changed since fetched; fetch the data again"
    ):
        staging.stage(DataFolder.read(data), [str(scratch)])
    assert not list(scratch.glob("*/*/*.npy"))


def test_no_manifest_no_data(data, scratch) -> None:
    (data / "manifest.json").write_text("{}")
    with pytest.raises(Refusal, match=r"is damaged, or not of this version \(required\); fetch"):
        staging.stage(DataFolder.read(data), [str(scratch)])
    (data / "manifest.json").unlink()
    with pytest.raises(
        Refusal,
        match=r"manifest.json is not there; fetch the data first",
    ):
        staging.stage(DataFolder.read(data), [str(scratch)])


def test_of_many_processes_at_once_one_copies(data, scratch) -> None:
    command = [
        sys.executable,
        str(SCRIPTS / "stage.py"),
        "--data",
        str(data),
        "--scratch",
        str(scratch),
    ]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    said = [process.communicate()[0] for process in processes]
    assert sum(": fresh " in line for line in said) == 1
    assert sum(": reused " in line for line in said) == 7


def test_killed_in_mid_copy_and_run_again(data, scratch) -> None:
    # Large enough to be caught in the act.
    big = data / "train_images.npy"
    for _ in range(5):
        shutil.rmtree(scratch)
        scratch.mkdir()
        process = subprocess.Popen(
            [
                sys.executable,
                str(SCRIPTS / "stage.py"),
                "--data",
                str(data),
                "--scratch",
                str(scratch),
            ]
        )
        while process.poll() is None and not list(scratch.glob("*/.*/*")):
            time.sleep(0.0005)
        process.send_signal(signal.SIGKILL)
        if process.wait() == -signal.SIGKILL:
            break
    else:
        pytest.fail(f"staging {big.stat().st_size} bytes was never caught in the act")
    staged = staging.stage(DataFolder.read(data), [str(scratch)])
    assert not DataFolder.read(data).at(Path(staged.path)).damaged_files()
    assert not [path for path in Path(staged.path).parent.iterdir() if path.name.startswith(".")]


def test_a_launched_stage_reports_every_node(data, scratch, tmp_path) -> None:
    report = tmp_path / "staging.json"
    done = program("launch", "--launcher", "none", "--nodes", 3, "--collect", report, "--",
                   SCRIPTS / "stage.py", "--data", data, "--scratch", scratch)  # fmt: skip
    assert done.returncode == 0, done.stderr
    nodes = json.loads(report.read_text())["nodes"]
    assert [node["node_rank"] for node in nodes] == [0, 1, 2]
    assert sorted(node["status"] for node in nodes) == ["fresh", "reused", "reused"]
    assert all(
        node.keys() >= {"host", "path", "bytes", "seconds", "status", "reason"} for node in nodes
    )


@pytest.mark.parametrize(
    "change",
    [
        {"dataset": "../../victim"},
        {"dataset": "cifar10"},
        {"files": {"../evil.npy": {"sha256": "0" * 64, "bytes": 1}}},
        {"sha256": "0" * 64},
        {"classes": 11},
        {"more": 1},
    ],
    ids=[
        "folder outside",
        "another data set",
        "file outside",
        "another hash",
        "another class",
        "another key",
    ],
)
def test_a_manifest_says_nothing_but_what_is_known(data, scratch, change) -> None:
    victim = scratch.parent / "victim"
    victim.mkdir()
    (victim / "precious").touch()
    manifest = DataFolder.read(data).manifest
    files = manifest["files"] | change.pop("files", {})
    (data / "manifest.json").write_text(json.dumps(manifest | {"files": files} | change))
    with pytest.raises(Refusal, match="manifest.json is (damaged|not that of)"):
        staging.stage(DataFolder.read(data), [str(scratch)])
    assert (victim / "precious").exists()
    assert list(scratch.rglob("*")) == []


def test_what_is_missing_to_stage_is_told_with_its_remedy(tmp_path) -> None:
    done = program("stage", "--data", ".", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == (
        "stage: manifest.json is not there; fetch the data first: "
        "your snakemake command, with --force manifest.json\n"
    )
    done = program("stage", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == "stage: nothing to stage; give --data, --files or --packed\n"


@pytest.mark.parametrize(
    ("entry", "of_job"), [("$JOB", True), ("${JOB}/x", True), ("$JOB_FAST", False)]
)
def test_only_the_job_s_own_scratch_is_emptied_by_the_scheduler(
    data: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch, entry: str, of_job: bool
) -> None:
    (scratch / "x").mkdir()
    for name in ("JOB", "JOB_FAST"):
        monkeypatch.setenv(name, str(scratch))
    staged = staging.stage(DataFolder.read(data), [entry], "JOB")
    assert (staged.status, staged.of_job) == ("fresh", of_job)


def test_an_environment_behind_a_link_is_packed_with_its_content(tmp_path: Path) -> None:
    (tmp_path / "real/bin").mkdir(parents=True)
    (tmp_path / "real/bin/python").touch()
    # What lies outside stays where it is; the folder has another name in its copy.
    links = {
        "../../src": f"{tmp_path}/src", "../../real/bin/python": "python",
        "..": "..", "python": "python", f"{tmp_path}/env/lib": "../lib", "/usr": "/usr",
    }  # fmt: skip
    for number, link in enumerate(links):
        (tmp_path / f"real/bin/link{number}").symlink_to(link)
    (tmp_path / "env").symlink_to(tmp_path / "real")
    where = ["--prefix", tmp_path / "env", "--output", tmp_path / "out"]
    done = program("pack", *where, "--name", "x", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with (
        (tmp_path / "out" / ARCHIVE).open("rb") as file,
        zstandard.ZstdDecompressor().stream_reader(file) as content,
        tarfile.open(fileobj=content, mode="r|") as archive,
    ):
        assert "./bin/python" in archive.getnames()
        packed = [archive.getmember(f"./bin/link{each}").linkname for each in range(len(links))]
    assert packed == [*links.values()]


@pytest.mark.parametrize("given", [{"python": "link"}, {"conda": "link"}, {"uv": "."}], ids=str)
def test_a_staged_environment_names_itself_and_is_unpacked_once(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str]
) -> None:
    """Its scripts would start the shared Python, which may be gone."""
    env = tmp_path / ".venv"
    for folder in ("bin", "etc/conda/activate.d", "lib/pkgconfig"):
        (env / folder).mkdir(parents=True)
    (env / "bin/python3").symlink_to(sys.executable)
    (env / "bin/python").symlink_to(env / "bin/python3")
    (env / "bin/where").write_text(f"#!{env}/bin/python\nimport sys\nprint(sys.executable)\n")
    (env / "bin/where").chmod(0o555)
    (env / "etc/conda/activate.d/of_it.sh").write_text(f"export OF_IT='{env}'/lib:{env}-2\n")
    (env / "lib/pkgconfig/of_it.pc").write_text(f"Libs: -L{env}/lib\n")
    (env / "lib/of_it.so").write_bytes(b"\x7fELF\0" + os.fsencode(env) + b"\0")
    # The name under which it is given may be another than that in its scripts.
    (tmp_path / "link").symlink_to(env)
    environment = EnvironmentHere.of({**given, "stage": True})
    where = ["--prefix", environment.staged_from, "--output", "out"]
    done = program("pack", *where, "--name", "x", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    env.rename(tmp_path / "gone")
    monkeypatch.chdir(tmp_path)
    packed = read_files(tmp_path / "out")
    _, place = unpacked_here(packed, [str(scratch)], None, print)
    assert place
    assert place.is_relative_to(scratch)
    environment = environment.at(place)
    ran = subprocess.run(
        environment.started(["bash", "-c", "echo $OF_IT; where"]),
        env=environment.variables(os.environ), capture_output=True, text=True, check=True,
    )  # fmt: skip
    activated = f"{place}/lib:{env}-2" if "conda" in given else ""
    assert ran.stdout.splitlines() == [activated, f"{place}/bin/python"]
    assert (place / "bin/where").stat().st_mode & 0o777 == 0o555
    assert (place / "lib/pkgconfig/of_it.pc").read_text() == f"Libs: -L{place}/lib\n"
    assert os.fsencode(env) in (place / "lib/of_it.so").read_bytes()
    # Of the next run: only the archive is verified again.
    before = (place / "bin/where").stat()
    staged, again = unpacked_here(packed, [str(scratch)], None, print)
    assert (staged.status, again) == ("reused", place)
    assert (place / "bin/where").stat() == before
    (Path(staged.path) / ARCHIVE).write_bytes(b"")
    assert unpacked_here(packed, [str(scratch)], None, print)[0].status == "fresh"


def test_a_packed_environment_is_for_this_user_alone_and_its_sum_that_of_what_was_written(
    packed: DataFolder,
) -> None:
    archive = packed.path / ARCHIVE
    assert archive.stat().st_mode & 0o777 == 0o600
    content = archive.read_bytes()
    known = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    assert packed.manifest["files"] == {ARCHIVE: known}
    # The note is of all that names it.
    other = packed.manifest | {"dataset": "another"}
    with pytest.raises(Refusal, match="was not packed by you in this folder"):
        unpacked_here(DataFolder(packed.path, other), [], None, print)


def test_what_was_unpacked_is_unpacked_again_if_files_are_gone_or_the_node_was_started_since(
    packed: DataFolder, scratch: Path
) -> None:
    _, place = unpacked_here(packed, [str(scratch)], None, print)
    assert place
    node, started, number = (place / COMPLETE).read_text().split()
    # Python makes these; one of them shows whether the folder is the same.
    marker = place / "lib/__pycache__/mine.pyc"

    def again() -> bool:
        marker.parent.mkdir(exist_ok=True)
        marker.touch()
        assert unpacked_here(packed, [str(scratch)], None, print)[1] == place
        assert (place / "lib/mine.py").read_text() == "mine"
        assert [path.name for path in place.parent.glob(".*")] == []
        return not marker.exists()

    assert not again()
    (place / "lib/mine.py").unlink()
    assert again()
    # Shortly before a loss of power, say.
    (place / "lib/mine.py").write_text("")
    (place / COMPLETE).write_text(f"{node} earlier {number}")
    assert again()
    (place / COMPLETE).write_text("")
    assert again()
    assert (place / COMPLETE).read_text().split() == [node, started, number]
    # Of another node that shares the folder, nothing is known.
    (place / COMPLETE).write_text(f"another earlier {number}")
    assert not again()


def test_a_damaged_archive_is_no_data(packed: DataFolder, scratch: Path) -> None:
    (packed.path / ARCHIVE).write_bytes(b"")
    done = program("stage", "--packed", "out", "--scratch", scratch)
    assert done.stderr == (
        f"stage: out: {ARCHIVE} missing or changed since its manifest was made; make it again: "
        "your snakemake command, with --force out/manifest.json\n"
    )


def test_where_nothing_can_be_executed_an_environment_is_a_fallback(
    packed: DataFolder, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it is neither read nor copied for nothing; another scratch folder may do."""
    monkeypatch.setattr(unpacking, "is_noexec", lambda path: path == scratch)
    told: list[str] = []
    other = packed.path.parent
    assert unpacked_here(packed, [str(scratch), str(other)], None, told.append)[1]
    (packed.path / ARCHIVE).write_bytes(b"")
    staged, place = unpacked_here(packed, [str(scratch)], None, told.append)
    assert (staged.status, place) == ("fallback", None)
    assert told == [f"warning: using the shared environment, because {scratch}: mounted noexec"]
    scratch.chmod(0o770)
    assert unpacked_here(packed, [str(scratch)], None, told.append)[1] is None
    assert f"because {scratch}: its group may replace files in it; it has no sticky" in told[-1]
    assert [path.name for path in scratch.glob("*/*")] == []


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DataFolder]:
    """A small environment whose folders nobody may write to."""
    (tmp_path / "env/lib").mkdir(parents=True)
    (tmp_path / "env/lib/mine.py").write_text("mine")
    for folder in ("env/lib", "env"):
        (tmp_path / folder).chmod(0o555)
    done = program("pack", "--prefix", "env", "--output", "out", "--name", "x", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(tmp_path)
    yield read_files(tmp_path / "out")
    for folder in ("env", "env/lib"):
        (tmp_path / folder).chmod(0o755)


def test_a_link_in_place_of_a_folder_of_results_is_not_written_through(tmp_path: Path) -> None:
    """What it leads to may be somebody else's, with links and a manifest of its own."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "link").symlink_to("anything")
    (tmp_path / "out").symlink_to(victim)
    (tmp_path / "env").mkdir()
    for name, given in (("pack", "--prefix"), ("collect", "--files")):
        done = program(name, given, "env", "--output", "out", "--name", "x", cwd=tmp_path)
        assert (done.returncode, done.stderr) == (1, f"{name}: out is a link; remove it\n")
        assert [path.name for path in victim.iterdir()] == ["link"]


def test_an_image_is_staged_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "image.sif").write_bytes(b"SIF_MAGIC")
    where = ["--prefix", "image.sif", "--output", "out"]
    done = program("pack", *where, "--name", "x", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(tmp_path)
    environment = EnvironmentHere(container="image.sif", stage=True)
    assert environment.staged_from == Path("image.sif")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    staged, place = unpacked_here(read_files(Path("out")), [str(scratch)], None, print)
    assert staged.status == "fresh"
    assert place
    assert place.is_relative_to(scratch)
    assert not place.is_symlink()
    assert environment.at(place).image == environment.image
    before = environment.contents_sha256
    os.utime("image.sif", (1, 1))
    assert environment.contents_sha256 != before
    place.write_bytes(b"SIF_MAGID")
    assert unpacked_here(read_files(Path("out")), [str(scratch)], None, print)[0].status == "fresh"
    assert place.read_bytes() == b"SIF_MAGIC"


def test_an_environment_that_cannot_be_unpacked_is_a_fallback_with_the_folder(tmp_path) -> None:
    full = tmp_path / "full"
    (tmp_path / "env").mkdir()
    full.mkdir()
    (tmp_path / "env/large").write_bytes(os.urandom(3_000_000))
    where = ["--prefix", tmp_path / "env", "--output", tmp_path / "out"]
    assert program("pack", *where, "--name", "x", cwd=tmp_path).returncode == 0
    stage = shell("stage", "--packed", tmp_path / "out", "--scratch", full)
    done = in_namespace(f"mount -t tmpfs -o size=5m tmpfs {full} && cd {tmp_path} && {stage}")
    assert done.returncode == 0, done.stderr
    warning, said = done.stdout.splitlines()
    because = f"because {full}/ddp-data-0: No space left on device"
    assert warning.startswith(f"warning: using the shared environment, {because}")
    assert f"fallback {tmp_path}/out, " in said
    assert because in said


def test_an_environment_that_somebody_else_has_packed_is_not_unpacked(tmp_path: Path) -> None:
    """Such as one in results that were sent to us, or that a member of the group has replaced."""
    theirs, ours, scratch = (tmp_path / name for name in ("theirs", "ours", "scratch"))
    for folder in (theirs, ours, scratch, theirs / "env"):
        folder.mkdir()
    (theirs / "env/python").write_text("evil")
    pack = ["--prefix", "env", "--output", "out", "--name", "x"]
    assert program("pack", *pack, cwd=theirs).returncode == 0
    (ours / "env").mkdir()
    assert program("pack", *pack, cwd=ours).returncode == 0
    stage = ["stage", "--packed", "out", "--scratch", scratch]
    shutil.rmtree(ours / "out")
    shutil.copytree(theirs / "out", ours / "out")
    refused = program(*stage, cwd=ours)
    assert (refused.returncode, refused.stderr) == (
        1,
        "stage: out was not packed by you in this folder; pack it first: this command --force "
        "out/manifest.json\n",
    )
    assert list(scratch.rglob("python")) == []
    assert program(*stage, cwd=theirs).returncode == 0
    # Others may note what they want there.
    (theirs / f".snakemake/packed-{os.getuid()}").chmod(0o770)
    assert program(*stage, cwd=theirs).returncode == 1
