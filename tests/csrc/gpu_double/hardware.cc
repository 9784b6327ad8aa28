// SPDX-License-Identifier: Apache-2.0
#include "gpu_double/hardware.h"

#include <algorithm>
#include <chrono>
#include <vector>

#include "gpu_double/gpu_double.h"

namespace farandole::check {

// Never destroyed: its thread works until the process ends.
Hardware& Hardware::instance() {
  static auto* hardware = new Hardware;
  return *hardware;
}

Hardware::Hardware() : default_stream_(std::make_unique<CUstream_st>()) {
  std::thread([this] { work(); }).detach();
}

cuda::Stream Hardware::stream_of(cuda::Stream stream) {
  constexpr uintptr_t kPerThread = 2;  // CUDA's numbers: 1 is the legacy default stream
  return reinterpret_cast<uintptr_t>(stream) > kPerThread ? stream : default_stream_.get();
}

cuda::Stream Hardware::add_stream(int device) {
  ++alive;
  const auto& added = *streams_.insert(std::make_unique<CUstream_st>()).first;
  added->device = device;
  return added.get();
}

bool Hardware::is_idle(int device) const {
  return std::ranges::none_of(streams_, [&](const auto& stream) {
    return stream->device == device && (!stream->queue.empty() || stream->running);
  });
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

int Hardware::next_result(const char* function) {
  auto found = faults.find(function);
  if (found == faults.end() || found->second.calls-- > 0) return 0;
  found->second.calls = 0;
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

extern "C" void gpu_double_capture(cuda::Stream stream, int capturing) {
  auto lock = Hardware::instance().lock();
  Hardware::instance().stream_of(stream)->capturing = capturing;
}

extern "C" int gpu_double_alive() {
  auto lock = Hardware::instance().lock();
  return Hardware::instance().alive;
}
