"""Every error cutegemm raises on purpose.

One base class, so that ``except CutegemmError`` catches whatever the package refuses, and below it
classes that also derive from the built-in a Python user expects (``ValueError``, ``TypeError``,
``RuntimeError``). Each message says in one sentence what was given, what is allowed and what to do.
"""


class CutegemmError(Exception):
    """Base of all errors raised by cutegemm."""


class ProblemError(CutegemmError, ValueError):
    """A size, layout, device or value that no cutegemm kernel can take."""


class OperandTypeError(CutegemmError, TypeError):
    """An argument of the wrong kind: not a tensor, an unknown or unsupported dtype."""


class ConfigError(CutegemmError, ValueError):
    """A configuration outside the hardware's or the kernel's limits."""


class EpilogueError(CutegemmError, ValueError):
    """An epilogue's function that cannot be fused; the message ends with the line of it that is at fault."""


class TargetError(CutegemmError, ValueError):
    """A target architecture that is unknown, unsupported, or not the one of the GPU at hand."""


class DeviceError(CutegemmError, RuntimeError):
    """A GPU is needed and there is none, or it cannot run this kernel."""


class BuildError(CutegemmError, RuntimeError):
    """The compiler refused a kernel; the message carries the compiler's first complaint."""


class MissingDependencyError(CutegemmError, ImportError):
    """A package cutegemm needs for this step is missing or of an untested version."""


class StaleSourceError(CutegemmError, RuntimeError):
    """A source file of the package changed on disk after this process imported it; restart to compile."""


class CacheWarning(UserWarning):
    """The kernel cache on disk is damaged or cannot be used: the kernel is right, but slower to get."""
