// SPDX-License-Identifier: Apache-2.0
// The launch lane over the GPU double: what is given up halfway. Two ranks in one thread, of which one comes too late.
#include "data/gpu/gpu_lane.h"

#include "base/error.h"
#include "data/nccl/nccl_backend.h"
#include "data/nccl/nccl_members.h"

using namespace farandole;
using namespace farandole::check;

namespace {

constexpr std::chrono::seconds kPatience{60};
constexpr size_t kNumbers = 1000;

class LaneRank {
 public:
  LaneRank(const nccl::UniqueId& id, int member)
      : device_(GpuDevice::open(gpu_library().cuda, member)),
        mover_(std::make_shared<GpuModule>(device_, *gpu_library().nvrtc)),
        lane_([] {}) {
    const NcclCommunicator::Setup setup{gpu_library().nccl, device_,   member, 2,
                                        kPatience,          kPatience, [] {}};
    auto backend = std::make_unique<NcclBackend>(mover_, setup);
    backend->connect(std::string(id.bytes, sizeof id.bytes));
    lane_.open(kWorldSet, std::move(backend));
  }

  ~LaneRank() { lane_.abort(false); }
  LaneRank(const LaneRank&) = delete;
  LaneRank& operator=(const LaneRank&) = delete;

  // Two tensors that share a call: a kernel packs them, and another one writes the results.
  void push() {
    for (std::vector<float>& one : data) {
      Part part;
      part.signature.shape = {static_cast<int64_t>(one.size())};
      part.input = part.output = reinterpret_cast<std::byte*>(one.data());
      parts_.push_back(part);
    }
    lane_.push({kWorldSet, parts_});
  }

  bool step() { return lane_.step(true, past); }

  void synchronize() { device_->recorded(device_->stream())->wait(); }
  GpuLane& lane() { return lane_; }

  std::vector<float> data[2] = {std::vector<float>(kNumbers, 1), std::vector<float>(kNumbers, 2)};
  std::shared_ptr<GpuEvent> past;  // set once it is launched

 private:
  std::shared_ptr<GpuDevice> device_;
  GpuMover mover_;
  std::vector<Part> parts_;
  GpuLane lane_;
};

}  // namespace

// NCCL's kernel ends when its communicator is aborted, and what comes after it in the stream goes on.
TEST(after_an_abort_nobody_writes_to_buffers) {
  for (uint64_t seed = 1; seed <= 30; ++seed) {
    gpu_library().seed(seed);
    const nccl::UniqueId id = new_nccl_id();
    LaneRank rank(id, 0), late(id, 1);
    rank.push();
    while (!rank.past) rank.step();
    rank.lane().abort(false);
    CHECK_EQ(rank.lane().finished(), uint64_t{0});
    for (std::vector<float>& one : rank.data) one.assign(kNumbers, 7);  // they are the user's again
    rank.synchronize();
    for (const std::vector<float>& one : rank.data) {
      CHECK(one == std::vector<float>(kNumbers, 7));
    }
  }
  CHECK_EQ(gpu_library().alive(), 0);
}

// The calls fail, and everything of ours ends but the thread that is in NCCL.
TEST(an_abort_that_never_returns_holds_nobody_up) {
  const nccl::UniqueId id = new_nccl_id();
  auto rank = std::make_unique<LaneRank>(id, 0), late = std::make_unique<LaneRank>(id, 1);
  rank->push();
  while (!rank->past) rank->step();
  gpu_library().hold_aborts(true);
  rank->lane().abort(false);
  late->lane().abort(false);
  // The double's stream goes on at the end, so its buffers stay.
  std::vector<float> kept[2] = {std::move(rank->data[0]), std::move(rank->data[1])};
  rank.reset();
  late.reset();
  CHECK(gpu_library().alive() > 0);
  gpu_library().hold_aborts(false);
  while (gpu_library().alive() > 0) std::this_thread::yield();
}

// A set is removed between a bucket's launch and NCCL's answer.
TEST(a_bucket_given_up_halfway_leaves_nothing) {
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    gpu_library().seed(seed);
    const nccl::UniqueId id = new_nccl_id();
    LaneRank rank(id, 0), late(id, 1);
    gpu_library().hold_launches(true);
    rank.push();
    while (!rank.step()) continue;
    CHECK(!rank.past);
    rank.lane().close(kWorldSet);
    gpu_library().hold_launches(false);
    CHECK(!rank.lane().ready(true));
  }
  CHECK_EQ(gpu_library().alive(), 0);
}
