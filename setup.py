"""Builds the one compiled part: a shared library with a plain C interface, without headers of Python or torch.

Everything else is in pyproject.toml. Without a compiler the package installs all the same and uses the plain twin.
"""

import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

OPENMP = "-fopenmp"
FLAGS = ["-O3", "-std=gnu++17", "-ffp-contract=fast", "-fno-math-errno"]


class BuildIfPossible(build_ext):
    """With OpenMP, else without it, else not at all."""

    def build_extension(self, ext):
        for openmp in ([OPENMP], []):
            ext.extra_compile_args, ext.extra_link_args = [*FLAGS, *openmp], list(openmp)
            try:
                return super().build_extension(ext)
            except Exception as error:
                print(f"headgate: {ext.name} not built ({error})", file=sys.stderr)
        print("headgate: no compiled kernel; conditional networks use PyTorch's operators instead", file=sys.stderr)
        return None

    def copy_extensions_to_source(self):
        try:
            super().copy_extensions_to_source()
        except OSError as error:  # nothing was built
            print(f"headgate: {error}", file=sys.stderr)


setup(
    cmdclass={"build_ext": BuildIfPossible},
    ext_modules=[
        Extension(
            "headgate.inference.kernel._conv",
            sources=[f"src/headgate/inference/kernel/{name}.cpp" for name in ("conv", "gates", "tape")],
            depends=["src/headgate/inference/kernel/tiles.inc"],
            language="c++",
            optional=True,
        )
    ],
)
