# SPDX-License-Identifier: Apache-2.0
"""py-farandole for Spack: copy it to packages/py_farandole/ of a Spack repository."""

from pathlib import Path

from spack.package import *
from spack_repo.builtin.build_systems.python import PythonPackage


class PyFarandole(PythonPackage):
    """Allreduce for data-parallel training under mpirun: PyTorch, JAX, TensorFlow and NumPy."""

    # Until a release has a public address: from the folder in which spack is called. `spack install
    # --no-checksum`; a release adds sha256.
    manual_download = True
    url = f"file://{Path.cwd()}/farandole-0.2.0.tar.gz"

    license("Apache-2.0")

    version("0.2.0")

    variant("torch", default=True, description="Install PyTorch")

    depends_on("cxx", type="build")
    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")
    depends_on("cmake@3.22:", type="build")
    depends_on("ninja", type="build")
    depends_on("binutils", type="build")
    depends_on("py-cffi@1.15:", type=("build", "run"))
    depends_on("py-cloudpickle@2.2:", type=("build", "run"))
    depends_on("py-mpi4py@4.0:", type=("build", "run"))
    depends_on("py-numpy@1.23:", type=("build", "run"))
    depends_on("py-torch@2.1:", type=("build", "run"), when="+torch")

    conflicts("platform=darwin")
    conflicts("platform=windows")
