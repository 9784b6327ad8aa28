// SPDX-License-Identifier: Apache-2.0
// The backend for GPU memory without NCCL. It copies data through pinned host memory and uses a host backend. Large
// reductions and broadcasts are cut into slices, so that the copies overlap with the host's work.
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

  // `host` is a backend with the same members, and nothing else uses it. `ring` wakes the driver.
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
  // A whole part, or some of its elements.
  struct Slice {
    size_t part;
    size_t first = 0;     // index of the first element
    size_t elements = 0;  // 0 means the whole part
  };
  struct Staged {
    Slice slice;
    std::shared_ptr<PinnedMemory> input, output;
    uint64_t arrival = 0;  // the copy to the host ends when completions_.past() reaches this
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
  std::deque<Slice> slices_;    // slices not yet fetched
  std::deque<Staged> staged_;   // slices fetched but not yet delivered
  uint64_t fetched_ = 0;        // number of copies to the host so far
  Part moving_;                 // staged_.front() as a part for host_
  bool begun_ = false;          // true while host_ moves moving_
  GpuCompletions completions_;  // waits for copies to the host
};

}  // namespace farandole
