"""bagua-run: labels, exit codes, and above all that nothing outlives a job."""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bagua_ext.runner.output import RankStream, Sink, draw_box, visible_state
from bagua_ext.runner.placement import Host, assign_slots, parse_hostfile, parse_hosts

DEADLINE_SECONDS = 60.0
HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# The launcher alone, its store recorded; tests of the core's own store say so.
LAUNCHER = [sys.executable, str(HERE / "fake_store_runner.py")]
WITH_CORE = [sys.executable, "-m", "bagua_ext.runner"]

needs_core = pytest.mark.skipif(
    importlib.util.find_spec("bagua_ext._core") is None, reason="the core is not built"
)


def environment(**variables: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **variables}


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def run_job(
    *words: str, launcher: list[str] = LAUNCHER, stdin: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*launcher, *words],
        env=environment(**variables),
        input=stdin,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=DEADLINE_SECONDS,
    )


class RunningJob:
    """bagua-run in the background; waits for what it prints and for processes to end."""

    def __init__(self, *words: str) -> None:
        self.process = subprocess.Popen(
            [*LAUNCHER, *words],
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._timer = threading.Timer(DEADLINE_SECONDS, self.process.kill)
        self._timer.start()
        self._pidfds: dict[int, int] = {}

    def lines(self, count: int) -> list[str]:
        """The next lines of the standard output, without labels; sorted, as ranks race."""
        assert self.process.stdout is not None
        got = [self.process.stdout.readline() for _ in range(count)]
        return sorted(re.sub(r"^\[\d+\] ", "", line).rstrip("\n") for line in got)

    def watch(self, pids: list[int]) -> None:
        """Opens the processes, so that their numbers cannot be mistaken later."""
        self._pidfds.update({pid: os.pidfd_open(pid) for pid in pids})

    def end(self, signum: signal.Signals | None = None) -> tuple[int, str, str]:
        if signum is not None:
            self.process.send_signal(signum)
        # Not communicate(): it would miss what `lines` has read ahead.
        assert self.process.stdout is not None and self.process.stderr is not None
        out, err = self.process.stdout.read(), self.process.stderr.read()
        return self.process.wait(DEADLINE_SECONDS), out, err

    def still_running(self, seconds: float) -> list[int]:
        """The watched processes that do not end within ``seconds``."""
        alive = []
        for pid, pidfd in self._pidfds.items():
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            if not poll.poll(seconds * 1000):
                alive.append(pid)
        return alive

    def close(self) -> None:
        self._timer.cancel()
        for pidfd in self._pidfds.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(DEADLINE_SECONDS)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def start_job() -> Iterator[type[RunningJob]]:
    jobs: list[RunningJob] = []

    class Job(RunningJob):
        def __init__(self, *words: str) -> None:
            super().__init__(*words)
            jobs.append(self)

    yield Job
    for job in jobs:
        job.close()


# A rank with a child of its own; prints both process numbers and ignores what it is asked to.
STUBBORN_FAMILY = """
import os, signal, sys
for name in sys.argv[1:]:
    signal.signal(getattr(signal, name), signal.SIG_IGN)
child = os.fork()
if child == 0:
    if {detached}:
        os.setsid()
    os.write(1, b"%d\\n" % os.getpid())
    while True: signal.pause()
os.write(1, b"%d\\n" % os.getpid())
while True: signal.pause()
"""


def family(*ignored: str, detached: bool = False) -> list[str]:
    return [*python(STUBBORN_FAMILY.format(detached=detached)), *ignored]


# ---- Output ----------------------------------------------------------------------------------


def test_every_line_carries_its_rank_on_the_stream_it_came_from() -> None:
    done = run_job("-np", "3", "sh", "-c", "echo out $BAGUA_RANK; echo err $BAGUA_RANK >&2")
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == [f"[{r}] out {r}" for r in range(3)]
    assert sorted(done.stderr.splitlines()) == [f"[{r}] err {r}" for r in range(3)]


def test_an_unfinished_last_line_is_printed_whole() -> None:
    assert run_job("-np", "1", "printf", "a\\nb").stdout == "[0] a\n[0] b\n"


def test_lines_of_different_ranks_never_mix() -> None:
    code = """
import os
letter = "abc"[int(os.environ["BAGUA_RANK"])]
for length in range(1, 2000): print(letter * length)
"""
    done = run_job("-np", "3", *python(code))
    lines = done.stdout.splitlines()
    assert len(lines) == 3 * 1999
    for rank, letter in enumerate("abc"):
        own = [line for line in lines if line.startswith(f"[{rank}] ")]
        assert own == [f"[{rank}] " + letter * length for length in range(1, 2000)]


def test_a_line_of_a_megabyte_stays_one_line() -> None:
    done = run_job("-np", "1", *python("print('x' * 1_000_000); print('y')"))
    assert done.stdout == "[0] " + "x" * 1_000_000 + "\n[0] y\n"


def test_ten_megabytes_at_full_speed_arrive_complete() -> None:
    code = "import sys; sys.stdout.write('0123456789abcde\\n' * 655_360)"
    done = run_job("-np", "2", *python(code))
    assert done.returncode == 0
    lines = collections.Counter(done.stdout.splitlines())
    assert lines == {f"[{rank}] 0123456789abcde": 655_360 for rank in range(2)}


def test_binary_output_passes_through() -> None:
    code = "import sys; sys.stdout.buffer.write(bytes(b for b in range(256) if b not in (10, 13)))"
    done = subprocess.run(
        [*LAUNCHER, "-np", "1", *python(code)],
        env=environment(),
        capture_output=True,
        timeout=DEADLINE_SECONDS,
    )
    assert done.stdout == b"[0] " + bytes(b for b in range(256) if b not in (10, 13)) + b"\n"


def test_of_a_progress_bar_the_last_state_goes_to_a_file() -> None:
    done = run_job("-np", "1", "printf", "\\r10%%\\r50%%\\r100%%\\ndos line\\r\\n")
    assert done.stdout == "[0] 100%\n[0] dos line\n"


def test_on_a_terminal_a_progress_bar_moves_below_other_lines() -> None:
    ours, theirs = pty.openpty()
    bar = "printf '\\r10%%'; read go; printf '\\r90%%\\n'"
    with subprocess.Popen(
        [*LAUNCHER, "-np", "1", "sh", "-c", bar],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=theirs,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        shown = b""
        while b"10%" not in shown:
            shown += os.read(ours, 4096)
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        process.stdin.close()
        try:
            while block := os.read(ours, 4096):
                shown += block
        except OSError:  # the other end was closed
            pass
        assert process.wait(DEADLINE_SECONDS) == 0
    os.close(ours)
    assert shown == b"\r\x1b[K[0] 10%\r\x1b[K[0] 90%\r\n"


def test_a_reader_that_leaves_ends_the_job(start_job: type[RunningJob]) -> None:
    job = start_job("-np", "2", *python("while True: print('x' * 1000)"))
    assert job.process.stdout is not None
    job.process.stdout.readline()
    job.process.stdout.close()
    assert job.process.wait(DEADLINE_SECONDS) == 128 + signal.SIGPIPE


def test_a_reader_that_pauses_loses_nothing_and_signals_still_work(
    start_job: type[RunningJob], tmp_path: Path
) -> None:
    """The rank writes until every pipe on the way is full, and says so through another one."""
    code = """
import os, signal, sys
os.set_blocking(1, False)
written = 0
try:
    while True: written += os.write(1, b"x" * 999 + b"\\n")
except BlockingIOError:
    with open(sys.argv[1], "w") as file: print(written // 1000, file=file)
signal.pause()
"""
    fifo = tmp_path / "full"
    os.mkfifo(fifo)
    job = start_job("-np", "1", *python(code), str(fifo))
    count = int(fifo.read_text())
    code_of_job, out, _ = job.end(signal.SIGTERM)
    assert code_of_job == 128 + signal.SIGTERM
    assert out == ("[0] " + "x" * 999 + "\n") * count


def test_output_and_errors_may_go_to_one_place() -> None:
    done = subprocess.run(
        [*LAUNCHER, "-np", "2", "sh", "-c", "echo out; echo err >&2"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_SECONDS,
    )
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["[0] err", "[0] out", "[1] err", "[1] out"]


def test_timestamps_stand_before_every_line() -> None:
    done = run_job("-np", "1", "--prefix-output-with-timestamp", "printf", "a\\nb\\n")
    pattern = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} \[0\] "
    assert [re.sub(pattern, "", line) for line in done.stdout.splitlines()] == ["a", "b"]


def test_each_rank_has_files_of_its_own(tmp_path: Path) -> None:
    done = run_job(
        "-np", "2", "--output-filename", str(tmp_path / "logs"),
        "sh", "-c", "echo out $BAGUA_RANK; echo err $BAGUA_RANK >&2",
    )  # fmt: skip
    assert done.returncode == 0
    for rank in range(2):
        folder = tmp_path / "logs" / f"rank.{rank}"
        assert (folder / "stdout").read_text() == f"out {rank}\n"
        assert (folder / "stderr").read_text() == f"err {rank}\n"


def test_an_output_folder_that_cannot_be_made_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run_job("-np", "1", "--output-filename", str(tmp_path / "file"), "echo", "x")
    assert (done.returncode, done.stdout) == (1, "")
    assert "the output of rank 0 cannot be written" in done.stderr


def test_closed_standard_descriptors_do_no_harm() -> None:
    line = shlex.join([*LAUNCHER, "-np", "2", "sh", "-c", "echo out; echo err >&2"])
    done = subprocess.run(
        ["sh", "-c", f"exec {line} <&- >&-"],
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        timeout=DEADLINE_SECONDS,
    )
    assert (done.returncode, sorted(done.stderr.splitlines())) == (0, ["[0] err", "[1] err"])


def test_rank_zero_alone_reads_the_standard_input() -> None:
    done = run_job("-np", "2", "cat", stdin="hello\n")
    assert done.stdout == "[0] hello\n"


# ---- What a rank finds -----------------------------------------------------------------------

SHOW = "import json, os; print(json.dumps(dict(os.environ)))"


def environments(*words: str, **variables: str) -> list[dict[str, str]]:
    done = run_job(*words, **variables)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line.split("] ", 1)[1]) for line in done.stdout.splitlines()]
    return sorted(found, key=lambda variables: int(variables["BAGUA_RANK"]))


def test_every_rank_finds_its_place_under_three_sets_of_names() -> None:
    found = environments("-np", "3", *python(SHOW))
    assert len(found) == 3
    for rank, variables in enumerate(found):
        place = {"RANK": rank, "SIZE": 3, "LOCAL_RANK": rank, "LOCAL_SIZE": 3}
        place.update({"CROSS_RANK": 0, "CROSS_SIZE": 1})
        for name, value in place.items():
            assert variables[f"BAGUA_{name}"] == variables[f"HOROVOD_{name}"] == str(value)
        assert variables["RANK"] == variables["LOCAL_RANK"] == str(rank)
        assert variables["WORLD_SIZE"] == variables["LOCAL_WORLD_SIZE"] == "3"
        assert variables["MASTER_ADDR"] == "127.0.0.1"
        assert 0 < int(variables["MASTER_PORT"]) < 65536
        assert variables["BAGUA_RENDEZVOUS"] == "127.0.0.1:1"
    assert len({variables["MASTER_PORT"] for variables in found}) == 1


def test_threads_and_buffering_are_set_unless_the_user_did() -> None:
    (one,) = environments("-np", "1", *python(SHOW), OMP_NUM_THREADS="7", PYTHONUNBUFFERED="")
    assert (one["OMP_NUM_THREADS"], one["PYTHONUNBUFFERED"]) == ("7", "")
    two = environments("-np", "2", "-x", "A=b", "env", "-u", "X", *python(SHOW))
    share = str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert all(v["TF_NUM_INTRAOP_THREADS"] == v["TF_NUM_INTEROP_THREADS"] == share for v in two)
    (own, _) = environments("-np", "2", *python(SHOW), TF_NUM_INTEROP_THREADS="9")
    assert own["TF_NUM_INTEROP_THREADS"] == "9"
    assert all(v["PYTHONUNBUFFERED"] == "1" and v["A"] == "b" for v in two)


def test_the_secret_is_read_from_a_descriptor_and_nowhere_else(tmp_path: Path) -> None:
    log = tmp_path / "store"
    code = """
import os
secret = os.pread(int(os.environ["BAGUA_SECRET_FD"]), 64, 0).hex()
assert not any(secret in value for value in os.environ.values())
print(secret)
"""
    done = run_job("-np", "2", *python(code), BAGUA_TEST_STORE_LOG=str(log))
    size, secret = log.read_text().splitlines()[0].split()[1:]
    assert (size, len(secret)) == ("2", 64)
    assert sorted(done.stdout.splitlines()) == [f"[0] {secret}", f"[1] {secret}"]


def test_a_colon_separates_programs_of_one_job() -> None:
    show = 'echo "$0 $BAGUA_RANK/$BAGUA_SIZE $A"'
    first = ["-np", "1", "-x", "A=1", "sh", "-c", show, "a"]
    second = ["-np", "2", "-x", "A=2", "sh", "-c", show, "b"]
    done = run_job(*first, ":", *second)
    assert sorted(done.stdout.splitlines()) == ["[0] a 0/3 1", "[1] b 1/3 2", "[2] b 2/3 2"]


def test_words_after_the_command_belong_to_the_command() -> None:
    done = run_job("-np", "1", "--", "echo", "--verbose", "-np", "0", "--v")
    assert (done.stdout, done.stderr) == ("[0] --verbose -np 0 --v\n", "")


def test_the_store_learns_of_every_end(tmp_path: Path) -> None:
    log = tmp_path / "store"
    run_job("-np", "2", "sh", "-c", "exit $BAGUA_RANK", BAGUA_TEST_STORE_LOG=str(log))
    assert sorted(log.read_text().splitlines()[1:]) == [
        "lost 0 exited with code 0", "lost 1 exited with code 1", "stop"
    ]  # fmt: skip


# ---- Failure ---------------------------------------------------------------------------------


def test_the_first_failing_rank_gives_the_exit_code_and_the_rest_is_ended(
    start_job: type[RunningJob],
) -> None:
    fail = "echo the reason >&2; exit 3"
    job = start_job("-np", "2", *family(), ":", "-np", "1", "sh", "-c", fail)
    job.watch([int(line) for line in job.lines(4)])
    code, _, err = job.end()
    assert code == 3
    assert "+--- rank 2 exited with code 3; its last lines: ---" in err
    assert "\n| the reason\n" in err
    assert not job.still_running(0)


def test_a_rank_ended_by_a_signal_gives_128_and_its_number() -> None:
    done = run_job("-np", "2", "sh", "-c", "[ $BAGUA_RANK = 0 ] || kill -9 $$")
    assert done.returncode == 128 + signal.SIGKILL
    assert "rank 1 was ended by SIGKILL without output" in done.stderr


def test_the_box_repeats_the_last_twenty_lines() -> None:
    done = run_job("-np", "1", *python("import sys; [print(i) for i in range(100)]; sys.exit(5)"))
    box = [line for line in done.stderr.splitlines() if line.startswith("| ")]
    assert box == [f"| {i}" for i in range(80, 100)]
    assert done.returncode == 5


def test_a_rank_that_lost_another_is_not_the_first_to_fail() -> None:
    """The failing rank closes its connections, then takes its time to leave."""
    lost = python("import sys; print('PeerLostError: rank 1'); sys.exit(1)")
    cause = python("import signal, sys; signal.sigtimedwait([], 1.0); sys.exit(3)")
    done = run_job("-np", "1", *lost, ":", "-np", "1", *cause)
    assert done.returncode == 3
    assert "+--- rank 1 exited with code 3" in done.stderr
    assert "rank 0 exited with code 1" in done.stderr


def test_the_others_may_end_by_themselves_after_a_failure() -> None:
    code = """
import signal
signal.sigtimedwait([], 0.5)
print("saved")
"""
    done = run_job("-np", "1", *python(code), ":", "-np", "1", "sh", "-c", "exit 4")
    assert done.returncode == 4
    assert done.stdout == "[0] saved\n"


@pytest.mark.parametrize("detached", [False, True], ids=["same session", "own session"])
def test_a_family_that_ignores_sigterm_is_ended_too(
    start_job: type[RunningJob], detached: bool
) -> None:
    stubborn = family("SIGTERM", "SIGINT", detached=detached)
    job = start_job("-np", "1", *stubborn, ":", "-np", "1", "sh", "-c", "exit 6")
    job.watch([int(line) for line in job.lines(2)])
    code, _, err = job.end()
    assert code == 6
    assert not job.still_running(0)
    assert "rank 0 was ended by SIGKILL, after bagua-run had told it to end" in err


def test_a_stopped_rank_is_ended_too(start_job: type[RunningJob]) -> None:
    job = start_job("-np", "1", *family())
    pids = [int(line) for line in job.lines(2)]
    job.watch(pids)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    assert job.end(signal.SIGTERM)[0] == 143
    assert not job.still_running(0)


def test_what_a_rank_leaves_behind_ends_with_the_job(start_job: type[RunningJob]) -> None:
    leave = "(trap '' TERM; setsid sh -c 'trap \"\" TERM; echo $$; sleep 1000 & wait') & read x"
    job = start_job("-np", "1", "sh", "-c", leave + "; exit 0")
    job.watch([int(line) for line in job.lines(1)])
    code, _, _ = job.end()
    assert code == 0
    assert not job.still_running(0)


def test_a_rank_may_leave_early_with_success() -> None:
    slow = python("import signal; signal.sigtimedwait([], 0.5); print('late')")
    done = run_job("-np", "1", "true", ":", "-np", "1", *slow)
    assert (done.returncode, done.stdout) == (0, "[1] late\n")


# ---- Signals ---------------------------------------------------------------------------------

CATCH = """
import signal, sys
def caught(signum, frame):
    print("caught", signal.Signals(signum).name, flush=True)
    if signum != signal.SIGUSR1: sys.exit(0)
for name in ("SIGINT", "SIGTERM", "SIGUSR1"): signal.signal(getattr(signal, name), caught)
print("ready", flush=True)
while True: signal.pause()
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM], ids=lambda s: s.name)
def test_interrupt_and_termination_reach_every_rank(
    start_job: type[RunningJob], signum: signal.Signals
) -> None:
    job = start_job("-np", "2", *python(CATCH))
    assert job.lines(2) == ["ready", "ready"]
    code, out, _ = job.end(signum)
    assert code == 128 + signum
    assert sorted(out.splitlines()) == [f"[{r}] caught {signum.name}" for r in range(2)]


def test_sigusr1_is_passed_on_and_ends_nothing(start_job: type[RunningJob]) -> None:
    job = start_job("-np", "2", *python(CATCH))
    job.lines(2)
    job.process.send_signal(signal.SIGUSR1)
    assert job.lines(2) == ["caught SIGUSR1", "caught SIGUSR1"]
    assert job.end(signal.SIGTERM)[0] == 143


def test_a_second_interrupt_ends_ranks_that_ignore_the_first(start_job: type[RunningJob]) -> None:
    job = start_job("-np", "2", *family("SIGINT"))
    job.watch([int(line) for line in job.lines(4)])
    job.process.send_signal(signal.SIGINT)
    assert job.process.stderr is not None
    assert "once more" in job.process.stderr.readline()
    assert job.end(signal.SIGINT)[0] == 130
    assert not job.still_running(0)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP], ids=lambda s: s.name)
def test_termination_ends_even_ranks_that_ignore_it(
    start_job: type[RunningJob], signum: signal.Signals
) -> None:
    job = start_job("-np", "2", *family("SIGTERM", "SIGHUP", "SIGINT"))
    job.watch([int(line) for line in job.lines(4)])
    assert job.end(signum)[0] == 128 + signum
    assert not job.still_running(0)


@pytest.mark.parametrize("detached", [False, True], ids=["same session", "own session"])
def test_nothing_survives_a_killed_launcher(start_job: type[RunningJob], detached: bool) -> None:
    job = start_job("-np", "2", *family("SIGTERM", "SIGHUP", detached=detached))
    job.watch([int(line) for line in job.lines(4)])
    os.killpg(job.process.pid, signal.SIGKILL)
    job.process.wait(DEADLINE_SECONDS)
    assert not job.still_running(DEADLINE_SECONDS / 2)


# ---- The command line ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["true"], "the number of processes is missing"),
        (["-np", "0", "true"], "'0' is not a number of processes"),
        (["-np", "-1", "true"], "'-1' is not a number of processes"),
        (["-np", "two", "true"], "'two' is not a number of processes"),
        (["-np", "2"], "the command to run is missing"),
        (["-np", "1", "true", ":", "true"], "the number of processes is missing"),
        (["-np", "1", "true", ":"], "the number of processes is missing"),
        (["-np", "2", "--no-such-option", "true"], "--no-such-option"),
        (["-np", "2", "-H", "far:2", "true"], "several hosts are not supported yet"),
        (["-np", "3", "-H", "localhost:2", "true"], "3 ranks asked for, but the hosts take 2"),
        (["-np", "2", "--min-np", "1", "true"], "--min-np: elastic jobs are not supported yet"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_command_line_is_explained_and_exits_with_2(words: list[str], message: str) -> None:
    done = run_job(*words)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.startswith("usage: bagua-run")


def test_a_missing_command_is_one_message_and_127() -> None:
    done = run_job("-np", "2", "no-such-command")
    assert (done.returncode, done.stderr) == (
        127,
        "bagua-run: no-such-command: command not found\n",
    )


def test_a_file_that_is_not_executable_is_one_message_and_126(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\n")
    done = run_job("-np", "2", str(script))
    assert (done.returncode, len(done.stderr.splitlines())) == (126, 1)
    script.write_bytes(b"not a program\0")
    script.chmod(0o755)
    done = run_job("-np", "1", "sleep", "1000", ":", "-np", "1", str(script))
    assert done.returncode == 126
    assert "rank 1 does not start" in done.stderr


def test_localhost_with_slots_gives_the_number_of_ranks() -> None:
    done = run_job("-H", "localhost:2", "sh", "-c", "echo $BAGUA_SIZE")
    assert sorted(done.stdout.splitlines()) == ["[0] 2", "[1] 2"]


def test_version_and_check_build_need_no_command() -> None:
    assert run_job("--version").stdout.startswith("bagua-run ")
    done = run_job("--check-build")
    assert done.returncode == 0
    assert "core: " in done.stdout


# ---- Pure parts ------------------------------------------------------------------------------


def test_slots_of_uneven_hosts_number_each_local_rank_across_hosts() -> None:
    slots = assign_slots([Host("a", 3), Host("b", 1), Host("c", 4)], 6)
    found = [(s.host, s.local_rank, s.local_size, s.cross_rank, s.cross_size) for s in slots]
    assert found == [
        ("a", 0, 3, 0, 3), ("a", 1, 3, 0, 2), ("a", 2, 3, 0, 1),
        ("b", 0, 1, 1, 3), ("c", 0, 2, 2, 3), ("c", 1, 2, 1, 2),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="9 ranks asked for, but the hosts take 8"):
        assign_slots([Host("a", 3), Host("b", 5)], 9)


def test_hosts_are_read_from_words_and_files() -> None:
    assert parse_hosts("a:2, b") == [Host("a", 2), Host("b", 1)]
    assert parse_hostfile("a slots=2 # big\n\nb\n") == [Host("a", 2), Host("b", 1)]
    for text in ("a:0", "a:x", ":2", ""):
        with pytest.raises(ValueError, match="expected"):
            parse_hosts(text)


@pytest.mark.parametrize("step", [1, 2, 7, 1000])
def test_lines_do_not_depend_on_how_the_bytes_were_cut(step: int) -> None:
    class Collector(Sink):
        def __init__(self) -> None:
            super().__init__(-1)
            self.text = b""

        def lines(self, source: object, text: bytes) -> None:
            self.text += text

    sink, (read_end, write_end) = Collector(), os.pipe()
    stream = RankStream(read_end, b"[7] ", sink, collections.deque(maxlen=2))
    text = b"one\n\n\r1\r22\r333\r\ntwo\r\n  4\r  5\nold\rnew\rlast"
    for begin in range(0, len(text), step):
        stream.feed(text[begin : begin + step])
    stream.close()
    os.close(write_end)
    assert sink.text == b"[7] one\n[7] \n[7] 333\n[7] two\n[7]   5\n[7] last\n"


def test_a_box_shows_no_control_characters() -> None:
    box = draw_box("title", [b"\x1b[31mred\x1b[0m\a", b"\xff\xfe"])
    assert b"| red?\n" in box
    assert b"\x1b" not in box
    assert visible_state(b"a\rb\r") == b"b"


# ---- bagua_ext.run ---------------------------------------------------------------------------


@needs_core
def test_run_returns_results_by_rank() -> None:
    code = """
import os
from bagua_ext.runner import run
def square(x, offset=0): return (int(os.environ["BAGUA_RANK"]) + offset) ** x
print(run(square, (2,), {"offset": 1}, np=3))
"""
    pytest.importorskip("cloudpickle")
    done = run_job(launcher=python(code))
    assert done.stdout == "[1, 4, 9]\n", done.stderr


@needs_core
def test_run_raises_what_a_rank_raised() -> None:
    code = """
from bagua_ext.runner import run
def fail(): raise KeyError("lost key")
try: run(fail, np=2)
except RuntimeError as error: print("exit code 1" in str(error), "lost key" in str(error))
"""
    pytest.importorskip("cloudpickle")
    done = run_job(launcher=python(code))
    assert done.stdout == "True True\n", done.stderr


# ---- With the core's store -------------------------------------------------------------------

MEET = """
import os
from bagua_ext._core import ffi, lib
rank = int(os.environ["BAGUA_RANK"])
if rank == {leaver}: raise SystemExit(3)
options = ffi.new("bagua_init_options_t*")
secret = ffi.from_buffer("uint8_t[]", os.pread(int(os.environ["BAGUA_SECRET_FD"]), 64, 0))
where = ffi.new("char[]", os.environ["BAGUA_RENDEZVOUS"].encode())
options.rank, options.size = rank, int(os.environ["BAGUA_SIZE"])
options.rendezvous, options.secret, options.secret_bytes = where, secret, len(secret)
status = lib.bagua_init(options, ffi.NULL)
print(status, lib.bagua_size(), ffi.string(lib.bagua_last_error()).decode())
lib.bagua_shutdown()
"""


@needs_core
def test_ranks_meet_at_the_core_s_store() -> None:
    done = run_job("-np", "3", *python(MEET.format(leaver=-1)), launcher=WITH_CORE)
    assert done.returncode == 0, done.stderr
    assert sorted(line[:7] for line in done.stdout.splitlines()) == [
        "[0] 0 3",
        "[1] 0 3",
        "[2] 0 3",
    ]


@needs_core
def test_a_rank_that_ends_before_init_fails_the_others_by_name() -> None:
    done = run_job(
        "--grace-period", "30", "-np", "3", *python(MEET.format(leaver=1)), launcher=WITH_CORE
    )
    assert done.returncode == 3
    lines = sorted(done.stdout.splitlines())
    assert [line[:5] for line in lines] == ["[0] 5", "[2] 5"], done.stderr
    assert all("rank 1" in line and "exited with code 3" in line for line in lines)
