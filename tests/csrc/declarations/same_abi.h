// SPDX-License-Identifier: Apache-2.0
// Whether two function types are called alike: the same number of arguments, each as large and of the
// same kind. Enums of a foreign header are plain integers in ours.
#pragma once

#include <cstddef>
#include <type_traits>

template <class A, class B>
constexpr bool same_value() {
  if constexpr (std::is_void_v<A> || std::is_void_v<B>) {
    return std::is_void_v<A> == std::is_void_v<B>;
  } else {
    return sizeof(A) == sizeof(B) && std::is_pointer_v<A> == std::is_pointer_v<B> &&
           std::is_floating_point_v<A> == std::is_floating_point_v<B>;
  }
}

template <class Ours, class Theirs>
constexpr bool same_abi = false;
template <class R1, class... A1, class R2, class... A2>
constexpr bool same_abi<R1(A1...), R2(A2...)> = [] {
  if constexpr (sizeof...(A1) != sizeof...(A2)) {
    return false;
  } else {
    return same_value<R1, R2>() && (same_value<A1, A2>() && ...);
  }
}();

// Of a member of a table of functions, and a function of the header.
template <class Table, class Ours, class Theirs>
constexpr bool alike(Ours* Table::*, Theirs*) {
  return same_abi<Ours, Theirs>;
}
