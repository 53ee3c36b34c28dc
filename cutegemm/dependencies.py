"""The packages cutegemm is made of, and the sentence for one that is not there."""

import importlib.metadata
import re

from cutegemm.errors import MissingDependencyError

#: Module -> what pip installs for it; the versions are those of pyproject.toml.
REQUIREMENTS = {
    "cutlass": "nvidia-cutlass-dsl==4.8.*",
    "tvm_ffi": "apache-tvm-ffi>=0.1.15,<0.2",
    "torch": "torch>=2.9",
    "cuda": "cuda-python>=12.8",
    "numpy": "numpy>=1.26",
    "rich": "rich>=13.7",
    "filelock": "filelock>=3.13",
    "platformdirs": "platformdirs>=4.2",
    "hypothesis": "hypothesis>=6.137",
}


def missing_dependency(error: ModuleNotFoundError) -> MissingDependencyError:
    """What to raise instead of a failed import.

    Raises ``error`` itself if the module belongs to no package that cutegemm depends on.
    """
    requirement = REQUIREMENTS.get((error.name or "").partition(".")[0])
    if requirement is None:
        raise error
    package = re.split("[=<>]", requirement)[0]
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return MissingDependencyError(
            f"{package} (the module {error.name}) is not installed, cutegemm needs it; install it with: "
            f'pip install "{requirement}"'
        )
    return MissingDependencyError(
        f"the module {error.name} cannot be imported, although {package} {version} is installed; "
        f'reinstall it with: pip install --force-reinstall "{requirement}"'
    )
