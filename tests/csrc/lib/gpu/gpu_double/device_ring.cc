// SPDX-License-Identifier: Apache-2.0
#include "lib/gpu/gpu_double/device_ring.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/kernels_reference.h"

namespace farandole::check::device {
namespace {

const std::map<std::string, DType> kTypes = {{"i8", DType::kInt8},     {"u8", DType::kUInt8},
                                             {"i32", DType::kInt32},   {"u32", DType::kUInt32},
                                             {"i64", DType::kInt64},   {"u64", DType::kUInt64},
                                             {"f16", DType::kFloat16}, {"f32", DType::kFloat32},
                                             {"f64", DType::kFloat64}, {"bf16", DType::kBFloat16}};

DType signed_type(DType type) {
  switch (type) {
    case DType::kUInt8: return DType::kInt8;
    case DType::kUInt32: return DType::kInt32;
    case DType::kUInt64: return DType::kInt64;
    default: return type;
  }
}

double value_of(DType type, uint64_t bits) {
  switch (type) {
    case DType::kFloat64: return std::bit_cast<double>(bits);
    case DType::kFloat32: return std::bit_cast<float>(static_cast<uint32_t>(bits));
    case DType::kFloat16:
      return reference::SmallFloat<10, -14>::decode(static_cast<uint16_t>(bits));
    case DType::kBFloat16:
      return reference::SmallFloat<7, -126>::decode(static_cast<uint16_t>(bits));
    default: return static_cast<double>(static_cast<int64_t>(bits));
  }
}

uint64_t load(const uint64_t* counter) {
  return std::atomic_ref(*const_cast<uint64_t*>(counter)).load(std::memory_order_acquire);
}
void store(uint64_t* counter, uint64_t value) {
  std::atomic_ref(*counter).store(value, std::memory_order_release);
}

uint64_t rounded_up(uint64_t step, uint64_t multiple) {
  return (step + multiple - 1) / multiple * multiple;
}

}  // namespace

Function::Function(const std::string& name) {
  std::vector<std::string> parts;
  for (size_t at = 0; at <= name.size();) {
    const size_t end = std::min(name.find('_', at), name.size());
    parts.push_back(name.substr(at, end - at));
    at = end + 1;
  }
  what = parts[0];
  const bool reduces = parts.size() >= 3 && kTypes.contains(parts[2]);
  if (reduces) operation = parts[1], type = parts[2];
  is_simple_ring = parts.size() == 1 || name.ends_with("RING_SIMPLE");
}

// What the scale says depends on the operation: Min or Max and the sign of integers, a weight, a divisor and the sign.
Reduction::Reduction(const Function& function, uint64_t scale) {
  if (function.type.empty()) return;
  type_ = kTypes.at(function.type);
  size_ = size_of(type_);
  if (function.operation == "Prod") op_ = ReduceOp::kProduct;
  if (function.operation == "MinMax") {
    const bool is_float = traits_of(type_).is_float();
    const bool max = (scale & 1) != 0;
    const bool top = (scale >> (size_ * 8 - 1) & 1) != 0;
    if (!is_float && max != top) type_ = signed_type(type_);
    op_ = max ? ReduceOp::kMax : ReduceOp::kMin;
  }
  if (function.operation == "PreMulSum") weight_ = value_of(type_, scale);
  if (function.operation == "SumPostDiv") {
    divisor_ = static_cast<int>(scale >> 1);
    if (scale & 1) type_ = signed_type(type_);
  }
}

void Reduction::apply(std::byte* out, const std::byte* input, const std::byte* other, size_t count,
                      bool last) const {
  if (count == 0) return;
  std::vector<std::byte> scaled;
  if (weight_ != 1.0) {
    scaled.resize(count * size_);
    const void* const inputs[] = {input};
    kernels::reduce(type_, ReduceOp::kSum, scaled.data(), inputs, 1, count, {weight_, 1.0, 1});
    input = scaled.data();
  }
  const void* const inputs[] = {input, other};
  const int divisor = last ? divisor_ : 1;
  if (!other && divisor == 1) {
    std::memmove(out, input, count * size_);
  } else {
    std::vector<std::byte> result(count * size_);  // `out` may be a part of an input
    kernels::reduce(type_, op_, result.data(), inputs, other ? 2 : 1, count, {1.0, 1.0, divisor});
    std::memcpy(out, result.data(), result.size());
  }
}

Link::Link(const Communicator& communicator, Connection* from, Connection* to, Steps steps,
           int step_bytes, const Reduction* reduction)
    : communicator_(communicator),
      from_(from),
      to_(to),
      steps_(steps),
      step_elements_(static_cast<size_t>(step_bytes) / reduction->size()),
      reduction_(reduction) {
  const auto multiple = static_cast<uint64_t>(steps_.slices * steps_.each);
  if (from_) {
    received_ = rounded_up(from_->step, multiple);
    store(from_->head, received_);
  }
  if (to_) sent_ = rounded_up(to_->step, multiple);
}

Link::~Link() {
  if (from_) from_->step = received_;
  if (to_) to_->step = sent_;
}

void Link::await(const uint64_t* counter, uint64_t wanted) const {
  device::await([&] { return load(counter) >= wanted; }, communicator_.abort);
}

std::byte* Link::slot(const Connection& connection, uint64_t step) const {
  std::byte* const buffer = connection.buffers[kSimple];
  const Slot* const told = connection.slots ? &connection.slots[step % kSteps] : nullptr;
  if (told && told->mode == kAtOffset) return buffer + told->offset;
  return buffer + step % kSteps * static_cast<size_t>(connection.step_bytes);
}

void Link::move(const std::byte* input, bool receives, std::byte* output, bool sends, size_t count,
                bool last) {
  const size_t size = reduction_->size();
  const auto each = static_cast<uint64_t>(steps_.each);
  const auto slices = static_cast<size_t>(steps_.slices);
  const size_t even = (count + 16 * slices - 1) / (16 * slices) * 16;
  size_t slice = std::max(even, step_elements_ * each / 32);
  size_t done = 0;
  for (size_t i = 0; i < slices; ++i) {
    slice = std::min(slice, count - done);
    if (receives) await(from_->tail, received_ + each);
    if (sends) {
      await(to_->head, sent_ + each - std::min<uint64_t>(kSteps, sent_ + each));
      if (to_->slots) to_->slots[sent_ % kSteps].bytes = static_cast<int64_t>(slice * size);
    }
    if (slice > 0) {
      const std::byte* const other = receives ? slot(*from_, received_) : nullptr;
      std::byte* const sent = sends ? slot(*to_, sent_) : nullptr;
      std::byte* const kept = output ? output + done * size : sent;
      if (input) {
        reduction_->apply(kept, input + done * size, other, slice, last);
      } else {
        std::memcpy(kept, other, slice * size);
      }
      if (sent && sent != kept) std::memcpy(sent, kept, slice * size);
    }
    if (receives) store(from_->head, received_ += each);
    if (sends) store(to_->tail, sent_ += each);
    done += slice;
  }
}

}  // namespace farandole::check::device
