"""The key of a kernel: everything that shapes it counts, and sources changed under a process are noticed."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cache_worker import FILES, a_key

from cutegemm import fingerprint
from cutegemm.cache import KernelCache, kernel_key
from cutegemm.errors import BuildError, MissingDependencyError

ROOT = Path(__file__).parent.parent


@pytest.fixture
def toolchain(monkeypatch):
    """The toolchain part of the key, to be changed at will."""
    parts = dict(fingerprint._toolchain())
    monkeypatch.setattr(fingerprint, "_toolchain", lambda: parts)
    return parts


@pytest.fixture(autouse=True)
def _compiler_installed(monkeypatch):
    """The key needs the compiler's version, not the compiler."""
    if fingerprint._installed("nvidia-cutlass-dsl") is None:
        monkeypatch.setattr(fingerprint, "_installed", lambda package: "4.8.1")


def test_keys_differ_by_target_and_spec():
    targets = "sm_90", "sm_90a", "sm_100", "sm_100a", "sm_100f", "sm_103a", "sm_120a", "sm_121a"
    keys = {kernel_key(spec, target) for target in targets for spec in ("a", "b", "a ", "")}
    assert len(keys) == 4 * len(targets)
    assert all(len(key) == 64 and int(key, 16) >= 0 for key in keys)
    assert kernel_key("a", "sm_90a") == kernel_key("a", "sm_90a")
    assert kernel_key("ab", "c") != kernel_key("a", "bc")


@pytest.mark.parametrize(
    "part", ["nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs", "apache-tvm-ffi", "python", "platform"]
)
def test_keys_differ_by_each_part_of_the_toolchain(toolchain, part):
    before = kernel_key("a", "sm_90a")
    assert toolchain[part]
    toolchain[part] += "x"
    assert kernel_key("a", "sm_90a") != before


def test_toolchain_is_this_interpreter():
    parts = fingerprint._toolchain()
    assert f"{sys.version_info.major}{sys.version_info.minor}" in parts["python"]
    assert parts["platform"].startswith(sys.platform)


def test_keys_differ_by_sources_and_compiler_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("CUTE_DSL_ENABLE_ASSERTIONS", raising=False)
    before = kernel_key("a", "sm_90a")
    monkeypatch.setenv("CUTE_DSL_ENABLE_ASSERTIONS", "1")
    changed = kernel_key("a", "sm_90a")
    monkeypatch.delenv("CUTE_DSL_ENABLE_ASSERTIONS")
    assert before == kernel_key("a", "sm_90a") != changed
    package = tmp_path / "cutegemm"
    package.mkdir()
    digests = set()
    for name, text in (("a.py", "x = 1\n"), ("a.py", "x = 2\n"), ("b.py", ""), ("sub/c.py", "x = 1\n")):
        (package / name).parent.mkdir(exist_ok=True)
        (package / name).write_text(text)
        watch = fingerprint.SourceWatch(package)
        monkeypatch.setattr(fingerprint, "sources", watch)
        digests |= {watch.digest, kernel_key("a", "sm_90a")}
    assert len(digests) == 8


def test_the_key_says_what_it_stands_for(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint.sources, "check", lambda: None)  # somebody may be editing the package
    key = kernel_key("tile 128x256", "sm_90a")
    assert {"target": "sm_90a", "spec": "tile 128x256"}.items() <= json.loads(key.text).items()
    assert (pickle.loads(pickle.dumps(key)), pickle.loads(pickle.dumps(key)).text) == (key, key.text)
    KernelCache(tmp_path).get_or_build(key, lambda: FILES)
    meta = json.loads((tmp_path / "kernels" / key / "meta.json").read_text())
    assert meta["description"] == key.text
    assert set(meta["files"]) == set(FILES)


def test_no_key_without_the_compiler(monkeypatch):
    monkeypatch.setattr(fingerprint, "_installed", lambda package: None)
    monkeypatch.setattr(fingerprint, "_toolchain", fingerprint._toolchain.__wrapped__)
    with pytest.raises(MissingDependencyError, match="pip install"):
        kernel_key("a", "sm_90a")


def test_a_package_without_sources_cannot_be_keyed(tmp_path):
    with pytest.raises(BuildError, match="install cutegemm unpacked and with its sources"):
        _ = fingerprint.SourceWatch(tmp_path).digest


# --- sources that change under a live process --------------------------------------------------------------


@pytest.fixture
def live_copy(tmp_path):
    """A copy of the package and a function that runs code on it: `edit` is executed after the import."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "cutegemm", tmp_path / "site" / "cutegemm", ignore=ignore)
    (tmp_path / "site" / "cutegemm" / "unused.py").write_text("# a module nobody imports\n")

    def run(edit: str) -> subprocess.CompletedProcess[str]:
        code = (
            "import os, bare_package\nfrom pathlib import Path\nimport cutegemm.cache as c\n"
            f"package = Path(c.__file__).parent\n{edit}\n"
            f"c.KernelCache({str(tmp_path / 'cache')!r}).get_or_build({a_key()!r}, lambda: {{'a': b'x'}})\n"
        )
        environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'site'}{os.pathsep}{ROOT / 'tests'}"}
        return subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
        )

    return run


def test_a_source_changed_after_the_import_is_named(live_copy, tmp_path):
    edited = "f = package / 'errors.py'; f.write_text('# upgraded\\n' + f.read_text())"
    done = live_copy(edited)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert f"StaleSourceError: {tmp_path / 'site' / 'cutegemm' / 'errors.py'} changed on disk" in last
    assert "restart the Python process" in last
    assert not (tmp_path / "cache" / "kernels").exists()


@pytest.mark.parametrize(
    "edit",
    [
        "pass",
        "os.utime(package / 'errors.py', (1, 1))",
        "(package / 'unused.py').write_text('# changed\\n')",
    ],
)
def test_sources_that_did_not_change_for_this_process(live_copy, edit):
    done = live_copy(edit)
    assert done.returncode == 0, done.stderr


def test_a_removed_source_is_noticed(live_copy):
    done = live_copy("(package / 'errors.py').unlink()")
    assert "StaleSourceError" in done.stderr
