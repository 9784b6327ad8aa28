// SPDX-License-Identifier: Apache-2.0
#include "data/gpu/gpu_staged_backend.h"

#include <algorithm>
#include <utility>

#include "data/backend/backend.h"

namespace farandole {

GpuStagedBackend::GpuStagedBackend(std::shared_ptr<GpuDevice> device, std::unique_ptr<Backend> host,
                                   int member, int members, std::function<void()> ring)
    : GpuBackend(std::move(device)),
      host_(std::move(host)),
      member_(member),
      members_(members),
      completions_(std::move(ring)) {}

void GpuStagedBackend::begin(std::span<const Part> parts) {
  parts_ = parts;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].produced) parts[i].produced->make_wait(device_->stream());
    cut(parts[i], i);
  }
}

// Cuts a part into slices. The cuts depend only on the part's shape, so all members make the same slices.
void GpuStagedBackend::cut(const Part& part, size_t index) {
  const auto elements = static_cast<size_t>(part.signature.elements());
  const size_t step = kPieceBytes / size_of(part.signature.dtype);
  if (part.signature.traits().rows != Rows::kNone || elements <= step)
    return slices_.push_back({index});
  for (size_t at = 0; at < elements; at += step) {
    slices_.push_back({index, at, std::min(step, elements - at)});
  }
}

Progress GpuStagedBackend::step() {
  check();
  GpuDevice::Scope scope(*device_);
  bool moved = fetch_next();
  moved |= move();
  if (!slices_.empty() || !staged_.empty()) return moved ? Progress::kMoved : Progress::kWaiting;
  return finish();
}

bool GpuStagedBackend::ready() const {
  const bool may_fetch = !slices_.empty() && staged_.size() < kSlicesAhead;
  const bool may_move = begun_ ? host_->ready() : has_arrived();
  const bool over = slices_.empty() && staged_.empty();
  return may_fetch || may_move || over || failed();
}

// Starts copying the next slice to the host. When the slice has arrived, completions_ wakes the driver.
bool GpuStagedBackend::fetch_next() {
  if (slices_.empty() || staged_.size() >= kSlicesAhead) return false;
  Staged staged;
  staged.slice = slices_.front();
  slices_.pop_front();
  const Part& part = parts_[staged.slice.part];
  const size_t size = size_of(part.signature.dtype);
  const size_t in =
      staged.slice.elements > 0 ? staged.slice.elements * size : part.signature.bytes();
  const size_t out = staged.slice.elements > 0 ? staged.slice.elements * size
                                               : PartLayout(part, members_).output_bytes(member_);
  if (part.input) {
    staged.input = device_->pinned(in);
    copy(staged.input->data(), part.input + staged.slice.first * size, in);
  }
  if (part.output) staged.output = device_->pinned(out);
  staged.arrival = ++fetched_;
  completions_.watch(device_->recorded(device_->stream()));
  staged_.push_back(std::move(staged));
  return true;
}

bool GpuStagedBackend::has_arrived() const {
  return !staged_.empty() && staged_.front().arrival <= completions_.past();
}

bool GpuStagedBackend::move() {
  if (!begun_) {
    if (!has_arrived()) return false;
    moving_ = host_part(staged_.front());
    host_->begin({&moving_, 1});
    begun_ = true;
  }
  const Progress progress = host_->step();
  if (progress == Progress::kFinished) {
    begun_ = false;
    deliver(staged_.front());
    staged_.pop_front();
  }
  return progress != Progress::kWaiting;
}

Part GpuStagedBackend::host_part(const Staged& staged) const {
  Part part = parts_[staged.slice.part];
  part.produced = nullptr;
  part.signature.device = kCpuDevice;
  part.input = staged.input ? staged.input->data() : nullptr;
  part.output = staged.output ? staged.output->data() : nullptr;
  if (staged.slice.elements > 0) {
    part.signature.shape = {static_cast<int64_t>(staged.slice.elements)};
  }
  return part;
}

void GpuStagedBackend::deliver(const Staged& staged) {
  const Part& part = parts_[staged.slice.part];
  if (!part.output) return;
  const size_t size = size_of(part.signature.dtype);
  const size_t bytes = staged.slice.elements > 0 ? staged.slice.elements * size
                                                 : PartLayout(part, members_).output_bytes(member_);
  copy(part.output + staged.slice.first * size, staged.output->data(), bytes);
  work_.keep.push_back(staged.output);
}

void GpuStagedBackend::copy(std::byte* target, const std::byte* source, size_t bytes) {
  if (bytes == 0) return;
  device_->api().check(
      device_->api().copy_async(reinterpret_cast<uintptr_t>(target),
                                reinterpret_cast<uintptr_t>(source), bytes, device_->stream()),
      "cuMemcpyAsync between a GPU and pinned memory");
}

void GpuStagedBackend::abort() {
  host_->abort();
  slices_.clear();
  staged_.clear();
  parts_ = {};
}

}  // namespace farandole
