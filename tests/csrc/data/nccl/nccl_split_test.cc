// SPDX-License-Identifier: Apache-2.0
// A communicator that is split: every rank must take part, soon.
#include "base/error.h"
#include "data/nccl/nccl_communicator.h"
#include "data/nccl/nccl_members.h"

using namespace farandole;
using namespace farandole::check;

namespace {

constexpr std::chrono::seconds kPatience{60};

NcclCommunicator::Setup setup_of(int member, int members,
                                 std::chrono::nanoseconds patience = kPatience) {
  return {gpu_library().nccl,
          GpuDevice::open(gpu_library().cuda, member),
          member,
          members,
          patience,
          patience,
          [] {}};
}

// Of a part: on the same GPU.
NcclCommunicator::Setup setup_of(const NcclCommunicator::Setup& parent, int member, int members) {
  NcclCommunicator::Setup setup = parent;
  setup.member = member, setup.members = members;
  return setup;
}

// Throws what has kept it from being ready.
void await(NcclCommunicator& communicator) {
  while (!communicator.ready()) {
    communicator.check();
    std::this_thread::yield();
  }
}

}  // namespace

TEST(a_part_goes_on_when_its_parent_is_gone) {
  const nccl::UniqueId id = new_nccl_id();
  in_threads(3, [&](int me) {
    const NcclCommunicator::Setup whole = setup_of(me, 3);
    auto world = std::make_unique<NcclCommunicator>(whole, id);
    await(*world);
    world->split(me - 1);  // of 1 and 2
    await(*world);
    const nccl::Comm half = world->take_part();
    CHECK_EQ(half != nullptr, me > 0);
    world.reset();
    if (me == 0) return;
    NcclCommunicator part(setup_of(whole, me - 1, 2), half);
    await(part);
  });
  CHECK_EQ(gpu_library().alive(), 0);
}

TEST(a_part_that_nobody_takes_goes_with_its_parent) {
  const nccl::UniqueId id = new_nccl_id();
  in_threads(2, [&](int me) {
    NcclCommunicator world(setup_of(me, 2), id);
    await(world);
    world.split(me);
    await(world);
  });
  CHECK_EQ(gpu_library().alive(), 0);
}

TEST(a_rank_that_does_not_take_part_is_a_typed_error_in_time) {
  const nccl::UniqueId id = new_nccl_id();
  std::atomic<int> failures{0};
  in_threads(3, [&](int me) {
    NcclCommunicator world(setup_of(me, 3, std::chrono::seconds{2}), id);
    await(world);
    if (me == 2) {
      while (failures < 2) std::this_thread::yield();
      return;
    }
    world.split(me);
    try {
      await(world);
      fail("a split ended without rank 2");
    } catch (const Error& error) {
      CHECK_EQ(error.code(), ErrorCode::kLibrary);
      const std::string text = error.what();
      CHECK(text.find("did not connect 3 ranks in time") != std::string::npos);
    }
    ++failures;
  });
  if (gpu_library().has_real_nccl) return;  // its abort leaves two of them
  CHECK_EQ(gpu_library().alive(), 0);
}
