"""Errors that a user meets. Each message names the thing, the place and the remedy, and fits a paragraph."""


class KimigraphError(Exception):
    """Base of all errors raised on purpose; the command line prints its message alone and exits with ``exit_code``."""

    exit_code = 1


class UsageError(KimigraphError):
    """The request itself cannot be understood (an unknown option value, a missing path)."""

    exit_code = 2


class CaptureError(KimigraphError):
    """The model could not be turned into a graph."""


class CompileError(KimigraphError):
    """A pass or the code generator could not go on."""


class NumericsError(KimigraphError):
    """A result lies outside its tolerance."""

    exit_code = 3


class RequiredFusionError(KimigraphError):
    """A fusion named by ``--require-fusion`` did not fire."""

    exit_code = 4


class CorruptArtifactError(KimigraphError):
    """A file of an artifact or a cache entry is not what its manifest says."""

    exit_code = 5
