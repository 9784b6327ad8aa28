# SPDX-License-Identifier: Apache-2.0
"""ignite's tests of its distributed package. Left out: its metrics and handlers but one, which use
the same calls and take an hour."""

from clients.suite import OWN_ROOT, Suite

_PACKAGES = ("pytorch-ignite==0.5.5", "scikit-learn==1.9.1")
_TESTS = (
    "{source}/tests/ignite/distributed",
    "{source}/tests/ignite/handlers/test_early_stopping.py",
)
SUITES = (
    Suite(
        "pytorch-ignite",
        "its tests of Horovod",
        _PACKAGES,
        "horovod",
        "pytest",
        (*OWN_ROOT, *_TESTS),
        ranks=(4,),  # what the tests themselves start
        select="hvd or horovod",
        sdist=True,
        launched=False,
        known={"test_auto_methods_hvd": "looks for Horovod's private `_allreduce_grad_async`"},
        seconds=1800,
    ),
    Suite(
        "pytorch-ignite",
        "its tests of torch.distributed, gloo's name replaced",
        _PACKAGES,
        "as_gloo",
        "pytest",
        (
            *OWN_ROOT,
            *("--dist=each", "--tx={ranks}*popen//python={python}", "-m", "distributed"),
            *_TESTS,
        ),
        select="not hvd and not horovod",
        sdist=True,
        launched=False,
        environment={"WORLD_SIZE": "{ranks}"},
        seconds=900,
    ),
)
