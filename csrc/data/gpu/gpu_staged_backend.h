// SPDX-License-Identifier: Apache-2.0
// The backend for GPU memory without NCCL: uses pinned host memory and a host backend. Cuts large reductions and
// broadcasts into slices, so that copies and the host's work overlap.
#pragma once

#include <deque>
#include <functional>
#include <memory>

#include "data/backend/backend.h"
#include "data/gpu/gpu_backend.h"
#include "data/gpu/gpu_completions.h"

namespace farandole {

class GpuStagedBackend final : public GpuBackend {
 public:
  static constexpr size_t kPieceBytes = 4 << 20;
  static constexpr size_t kSlicesAhead = 3;

  // `host`: a backend of the same members that nothing else uses. `ring` wakes the driver.
  GpuStagedBackend(std::shared_ptr<GpuDevice> device, std::unique_ptr<Backend> host, int member,
                   int members, std::function<void()> ring);

  void begin(std::span<const Part> parts) override;
  Progress step() override;
  bool ready() const override;
  Deadline look_again() const override { return begun_ ? host_->look_again() : Deadline::never(); }
  void abort() override;
  void check() const override { completions_.check(); }
  bool failed() const override { return completions_.failed(); }
  void finished() override {}

 private:
  // A part, or some of its elements.
  struct Slice {
    size_t part;
    size_t first = 0;     // element
    size_t elements = 0;  // 0: the whole part
  };
  struct Staged {
    Slice slice;
    std::shared_ptr<PinnedMemory> input, output;
    uint64_t arrival = 0;  // the copy to the host ends when completions_.past() has this value
  };

  void cut(const Part& part, size_t index);
  bool fetch_next();
  bool has_arrived() const;
  bool move();
  void deliver(const Staged& staged);
  Part host_part(const Staged& staged) const;
  void copy(std::byte* target, const std::byte* source, size_t bytes);

  const std::unique_ptr<Backend> host_;
  const int member_;
  const int members_;
  std::deque<Slice> slices_;    // not yet fetched
  std::deque<Staged> staged_;   // fetched, not yet delivered
  uint64_t fetched_ = 0;        // copies to the host so far
  Part moving_;                 // staged_.front() as a part for host_
  bool begun_ = false;          // true: host_ is moving moving_
  GpuCompletions completions_;  // for copies to the host
};

}  // namespace farandole
