// SPDX-License-Identifier: Apache-2.0
// From init to shutdown, again and again: nothing is left behind, and nobody waits for ever for the others.
// The C ABI's part in it: calls that cross a shutdown, and forked children.
#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "runtime/runtime_ranks.h"

using namespace farandole;
using namespace farandole::check;

namespace {

auto entries_of(const char* folder) {
  return std::ranges::distance(std::filesystem::directory_iterator(folder),
                               std::filesystem::directory_iterator());
}

}  // namespace

TEST(a_process_may_start_and_leave_again_and_again) {
  for (Kind kind : {Kind::kProcesses, Kind::kThreads}) {
    for (int ranks : {1, 2, 3}) {
      run_job(kind, ranks, [kind](TestRank& self) {
        ptrdiff_t fds = 0;
        ptrdiff_t threads = 0;
        for (int i = 0; i < 20; ++i) {
          self.check_usable();
          self.leave();
          CHECK(!self.up());
          self.bootstrap.barrier();
          if (kind == Kind::kProcesses) {
            if (i == 0) {
              fds = entries_of("/proc/self/fd");
              threads = entries_of("/proc/self/task");
            }
            CHECK_EQ(entries_of("/proc/self/fd"), fds);
            CHECK_EQ(entries_of("/proc/self/task"), threads);
            CHECK(mapped_segments().empty());
          }
          self.start();
        }
      });
    }
  }
}

TEST(init_ends_in_time_without_a_missing_rank) {
  LocalBootstrap bootstrap(3);
  run_in_forks(3, [&](int rank) {
    Config config = test_config();
    config.init_timeout = 0.3;
    LocalEndpoint endpoint(config);
    std::vector<PeerInfo> peer_infos = bootstrap.exchange(rank, 0, endpoint.peer_info());
    if (rank == 2) return bootstrap.await(0, 2);
    TestRank self(bootstrap, rank, config);
    const int64_t before = now_ns();
    try {
      self.enter(std::move(endpoint), peer_infos);
      fail("the job began without rank 2");
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::kStall || error.code() == ErrorCode::kPeer);
    }
    CHECK(now_ns() - before < 20'000'000'000);
    bootstrap.tell(0);
  });
}

TEST(another_build_is_refused) {
  LocalBootstrap bootstrap(2);
  run_in_forks(2, [&](int rank) {
    LocalEndpoint endpoint(test_config());
    PeerInfo peer_info = PeerInfo::decode(endpoint.peer_info());
    if (rank == 1) peer_info.build += " of yesterday";
    std::vector<PeerInfo> peer_infos = bootstrap.exchange(rank, 0, peer_info.encode());
    TestRank self(bootstrap, rank, test_config());
    const std::string text =
        CHECK_THROWS(self.enter(std::move(endpoint), peer_infos), ErrorCode::kMismatch);
    CHECK(contains(text, "of yesterday' on rank 1"));
  });
}

// A prepared call may be submitted while another thread shuts down, and after.
TEST(a_shutdown_while_a_thread_submits_is_an_error_there) {
  for (int round = 0; round < 10; ++round) {
    init_alone();
    Floats data(2000, 1);
    const Ask ask = allreduce(data, "prepared");
    const farandole_request request = ask.request();
    const int64_t call = farandole_prepare_call(&request, 1);
    CHECK(call > 0);
    std::atomic<uint32_t> calls{0};
    std::thread submitter([&] {
      int64_t handle = 0;
      for (; handle >= 0; calls.fetch_add(1), futex_wake(calls, 1, kFutexAnyBit)) {
        handle = farandole_submit_one(call, address(data.data()), address(data.data()));
        if (handle < 0) break;
        const int32_t code = farandole_wait(&handle, 1, 60);
        CHECK(code == FARANDOLE_OK || code == FARANDOLE_E_SHUTDOWN);
        farandole_release(handle);
      }
      CHECK(handle == -FARANDOLE_E_SHUTDOWN || handle == -FARANDOLE_E_ARGUMENT);
    });
    for (uint32_t seen = calls; seen < 20; seen = calls) {
      futex_wait(calls, seen, kFutexAnyBit, patience());
    }
    shut_down();
    submitter.join();
    CHECK_EQ(farandole_submit_one(call, address(data.data()), address(data.data())),
             -FARANDOLE_E_SHUTDOWN);
    shut_down();  // there is nothing any more
  }
}

// Each number is that of its own call; the first that fails ends the call.
TEST(several_prepared_calls_go_in_one_batch) {
  init_alone();
  Floats one = values_of(0, 5), other = values_of(1, 3);
  const Ask asks[] = {allreduce(one, "one"), allreduce(other, "other")};
  int64_t prepared[3] = {};
  for (int i = 0; i < 2; ++i) {
    farandole_request request = asks[i].request();
    request.prescale = 2 + i;
    prepared[i] = farandole_prepare_call(&request, 1);
    CHECK(prepared[i] > 0);
  }
  const uintptr_t buffers[] = {address(one.data()), address(other.data()), address(other.data())};
  prepared[2] = prepared[0] + prepared[1] + 1;  // none
  int64_t handles[3] = {};
  CHECK_EQ(farandole_submit(prepared, buffers, buffers, nullptr, 3, handles), FARANDOLE_E_ARGUMENT);
  CHECK(handles[0] > 0 && handles[1] > 0 && handles[2] == 0);
  CHECK_EQ(farandole_wait(handles, 2, 60), FARANDOLE_OK);
  for (size_t i = 0; i < one.size(); ++i) CHECK_EQ(one[i], 2 * values_of(0, 5)[i]);
  for (size_t i = 0; i < other.size(); ++i) CHECK_EQ(other[i], 3 * values_of(1, 3)[i]);
  farandole_release_all(handles, 2);
  shut_down();
  CHECK_EQ(farandole_submit(prepared, buffers, buffers, nullptr, 1, handles), FARANDOLE_E_SHUTDOWN);
}
