"""Exceptions of kda_tl: every user error is one of these, with a sentence that says what to do instead."""


class KdaTlError(Exception):
    """Base of all errors raised by kda_tl."""


class InputError(KdaTlError, ValueError):
    """A tensor, flag or name passed by the caller cannot be used; the message says what to pass instead."""


class UnsupportedError(KdaTlError, NotImplementedError):
    """The request is well formed, but kda_tl cannot serve it; the message names the nearest thing that works."""


class CompileError(KdaTlError, RuntimeError):
    """A kernel could not be compiled for the device, or no compiler or no TileLang that works was found."""


class LaunchError(KdaTlError, RuntimeError):
    """A compiled kernel could not be launched; the message holds the driver's or tilelang's reason."""


class DatabaseError(KdaTlError, RuntimeError):
    """A tuning database cannot be read, written or understood."""


class BundleError(KdaTlError, RuntimeError):
    """A bundle of kernels cannot be read, written or trusted."""


class PackageError(KdaTlError, ImportError):
    """A package that kda_tl needs is missing or broken; the message says what to install."""


class DeviceError(KdaTlError, RuntimeError):
    """The GPU that was asked for is not the one that is here."""


class WrongResultError(KdaTlError, ArithmeticError):
    """A kernel disagrees with its reference by more than the tolerance."""


class KdaTlWarning(UserWarning):
    """Warnings of kda_tl: a fallback was taken, or a database entry was ignored."""
