// SPDX-License-Identifier: Apache-2.0
#include "runtime/calls/handles.h"

#include <functional>
#include <limits>
#include <numeric>
#include <string>
#include <utility>

#include "lib/gpu/gpu_device.h"
#include "lib/os/futex.h"

namespace farandole {
namespace {

int64_t sum(const std::vector<int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), int64_t{0});
}

}  // namespace

void FreeMemory::operator()(std::byte* memory) const {
  if (device) {
    device->free(reinterpret_cast<uintptr_t>(memory), device->stream());
  } else {
    std::free(memory);
  }
}

OwnedMemory allocate(size_t bytes, const std::shared_ptr<GpuDevice>& device) {
  if (device) {
    const cuda::Address address = device->allocate(bytes, device->stream());
    return OwnedMemory(reinterpret_cast<std::byte*>(address), {device});
  }
  constexpr size_t kAlignment = 64;
  const size_t room = (bytes / kAlignment + 1) * kAlignment;  // never 0
  auto* memory = static_cast<std::byte*>(std::aligned_alloc(kAlignment, room));
  if (!memory) {
    throw Error(ErrorCode::kLibrary,
                "no memory for a result of " + std::to_string(bytes) + " bytes");
  }
  return OwnedMemory(memory, {nullptr});
}

std::vector<int64_t> rows_of(std::span<const int64_t> logged, const Signature& signature,
                             int members) {
  if (signature.traits().rows != Rows::kKept) return {logged.begin(), logged.end()};
  std::vector<int64_t> rows;
  for (int m = 0; m < members; ++m) rows.push_back(kept_rows(signature.rows(), m, members));
  return rows;
}

Outcome outcome_of(const Signature& signature, const std::vector<int64_t>& rows, int member,
                   int members, Dimensions shape, std::byte* output,
                   const std::shared_ptr<GpuDevice>& device) {
  Outcome outcome;
  outcome.shape = std::move(shape);
  outcome.output = output;
  auto own = static_cast<size_t>(member);
  switch (signature.traits().rows) {
    case Rows::kBrought:
      outcome.received = rows;
      outcome.shape[0] = sum(rows);
      break;
    case Rows::kKept: outcome.shape[0] = rows[own]; break;
    case Rows::kPairs:
      if (signature.traits().rooted()) {  // `rows` is indexed by receiver
        outcome.shape[0] = rows[own];
        break;
      }
      for (size_t at = own; at < rows.size(); at += static_cast<size_t>(members)) {
        outcome.received.push_back(rows[at]);
      }
      outcome.shape[0] = sum(outcome.received);
      break;
    case Rows::kNone: return outcome;
  }
  if (!outcome.output) {
    int64_t elements = std::accumulate(outcome.shape.begin(), outcome.shape.end(), int64_t{1},
                                       std::multiplies<>());
    outcome.owned = allocate(static_cast<size_t>(elements) * size_of(signature.dtype), device);
    outcome.output = outcome.owned.get();
  }
  return outcome;
}

Handles::Slot* Handles::find(Handle handle) {
  auto index = static_cast<uint64_t>(handle) & std::numeric_limits<uint32_t>::max();
  auto generation = static_cast<uint64_t>(handle) >> 32;
  if (index == 0 || index > slots_.size()) return nullptr;
  Slot& slot = slots_[index - 1];
  const bool ours = slot.generation == generation && slot.state != State::kFree && !slot.released;
  return ours ? &slot : nullptr;
}

Handles::Slot& Handles::slot_of(Handle handle) {
  if (Slot* slot = find(handle)) return *slot;
  throw Error(ErrorCode::kInvalidArgument,
              "unknown handle: it was released, for example by a wait, or was created before the "
              "last init()");
}

Outcome& Handles::outcome_of(Handle handle) {
  Slot& slot = slot_of(handle);
  if (slot.state == State::kDone || slot.state == State::kLaunched) return slot.outcome;
  throw Error(ErrorCode::kInvalidArgument, "this call is under way; wait for it first");
}

Handle Handles::create(uint32_t label, bool on_gpu) {
  // Shared by all runtimes of the process, so that handles of earlier runtimes are recognized as unknown.
  static std::atomic<uint32_t> generations{0};
  std::lock_guard lock(mutex_);
  if (free_.empty()) {
    slots_.emplace_back();
    free_.push_back(static_cast<uint32_t>(slots_.size()));
  }
  uint32_t index = free_.back();
  free_.pop_back();
  Slot& slot = slots_[index - 1];
  slot.state = State::kUnderWay;
  slot.released = false;
  slot.on_gpu = on_gpu;
  slot.label = label;
  slot.generation = generations.fetch_add(1, std::memory_order_relaxed) & 0x7fffffff;
  return static_cast<Handle>((uint64_t{slot.generation} << 32) | index);
}

uint32_t Handles::label_of(Handle handle) {
  std::lock_guard lock(mutex_);
  return slot_of(handle).label;
}

void Handles::free(Slot& slot, uint32_t index) {
  slot.state = State::kFree;
  std::destroy_at(&slot.outcome);  // cheaper than move-assigning an empty Outcome
  std::construct_at(&slot.outcome);
  free_.push_back(index);
}

void Handles::end(Handle handle, Outcome&& outcome) {
  auto index = static_cast<uint32_t>(handle);
  Slot& slot = slots_.at(index - 1);
  if (slot.state != State::kLaunched) {
    slot.outcome = std::move(outcome);
  } else {
    slot.outcome.past.reset();
    if (outcome.failure) slot.outcome.failure = std::move(outcome.failure);
  }
  slot.state = State::kDone;
  if (slot.released) free(slot, index);
}

void Handles::fail_all(const Failure& failure) {
  {
    std::lock_guard lock(mutex_);
    for (size_t i = 0; i < slots_.size(); ++i) {
      Slot& slot = slots_[i];
      if (slot.state != State::kUnderWay && slot.state != State::kLaunched) continue;
      slot.state = State::kDone;
      slot.outcome.failure = failure;
      if (slot.released) free(slot, static_cast<uint32_t>(i + 1));
    }
  }
  announce();
}

void Handles::announce() {
  finished_count_.fetch_add(1);
  if (sleepers_.load() == 0) return;
  futex_wake(finished_count_, std::numeric_limits<int>::max(), kFutexAnyBit);
}

bool Handles::done(Handle handle) {
  std::lock_guard lock(mutex_);
  return slot_of(handle).state != State::kUnderWay;
}

bool Handles::settled(Handle handle) {
  std::lock_guard lock(mutex_);
  return slot_of(handle).state == State::kDone;
}

bool Handles::unlaunched(Handle handle) {
  std::lock_guard lock(mutex_);
  auto index = static_cast<uint32_t>(handle);
  if (index == 0 || index > slots_.size()) return false;
  const Slot& slot = slots_[index - 1];
  return slot.on_gpu && slot.state == State::kUnderWay;
}

void Handles::launch(Handle handle, Outcome outcome) {
  {
    std::lock_guard lock(mutex_);
    Slot& slot = slots_.at(static_cast<uint32_t>(handle) - 1);
    slot.state = State::kLaunched;
    slot.outcome = std::move(outcome);
  }
  announce();
}

bool Handles::finished(std::span<const Handle> handles, size_t& ready, Failure& failure) {
  std::lock_guard lock(mutex_);
  while (ready < handles.size()) {
    Slot& slot = slot_of(handles[ready]);
    if (slot.state == State::kUnderWay) return false;
    if (slot.outcome.failure) {
      failure = slot.outcome.failure;
      return true;
    }
    ++ready;
  }
  return true;
}

OwnedMemory Handles::take(Handle handle) {
  std::lock_guard lock(mutex_);
  Outcome& outcome = outcome_of(handle);
  if (outcome.failure) throw Error(outcome.failure.code, outcome.failure.text);
  if (!outcome.owned) {
    throw Error(ErrorCode::kInvalidArgument,
                outcome.output ? "this result is in the caller's own memory, so it can't be taken"
                               : "this result was taken before, or the call has no result");
  }
  outcome.output = nullptr;
  return std::move(outcome.owned);
}

void Handles::let_go(Slot& slot, Handle handle) {
  slot.released = true;
  if (slot.state == State::kDone) free(slot, static_cast<uint32_t>(handle));
}

void Handles::release(Handle handle) {
  std::lock_guard lock(mutex_);
  let_go(slot_of(handle), handle);
}

void Handles::cancel(Handle handle) {
  std::lock_guard lock(mutex_);
  free(slot_of(handle), static_cast<uint32_t>(handle));
}

void Handles::release_all(std::span<const Handle> handles) {
  std::lock_guard lock(mutex_);
  for (Handle handle : handles) {
    if (Slot* slot = find(handle)) let_go(*slot, handle);
  }
}

bool Handles::wait(uint32_t ticket, Deadline deadline) {
  sleepers_.fetch_add(1);
  FutexResult result = futex_wait(finished_count_, ticket, kFutexAnyBit, deadline);
  sleepers_.fetch_sub(1);
  return result != FutexResult::kInterrupted;
}

}  // namespace farandole
