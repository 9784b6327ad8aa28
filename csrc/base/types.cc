// SPDX-License-Identifier: Apache-2.0
#include "base/types.h"

#include <array>
#include <functional>
#include <numeric>

namespace farandole {
namespace {

struct DTypeRow {
  const char* name;
  size_t size;
};
constexpr std::array<DTypeRow, kDTypeCount> kDTypes = {{
    {"uint8", 1},
    {"int8", 1},
    {"uint16", 2},
    {"int16", 2},
    {"uint32", 4},
    {"int32", 4},
    {"uint64", 8},
    {"int64", 8},
    {"float16", 2},
    {"bfloat16", 2},
    {"float32", 4},
    {"float64", 8},
    {"bool", 1},
    {"complex64", 8},
    {"complex128", 16},
}};
constexpr std::array<const char*, kReduceOpCount> kReduceOps = {"Average", "Sum", "Adasum",
                                                                "Min",     "Max", "Product"};
constexpr std::array<const char*, kOpCount> kOps = {
    "allreduce", "broadcast", "allgather",       "reducescatter",     "alltoall",
    "barrier",   "join",      "add_process_set", "remove_process_set"};

template <class Table, class Enum>
const char* row(const Table& table, Enum value) {
  auto index = static_cast<size_t>(value);
  return index < table.size() ? table[index] : "unknown";
}

}  // namespace

size_t size_of(DType dtype) { return kDTypes.at(static_cast<size_t>(dtype)).size; }
const char* name_of(DType dtype) { return kDTypes.at(static_cast<size_t>(dtype)).name; }
const char* name_of(ReduceOp op) { return row(kReduceOps, op); }
const char* name_of(Op op) { return row(kOps, op); }

std::string text_of(std::span<const int64_t> shape) {
  std::string text = "(";
  for (size_t i = 0; i < shape.size(); ++i) {
    text += (i ? ", " : "") + (shape[i] < 0 ? "*" : std::to_string(shape[i]));
  }
  return text + (shape.size() == 1 ? ",)" : ")");
}

std::string text_of(const Place& place) {
  if (place.window == 0) return "none";
  return "byte " + std::to_string(place.offset) + " of window " + std::to_string(place.window) +
         " of " + std::to_string(place.window_bytes) + " bytes";
}

std::string text_of_ranks(const std::vector<Rank>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size();) {
    size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    text += (i ? ", " : "") + std::to_string(ranks[i]);
    if (last == i + 1) text += ", " + std::to_string(ranks[last]);
    if (last > i + 1) text += "-" + std::to_string(ranks[last]);
    i = last + 1;
  }
  return text;
}

int64_t Signature::elements() const {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

int64_t Signature::row_elements() const {
  if (shape.empty()) return 1;
  return std::accumulate(shape.begin() + 1, shape.end(), int64_t{1}, std::multiplies<>());
}

}  // namespace farandole
