# SPDX-License-Identifier: Apache-2.0
"""Our errors within those of frameworks, which have one class for all and add to the text."""

from __future__ import annotations

import pytest

from farandole.errors import MismatchError, retyped


@pytest.mark.parametrize(
    "appendix",
    ["", " [executable_name='jit_step']", " [executable_name='jit_step'] [device='0']"],
)
def test_what_xla_knows_of_the_program_is_no_part_of_the_message(appendix: str) -> None:
    with pytest.raises(MismatchError) as caught, retyped(RuntimeError):
        raise RuntimeError(f"INTERNAL: farandole.MismatchError: 'x' [2, 3] differs{appendix}")
    assert str(caught.value) == "'x' [2, 3] differs"


def test_what_is_not_ours_stays() -> None:
    with pytest.raises(RuntimeError, match="out of memory"), retyped(RuntimeError):
        raise RuntimeError("INTERNAL: out of memory")
