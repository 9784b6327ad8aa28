// SPDX-License-Identifier: Apache-2.0
// What the C ABI hands out, and for how long: results, memory, texts and numbers, while another thread
// shuts down.
#include <algorithm>
#include <cstring>
#include <filesystem>

#include "runtime/runtime_ranks.h"

using namespace farandole;
using namespace farandole::check;

namespace {

// More lengths than a Dimensions holds without memory of its own.
const std::vector<int64_t> kLongShape{2, 3, 1, 1, 1, 1, 1};

int64_t submitted(const Ask& ask) {
  int64_t handle = 0;
  CHECK_EQ(submit_by_abi(ask, handle), FARANDOLE_OK);
  return handle;
}

int64_t done(const Ask& ask) {
  const int64_t handle = submitted(ask);
  CHECK_EQ(farandole_wait(&handle, 1, 60), FARANDOLE_OK);
  return handle;
}

// Its result is memory of the core's.
Ask alltoall(Floats& data) {
  return {FARANDOLE_ALLTOALL, kLongShape, data.data(), nullptr, "all to all"};
}

void check_long_result(const farandole_result& result) {
  CHECK_EQ(result.ndim, kLongShape.size());
  CHECK(std::equal(kLongShape.begin(), kLongShape.end(), result.shape));
  CHECK_EQ(result.n_received, 1);
  CHECK_EQ(result.received[0], 2);
}

}  // namespace

// Each thread has its own.
TEST(two_threads_take_their_own_results) {
  init_alone();
  Floats data = values_of(0, 6);
  const int64_t mine = done(alltoall(data));
  const int64_t other = done(allreduce(data, "another"));
  farandole_result result{};
  CHECK_EQ(farandole_result_of(mine, &result), FARANDOLE_OK);
  std::thread asks([&] {
    farandole_result theirs{};
    CHECK_EQ(farandole_result_of(other, &theirs), FARANDOLE_OK);
    CHECK_EQ(theirs.ndim, 1);
    CHECK_EQ(theirs.n_received, 0);
  });
  asks.join();
  check_long_result(result);
  shut_down();
}

// Unlike the arrays of farandole_result_of, the caller's own array keeps its numbers.
TEST(sizes_are_written_to_the_caller_s_memory) {
  init_alone();
  Floats data = values_of(0, 6);
  const int64_t handle = done(alltoall(data));
  std::vector<int64_t> expected(kLongShape.begin(), kLongShape.end());
  expected.push_back(2);
  const auto count = static_cast<int32_t>(expected.size());
  CHECK_EQ(farandole_sizes_of(handle, nullptr, 0), count);
  std::vector<int64_t> sizes(expected.size(), -1);
  CHECK_EQ(farandole_sizes_of(handle, sizes.data(), count - 1), count);
  CHECK_EQ(sizes.back(), -1);
  CHECK_EQ(farandole_sizes_of(handle, sizes.data(), count), count);
  CHECK(sizes == expected);
  farandole_release(handle);
  CHECK_EQ(farandole_sizes_of(handle, sizes.data(), count), -FARANDOLE_E_ARGUMENT);
  shut_down();
}

TEST(taking_a_result_without_memory_is_an_error) {
  init_alone();
  Floats data = values_of(0, 6);
  const int64_t handle = done(alltoall(data));
  void* const memory = farandole_take(handle);
  CHECK(memory != nullptr);
  CHECK_EQ(farandole_error_code(), FARANDOLE_OK);
  CHECK(std::memcmp(memory, data.data(), data.size() * sizeof data[0]) == 0);
  farandole_free(memory);
  CHECK(farandole_take(handle) == nullptr);
  CHECK_EQ(farandole_error_code(), FARANDOLE_E_ARGUMENT);
  CHECK(contains(farandole_error(), "taken before"));
  // As after the first take: nobody is led to freed memory.
  farandole_result result{};
  CHECK_EQ(farandole_result_of(handle, &result), FARANDOLE_OK);
  CHECK(result.output == nullptr);

  const int64_t in_place = done(allreduce(data, "in place"));
  CHECK(farandole_take(in_place) == nullptr);
  CHECK_EQ(farandole_error_code(), FARANDOLE_E_ARGUMENT);
  CHECK(contains(farandole_error(), "caller's own"));

  const int64_t late = done(alltoall(data));
  shut_down();
  CHECK(farandole_take(late) == nullptr);
  CHECK_EQ(farandole_error_code(), FARANDOLE_E_SHUTDOWN);
}

// A caller that still drives in farandole_wait holds the runtime: shutdown waits for it.
TEST(after_a_shutdown_no_thread_is_in_the_core) {
  for (int round = 0; round < 40; ++round) {
    init_alone();
    std::atomic<uint32_t> inside{0};
    std::vector<Floats> memory(2, Floats(2000, 1));
    std::vector<std::thread> waiters;
    for (int t = 0; t < 2; ++t) {
      waiters.emplace_back([&, t] {
        const Ask ask = allreduce(memory[static_cast<size_t>(t)], "of thread " + std::to_string(t));
        int32_t code = FARANDOLE_OK;
        for (int call = 0; code == FARANDOLE_OK; ++call) {
          int64_t handle = 0;
          code = submit_by_abi(ask, handle);
          if (call == 0) inside.fetch_add(1), futex_wake(inside, 1, kFutexAnyBit);
          if (code == FARANDOLE_OK) code = farandole_wait(&handle, 1, 60);
        }
        CHECK_EQ(code, FARANDOLE_E_SHUTDOWN);
      });
    }
    for (uint32_t seen = inside; seen < 2; seen = inside) {
      futex_wait(inside, seen, kFutexAnyBit, patience());
    }
    shut_down();
    CHECK(
        mapped_segments().empty());  // the runtime is gone, with its threads and all that they used
    for (std::thread& waiter : waiters) waiter.join();
  }
}

TEST(values_of_settings_outlive_the_next_look_at_them) {
  const auto rate = [](const char* value) {
    setenv("FARANDOLE_LOG_RATE", value, 1);
    std::vector<farandole_variable> rows(static_cast<size_t>(farandole_variables(nullptr, 0)));
    farandole_variables(rows.data(), static_cast<int32_t>(rows.size()));
    const auto found = std::ranges::find(rows, "FARANDOLE_LOG_RATE",
                                         [](const auto& row) { return std::string(row.name); });
    return found->value;
  };
  const char* const before = rate("1234567890123");
  CHECK_EQ(std::string(rate("21")), "21");
  CHECK_EQ(std::string(before), "1234567890123");
  unsetenv("FARANDOLE_LOG_RATE");
}

TEST(a_negative_number_of_rows_is_none) {
  init_alone();
  CHECK_EQ(farandole_set_ranks(0, nullptr, -1), 1);
  CHECK(farandole_counters(nullptr, -1) > 0);
  CHECK(farandole_variables(nullptr, -1) > 0);
  int64_t handle = 0;
  const farandole_request request{};
  CHECK_EQ(farandole_prepare_call(&request, -1), -FARANDOLE_E_ARGUMENT);
  CHECK_EQ(farandole_submit(&handle, nullptr, nullptr, nullptr, -1, &handle), FARANDOLE_E_ARGUMENT);
  CHECK_EQ(farandole_wait(&handle, -1, 1), FARANDOLE_E_ARGUMENT);
  shut_down();
}

TEST(a_start_without_a_preparation_is_an_error) {
  const farandole_world world{};
  CHECK_EQ(farandole_start(&world), FARANDOLE_E_ARGUMENT);
  CHECK(contains(farandole_error(), "call farandole_prepare first"));
}

TEST(without_a_job_nothing_is_mapped) {
  farandole_counter counters[3]{};
  CHECK_EQ(farandole_counters(counters, 3), 3);
  CHECK_EQ(std::string(counters[1].name), "mapped_bytes");
  CHECK_EQ(counters[1].value, 0);
}

TEST(what_is_no_error_is_no_refusal) {
  init_alone();
  Floats data = values_of(0, 6);
  const Ask ask = allreduce(data, "refused");
  const farandole_request request = ask.request();
  for (int32_t code : {0, -1, 9, FARANDOLE_PENDING}) {
    CHECK_EQ(farandole_refuse(&request, code, "no error"), FARANDOLE_E_ARGUMENT);
  }
  done(ask);
  shut_down();
}

// Rank 0's calls wait for rank 1: one reads memory, the other writes.
TEST(a_copy_from_or_to_memory_in_use_is_refused) {
  LocalBootstrap bootstrap(2);
  run_in_forks(2, [&](int rank) {
    init_by_abi(bootstrap, rank, {0, 0});
    Floats read = values_of(rank, 6), sum(6), written = values_of(rank, 6);
    Ask reads = allreduce(read, "reads");
    reads.output = sum.data();
    if (rank == 1) bootstrap.await(0, 1);
    const int64_t handles[] = {submitted(reads), submitted(allreduce(written, "writes"))};
    if (rank == 0) {
      const int64_t shape = 3, stride = 8;
      const auto code = [&](const float* begin, bool writes) {
        return farandole_check_unused(address(begin), 4, 1, &shape, &stride, writes);
      };
      CHECK_EQ(code(read.data(), false), FARANDOLE_OK);
      CHECK_EQ(code(read.data(), true), FARANDOLE_E_ARGUMENT);
      CHECK(contains(farandole_error(), "in use by 'reads'"));
      CHECK_EQ(code(written.data() + 1, false), FARANDOLE_E_ARGUMENT);
      bootstrap.tell(0);
    }
    CHECK_EQ(farandole_wait(handles, 2, 60), FARANDOLE_OK);
    CHECK(sum == sum_over(2, 6) && written == sum);
    shut_down();
  });
}

namespace {

std::vector<std::string> open_descriptors() {
  std::vector<std::string> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;  // the one that reads the folder
    const auto target = std::filesystem::read_symlink(entry.path(), gone);
    if (!contains(target.string(), "/fd")) found.push_back(entry.path().filename().string());
  }
  std::ranges::sort(found);
  return found;
}

}  // namespace

TEST(a_forked_child_has_no_descriptor_of_its_parent_s_job) {
  const std::vector<std::string> before = open_descriptors();
  const auto has_none = [&] { return std::ranges::includes(before, open_descriptors()); };
  init_alone();
  CHECK(!has_none());
  run_in_fork([&] {
    farandole_forked();
    CHECK(has_none());
    run_in_fork([&] { CHECK(has_none()); });
  });
  CHECK(!has_none());
  shut_down();
}

// Children free what they have inherited, while the parent's other threads free as well.
TEST(a_forked_child_frees_gpu_memory_without_the_parent_s_lock) {
  std::atomic<bool> over{false};
  std::thread frees([&] {
    while (!over) farandole_free_on(nullptr, 0);
  });
  for (int turn = 0; turn < 200; ++turn) {
    run_in_fork([] {
      farandole_forked();
      CHECK_EQ(farandole_free_on(nullptr, 0), 1);
    });
  }
  over = true;
  frees.join();
}

// What a rank is does not change in its forked child; whether it may work there does.
TEST(a_forked_child_knows_where_it_stands) {
  init_alone();
  run_in_fork([] {
    farandole_forked();
    farandole_topology here{};
    here.rank = 7;
    CHECK_EQ(farandole_where(&here), FARANDOLE_OK);
    CHECK_EQ(here.rank, 0);
    CHECK_EQ(here.size, 1);
    CHECK_EQ(here.local_size, 1);
    CHECK_EQ(here.world, 1);
    CHECK_EQ(farandole_initialized(), 0);
    CHECK_EQ(farandole_broken(), 0);
    // Where an answer is a number, an error is a negative one.
    CHECK_EQ(farandole_set_ranks(0, nullptr, 0), -FARANDOLE_E_SHUTDOWN);
    CHECK_EQ(farandole_submit_pointers(1, nullptr, nullptr), -FARANDOLE_E_SHUTDOWN);
    char peer_info[8];
    CHECK_EQ(farandole_prepare(peer_info, sizeof peer_info), -FARANDOLE_E_SHUTDOWN);
  });
  shut_down();
  run_in_fork([] {
    farandole_forked();
    farandole_topology here{};
    CHECK_EQ(farandole_where(&here), FARANDOLE_E_SHUTDOWN);
  });
}
