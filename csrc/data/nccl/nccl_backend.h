// SPDX-License-Identifier: Apache-2.0
// The backend for GPU memory that uses NCCL. All of its work is in the device's stream.
#pragma once

#include <memory>
#include <optional>

#include "data/gpu/gpu_backend.h"
#include "data/gpu/gpu_mover.h"
#include "data/nccl/nccl_communicator.h"
#include "data/nccl/nccl_schedule.h"

namespace farandole {

class NcclBackend final : public GpuBackend {
 public:
  // `mover` must be for the same device and must outlive the backend.
  NcclBackend(const GpuMover& mover, NcclCommunicator::Setup setup);

  void begin(std::span<const Part> parts) override;
  Progress step() override;
  bool ready() const override;
  void abort() override;
  void check() const override {
    if (communicator_) communicator_->check();
  }
  bool failed() const override { return communicator_ && communicator_->failed(); }
  void finished() override { communicator_->finished(); }
  std::optional<std::string> new_key() override;
  void connect(const std::string& key) override;

 private:
  void wait_for_inputs();
  void launch_pack();
  void upload();

  const GpuMover& mover_;
  const NcclCommunicator::Setup setup_;
  const std::shared_ptr<const nccl::Api> api_;
  bool has_key_ = false;  // true once new_key() has returned the key
  std::unique_ptr<NcclCommunicator> communicator_;
  NcclSchedule plan_;
  bool launched_ = false;  // true once the bucket's pack kernel and NCCL calls are launched
  cuda::Address scratch_ = 0;
  cuda::Address table_ = 0;  // table of segments, in scratch memory
};

}  // namespace farandole
