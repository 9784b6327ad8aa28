// SPDX-License-Identifier: Apache-2.0
// Goes through the fields of messages, whatever they have.
#pragma once

#include <algorithm>
#include <concepts>
#include <ranges>
#include <tuple>
#include <type_traits>

namespace farandole::check {

struct AnyField {
  template <class T>
  operator T() const;
};

template <class T, class... Fields>
constexpr size_t count_fields() {
  if constexpr (requires { T{Fields{}..., AnyField{}}; }) {
    return count_fields<T, Fields..., AnyField>();
  } else {
    return sizeof...(Fields);
  }
}

// References to the fields of a plain struct.
template <class T>
auto fields_of(T& x) {
  constexpr size_t n = count_fields<std::remove_const_t<T>>();
  static_assert(n < 10, "one more case is needed");
  if constexpr (n == 0) {
    return std::tie();
  } else if constexpr (n == 1) {
    auto& [a] = x;
    return std::tie(a);
  } else if constexpr (n == 2) {
    auto& [a, b] = x;
    return std::tie(a, b);
  } else if constexpr (n == 3) {
    auto& [a, b, c] = x;
    return std::tie(a, b, c);
  } else if constexpr (n == 4) {
    auto& [a, b, c, d] = x;
    return std::tie(a, b, c, d);
  } else if constexpr (n == 5) {
    auto& [a, b, c, d, e] = x;
    return std::tie(a, b, c, d, e);
  } else if constexpr (n == 6) {
    auto& [a, b, c, d, e, f] = x;
    return std::tie(a, b, c, d, e, f);
  } else if constexpr (n == 7) {
    auto& [a, b, c, d, e, f, g] = x;
    return std::tie(a, b, c, d, e, f, g);
  } else if constexpr (n == 8) {
    auto& [a, b, c, d, e, f, g, h] = x;
    return std::tie(a, b, c, d, e, f, g, h);
  } else if constexpr (n == 9) {
    auto& [a, b, c, d, e, f, g, h, i] = x;
    return std::tie(a, b, c, d, e, f, g, h, i);
  }
}

template <class T>
bool same(const T& a, const T& b) {
  if constexpr (std::ranges::range<T>) {
    return std::ranges::equal(a, b, [](const auto& x, const auto& y) { return same(x, y); });
  } else if constexpr (std::equality_comparable<T>) {
    return a == b;
  } else {
    const auto equal = [](const auto& x, const auto& y) { return same(x, y); };
    const auto pairs = [&](const auto&... x) {
      return std::apply([&](const auto&... y) { return (equal(x, y) && ...); }, fields_of(b));
    };
    return std::apply(pairs, fields_of(a));
  }
}

}  // namespace farandole::check
