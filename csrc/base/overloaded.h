// SPDX-License-Identifier: Apache-2.0
// Makes one std::visit visitor out of several lambdas.
#pragma once

namespace farandole {

template <class... F>
struct Overloaded : F... {
  using F::operator()...;
};

}  // namespace farandole
