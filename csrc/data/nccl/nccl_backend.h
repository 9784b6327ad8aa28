// SPDX-License-Identifier: Apache-2.0
// Collectives on GPUs by NCCL, everything in the order of our stream.
#pragma once

#include <memory>
#include <optional>
#include <set>

#include "data/gpu/gpu_backend.h"
#include "data/gpu/gpu_mover.h"
#include "data/nccl/nccl_communicator.h"
#include "data/nccl/nccl_schedule.h"

namespace farandole {

class NcclBackend final : public GpuBackend {
 public:
  // `mover` and `windows` are the device's and outlive the backend. `plain_sums`: as NcclSchedule's.
  NcclBackend(const GpuMover& mover, const GpuWindows& windows, SetId set,
              NcclCommunicator::Setup setup, bool plain_sums);

  void begin(std::span<const Part> parts) override;
  Progress step() override;
  bool ready() const override;
  void abort() override;
  void check() const override {
    if (communicator_) communicator_->check();
  }
  bool failed() const override { return communicator_ && communicator_->failed(); }
  void finished() override { communicator_->finished(); }
  // First it wants a key from the lowest member, by which all find each other (connect() replaces this where the
  // communicator is split off another). Later it wants to forget windows that their owners have closed: all members do so
  // at one point of the log, because NCCL places windows by what is registered.
  std::optional<Step> wants_step() override;
  void set_up(const Step& step) override;
  void connect(nccl::Comm part);
  bool is_set_up() const override { return communicator_ != nullptr; }
  // As NcclCommunicator's.
  void split(int member) { communicator_->split(member); }
  nccl::Comm take_part() { return communicator_->take_part(); }

 private:
  Step new_key() const;
  void look_up_windows();
  void wait_for_inputs();
  void launch_pack();
  void upload();

  const GpuMover& mover_;
  const GpuWindows& windows_;
  const SetId set_;
  const NcclCommunicator::Setup setup_;
  const std::shared_ptr<const nccl::Api> api_;
  std::set<uint32_t> requested_;  // for which steps: windows to forget; 0: the key
  std::unique_ptr<NcclCommunicator> communicator_;
  NcclSchedule plan_;
  NcclSchedule::Windows bases_;  // of the windows that the bucket uses
  bool known_ = false;           // to the communicator
  bool launched_ = false;        // the bucket's pack kernel and NCCL calls
  cuda::Address scratch_ = 0;
  cuda::Address table_ = 0;  // of segments, in scratch memory
};

}  // namespace farandole
