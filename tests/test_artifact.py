"""Compiling to files, what an artifact reads from them, the compiler under threads, forks and mistakes."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from cutegemm import artifact, cache, cubin, fingerprint, loader
from cutegemm.artifact import Artifact, compile_to_files, instruction_histogram, launched_smem_bytes
from cutegemm.cache import KernelCache, kernel_key
from cutegemm.errors import BuildError, ConfigError, MissingDependencyError

tiny = pytest.importorskip("tiny_kernels", reason="needs the kernel compiler, nvidia-cutlass-dsl")

TESTS = Path(__file__).parent


def compiled(function, **overrides) -> Artifact:
    """The artifact of one of the tiny kernels."""
    options = {"target": "sm_90a", "facts": tiny.FACTS, **overrides}
    return Artifact(compile_to_files(function, tiny.vector_args(), **options))


@pytest.fixture(autouse=True)
def _sources_may_change(monkeypatch):
    """Somebody may be editing the package while the tests run; test_cache.py tests that this is noticed."""
    monkeypatch.setattr(cache.sources, "check", lambda: None)


@pytest.fixture(scope="module")
def fill() -> Artifact:
    """A kernel without shared memory and without spills."""
    return compiled(tiny.fill)


@pytest.fixture(scope="module")
def local_memory() -> Artifact:
    """A kernel that keeps a table in local memory."""
    return compiled(tiny.local_memory)


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter that can import cutegemm and the tiny kernels."""
    path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    return subprocess.run(
        [sys.executable, "-c", f"from pathlib import Path\n{code}"],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


# --- what comes out ----------------------------------------------------------------------------------------


def test_files_and_facts(fill):
    library = {"kernel.so"} if shutil.which("cc") else set()
    assert set(fill.files) == {"kernel.ptx", "kernel.cubin", "kernel.o", "host.mlir", "facts.json"} | library
    assert re.search(r"^\.target sm_90a", fill.ptx, re.MULTILINE)
    assert f".entry {fill.kernel_name}(" in fill.ptx
    assert fill.kernel_name.encode() in fill.cubin
    assert fill.object.startswith(b"\x7fELF")
    assert fill.facts == {**tiny.FACTS, "entry": "gemm", "target": "sm_90a"}
    assert fill.host_mlir.startswith("module")


def test_large_host_code_is_stored_compressed(monkeypatch, fill):
    monkeypatch.setattr(artifact, "LARGE_TEXT", 100)
    small = compiled(tiny.fill)
    assert "host.mlir" not in small.files
    assert small.host_mlir.count("llvm.func") == fill.host_mlir.count("llvm.func") > 5
    assert len(small.files["host.mlir.gz"]) < len(fill.files["host.mlir"])


def test_target_is_the_one_asked_for():
    assert ".target sm_100a" in compiled(tiny.fill, target="sm_100a").ptx


def test_no_scratch_files_stay_behind(tmp_path, monkeypatch):
    folder = tmp_path / "with space"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    compiled(tiny.fill)
    with pytest.raises(BuildError):
        compiled(tiny.early_exit)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", ["fill", "local_memory", "mirror"])
def test_resources_agree_with_cuobjdump(name, tmp_path):
    try:
        tool = cubin.find_nvdisasm().with_name("cuobjdump")
    except MissingDependencyError:
        pytest.skip("needs nvdisasm and cuobjdump")
    if not tool.exists():
        pytest.skip("needs cuobjdump next to nvdisasm")
    kernel = compiled(getattr(tiny, name), facts={**tiny.FACTS, "smem_bytes": tiny.MIRROR_BYTES})
    path = tmp_path / "kernel.cubin"
    path.write_bytes(kernel.cubin)
    report = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    assert f"Function {kernel.kernel_name}:" in report
    assert f"REG:{kernel.resources.registers} " in report
    assert f"STACK:{kernel.resources.spills} " in report
    assert (kernel.resources.spills > 0) == (name == "local_memory")


def test_resources_repeat_the_facts():
    facts = {"smem_bytes": tiny.MIRROR_BYTES, "stages": 7, "threads": tiny.THREADS}
    resources = compiled(tiny.mirror, facts=facts).resources
    assert (resources.smem_bytes, resources.stages, resources.threads) == (49380, 7, 64)
    assert "49380 bytes of shared memory, 7 stages, 64 threads" in str(resources)


def test_shared_memory_of_the_launch_is_read_from_the_host_code(fill):
    mirror = compiled(tiny.mirror, facts={**tiny.FACTS, "smem_bytes": tiny.MIRROR_BYTES})
    assert launched_smem_bytes(mirror.host_mlir) == tiny.MIRROR_BYTES
    assert launched_smem_bytes(fill.host_mlir) == 0
    assert launched_smem_bytes("module {}") is None


@pytest.mark.parametrize(
    ("function", "facts", "message"),
    [
        ("fill", {"threads": 128}, "launched with 64 threads, its builder says 128"),
        ("mirror", {"smem_bytes": 49379}, "49380 bytes of shared memory, its builder says 49379"),
        ("fill", {"stages": None}, "facts must give stages as an int, not None"),
    ],
)
def test_facts_that_contradict_the_code_are_refused(function, facts, message):
    with pytest.raises(BuildError, match=message):
        compiled(getattr(tiny, function), facts={**tiny.FACTS, **facts})


def test_artifact_of_a_cache_entry(tmp_path, fill):
    key = kernel_key("fill", "sm_90a")
    built = Artifact.from_entry(KernelCache(tmp_path).get_or_build(key, lambda: fill.files))
    found = Artifact.from_entry(KernelCache(tmp_path).get_or_build(key, dict))
    assert (built.from_cache, found.from_cache) == (False, True)
    assert (found.ptx, found.cubin, found.resources) == (fill.ptx, fill.cubin, fill.resources)
    assert found.build_seconds == built.build_seconds


# --- mistakes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            "odd_barrier",
            r"ptxas: Number of threads participating in barrier must be in multiple of warp size",
        ),
        (
            "early_exit",
            r"Early exit \(return\) is not allowed in `early_exit_kernel` \(tiny_kernels.py:\d+\)$",
        ),
        ("value_error", r"ValueError: three stages do not fit \(tiny_kernels.py:\d+\)$"),
        ("two_kernels", r"exactly one kernel must come out of a compile, not 2"),
        ("no_kernel", r"the host function launches no kernel"),
    ],
)
def test_a_refusal_is_one_plain_line(function, message):
    with pytest.raises(BuildError, match=message) as caught:
        compiled(getattr(tiny, function))
    text = str(caught.value)
    assert "\n" not in text
    assert "\x1b" not in text
    assert len(text) < 500
    if function in ("odd_barrier", "early_exit", "value_error"):
        assert text.startswith(f"compiling {function} for sm_90a failed: ")
        assert caught.value.__cause__ is not None


def test_a_variable_that_keeps_the_compiler_from_compiling_is_named():
    code = "import test_artifact as t; t.compiled(t.tiny.fill)"
    said = run_python(code, CUTE_DSL_DRYRUN="1").stderr.splitlines()[-1]
    assert said.startswith("cutegemm.errors.BuildError: the compiler returned no kernel for sm_90a; ")
    assert "CUTE_DSL_DRYRUN=1" in said
    assert "unset" in said


def test_a_full_temporary_folder_is_named(tmp_path, monkeypatch, fill):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=9000))
    with pytest.raises(BuildError) as caught:
        compiled(tiny.value_error)
    assert f"the temporary folder {tmp_path} has 9 kB left: free some space, or" in str(caught.value)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "not there"))
    with pytest.raises(BuildError, match=r"needs a temporary folder and none can be made .* set TMPDIR"):
        compiled(tiny.fill)
    with pytest.raises(BuildError, match=r"through a temporary folder \(.*No such file.*\); .* set TMPDIR"):
        cubin.disassemble(fill.cubin)


def test_an_error_of_cutegemm_passes_unchanged():
    with pytest.raises(ConfigError, match=r"^tile_n must be a multiple of 8, not 12$"):
        compiled(tiny.refused)


def test_unknown_target_and_option_are_build_errors():
    with pytest.raises(BuildError, match=r"for sm_9000 failed: .*sm_9000"):
        compiled(tiny.fill, target="sm_9000")
    with pytest.raises(BuildError, match="options string is malformed"):
        compiled(tiny.fill, options="--no-such-option")


def test_compiling_still_works_after_a_refusal(fill):
    with pytest.raises(BuildError):
        compiled(tiny.odd_barrier)
    assert compiled(tiny.fill).ptx == fill.ptx


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (None, "nvidia-cutlass-dsl, the kernel compiler, is not installed"),
        ("4.9.0", "nvidia-cutlass-dsl 4.9.0 is installed, cutegemm is tested with 4.8.x"),
        ("4.80.1", "nvidia-cutlass-dsl 4.80.1 is installed"),
        ("4.6.2", "nvidia-cutlass-dsl 4.6.2 is installed"),
    ],
)
def test_compiler_missing_or_of_another_version(monkeypatch, version, message):
    monkeypatch.setattr(fingerprint, "_installed", lambda package: version)
    with pytest.raises(MissingDependencyError, match=re.escape(message)) as caught:
        compiled(tiny.fill)
    assert 'pip install "nvidia-cutlass-dsl==4.8.*"' in str(caught.value)


# --- reading cubins and SASS -------------------------------------------------------------------------------


@pytest.fixture
def _needs_nvdisasm():
    try:
        cubin.find_nvdisasm()
    except MissingDependencyError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("_needs_nvdisasm")
def test_sass_and_its_histogram(fill, local_memory):
    assert fill.kernel_name in fill.sass
    assert "EXIT" in fill.sass
    counts = instruction_histogram(local_memory.sass)
    assert counts["local memory"] == len(re.findall(r"\b(?:LDL|STL)\b", local_memory.sass)) > 0
    assert sum(counts.values()) == len(re.findall(r"^\s*/\*[0-9a-f]{4}\*/", local_memory.sass, re.MULTILINE))
    assert instruction_histogram(fill.sass)["local memory"] == 0
    mirror = compiled(tiny.mirror, facts={**tiny.FACTS, "smem_bytes": tiny.MIRROR_BYTES})
    counts = instruction_histogram(mirror.sass)
    assert (counts["shared memory"], counts["barrier"], counts["global memory"]) == (2, 1, 2)


@pytest.mark.usefixtures("_needs_nvdisasm")
def test_sass_of_something_else_is_refused():
    with pytest.raises(BuildError, match="could not read the cubin"):
        cubin.disassemble(b"not a cubin")


def test_histogram_groups():
    lines = """
        /*0000*/  HGMMA.64x256x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;
        /*0010*/  @P0 UTMALDG.3D.MULTICAST [UR8], [UR4], UR6 ;
        /*0020*/  @!UP1 UTMASTG.2D [UR8], [UR4] ;
        /*0030*/  SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR5], R3 ;
        /*0040*/  BAR.SYNC.DEFER_BLOCKING 0x1, 0x80 ;
        /*0050*/  FENCE.VIEW.ASYNC.S ;
        /*0060*/  WARPGROUP.ARRIVE ;
        /*0070*/  STL.64 [R1], R2 ;
        /*0080*/  LDL R2, [R1+0x8] ;
        /*0090*/  STSM.16.MT88.4 [R5], R8 ;
        /*00a0*/  LDS.128 R4, [R2] ;
        /*00b0*/  IMAD.WIDE.U32 R2, R5, 0x4, R2 ;
        /*00c0*/  @!P1 BRA `(.L_x_3) ;
        /*00d0*/  NOVELTY R1, R2 ;
    """
    counts = {group: count for group, count in instruction_histogram(lines).items() if count}
    assert counts == {
        "WGMMA": 1,
        "TMA load": 1,
        "TMA store": 1,
        "mbarrier": 1,
        "barrier": 1,
        "fence": 2,
        "local memory": 2,
        "stmatrix": 1,
        "shared memory": 1,
        "integer": 1,
        "branch": 1,
        "other": 1,
    }


def test_nvdisasm_is_looked_for_in_order(tmp_path, monkeypatch):
    def tool(folder: Path) -> Path:
        folder.mkdir(parents=True)
        path = folder / "nvdisasm"
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
        return path

    wheel = tmp_path / "nvidia"
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name: type("Spec", (), {"submodule_search_locations": [str(wheel)]}),
    )
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    with pytest.raises(MissingDependencyError, match="pip install nvidia-cuda-nvdisasm"):
        cubin.find_nvdisasm()
    for folder in (
        tmp_path / "path",
        tmp_path / "cuda" / "bin",
        wheel / "cu12" / "bin",
        wheel / "cu13" / "bin",
    ):
        expected = tool(folder)
        assert cubin.find_nvdisasm() == expected


# --- loading -----------------------------------------------------------------------------------------------


def test_loaded_function_checks_its_arguments_without_a_gpu(fill):
    function = fill.load()
    with pytest.raises(TypeError, match="Expects 1 parameters"):
        function(1, 2)
    with pytest.raises(TypeError, match="Tensor"):
        function(1)


def test_equal_objects_are_loaded_once(fill):
    assert Artifact(dict(fill.files)).load() is fill.load()


def test_loading_when_the_cache_was_cleared_meanwhile(tmp_path, monkeypatch, fill):
    monkeypatch.setattr(artifact, "_loaded", {})
    kernels = KernelCache(tmp_path)
    entry = kernels.get_or_build(kernel_key("fill", "sm_90a"), lambda: fill.files)
    assert kernels.clear() == 1
    with pytest.raises(TypeError, match="Expects 1 parameters"):
        Artifact.from_entry(entry).load()(1, 2)


@pytest.fixture(params=["library", "object"])
def way_of_loading(request, monkeypatch):
    """Both ways from files to a function, with nothing loaded yet."""
    if request.param == "library" and not shutil.which("cc"):
        pytest.skip("needs a C compiler")
    monkeypatch.setattr(artifact, "_loaded", {})
    if request.param == "object":
        monkeypatch.setattr(loader, "load_library", lambda path, entry: None)
    else:
        monkeypatch.setattr(loader, "load_object", None)


@pytest.mark.usefixtures("way_of_loading")
def test_kernels_loaded_side_by_side_keep_apart(fill):
    two = Artifact(compile_to_files(tiny.scale, tiny.scale_args(), target="sm_90a", facts=tiny.FACTS))
    functions = [kernel.load() for kernel in (fill, two, compiled(tiny.local_memory))]
    for _ in range(2):
        for function, name, count in zip(
            functions, ("fill", "scale", "local_memory"), (1, 2, 1), strict=True
        ):
            with pytest.raises(TypeError, match=rf"Expects {count} parameters when calling: `{name}\("):
                function(1, 2, 3)


def test_a_library_that_cannot_be_used_falls_back_to_the_object(fill, monkeypatch):
    monkeypatch.setattr(artifact, "_loaded", {})
    broken = Artifact({**fill.files, "kernel.so": b"no library"})
    with pytest.raises(TypeError, match="Expects 1 parameters"):
        broken.load()(1, 2)


def test_without_a_linker_there_is_only_the_object(fill, monkeypatch):
    monkeypatch.setattr(loader.shutil, "which", lambda name: None)
    without = compiled(tiny.fill)
    assert set(fill.files) - set(without.files) <= {"kernel.so"}
    assert "kernel.so" not in without.files


@pytest.mark.parametrize(
    "trouble",
    [subprocess.TimeoutExpired("cc", 60), OSError(8, "Exec format error")],
    ids=["hangs", "no program"],
)
def test_a_linker_that_fails_to_run_is_as_good_as_none(monkeypatch, trouble):
    def run(*args, **options):
        raise trouble

    monkeypatch.setattr(loader.shutil, "which", lambda name: "/bin/cc")
    monkeypatch.setattr(loader.subprocess, "run", run)
    assert "kernel.so" not in compiled(tiny.fill).files


def test_the_runtime_library_is_used_only_if_there_is_no_choice(tmp_path, monkeypatch):
    monkeypatch.delenv("CUTE_DSL_LIBS", raising=False)
    package = type("Spec", (), {"submodule_search_locations": [str(tmp_path)]})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: package)
    assert loader.runtime_library() is None
    for variant in ("cu12", "cu13"):
        path = tmp_path / variant / "lib" / loader.RUNTIME
        path.parent.mkdir(parents=True)
        path.touch()
        assert loader.runtime_library() == (path if variant == "cu12" else None)
    shutil.rmtree(tmp_path / "cu13")
    monkeypatch.setenv("CUTE_DSL_LIBS", "/elsewhere")
    assert loader.runtime_library() is None


def test_an_object_that_cannot_be_loaded_is_a_build_error(tmp_path):
    path = tmp_path / "kernel.o"
    path.write_bytes(b"no object at all")
    done = run_python(f"from cutegemm.loader import load_object\nload_object(Path({str(path)!r}), 'gemm')")
    assert done.returncode == 1, done.stderr
    assert "BuildError: the compiled kernel" in done.stderr.splitlines()[-1]


def test_loading_a_library_does_not_import_the_compiler(tmp_path, fill):
    if "kernel.so" not in fill.files:
        pytest.skip("needs a C compiler")
    for name, content in fill.files.items():
        (tmp_path / name).write_bytes(content)
    done = run_python(
        "import sys\nfrom cutegemm.artifact import Artifact\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "function = Artifact({p.name: p.read_bytes() for p in folder.iterdir()}, folder).load()\n"
        "print(function, 'cutlass' in sys.modules)"
    )
    assert (done.returncode, done.stdout.split()[-1]) == (0, "False"), done.stderr


def test_importing_the_modules_does_not_import_the_compiler():
    done = run_python("import sys, cutegemm.artifact, cutegemm.cache; sys.exit('cutlass' in sys.modules)")
    assert done.returncode == 0, done.stderr


# --- one process, many compiles ----------------------------------------------------------------------------


def threads_after_compiling(count: int) -> list[int]:
    """Operating-system threads of a fresh process before and after compiling `count` kernels, every tenth."""
    code = f"""
import os, tiny_kernels as tiny
from cutegemm.artifact import compile_to_files
print(len(os.listdir("/proc/self/task")))
for i in range({count}):
    compile_to_files(tiny.Filler(float(i)), tiny.vector_args(), target="sm_90a", facts=tiny.FACTS)
    if i % 10 == 9:
        print(len(os.listdir("/proc/self/task")))
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.split()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
@pytest.mark.sample(2)
@pytest.mark.parametrize("count", [40, pytest.param(100, marks=pytest.mark.slow)])
def test_threads_do_not_grow_with_the_number_of_compiles(count):
    seen = threads_after_compiling(count)
    assert len(seen) == 1 + count // 10
    assert seen[-1] == seen[1], f"threads: {seen}"
    assert seen[-1] <= seen[0] + 4, f"threads: {seen}"


def test_eight_threads_compile_at_once():
    code = """
import threading, tiny_kernels as tiny
from cutegemm.artifact import Artifact, compile_to_files
start, texts = threading.Barrier(8), {}
def work(i):
    start.wait()
    for j in range(2):
        number = 8 * j + i
        host = tiny.Filler(float(number))
        files = compile_to_files(host, tiny.vector_args(), target="sm_90a", facts=tiny.FACTS)
        texts[number] = Artifact(files).ptx
threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
import re, struct
for i, text in texts.items():
    stored = int(re.search(r"st.global.b32\\s+\\[%rd\\d+\\], (\\d+)", text)[1])
    assert struct.unpack("<f", struct.pack("<I", stored))[0] == float(i), (i, stored)
print(len(texts))
"""
    done = run_python(code)
    assert (done.returncode, done.stdout.strip()) == (0, "16"), done.stderr


def test_a_fork_after_compiling_can_compile():
    code = """
import os, sys, tiny_kernels as tiny
from cutegemm.artifact import Artifact, compile_to_files
def artifact(value):
    host = tiny.Filler(value)
    return Artifact(compile_to_files(host, tiny.vector_args(), target="sm_90a", facts=tiny.FACTS))
before = artifact(1.0)
before.load()
child = os.fork()
if child == 0:
    again, other = artifact(1.0), artifact(2.0)
    try:
        other.load()(1, 2)
    except TypeError:
        sys.exit(0 if again.ptx == before.ptx and other.ptx != before.ptx else 3)
    sys.exit(4)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert artifact(3.0).ptx != before.ptx
print("both")
"""
    done = run_python(code)
    assert (done.returncode, done.stdout.strip()) == (0, "both"), done.stderr


def test_a_fork_waits_for_a_compile_in_another_thread():
    entered, let_go, order = threading.Event(), threading.Event(), []

    def compiling():
        with artifact.compile_lock:
            entered.set()
            let_go.wait()
            order.append("compiled")

    thread = threading.Thread(target=compiling)
    thread.start()
    entered.wait()
    threading.Timer(0.3, let_go.set).start()
    child = os.fork()
    if child == 0:
        os._exit(0 if order == ["compiled"] and artifact.compile_lock.acquire(timeout=5) else 1)
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# --- warm start --------------------------------------------------------------------------------------------


def test_a_second_process_compiles_nothing(tmp_path):
    code = """
import time, torch, tiny_kernels as tiny
from cutegemm.artifact import Artifact, compile_to_files
from cutegemm.cache import KernelCache, kernel_key
cache = KernelCache()
build = lambda: compile_to_files(tiny.fill, tiny.vector_args(), target="sm_90a", facts=tiny.FACTS)
started = time.perf_counter()
entry = cache.get_or_build(kernel_key("fill", "sm_90a"), build)
Artifact.from_entry(entry).load()
print(cache.stats().compiled, cache.stats().from_disk, time.perf_counter() - started)
"""
    first, second = (run_python(code, CUTEGEMM_CACHE_DIR=str(tmp_path)) for _ in range(2))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert first.stdout.split()[:2] == ["1", "0"]
    assert second.stdout.split()[:2] == ["0", "1"]
    assert float(second.stdout.split()[2]) < 0.2, "reading, verifying and loading a kernel took too long"


def test_hits_are_quick(tmp_path, fill):
    key = kernel_key("fill", "sm_90a")
    KernelCache(tmp_path).get_or_build(key, lambda: fill.files)
    disk = []
    for _ in range(5):
        kernels = KernelCache(tmp_path)
        started = time.perf_counter()
        kernels.get_or_build(key, dict)
        disk.append(time.perf_counter() - started)
        assert kernels.stats().from_disk == 1
    started = time.perf_counter()
    for _ in range(1000):
        kernels.get_or_build(key, dict)
    assert (time.perf_counter() - started) / 1000 < 50e-6
    assert min(disk) < 0.03, "reading and verifying a kernel took too long"
