// SPDX-License-Identifier: Apache-2.0
// State of the process that functions of the C ABI share, and the conversion of exceptions to error codes.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <span>
#include <sstream>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "base/error.h"
#include "runtime/exit_latch.h"
#include "runtime/runtime.h"
#include "runtime/watchdog.h"

#define FARANDOLE_API extern "C" __attribute__((visibility("default")))

#include "base/abi.h"

namespace farandole {

// A call from farandole_prepare_call and its runtime, kept together so that one look-up finds both.
struct PreparedCall {
  // Submits this call, which must have exactly one tensor, and returns its handle. If `waits` is true, the call may
  // complete before this function returns; the function then returns 0.
  int64_t submit(uintptr_t input, uintptr_t output, bool waits) const {
    if (call.request.parts() > 1) {
      throw Error(ErrorCode::kInvalidArgument, "this call has several tensors");
    }
    Handle handle = 0;
    PreparedSubmission one{&call, {&input, 1}, {&output, 1}, {}, {&handle, 1}};
    if (!waits) {
      runtime->submit({&one, 1});
    } else if (runtime->call(one)) {
      return 0;
    }
    return handle;
  }

  std::shared_ptr<Runtime> runtime;
  CheckedCall call;
};

// State that outlives a runtime. It is never destroyed, because threads may use it during process exit.
struct Process {
  std::mutex mutex;
  std::unique_ptr<LocalEndpoint> endpoint;
  // In a forked child, this is the parent's runtime, of which only the topology is used.
  std::shared_ptr<Runtime> runtime;
  std::shared_ptr<ExitLatch> ended;  // opens when the last runtime is destroyed
  std::unique_ptr<Watchdog> init_limit;
  std::mutex prepared_mutex;
  std::unordered_map<int64_t, std::shared_ptr<const PreparedCall>> prepared;
  int64_t next_prepared = 1;
  std::atomic<bool> forked{false};
  std::vector<std::string> library_folders;
  std::mutex on_gpu_mutex;
  std::unordered_map<void*, std::shared_ptr<GpuDevice>> on_gpu;  // memory that callers must free
  StackSource stacks;
  ArenaPool arenas;

  Process();
};

inline Process& process() {
  static auto* instance = new Process;
  return *instance;
}

inline std::vector<std::string> folders_of(const char* text) {
  std::vector<std::string> folders;
  std::istringstream list(text);
  for (std::string folder; std::getline(list, folder, ':');) folders.push_back(folder);
  return folders;
}

// A fixed array, so that reporting an error does not allocate memory.
inline thread_local char last_error[16384];
inline thread_local ErrorCode last_code = ErrorCode::kOk;

inline int32_t set_error(ErrorCode code, const char* text) {
  size_t length = std::min(std::strlen(text), sizeof last_error - 1);
  const auto inside_character = [&] { return (text[length] & 0xC0) == 0x80; };
  while (length > 0 && inside_character()) --length;  // does not cut a UTF-8 character
  std::memcpy(last_error, text, length);
  last_error[length] = '\0';
  last_code = code;
  return static_cast<int32_t>(code);
}

inline Error forked_error() {
  std::lock_guard lock(process().mutex);
  const std::string parent = process().runtime
                                 ? "rank " + std::to_string(process().runtime->topology().rank)
                                 : std::string("a process that had imported farandole");
  return {
      ErrorCode::kShutdown,
      "this process was forked from " + parent +
          ", and only the rank's own process can make calls. Remedy: let a DataLoader worker "
          "return its data, and call farandole in the process that gets it; rank(), size() and "
          "the like also work in the worker. Start a process of a different world by subprocess"};
}

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

// Like translated(), but fails in a forked child. `body` returns a code or a count; void stands for FARANDOLE_OK.
template <class Body>
auto guarded(Body&& body) {
  return translated([&] {
    if (process().forked) throw forked_error();
    if constexpr (std::is_void_v<decltype(body())>) {
      body();
      return int32_t{FARANDOLE_OK};
    } else {
      return body();
    }
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

// True once XLA has called a handler. From then on, XLA's threads also make calls, without Python.
inline std::atomic<bool> xla_may_call{false};

inline Deadline deadline_in(double seconds) {
  constexpr double kLongest = 1e9;
  if (!(seconds < kLongest)) return Deadline::never();
  return Deadline::in(std::chrono::nanoseconds(static_cast<int64_t>(std::max(seconds, 0.0) * 1e9)));
}

// Returns the caller's array as a span. Throws if `count` is negative.
template <class T>
std::span<T> span_of(T* first, int32_t count) {
  if (count < 0) throw Error(ErrorCode::kInvalidArgument, "bad count " + std::to_string(count));
  return {first, static_cast<size_t>(count)};
}

// Returns the number of rows that fit into the caller's array.
inline size_t rows_in(int64_t capacity, size_t rows) {
  return std::min(rows, static_cast<size_t>(std::max<int64_t>(capacity, 0)));
}

inline std::shared_ptr<Runtime> runtime_if_any() {
  std::lock_guard lock(process().mutex);
  return process().runtime;
}

inline std::shared_ptr<Runtime> runtime() {
  std::lock_guard lock(process().mutex);
  if (!process().runtime) {
    throw Error(ErrorCode::kShutdown, "farandole has not been initialized: call init() first");
  }
  return process().runtime;
}

// Returns the calls with these numbers, up to the first unknown one. Shared, because shutdown() may clear the table.
inline std::vector<std::shared_ptr<const PreparedCall>> prepared_calls(
    std::span<const int64_t> numbers) {
  std::vector<std::shared_ptr<const PreparedCall>> known;
  known.reserve(numbers.size());
  std::lock_guard lock(process().prepared_mutex);
  for (int64_t number : numbers) {
    auto found = process().prepared.find(number);
    if (found == process().prepared.end()) break;
    known.push_back(found->second);
  }
  return known;
}

inline std::shared_ptr<const PreparedCall> prepared_call(int64_t number) {
  std::unique_lock lock(process().prepared_mutex);
  auto found = process().prepared.find(number);
  if (found == process().prepared.end()) {
    lock.unlock();
    runtime();  // throws a clearer error if there is no runtime
    throw Error(ErrorCode::kInvalidArgument,
                "this call was prepared before the last shutdown(), or has been forgotten");
  }
  return found->second;
}

}  // namespace farandole
