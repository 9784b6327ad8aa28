// SPDX-License-Identifier: Apache-2.0
#include "data/nccl/nccl_backend.h"

#include <cstring>
#include <set>
#include <utility>

#include "base/error.h"

namespace farandole {
NcclBackend::NcclBackend(const GpuMover& mover, NcclCommunicator::Setup setup)
    : GpuBackend(setup.device),
      mover_(mover),
      setup_(setup),
      api_(setup.api),
      plan_(setup.member, setup.members) {}

std::optional<std::string> NcclBackend::new_key() {
  if (setup_.member != 0 || std::exchange(has_key_, true)) return std::nullopt;
  nccl::UniqueId id;
  api_->check(api_->unique_id(&id), "ncclGetUniqueId");
  return std::string(id.bytes, sizeof id.bytes);
}

void NcclBackend::connect(const std::string& key) {
  nccl::UniqueId id;
  if (key.size() != sizeof id.bytes) {
    throw Error(ErrorCode::kInternal, "an NCCL key has " + std::to_string(key.size()) + " bytes");
  }
  std::memcpy(id.bytes, key.data(), sizeof id.bytes);
  communicator_ = std::make_unique<NcclCommunicator>(setup_, id);
}

void NcclBackend::begin(std::span<const Part> parts) {
  parts_ = parts;
  launched_ = false;
}

bool NcclBackend::ready() const {
  return communicator_ && (communicator_->ready() || communicator_->failed());
}

// Launches the unpack kernel only when the communicator is ready() again. NCCL's kernels enter the stream after
// launch() has returned, and the unpack kernel must follow them.
Progress NcclBackend::step() {
  if (!communicator_) return Progress::kWaiting;
  communicator_->check();
  if (!communicator_->ready()) return Progress::kWaiting;
  GpuDevice::Scope scope(*device_);
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

void NcclBackend::launch_pack() {
  const cuda::Stream stream = device_->stream();
  plan_.make(parts_, 0);
  const size_t tables = plan_.pack.bytes() + plan_.unpack.bytes();
  const size_t bytes = plan_.scratch_bytes() + tables;
  scratch_ = bytes > 0 ? device_->allocate(bytes, stream) : 0;
  plan_.make(parts_, scratch_);
  table_ = scratch_ + plan_.scratch_bytes();
  wait_for_inputs();
  if (tables > 0) upload();
  mover_.launch(plan_.pack, table_, stream);
}

// Copies both tables to the device together, from pinned memory that is kept until the bucket is done.
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

// Frees the scratch memory in stream order, and therefore after the bucket's work.
void NcclBackend::abort() {
  if (communicator_) communicator_->abort();
  device_->free(std::exchange(scratch_, 0), device_->stream());
  parts_ = {};
}

}  // namespace farandole
