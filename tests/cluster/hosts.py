"""Simulated cluster on one machine. Each host is a set of Linux namespaces, connected to a bridge by a veth pair.

    with hosts(2, rate="100mbit") as box:
        processes = [box.start(host, ["bash", "scripts/train_gpt_elastic.sh", *FLAGS]) for host in range(2)]
        box.pull_cable(1)
        codes = [process.wait() for process in processes]

Each host has a separate network, host name, process tree, mount table, /dev/shm and, on request, disk. All other files
are shared with this machine. Nothing is visible outside the namespaces, so several clusters (`Box`) can run at the same
time. A cluster disappears when the process that created the cluster ends, even if this process is killed. The rate of
each cable can be limited in both directions (command `tc`, queueing discipline `tbf`).
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from tests.limits import HANG

ROOT = Path(__file__).parents[2]
PROGRAMS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
}
"""Programs that a simulated cluster (`Box`) needs. The values are the Debian packages that provide the programs."""

SEARCHED = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
ENDED_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")
LAUNCHERS = ("SLURM_", "SBATCH_", "TORCHEL", "PET_")
"""Prefixes of environment variables that a launcher may have set for this process. Programs on simulated hosts must not
inherit these variables."""

RENDEZVOUS_PORT = 29500
_libc = ctypes.CDLL(None, use_errno=True)


@cache
def missing() -> str:
    """Return the reason why this machine cannot simulate hosts, or "" if it can."""
    if os.geteuid() != 0:
        return "hosts of their own need root"
    lacking = [f"{name} ({package})" for name, package in PROGRAMS.items() if not shutil.which(name, path=SEARCHED)]
    if lacking:
        return f"hosts of their own need {', '.join(lacking)}"
    probe = "ip link add name one type veth peer name two && ip link add name three type bridge && "
    probe += "tc qdisc add dev one root tbf rate 1mbit burst 16kb limit 64kb && mount -t tmpfs none /dev/shm"
    done = subprocess.run(
        ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "sh", "-c", probe],
        env=os.environ | {"PATH": SEARCHED},
        capture_output=True,
        text=True,
    )
    return f"hosts of their own: {done.stderr.strip()}" if done.returncode else ""


class Process:
    """Process on a host. The process's output is written to the file `log`."""

    def __init__(self, words: Sequence[str], environ: dict[str, str], cwd: Path, log: Path) -> None:
        self.log = log
        with log.open("ab") as output:
            self._entered = subprocess.Popen(words, cwd=cwd, env=environ, stdout=output, stderr=output)

    @property
    def running(self) -> bool:
        return self._entered.poll() is None

    @property
    def screen(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, seconds: float = HANG) -> int:
        """Wait for the process, and return its exit code, which is negative if a signal killed the process. After
        `seconds`, the method raises TimeoutError with the output of the process."""
        try:
            return self._entered.wait(seconds)
        except subprocess.TimeoutExpired:
            raise TimeoutError(
                f"{self._entered.args} still runs; its output ends with\n{self.screen[-3000:]}"
            ) from None


@dataclass
class Host:
    """One simulated host of a `Box`."""

    number: int
    keeper: subprocess.Popen[str]
    """The `unshare` process that created the host. Its only child is the init process of the host."""

    init: int
    """Process id of the host's init process, as seen from this machine. When the init process exits, all processes on
    the host are killed."""

    @property
    def port(self) -> str:
        """Name of the network interface at the bridge's end of the host's cable."""
        return f"port{self.number}"


class Box:
    """Simulated hosts on one network. Their names are host0, host1, and so on, and their addresses are 10.77.0.1,
    10.77.0.2, and so on."""

    def __init__(self, count: int, rate: str | None, disk: Path | None) -> None:
        if not 1 <= count <= 200:
            raise ValueError(f"{count} hosts: 1 to 200 have addresses")
        self.names = [f"host{number}" for number in range(count)]
        self.addresses = [f"10.77.0.{number + 1}" for number in range(count)]
        self.folder = Path(tempfile.mkdtemp(prefix="box-", dir="/tmp"))
        """Folder for the hosts' disks, logs and host name files."""

        self.disk = disk
        """Path at which each host sees its own disk. The disk is empty at first and is not visible on other hosts."""

        (self.folder / "owner").write_text(str(os.getpid()))
        self._rates = [rate] * count
        self._hosts: dict[int, Host] = {}
        names = zip(self.addresses, self.names, strict=True)
        (self.folder / "hosts").write_text(
            "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for address, name in names)
        )
        (self.folder / "resolv.conf").write_text("")
        script = "ip link set lo up; ip link add bridge type bridge forward_delay 0; ip link set bridge up; echo ready"
        self._switch = subprocess.Popen(
            [*ENDED_WITH_PARENT, "unshare", "--net", "sh", "-e", "-c", f"{NO_IPV6}; {script}; exec sleep infinity"],
            env=os.environ | {"PATH": SEARCHED},
            stdout=subprocess.PIPE,
            stderr=(self.folder / "switch.log").open("a"),
            text=True,
        )
        _await_ready(self._switch, self.folder / "switch.log")
        for number in range(count):
            self.boot(number)

    # Power

    def boot(self, host: int) -> None:
        """Start a host, or start it again after `kill_host`. The disk of the host keeps its contents."""
        assert host not in self._hosts, f"host {host} runs"
        script = f"{NO_IPV6}; hostname {self.names[host]}; ip link set lo up; mount -t tmpfs none /dev/shm; "
        script += "".join(f"mount --bind {self.folder}/{name} /etc/{name}; " for name in ("hosts", "resolv.conf"))
        if self.disk is not None:
            self.disk.mkdir(parents=True, exist_ok=True)
            self.disk_of(host).mkdir(exist_ok=True)
            script += f"mount --bind '{self.disk_of(host)}' '{self.disk}'; "
        # This process is the init process of the host and therefore reaps the processes whose parents have ended.
        script += "echo ready; exec >/dev/null; while true; do sleep 1000 & wait; done"
        spaces = ["--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        keeper = subprocess.Popen(
            [*ENDED_WITH_PARENT, "unshare", *spaces, "bash", "-e", "-c", script],
            env=os.environ | {"PATH": SEARCHED},
            stdout=subprocess.PIPE,
            stderr=(self.folder / f"{self.names[host]}.boot").open("a"),
            text=True,
        )
        _await_ready(keeper, self.folder / f"{self.names[host]}.boot")
        (init,) = _children(keeper.pid)
        self._hosts[host] = here = Host(host, keeper, init)
        self._switch_command(f"ip link add {here.port} type veth peer name eth0 netns {init}")
        self._switch_command(f"ip link set {here.port} master bridge up")
        self._host_command(host, f"ip address add {self.addresses[host]}/24 dev eth0")
        self._host_command(host, "ip link set eth0 up")
        self._shape(host)

    def kill_host(self, host: int) -> None:
        """Simulate a power failure of a host. All its processes are killed with SIGKILL, and the other hosts are not
        notified."""
        here = self._hosts.pop(host)
        # Cut the cable first. Otherwise, the kernel would close the connections of the killed processes and thereby
        # notify the other hosts.
        self._switch_command(f"ip link delete {here.port}")
        os.kill(here.init, signal.SIGKILL)
        here.keeper.wait()

    # Cables

    def pull_cable(self, host: int) -> None:
        """Unplug the network cable of a host, so that both ends of the cable lose their carrier."""
        self._switch_command(f"ip link set {self._hosts[host].port} down")

    def plug(self, host: int) -> None:
        """Undo `pull_cable` and `one_way`."""
        self._switch_command(f"ip link set {self._hosts[host].port} up")
        self._shape(host)

    def one_way(self, host: int, lost: Literal["out", "in"]) -> None:
        """Silently drop the packets that a host sends (`out`) or receives (`in`)."""
        if lost == "out":
            self._host_command(host, "tc qdisc replace dev eth0 root blackhole")
        else:
            self._switch_command(f"tc qdisc replace dev {self._hosts[host].port} root blackhole")

    def set_rate(self, host: int, rate: str | None) -> None:
        """Limit the rate of a host's cable in each direction. `rate` is in the notation of `tc`, such as `100mbit` or
        `1gbit`. None removes the limit."""
        self._rates[host] = rate
        self._shape(host)

    def _shape(self, host: int) -> None:
        rate = self._rates[host]
        queue = "noqueue"
        if rate is not None:
            bytes_per_second = bits_per_second(rate) / 8
            # A burst lasts for one millisecond. A burst is short compared with the messages of a step, but large enough
            # for one network segment at any rate.
            burst = int(max(16_384, bytes_per_second / 1000))
            queue = f"tbf rate {rate} burst {burst} limit {int(burst + bytes_per_second / 20)}"
        self._host_command(host, f"tc qdisc replace dev eth0 root {queue}")
        self._switch_command(f"tc qdisc replace dev {self._hosts[host].port} root {queue}")

    # Processes

    def start(
        self, host: int, command: Sequence[object], log: Path | None = None, cwd: Path = ROOT, **environ: str
    ) -> Process:
        """Start a command on a host, with the additional environment variables `environ`. The output of the command is
        appended to `log`."""
        inside = ["nsenter", "--target", str(self._hosts[host].init), "--net", "--uts", "--ipc", "--mount", "--pid"]
        inside += ["env", f"--chdir={cwd}", *(str(word) for word in command)]
        outer = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
        log = log or self.folder / f"{self.names[host]}.log"
        return Process([*ENDED_WITH_PARENT, *inside], outer | self.environ(host) | environ, cwd, log)

    def run(self, host: int, *command: object, **environ: str) -> str:
        """Run a command on a host and return its output. If the command fails, the method raises RuntimeError with the
        output."""
        number, log = tempfile.mkstemp(dir=self.folder)
        os.close(number)
        done = self.start(host, command, Path(log), **environ)
        if code := done.wait():
            raise RuntimeError(f"{command} on {self.names[host]} exits with {code}:\n{done.screen}")
        return done.screen

    def enter(self, host: int) -> None:
        """Fork this process, and move the child to a host, on which the child continues the program.

        The calling process waits for the child, and exits with the child's exit code.
        """
        cwd, init = Path.cwd(), self._hosts[host].init
        spaces = {name: os.open(f"/proc/{init}/ns/{name}", os.O_RDONLY) for name in ("net", "uts", "ipc", "pid", "mnt")}
        for name, space in spaces.items():
            if _libc.setns(space, 0) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter {name} of {self.names[host]}")
            os.close(space)
        os.chdir(cwd)
        if child := os.fork():
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if code < 0:
                signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
                os.kill(os.getpid(), -code)
            os._exit(code)
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.environ |= self.environ(host)

    def environ(self, host: int) -> dict[str, str]:
        """Return the environment variables that programs on a host need to find each other."""
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
        return dict.fromkeys(names, "eth0") | {"OMP_NUM_THREADS": "1", "PATH": SEARCHED, "BOX_HOST": str(host)}

    def disk_of(self, host: int) -> Path:
        """Return the folder on this machine in which a host's disk is stored."""
        return self.folder / f"disk{host}"

    def close(self) -> None:
        """End all processes on the hosts. The kernel then removes the namespaces and everything in them."""
        for here in self._hosts.values():
            with suppress(ProcessLookupError):
                os.kill(here.init, signal.SIGKILL)
            here.keeper.wait()
        self._hosts.clear()
        self._switch.kill()
        self._switch.wait()
        shutil.rmtree(self.folder)

    def _switch_command(self, line: str) -> None:
        _run(["nsenter", "--target", str(self._switch.pid), "--net", *line.split()])

    def _host_command(self, host: int, line: str) -> None:
        _run(["nsenter", "--target", str(self._hosts[host].init), "--net", *line.split()])


PR_SET_PDEATHSIG = 1
NO_IPV6 = "echo 1 >/proc/sys/net/ipv6/conf/default/disable_ipv6; echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6"
"""Shell commands that disable IPv6. Otherwise, some programs would try IPv6 addresses, which no host has."""


@contextmanager
def hosts(count: int, rate: str | None = None, disk: Path | None = None) -> Iterator[Box]:
    """Simulate `count` hosts. `rate` is the rate of the hosts' network links in the notation of `tc`, or None for
    unlimited links. If `disk` is given, each host has a separate disk, which is mounted at this folder. See `missing`
    for the requirements."""
    sweep()
    with closing(Box(count, rate, disk)) as box:
        yield box


def bits_per_second(rate: str) -> float:
    """Convert a rate in the notation of `tc`, such as `100mbit`, to bits per second. The function raises ValueError for
    any other notation."""
    match = re.fullmatch(r"([0-9.]+)(k|m|g)?bit", rate)
    if match is None:
        raise ValueError(f"rate {rate} is not of the form 100mbit (kbit, mbit or gbit)")
    return float(match[1]) * {None: 1.0, "k": 1e3, "m": 1e6, "g": 1e9}[match[2]]


def sweep() -> None:
    """Delete the folders of clusters (`Box`) whose creating process was killed. Such a cluster leaves nothing behind
    except its folder."""
    for folder in Path("/tmp").glob("box-*"):
        with suppress(OSError, ValueError):
            if not Path(f"/proc/{(folder / 'owner').read_text()}").exists():
                shutil.rmtree(folder, ignore_errors=True)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _await_ready(process: subprocess.Popen[str], said: Path) -> None:
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        raise RuntimeError(f"a host did not start: {process.args} exits with {process.wait()}: {said.read_text()}")


def _run(words: Sequence[str]) -> None:
    done = subprocess.run(words, env=os.environ | {"PATH": SEARCHED}, capture_output=True, text=True, timeout=HANG)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
