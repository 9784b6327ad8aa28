# SPDX-License-Identifier: Apache-2.0
"""Frameworks over torch.distributed whose releases bring no tests for several CPU processes: the
programs are ours, the frameworks' code is unchanged."""

from dataclasses import replace

from clients.suite import Suite, program


def _suite(what: str, name: str, packages: tuple[str, ...], mode: str = "group") -> Suite:
    client = packages[0].partition("==")[0]
    return Suite(client, what, packages, mode, "pytest", program(name), quick=mode == "group")


_KERAS = _suite(
    "fit() over farandole.keras",
    "keras_fit",
    ("keras==3.15.0", "jax==0.10.2"),
    "init",
)
SUITES = (
    _suite(
        "Trainer with DDP, metrics, a checkpoint; Fabric",
        "lightning_fit",
        ("lightning==2.6.6",),
        "init",
    ),
    _suite(
        "Trainer, with accumulation, clipping, evaluation, a checkpoint",
        "transformers_trainer",
        ("transformers==5.23.0", "accelerate==1.15.0"),
    ),
    _suite(
        "a metric of each kind of state",
        "torchmetrics_states",
        ("torchmetrics==1.9.0",),
    ),
    _suite(
        "optimizers over farandole.jax",
        "optax_optimizers",
        ("optax==0.2.8", "jax==0.10.2"),
        "init",
    ),
    _suite(
        "a network trained over farandole.jax",
        "flax_fit",
        ("flax==0.12.8", "jax==0.10.2", "optax==0.2.8"),
        "init",
    ),
    *(
        replace(_KERAS, what=f"{_KERAS.what}, on {backend}", environment={"KERAS_BACKEND": backend})
        for backend in ("jax", "torch")
    ),
)
