// SPDX-License-Identifier: Apache-2.0
// One visitor of a variant out of several lambdas.
#pragma once

namespace farandole {

template <class... F>
struct Overloaded : F... {
  using F::operator()...;
};

}  // namespace farandole
