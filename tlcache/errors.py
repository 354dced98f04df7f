"""The exception tree of tlcache; every error that a caller may want to handle is one of these.

    TlcacheError                 exit code
      UsageError                 2   what was asked for cannot be understood
        TargetError              2   a target's spelling is unknown, or needs a GPU that is not here
        SpecError                2   a kernel spec is malformed
        ShapesError              2   shapes.json is missing, not JSON, or says something impossible
        ModelConfigError         2   a model's config.json is missing, or not one that is known here
        ConfigError              2   tlcache.toml or a variable sets what there is not, or wrongly
        FactoryError             2   a kernel's factory cannot be found or does not yield a kernel
        GradientError            2   a gradient was asked for through an operator that has none
      EnvironmentFault           3   this machine cannot do it
        ToolchainError           3   nvcc or a C++ compiler is missing
        CacheRootError           3   the cache root cannot be written, or is out of space
        UntrustedRootError       3   others can write the cache root: a library is code
        RuntimeLibraryError      3   TileLang's or tvm-ffi's runtime library is not installed
        AgentError               3   an agent cannot listen, or its directory is not the user's
        alone
        TransferError            3   an archive cannot be fetched from where it is, or sent there
        DaemonError              3   the daemon cannot run here: another one does, or a socket
        cannot be had
      KernelError                1   this kernel is not to be had
        CompileError             1   it does not compile
        MissError                1   it is not in the cache, and compiling was ruled out
        CaptureError             1   it would have to be compiled during CUDA graph capture
        RestoreError             1   it was restored, and TileLang makes another one of the call
      ArchiveError               1   an archive is not what it should be, and is refused

Each holds one sentence with the actual values, and a `hint`: what to do about it.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "AgentError",
    "ArchiveError",
    "CacheRootError",
    "CaptureError",
    "CompileError",
    "ConfigError",
    "DaemonError",
    "EnvironmentFault",
    "FactoryError",
    "GradientError",
    "KernelError",
    "MissError",
    "ModelConfigError",
    "RestoreError",
    "RuntimeLibraryError",
    "ShapesError",
    "SpecError",
    "TargetError",
    "TlcacheError",
    "ToolchainError",
    "TransferError",
    "UntrustedRootError",
    "UsageError",
]


class TlcacheError(Exception):
    """Base of all errors of tlcache.

    Args:
        message: One sentence that names the actual values.
        hint: What to do about it, usually a command in backticks; None where nothing helps.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n\nhint: {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.hint))


def _rebuild(kind: type[TlcacheError], message: str, hint: str | None) -> TlcacheError:
    return kind(message, hint=hint)


class UsageError(TlcacheError):
    """What was asked for cannot be understood."""

    exit_code = 2


class TargetError(UsageError):
    """A target's spelling is unknown, or it names the GPU of a machine that has none."""


class SpecError(UsageError):
    """A kernel spec is malformed, or its workload or schedule is impossible."""


class ShapesError(UsageError):
    """A shapes document is missing, not JSON, or says something impossible."""


class ModelConfigError(UsageError):
    """A model's config.json is missing, of no known family, or says something impossible."""


class ConfigError(UsageError):
    """A tlcache.toml, an environment variable or an option sets what there is not, or wrongly."""


class FactoryError(UsageError):
    """A kernel's factory cannot be found, or does not yield a TileLang kernel."""


class GradientError(UsageError):
    """A gradient was asked for through an operator that is for inference only."""


class EnvironmentFault(TlcacheError):
    """This machine cannot do what was asked."""

    exit_code = 3


class ToolchainError(EnvironmentFault):
    """nvcc or a C++ compiler is missing."""


class CacheRootError(EnvironmentFault):
    """The cache root cannot be created or written, or its disk is full."""


class UntrustedRootError(EnvironmentFault):
    """Others can write the cache root, and a library that is loaded is code that runs."""


class RuntimeLibraryError(EnvironmentFault):
    """A runtime library that a restored kernel needs is not installed."""


class AgentError(EnvironmentFault):
    """An agent cannot listen: its directory is not the user's alone, or a socket is not to be had
    there.
    """


class TransferError(EnvironmentFault):
    """An archive cannot be fetched from where it is, or sent there: a server, the network, or a
    package that speaks its protocol.
    """


class DaemonError(EnvironmentFault):
    """The daemon cannot run here: another one watches the root, or its socket cannot be had."""


class KernelError(TlcacheError):
    """A kernel is not to be had."""


class CompileError(KernelError):
    """A kernel does not compile, or its compile was killed."""


class MissError(KernelError):
    """A kernel is not in the cache, and compiling it was ruled out."""


class CaptureError(KernelError):
    """A kernel would have to be compiled while a CUDA graph is captured."""


class RestoreError(KernelError):
    """A kernel was restored, and TileLang makes another one of the same call."""


class ArchiveError(TlcacheError):
    """An archive is not what it should be: damaged, hostile, of another digest, or not signed by
    who should have. Nothing of it is taken.
    """
