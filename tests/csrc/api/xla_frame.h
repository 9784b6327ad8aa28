// SPDX-License-Identifier: Apache-2.0
// A call as XLA makes it, of two tensors, and what XLA hears of it. For tests of the handlers.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "lib/xla/xla_ffi.h"
#include "runtime/runtime_ranks.h"

namespace farandole::check {

inline std::string told;  // by the handler, through XLA's function
inline xla::Code told_code;

inline xla::Error* create_error(xla::ErrorArguments* arguments) {
  told = arguments->message;
  told_code = arguments->code;
  return reinterpret_cast<xla::Error*>(&told);
}

inline void* stream_now = nullptr;  // in which XLA's program runs; nullptr: XLA refuses to tell
inline int destroyed = 0;           // errors of XLA's

inline xla::Error* give_stream(xla::StreamArguments* arguments) {
  arguments->stream = stream_now;
  return stream_now ? nullptr : reinterpret_cast<xla::Error*>(&destroyed);
}

// One call in a compiled program, with a token before its tensors.
struct Frame {
  void* (*handler)(void*) = farandole_xla_collective;
  std::vector<int64_t> shape;
  Floats first, second, results[2];
  xla::Api api{.size = sizeof api,
               .extensions = nullptr,
               .version = {sizeof(xla::Version), nullptr, 0, 1},
               .internal = nullptr,
               .create_error = create_error,
               .message_of = nullptr,
               .destroy_error = [](xla::DestroyArguments*) { ++destroyed; },
               .register_handler = nullptr,
               .stream_of = give_stream,
               .not_ours = {},
               .ordinal_of = [](xla::OrdinalArguments* arguments) -> xla::Error* {
                 arguments->ordinal = 0;
                 return nullptr;
               }};
  xla::Buffer token{sizeof token, nullptr, xla::kToken, nullptr, 0, nullptr};
  std::vector<xla::Buffer> tensors, outputs;
  std::vector<int> kinds = std::vector<int>(3, xla::kBuffer);
  std::vector<void*> arguments, rets;
  std::vector<int32_t> head{FARANDOLE_ALLREDUCE, FARANDOLE_SUM, -1, 0, 0};
  std::vector<int32_t> dtypes{FARANDOLE_FLOAT32, FARANDOLE_FLOAT32}, members{0};
  std::vector<double> factors{3.0, 1.0};
  std::string name = "of a program";
  xla::Array numbers[4];
  xla::Text text{}, labels[5];
  int attribute_kinds[5] = {xla::kArrayAttribute, xla::kArrayAttribute, xla::kArrayAttribute,
                            xla::kArrayAttribute, xla::kStringAttribute};
  xla::Text* names[5];
  void* values[5];
  xla::CallFrame frame{};

  explicit Frame(size_t n)
      : shape{static_cast<int64_t>(n)}, first(values_of(0, n)), second(values_of(1, n)) {
    for (Floats& result : results) result.resize(n);
  }

  void build() {
    const auto buffer = [&](Floats& data) {
      return xla::Buffer{sizeof(xla::Buffer), nullptr, 11, data.data(), 1, shape.data()};
    };
    tensors = {buffer(first), buffer(second)};
    outputs = {buffer(results[0]), buffer(results[1])};
    arguments = {&token, &tensors[0], &tensors[1]};
    rets = {&token, &outputs[0], &outputs[1]};
    numbers[0] = {xla::kInt32, head.size(), head.data()};
    numbers[1] = {xla::kInt32, dtypes.size(), dtypes.data()};
    numbers[2] = {xla::kInt32, members.size(), members.data()};
    numbers[3] = {xla::kFloat64, factors.size(), factors.data()};
    text = {name.data(), name.size()};
    const char* words[] = {"call", "dtypes", "members", "factors", "name"};
    for (int i = 0; i < 5; ++i) {
      labels[i] = {words[i], std::strlen(words[i])};
      names[i] = &labels[i];
      values[i] = i < 4 ? static_cast<void*>(&numbers[i]) : &text;
    }
    frame.size = sizeof frame;
    frame.api = &api;
    frame.stage = xla::kExecuteStage;
    frame.arguments = {sizeof(xla::Values), nullptr, 3, kinds.data(), arguments.data()};
    frame.results = {sizeof(xla::Values), nullptr, 3, kinds.data(), rets.data()};
    frame.attributes = {sizeof(xla::Attributes), nullptr, 5, attribute_kinds, names, values};
  }
  // Empty: it has no error.
  std::string run() {
    build();
    return call();
  }
  std::string call() {
    told.clear();
    const bool failed = handler(&frame) != nullptr;
    CHECK_EQ(failed, !told.empty());
    return told;
  }
};

inline Floats tripled(Floats values) {
  for (float& value : values) value *= 3;
  return values;
}

}  // namespace farandole::check
