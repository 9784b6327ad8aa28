// SPDX-License-Identifier: Apache-2.0
// See nccl_backend.h. Used by the launch lane (data/gpu/gpu_lane); the driver only.
#include "data/nccl/nccl_backend.h"

#include <cstring>
#include <set>
#include <utility>

#include "base/error.h"

namespace farandole {
namespace {

constexpr uint32_t kKey = 0;  // a step's name, where others have the number of a window

}  // namespace

NcclBackend::NcclBackend(const GpuMover& mover, const GpuWindows& windows, SetId set,
                         NcclCommunicator::Setup setup, bool plain_sums)
    : GpuBackend(setup.device),
      mover_(mover),
      windows_(windows),
      set_(set),
      setup_(setup),
      api_(setup.api),
      plan_(setup.member, setup.members, &windows, plain_sums) {}

std::optional<Backend::Step> NcclBackend::wants_step() {
  if (!communicator_)
    return requested_.insert(kKey).second ? std::optional(new_key()) : std::nullopt;
  for (const uint32_t window : communicator_->closed_windows()) {
    if (requested_.insert(window).second) return Step{std::to_string(window)};
  }
  return std::nullopt;
}

Backend::Step NcclBackend::new_key() const {
  Step key{std::to_string(kKey)};
  if (setup_.member == 0) {
    nccl::UniqueId id;
    api_->check(api_->unique_id(&id), "ncclGetUniqueId");
    key.bytes.assign(id.bytes, sizeof id.bytes);
  }
  return key;
}

void NcclBackend::set_up(const Step& step) {
  if (communicator_) {
    const auto window = static_cast<uint32_t>(std::stoul(step.name));
    communicator_->forget(window);
    requested_.erase(window);
    return;
  }
  nccl::UniqueId id;
  if (step.bytes.size() != sizeof id.bytes) {
    throw Error(ErrorCode::kInternal,
                "an NCCL key of " + std::to_string(step.bytes.size()) + " bytes");
  }
  std::memcpy(id.bytes, step.bytes.data(), sizeof id.bytes);
  communicator_ = std::make_unique<NcclCommunicator>(setup_, id);
}

void NcclBackend::connect(nccl::Comm part) {
  communicator_ = std::make_unique<NcclCommunicator>(setup_, part);
}

void NcclBackend::begin(std::span<const Part> parts) {
  parts_ = parts;
  known_ = launched_ = false;
}

bool NcclBackend::ready() const {
  return communicator_ && (communicator_->ready() || communicator_->failed());
}

// The host waits for nothing but the communicator: NCCL's kernels come into the stream later, from its thread, and what
// must follow them waits for ready().
Progress NcclBackend::step() {
  if (!communicator_) return Progress::kWaiting;
  communicator_->check();
  if (!communicator_->ready()) return Progress::kWaiting;
  GpuDevice::Scope scope(*device_);
  if (!known_) {
    look_up_windows();
    known_ = true;
    if (!communicator_->ready()) return Progress::kMoved;
  }
  if (!launched_) {
    launch_pack();
    communicator_->launch(plan_.calls);
    launched_ = true;
    if (!communicator_->ready()) return Progress::kMoved;
  }
  mover_.launch(plan_.unpack, table_ + plan_.pack.bytes(), device_->stream());
  device_->free(std::exchange(scratch_, 0), device_->stream());
  return finish();
}

// An agreed point of the log: registering may be collective.
void NcclBackend::look_up_windows() {
  bases_.clear();
  std::vector<std::shared_ptr<GpuWindow>> fresh;
  for (const Part& part : parts_) {
    const uint32_t number = part.signature.window_range.window;
    if (!api_->registers_memory() || !may_be_placed(part) || bases_.contains(number)) continue;
    const std::shared_ptr<GpuWindow> window = windows_.find(set_, number);
    if (!window) {
      throw Error(ErrorCode::kInvalidArgument,
                  "window " + std::to_string(number) +
                      " was closed on this rank while others reduce tensors in it");
    }
    bases_[number] = window->address();
    if (!communicator_->knows(number)) fresh.push_back(window);
  }
  if (!fresh.empty()) communicator_->know(fresh);
}

void NcclBackend::launch_pack() {
  const cuda::Stream stream = device_->stream();
  plan_.make(parts_, 0, bases_);
  const size_t tables = plan_.pack.bytes() + plan_.unpack.bytes();
  const size_t bytes = plan_.scratch_bytes() + tables;
  scratch_ = bytes > 0 ? device_->allocate(bytes, stream) : 0;
  plan_.make(parts_, scratch_, bases_);
  table_ = scratch_ + plan_.scratch_bytes();
  wait_for_inputs();
  if (tables > 0) upload();
  mover_.launch(plan_.pack, table_, stream);
}

// Both tables in one copy, from pinned memory that lives until the bucket is done.
void NcclBackend::upload() {
  const size_t first = plan_.pack.bytes(), second = plan_.unpack.bytes();
  auto pinned = device_->pinned(first + second);
  if (first > 0) std::memcpy(pinned->data(), plan_.pack.chunks().data(), first);
  if (second > 0) std::memcpy(pinned->data() + first, plan_.unpack.chunks().data(), second);
  const auto source = reinterpret_cast<uintptr_t>(pinned->data());
  device_->api().check(device_->api().copy_async(table_, source, first + second, device_->stream()),
                       "cuMemcpyAsync of the segment table");
  work_.keep = {std::move(pinned)};
}

void NcclBackend::wait_for_inputs() {
  std::set<const GpuEvent*> seen;
  for (const Part& part : parts_) {
    if (part.produced && seen.insert(part.produced.get()).second) {
      part.produced->make_wait(device_->stream());
    }
  }
}

// Scratch memory of a bucket that was cut short goes back in the order of our stream.
void NcclBackend::abort() {
  if (communicator_) communicator_->abort();
  device_->free(std::exchange(scratch_, 0), device_->stream());
  parts_ = {};
}

}  // namespace farandole
