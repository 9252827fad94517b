"""Runs make test, test-all, test-vllm, check, wheel, demo, docs, lint, bench, fuzz, clean. The Makefile calls it.

    python3 tools/dev.py test [--only NAME ...]     the suite, or some stages of `test` and `test-all`
"""

from __future__ import annotations

import argparse
import fcntl
import os
import platform
import shutil
import sys
from pathlib import Path

from builds import c_build
from env import BUILD, ROOT, VENV, EnvError, child_env, ensure_compilers, ensure_spccl, ensure_venv, say, sources
from packages import make_wheel
from site_pages import build_site
from stages import run_stages
from suite import CHECK_STAGES, TEST_ALL_STAGES, TEST_STAGES, lint, run_fuzz
from vllm_tests import run_vllm_tests


def cmd_setup(_: argparse.Namespace) -> int:
    ensure_spccl()
    say(f"set-up is complete; Python with spccl: {VENV / 'bin/python'}")
    return 0


def cmd_test(args: argparse.Namespace) -> int:
    """Run the suite, or the stages of --only."""
    unknown = set(args.only) - {stage.name for stage in TEST_ALL_STAGES}
    if unknown:
        names = ", ".join(stage.name for stage in TEST_ALL_STAGES)
        raise EnvError(f"no stage {', '.join(sorted(unknown))}: the stages are {names}")
    ensure_venv() if args.only else ensure_compilers()
    stages = [s for s in TEST_ALL_STAGES if s.name in args.only] or TEST_STAGES
    return 0 if run_stages(stages, args.at_once, sources()) else 1


def cmd_test_all(args: argparse.Namespace) -> int:
    """Run every stage. A stage that has passed with these sources does not run again."""
    ensure_venv()
    return 0 if run_stages(TEST_ALL_STAGES, args.at_once, sources(), repeat=False) else 1


def cmd_test_vllm(_: argparse.Namespace) -> int:
    say(f"test-vllm: {run_vllm_tests()}")
    return 0


def cmd_check(args: argparse.Namespace) -> int:
    ensure_venv()
    return 0 if run_stages(CHECK_STAGES, args.at_once) else 1


def cmd_wheel(args: argparse.Namespace) -> int:
    say(f"wheel: {make_wheel(args.archs).relative_to(ROOT)}")
    return 0


def cmd_demo(args: argparse.Namespace) -> int:
    ensure_spccl()
    return _hand_over([VENV / "bin/python", ROOT / "examples/ddp/demo.py", *args.rest])


def cmd_lint(_: argparse.Namespace) -> int:
    ensure_venv()
    say(lint())
    return 0


def cmd_bench(args: argparse.Namespace) -> int:
    ensure_spccl()
    folder = c_build("gcc")
    for program in sorted((folder / "bench/micro").glob("spccl_bench_*")):
        if program.is_file() and os.access(program, os.X_OK):
            say(f"\n==== {program.name}")
            if os.spawnve(os.P_WAIT, program, [str(program)], child_env()) != 0:
                raise EnvError(f"{program.name} failed")
    say("\n==== spccl bench")
    return _hand_over([VENV / "bin/python", "-m", "spccl", "bench", *args.rest])


def cmd_fuzz(args: argparse.Namespace) -> int:
    ensure_venv()
    run_fuzz(args.seconds)
    return 0


def cmd_docs(_: argparse.Namespace) -> int:
    say(f"docs: {build_site().relative_to(ROOT)}")
    return 0


def cmd_clean(args: argparse.Namespace) -> int:
    for path in [BUILD, *([VENV] if args.all else [])]:
        shutil.rmtree(path, ignore_errors=True)
    return 0


def _hand_over(argv: list[object]) -> int:
    """Replace this process by that program, so that it controls the terminal (progress bars, Ctrl-C)."""
    words = [str(a) for a in argv]
    sys.stdout.flush()
    os.chdir(ROOT)
    os.execve(words[0], words, child_env())


def _lock() -> object:
    """Lock this folder until the process ends: only one make may run in it."""
    BUILD.mkdir(exist_ok=True)
    lock = open(BUILD / ".lock", "w")  # noqa: SIM115 (the caller closes it)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("waiting: another make is running in this folder")
        fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def main() -> int:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("setup", help="make .venv and install spccl in it").set_defaults(fn=cmd_setup)
    test = commands.add_parser("test", help="run the test suite: 10 minutes on 2 cores")
    test.add_argument("--only", nargs="+", default=[], metavar="STAGE", help="run only these stages")
    test.set_defaults(fn=cmd_test)
    test_all = commands.add_parser("test-all", help="run the suite and all else: what passed before is not repeated")
    test_all.set_defaults(fn=cmd_test_all)
    real = commands.add_parser("test-vllm", help="test spccl.sync with a real vLLM server, in build/vllm")
    real.set_defaults(fn=cmd_test_vllm)
    check = commands.add_parser("check", help="run the checks for each commit: 2 minutes")
    check.set_defaults(fn=cmd_check)
    for command in (test, test_all, check):
        at_once = min(3, (os.cpu_count() or 1) + 1)  # their tests wait for each other a quarter of the time
        command.add_argument("--at-once", type=int, default=at_once, metavar="N", help="stages at the same time")
    wheel = commands.add_parser("wheel", help="build the wheel for distribution, in dist/")
    wheel.add_argument("--archs", default="all", help="SPCCL_CUDA_ARCHS of the build")
    wheel.set_defaults(fn=cmd_wheel)
    for name, fn, text in (
        ("demo", cmd_demo, "run examples/ddp/demo.py"),
        ("bench", cmd_bench, "run the micro-benchmarks, then spccl bench"),
    ):
        commands.add_parser(name, help=text + "; further arguments are passed on").set_defaults(fn=fn, passes_on=True)
    commands.add_parser("docs", help="build the site of the documentation, links checked").set_defaults(fn=cmd_docs)
    commands.add_parser("lint", help="check with ruff and clang-format").set_defaults(fn=cmd_lint)
    fuzz = commands.add_parser("fuzz", help="run every libFuzzer target in turn (needs clang)")
    fuzz.add_argument("--seconds", type=int, default=600, help="time of each target")
    fuzz.set_defaults(fn=cmd_fuzz)
    clean = commands.add_parser("clean", help="remove build/")
    clean.add_argument("--all", action="store_true", help="remove .venv too")
    clean.set_defaults(fn=cmd_clean)
    args, args.rest = parser.parse_known_args()
    if args.rest and not getattr(args, "passes_on", False):
        parser.error(f"unrecognized arguments: {' '.join(args.rest)}")
    if platform.system() != "Linux":
        raise EnvError(f"spccl runs on Linux; this is {platform.system()}")
    lock = _lock()
    try:
        return args.fn(args)
    finally:
        lock.close()  # type: ignore[attr-defined]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except EnvError as err:
        sys.exit(f"{Path(__file__).name}: {err}")
    except KeyboardInterrupt:
        sys.exit("interrupted")
