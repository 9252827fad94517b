"""Runs the tests of transport ib (InfiniBand, RoCE) without a device: over software RoCE in a virtual machine.

The guest runs Debian's own kernel, which is unpacked and not installed. Its root is this machine's root, read-only: it
runs the programs that were built here. Nothing on this machine is changed, and no network of it is used.
On a machine that has a device with an active port, the programs run on that device, without the tests that break links.

    python3 tools/softroce.py build/gcc    # rates of transport ib against ib_write_bw (Debian: perftest), in that guest
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import tempfile
from pathlib import Path

from env import BUILD, ROOT, EnvError, apt_install, child_env, digest, is_stamped, must_run, run, say, write_stamp
from stages import Skip

PARTS = ROOT / "tools/softroce"
CACHE = BUILD / "softroce"
PACKAGES = ["qemu-system-x86", "busybox-static", "cpio", "kmod", "iproute2", "ibverbs-providers"]
TOOLS = ("qemu-system-x86_64", "cpio", "depmod", "modprobe", "rdma", "tc")
# The guest loads these kernel modules, and all that they need.
MODULES = ["virtio_pci", "9pnet_virtio", "9p", "overlay", "veth", "crc32_generic", "rdma_rxe", "ib_uverbs", "sch_netem"]
GUEST_MIB = 3072  # 16 ranks start; the host gives only what the guest touches
LIMIT_S = 1800  # of the guest; it took 500 s on two cores with a load of 20
PROGRAMS = (
    "ib_transport",
    "ib_transport_faults",
    "ib_transport_forks",
    "ib_collectives",
    "ib_put",
    "ib_next",
    "ib_peers",
    "ib_startup",
)
GUEST_ONLY = ("ib_next",)  # its cases name the guest's devices
GPU_PROGRAMS = ("ib_cuda", "ib_cuda_direct")  # of the build with the GPU in software


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def _missing() -> list[str]:
    missing = [tool for tool in TOOLS if shutil.which(tool, path=_path()) is None]
    driver = Path("/etc/libibverbs.d/rxe.driver")
    return missing + [str(p) for p in (Path("/bin/busybox"), driver) if not p.exists()]


def _need_packages() -> None:
    if platform.machine() != "x86_64":
        raise Skip(f"the virtual machine is for x86_64; this machine is {platform.machine()}")
    if _missing():
        apt_install(PACKAGES, "a virtual machine with software RoCE")
    if _missing():
        raise Skip(f"no {', '.join(_missing())} (Debian, as root: apt-get install {' '.join(PACKAGES)})")


def _kernel_package() -> str:
    """The package that Debian's linux-image-amd64 stands for."""
    for update in (False, True):
        if update and not apt_install(PACKAGES, "to update the list of packages"):
            break
        _, lines = run(["apt-cache", "depends", "linux-image-amd64"], "softroce")
        names = re.findall(r"Depends: (linux-image-\S+)", "\n".join(lines))
        if names:
            return names[0]
    raise Skip("apt-cache knows no linux-image-amd64 (Debian, as root: apt-get update)")


def _module_files(root: Path, version: str) -> list[Path]:
    """The modules of MODULES and those they need, each after those it needs."""
    files: list[Path] = []
    for module in MODULES:
        command = ["modprobe", "-d", root, "-S", version, "--show-depends", module]
        for line in must_run("modprobe", command, "softroce", env=child_env(PATH=_path())):
            file = Path(line.removeprefix("insmod ").strip())
            if line.startswith("insmod ") and file not in files:
                files.append(file)
    return files


def _make_initrd(kernel: Path, version: str) -> None:
    tree = CACHE / "initrd"
    shutil.rmtree(tree, ignore_errors=True)
    for folder in ("bin", "modules", "proc", "sys", "dev", "host", "upper", "new"):
        (tree / folder).mkdir(parents=True)
    shutil.copy("/bin/busybox", tree / "bin/busybox")
    shutil.copy(PARTS / "init", tree / "init")
    (tree / "init").chmod(0o755)
    files = _module_files(kernel, version)
    for file in files:
        shutil.copy(file, tree / "modules")
    (tree / "modules/order").write_text("".join(f"{file.name}\n" for file in files))
    pack = "find . | cpio -o -H newc -R 0:0 --quiet > ../initrd.cpio"
    must_run("cpio", ["sh", "-c", pack], "softroce", cwd=tree, env=child_env(PATH=_path()))


def _need_kernel() -> None:
    """Download the kernel, once, and make vmlinuz and initrd.cpio in CACHE."""
    name = _kernel_package()
    key = digest(name, PARTS / "init", *MODULES)
    stamp = CACHE / "stamp"
    if is_stamped(stamp, key):
        return
    shutil.rmtree(CACHE, ignore_errors=True)
    kernel = CACHE / "kernel"
    kernel.mkdir(parents=True)
    say(f"set-up: apt-get download {name} (the kernel of a virtual machine; it is not installed)")
    command = ["apt-get", "-o", "APT::Sandbox::User=root", "download", name]
    status, lines = run(command, "softroce", cwd=CACHE)
    packages = list(CACHE.glob("linux-image-*.deb"))
    if status != 0 or not packages:
        raise Skip(f"{name} cannot be downloaded: {lines[-1] if lines else f'exit status {status}'}")
    must_run("dpkg-deb", ["dpkg-deb", "-x", packages[0], kernel], "softroce")
    version = name.removeprefix("linux-image-")
    must_run("depmod", ["depmod", "-b", kernel, version], "softroce", env=child_env(PATH=_path()))
    _make_initrd(kernel, version)
    shutil.copy(kernel / f"boot/vmlinuz-{version}", CACHE / "vmlinuz")
    shutil.rmtree(kernel)
    packages[0].unlink()
    write_stamp(stamp, key)


def _qemu(folder: Path) -> list[object]:
    """The command. KVM is used only on processors that have it: a /dev/kvm that can be opened is not enough."""
    flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    has_kvm = {"vmx", "svm"} & set(flags.group(1).split() if flags else []) and os.access("/dev/kvm", os.W_OK)
    line = "console=ttyS0 quiet loglevel=3 panic=-1 mitigations=off nokaslr tsc=reliable random.trust_cpu=on"
    share = "local,security_model=none,readonly=on"
    return [
        *("nice", "-n", "5", "qemu-system-x86_64"),
        *("-accel", "kvm" if has_kvm else "tcg", "-cpu", "host" if has_kvm else "max"),
        *("-m", GUEST_MIB, "-smp", min(2, os.cpu_count() or 1), "-nodefaults", "-no-reboot"),
        *("-display", "none", "-serial", "stdio", "-kernel", CACHE / "vmlinuz", "-initrd", CACHE / "initrd.cpio"),
        *("-append", line),
        *("-virtfs", f"{share},path=/,mount_tag=host,multidevs=remap"),
        *("-virtfs", f"{share},path={folder},mount_tag=folder"),
    ]


def _run_guest(programs: Path, gpu_programs: Path, script: str = "tests.sh") -> list[str]:
    """Run a script of PARTS in the guest. Returns its output. Raises Skip if the guest does not start."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(PARTS / "guest.sh", folder)
        shutil.copy(PARTS / script, folder / "tests.sh")
        quoted = [str(p).replace("'", "'\\''") for p in (programs, gpu_programs)]
        share = "export SPCCL_TEST_SHARE=" + os.environ.get("SPCCL_TEST_SHARE", "4")
        (folder / "settings").write_text(f"PROGRAMS='{quoted[0]}'\nGPU_PROGRAMS='{quoted[1]}'\n{share}\n")
        _, lines = run(_qemu(folder), "softroce", timeout_s=LIMIT_S)
    text = "\n".join(line.rstrip("\r") for line in lines)
    if "SOFTROCE_UP" not in text:
        raise Skip(f"the virtual machine did not start: {lines[-1] if lines else 'no output'}; see softroce.log")
    text = text.split("SOFTROCE_UP", 1)[1]
    say(text)
    if not re.search(r"SOFTROCE_RC=0$", text, re.MULTILINE):
        raise EnvError("transport ib: a program failed in the virtual machine; see build/logs/softroce.log")
    return text.splitlines()


def _has_device() -> bool:
    states = Path("/sys/class/infiniband").glob("*/ports/*/state")
    return any("ACTIVE" in path.read_text() for path in states)


def run_ib_tests(build: Path, gpu_build: Path) -> str:
    """Run the tests of transport ib in these build folders; gpu_build has the GPU in software. Returns a line for the
    table."""
    programs, gpu_programs = build / "tests/c", gpu_build / "tests/c"
    if not all((programs / name).exists() for name in PROGRAMS):
        raise Skip("built without <infiniband/verbs.h> (Debian, as root: apt-get install libibverbs-dev)")
    if _has_device():
        for name in (n for n in PROGRAMS if n not in GUEST_ONLY):
            must_run(name, [programs / name], "softroce", show=True)
        for name in GPU_PROGRAMS:
            must_run(name, [gpu_programs / name, "--small"], "softroce", show=True)
        return "on a device of this machine, without the tests that break links"
    _need_packages()
    _need_kernel()
    lines = _run_guest(programs, gpu_programs)
    counts = [re.fullmatch(r"(\d+) checks, 0 failed", line) for line in lines]
    total = sum(int(count.group(1)) for count in counts if count)
    return f"software RoCE in a virtual machine: {total} checks; {next(s for s in lines if 'retransmissions' in s)}"


def main() -> None:
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "bench/micro/spccl_bench_transport").exists():
        sys.exit("softroce: wanted a build folder with bench/micro/spccl_bench_transport: build/gcc after `make test`")
    if shutil.which("ib_write_bw") is None:
        sys.exit("softroce: no ib_write_bw (Debian, as root: apt-get install perftest)")
    _need_packages()
    _need_kernel()
    programs = Path(sys.argv[1]).resolve() / "tests/c"
    _run_guest(programs, programs, "bench.sh")


if __name__ == "__main__":
    main()
