// SPDX-License-Identifier: Apache-2.0
// Collectives on GPUs by NCCL, everything in the order of our stream.
#pragma once

#include <memory>

#include "data/gpu/gpu_mover.h"
#include "data/gpu/gpu_plane.h"
#include "data/nccl/nccl_communicator.h"
#include "data/nccl/nccl_plan.h"

namespace farandole {

class NcclPlane final : public GpuPlane {
 public:
  // `mover` and `windows` are the device's and outlive the plane.
  NcclPlane(const GpuMover& mover, const GpuWindows& windows, SetId set,
            NcclCommunicator::Setup setup);

  const char* name() const override { return "nccl"; }
  bool supports(const Signature& signature) const override;
  void begin(std::span<const Part> parts) override;
  Progress step() override;
  bool ready() const override;
  void abort() override;
  void check() const override { communicator_.check(); }
  bool failed() const override { return communicator_.failed(); }
  void finished() override { communicator_.finished(); }
  // As NcclCommunicator's.
  void split(int member) { communicator_.split(member); }
  nccl::Comm take_part() { return communicator_.take_part(); }

 private:
  void look_up_windows();
  void wait_for_inputs();
  void launch_pack();
  void upload();
  nccl::Result launch_calls();
  nccl::Result launch(const NcclCall& call);

  const GpuMover& mover_;
  const GpuWindows& windows_;
  const SetId set_;
  const std::shared_ptr<const nccl::Api> api_;
  NcclCommunicator communicator_;
  NcclPlan plan_;
  NcclPlan::Windows bases_;  // of the windows that the bucket uses
  bool known_ = false;       // to the communicator
  bool launched_ = false;    // the bucket's pack kernel and NCCL calls
  cuda::Address scratch_ = 0;
  cuda::Address table_ = 0;  // of segments, in scratch memory
};

}  // namespace farandole
