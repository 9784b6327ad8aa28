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

#define FIELDS(count, ...)        \
  if constexpr (n == count) {     \
    auto& [__VA_ARGS__] = x;      \
    return std::tie(__VA_ARGS__); \
  }

// References to the fields of a plain struct.
template <class T>
auto fields_of(T& x) {
  constexpr size_t n = count_fields<std::remove_const_t<T>>();
  static_assert(n < 10, "one more case is needed");
  if constexpr (n == 0) return std::tie();
  FIELDS(1, a)
  FIELDS(2, a, b)
  FIELDS(3, a, b, c)
  FIELDS(4, a, b, c, d)
  FIELDS(5, a, b, c, d, e)
  FIELDS(6, a, b, c, d, e, f)
  FIELDS(7, a, b, c, d, e, f, g)
  FIELDS(8, a, b, c, d, e, f, g, h)
  FIELDS(9, a, b, c, d, e, f, g, h, i)
}
#undef FIELDS

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
