// SPDX-License-Identifier: Apache-2.0
// Reports and log entries of every kind with random content.
#pragma once

#include <string>
#include <type_traits>
#include <variant>
#include <vector>

#include "control/protocol/fields.h"
#include "control/protocol/message.h"
#include "random.h"

namespace farandole {

using check::Random;

template <class E>
constexpr int kValuesOf = 0;
template <>
constexpr int kValuesOf<Op> = kOpCount;
template <>
constexpr int kValuesOf<ReduceOp> = kReduceOpCount;
template <>
constexpr int kValuesOf<DType> = kDTypeCount;
template <>
constexpr int kValuesOf<BackendKind> = kBackendKindCount;
template <>
constexpr int kValuesOf<ErrorCode> = 9;

// `storage` holds the bytes of views.
template <class T>
void fill(Random& random, T& x, ByteString& storage) {
  if constexpr (std::is_same_v<T, bool>) {
    x = random.chance(0.5);
  } else if constexpr (std::is_enum_v<T> && !std::is_same_v<T, std::byte>) {
    x = static_cast<T>(random.below(kValuesOf<T>));
  } else if constexpr (std::is_floating_point_v<T>) {
    x = (random.unit() - 0.5) * 1e9;
  } else if constexpr (std::is_integral_v<T> || std::is_same_v<T, std::byte>) {
    x = static_cast<T>(random.next());
  } else if constexpr (std::is_same_v<T, ByteView>) {
    storage.resize(random.below(kTinyBytes + 1));
    for (std::byte& byte : storage) fill(random, byte, storage);
    x = storage;
  } else if constexpr (std::is_same_v<T, Dimensions>) {
    std::vector<int64_t> lengths;
    fill(random, lengths, storage);
    x = lengths;
  } else if constexpr (std::is_same_v<T, IdRuns>) {
    for (size_t runs = random.below(5); runs > 0; --runs) {
      x.add({1 + static_cast<uint32_t>(random.below(1 << 20)),
             1 + static_cast<uint32_t>(random.below(1000))});
    }
  } else if constexpr (requires { x.resize(1); }) {
    constexpr bool kText = sizeof(typename T::value_type) == 1;
    x.resize(random.below(kText ? 100 : 6));
    for (auto& item : x) fill(random, item, storage);
  } else {
    std::apply([&](auto&... fields) { (fill(random, fields, storage), ...); }, check::fields_of(x));
  }
}

// The `kind`-th alternative.
template <class Message, size_t I = 0>
Message random_message(Random& random, size_t kind, ByteString& storage) {
  if constexpr (I + 1 < std::variant_size_v<Message>) {
    if (kind > I) return random_message<Message, I + 1>(random, kind, storage);
  }
  std::variant_alternative_t<I, Message> made;
  fill(random, made, storage);
  if constexpr (std::is_same_v<decltype(made), Ready>) {  // it sends either
    if (random.chance(0.5)) made.id = 0;
    if (made.id != 0) made.request = {};
    made.contribution.payload = storage;
    for (Contribution& one : made.more) one.payload = storage;
  }
  return made;
}

// The payload of a Ready or Post is a view: `storage` holds the bytes.
inline Report random_report(Random& random, size_t kind, ByteString& storage) {
  return random_message<Report>(random, kind, storage);
}
inline Entry random_entry(Random& random, size_t kind) {
  ByteString storage;
  return random_message<Entry>(random, kind, storage);
}

}  // namespace farandole
