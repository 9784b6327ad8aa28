// SPDX-License-Identifier: Apache-2.0
#include "lib/gpu/gpu_double/hardware.h"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

#include "lib/gpu/gpu_double/gpu_double.h"

namespace farandole::check {

// Never destroyed: its thread works until the process ends.
Hardware& Hardware::instance() {
  static auto* hardware = new Hardware;
  return *hardware;
}

Hardware::Hardware() : default_stream_(std::make_unique<CUstream_st>()) {
  std::thread([this] { work(); }).detach();
}

cuda::Stream Hardware::stream_of(cuda::Stream stream) const {
  constexpr uintptr_t kPerThread = 2;  // CUDA's numbers: 1 is the legacy default stream
  return reinterpret_cast<uintptr_t>(stream) > kPerThread ? stream : default_stream_.get();
}

cuda::Stream Hardware::add_stream(int device, bool blocking) {
  ++alive;
  const auto& added = *streams_.insert(std::make_unique<CUstream_st>()).first;
  added->device = device, added->blocking = blocking;
  return added.get();
}

namespace {

constexpr int kGlobal = 0, kThreadLocal = 1;  // CU_STREAM_CAPTURE_MODE_...; relaxed: 2
thread_local int capture_mode = kGlobal;

}  // namespace

int Hardware::unsafe() {
  int result = 0;
  for (const auto& stream : streams_) {
    const bool mine = stream->captor == std::this_thread::get_id();
    if (stream->capturing == 0 || capture_mode > kThreadLocal) continue;
    if (!mine && capture_mode == kThreadLocal) continue;
    stream->capturing = 2;
    result = kCaptureUnsupported;
  }
  return result;
}

cuda::Stream Hardware::captured_beside(cuda::Stream stream) const {
  if (stream_of(stream) != default_stream_.get()) return nullptr;
  for (const auto& other : streams_) {
    const bool here = other->device == current_device().value_or(other->device);
    if (here && other->blocking && other->capturing != 0) return other.get();
  }
  return nullptr;
}

int Hardware::unusable(cuda::Stream stream) {
  must_live(stream);
  const cuda::Stream captured = captured_beside(stream);
  if (!captured) return 0;
  captured->capturing = 2;
  return kCaptureImplicit;
}

void Hardware::must_live(cuda::Stream stream) const {
  if (stream_of(stream) != stream ||
      std::ranges::any_of(streams_, [&](const auto& owned) { return owned.get() == stream; })) {
    return;
  }
  std::fprintf(stderr, "GPU double: a stream is used after its end\n");
  std::abort();
}

// As in CUDA: what was queued still runs.
void Hardware::remove_stream(cuda::Stream stream) {
  --alive;
  auto found = std::ranges::find(streams_, stream, [](const auto& owned) { return owned.get(); });
  if (stream->queue.empty() && !stream->running) {
    if (favourite_ == stream) favourite_ = nullptr;
    streams_.erase(found);
  }
}

void Hardware::push(cuda::Stream stream, std::function<void()> run) {
  push(stream, [] { return true; }, std::move(run));
}

void Hardware::push(cuda::Stream stream, std::function<bool()> ready, std::function<void()> run) {
  stream_of(stream)->queue.push_back({std::move(ready), std::move(run)});
  changed();
}

std::optional<int> Hardware::device_of(cuda::Address address) const {
  auto at = devices_of_memory.upper_bound(address);
  if (at == devices_of_memory.begin()) return std::nullopt;
  --at;
  if (address >= at->first + std::max<size_t>(at->second.bytes, 1)) return std::nullopt;
  return at->second.device;
}

bool Hardware::is_pinned(cuda::Address address) const {
  auto at = pinned.upper_bound(address);
  return at != pinned.begin() && address < std::prev(at)->first + std::prev(at)->second;
}

int Hardware::next_result(const char* function) {
  auto found = faults.find(function);
  if (found == faults.end() || found->second.calls-- > 0) return 0;
  found->second.calls = 0;
  if (found->second.result < 0) raise(-found->second.result);
  return found->second.result;
}

void Hardware::work() {
  Lock lock(mutex_);
  for (;;) {
    if (advance(lock)) continue;
    condition_.wait_for(lock, std::chrono::milliseconds(1));
  }
}

// Runs one piece of work. It often stays with one stream while the others fall behind, and it often lets
// the host get ahead first.
bool Hardware::advance(Lock& lock) {
  std::vector<CUstream_st*> runnable;
  const auto look = [&](CUstream_st& stream) {
    if (!stream.queue.empty() && stream.queue.front().ready()) runnable.push_back(&stream);
  };
  look(*default_stream_);
  for (const auto& stream : streams_) look(*stream);
  if (runnable.empty()) return false;
  if (random.chance(0.2)) {
    const std::chrono::microseconds pause(random.below(50));
    lock.unlock();
    std::this_thread::sleep_for(pause);
    lock.lock();
    return true;
  }
  const bool stays = std::ranges::count(runnable, favourite_) > 0 && random.chance(0.8);
  if (!stays) favourite_ = runnable[random.below(runnable.size())];
  CUstream_st& stream = *favourite_;
  stream.running = true;
  Work work = std::move(stream.queue.front());
  stream.queue.pop_front();
  work.run();
  stream.running = false;
  changed();
  return true;
}

}  // namespace farandole::check

using namespace farandole;
using farandole::check::Hardware;

extern "C" void gpu_double_seed(uint64_t seed) {
  auto lock = Hardware::instance().lock();
  Hardware::instance().random = check::Random(seed);
}

extern "C" int gpu_double_gate(cuda::Stream stream) {
  auto& hardware = Hardware::instance();
  auto lock = hardware.lock();
  const int gate = hardware.next_gate++;
  hardware.push(stream, [&hardware, gate] { return hardware.open_gates.contains(gate); }, [] {});
  return gate;
}

extern "C" void gpu_double_open(int gate) {
  auto lock = Hardware::instance().lock();
  Hardware::instance().open_gates.insert(gate);
  Hardware::instance().changed();
}

extern "C" void gpu_double_call(cuda::Stream stream, void (*function)(void*), void* argument) {
  auto lock = Hardware::instance().lock();
  Hardware::instance().push(stream, [=] { function(argument); });
}

extern "C" void gpu_double_fail(const char* function, int calls, int result) {
  auto lock = Hardware::instance().lock();
  Hardware::instance().faults[function] = {calls, result};
}

extern "C" void gpu_double_heal() {
  auto lock = Hardware::instance().lock();
  Hardware::instance().faults.clear();
}

extern "C" void gpu_double_capture(cuda::Stream stream) {
  auto lock = Hardware::instance().lock();
  CUstream_st* const captured = Hardware::instance().stream_of(stream);
  captured->capturing = 1;
  captured->captor = std::this_thread::get_id();
}

extern "C" int gpu_double_end_capture(cuda::Stream stream) {
  auto lock = Hardware::instance().lock();
  return std::exchange(Hardware::instance().stream_of(stream)->capturing, 0) == 2
             ? check::kCaptureInvalidated
             : 0;
}

extern "C" int cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, check::capture_mode);
  return 0;
}

extern "C" int gpu_double_alive() {
  auto lock = Hardware::instance().lock();
  return Hardware::instance().alive;
}
