// SPDX-License-Identifier: Apache-2.0
// What every function of the C ABI passes through: the process's one runtime, exceptions to codes.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/error.h"
#include "runtime/departure.h"
#include "runtime/last_resort.h"
#include "runtime/runtime.h"

#define FARANDOLE_API extern "C" __attribute__((visibility("default")))

#include "base/abi.h"

namespace farandole {

// What farandole_tensor keeps, and for whom: one look at the table finds both.
struct Kept {
  std::shared_ptr<Runtime> runtime;
  Asked asked;
};

// All that outlives a runtime. Never destroyed: no order of static destructors to get wrong.
struct Process {
  std::mutex mutex;
  std::unique_ptr<Door> door;
  std::shared_ptr<Runtime> runtime;      // in a forked child: its parent's, for what it was
  std::shared_ptr<Departure> departure;  // of the runtime, or of the last one while others hold it
  std::unique_ptr<LastResort> init_limit;
  std::mutex kept_mutex;
  std::unordered_map<int64_t, std::shared_ptr<const Kept>> kept;
  int64_t next_kept = 1;
  std::atomic<bool> forked{false};
  std::vector<std::string> library_folders;
  std::mutex on_gpu_mutex;
  std::unordered_map<void*, std::shared_ptr<GpuDevice>> on_gpu;   // memory that was taken
  std::unordered_map<void*, std::shared_ptr<GpuWindow>> windows;  // by their memory
  StackSource stacks;
  ArenaPool arenas;

  Process();
};

inline Process& process() {
  static auto* instance = new Process;
  return *instance;
}

// Of fixed size: nothing to free when a thread ends, nothing that could fail.
inline thread_local char last_error[16384];
inline thread_local ErrorCode last_code = ErrorCode::kOk;

inline int32_t set_error(ErrorCode code, const char* text) {
  size_t length = std::min(std::strlen(text), sizeof last_error - 1);
  const auto inside_character = [&] { return (text[length] & 0xC0) == 0x80; };
  while (length > 0 && inside_character()) --length;  // UTF-8
  std::memcpy(last_error, text, length);
  last_error[length] = '\0';
  last_code = code;
  return static_cast<int32_t>(code);
}

// For a forked child: what is wrong, and the remedy.
inline Error forked_error() {
  std::lock_guard lock(process().mutex);
  const std::string parent = process().runtime
                                 ? "rank " + std::to_string(process().runtime->topology().rank)
                                 : std::string("one that had imported farandole");
  return {ErrorCode::kShutdown,
          "this process was forked from " + parent +
              " and can't take part itself: only the rank's own process may. Remedy: a DataLoader "
              "worker returns its data, and the loop that receives them calls farandole; rank(), "
              "size() and their kind work in it. A process that is to be a world of its own is "
              "started anew, by subprocess"};
}

// Exceptions to codes.
template <class Body>
auto translated(Body&& body) -> decltype(body()) {
  using Number = decltype(body());
  try {
    return body();
  } catch (const Error& error) {
    return static_cast<Number>(set_error(error.code(), error.what()));
  } catch (const std::exception& error) {
    return static_cast<Number>(set_error(ErrorCode::kInternal, error.what()));
  }
}

// Every entry runs through here: body() returns a code or a count.
template <class Body>
auto guarded(Body&& body) -> decltype(body()) {
  return translated([&]() -> decltype(body()) {
    if (process().forked) throw forked_error();
    return body();
  });
}

template <class Body>
auto negated(Body&& body) -> decltype(body()) {
  bool done = false;
  auto result = guarded([&]() -> decltype(body()) {
    auto value = body();
    done = true;
    return value;
  });
  return done ? result : -result;
}

inline Deadline deadline_in(double seconds) {
  constexpr double kLongest = 1e9;
  if (!(seconds < kLongest)) return Deadline::never();
  return Deadline::in(std::chrono::nanoseconds(static_cast<int64_t>(std::max(seconds, 0.0) * 1e9)));
}

// What a caller says is `count` long; nobody may say less than nothing.
template <class T>
std::span<T> span_of(T* first, int32_t count) {
  if (count < 0) throw Error(ErrorCode::kInvalidArgument, "a count of " + std::to_string(count));
  return {first, static_cast<size_t>(count)};
}

// Rows that fit where a caller has room for `capacity`.
inline size_t rows_in(int32_t capacity, size_t rows) {
  return std::min(rows, static_cast<size_t>(std::max(capacity, 0)));
}

// nullptr: there is none.
inline std::shared_ptr<Runtime> runtime_if_any() {
  std::lock_guard lock(process().mutex);
  return process().runtime;
}

inline std::shared_ptr<Runtime> runtime() {
  std::lock_guard lock(process().mutex);
  if (!process().runtime) {
    throw Error(ErrorCode::kShutdown, "farandole is not initialised; call init() first");
  }
  return process().runtime;
}

// shutdown() may clear the table meanwhile.
inline std::shared_ptr<const Kept> kept(int64_t tensor) {
  std::unique_lock lock(process().kept_mutex);
  auto found = process().kept.find(tensor);
  if (found == process().kept.end()) {
    lock.unlock();
    runtime();  // which tells what is missing before the tensor
    throw Error(ErrorCode::kInvalidArgument,
                "this tensor was prepared before the last shutdown(), or forgotten");
  }
  return found->second;
}

}  // namespace farandole
