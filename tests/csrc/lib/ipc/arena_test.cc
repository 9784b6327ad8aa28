// SPDX-License-Identifier: Apache-2.0
#include "lib/ipc/arena.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

#include "check.h"
#include "lib/os/memory.h"
#include "random.h"

using namespace farandole;
using namespace farandole::check;

namespace {

constexpr size_t kArenaBytes = size_t{64} << 20;
constexpr size_t kHuge = kHugePageBytes;

// Memory that the arena's memfd holds, in bytes.
size_t held(const Arena& arena) {
  struct stat status;
  CHECK_EQ(fstat(arena.fd(), &status), 0);
  return static_cast<size_t>(status.st_blocks) * 512;
}

bool all_are(const std::byte* memory, size_t bytes, int value) {
  return std::all_of(memory, memory + bytes,
                     [value](std::byte b) { return b == static_cast<std::byte>(value); });
}

}  // namespace

TEST(allocations_are_zeroed_shared_and_apart) {
  Arena arena(kArenaBytes);
  const Mapping peer = map_arena(arena.fd(), /*inherit=*/false);
  std::byte* const one = arena.allocate(5000);
  std::byte* const two = arena.allocate(3 * kHuge);
  CHECK(all_are(one, 5000, 0) && all_are(two, 3 * kHuge, 0));
  std::memset(one, 1, 5000);
  std::memset(two, 2, 3 * kHuge);
  CHECK(all_are(one, 5000, 1));
  CHECK(all_are(peer.get() + arena.offset_of(one).value(), 5000, 1));
  CHECK(all_are(peer.get() + arena.offset_of(two + 77).value(), 3 * kHuge - 77, 2));
  CHECK_EQ(reinterpret_cast<uintptr_t>(two) % kHuge, 0);
  CHECK(arena.release(one) && arena.release(two));
}

TEST(only_the_inside_of_a_live_allocation_has_an_offset) {
  Arena arena(kArenaBytes);
  int elsewhere = 0;
  CHECK(!arena.offset_of(reinterpret_cast<std::byte*>(&elsewhere)));
  std::byte* const memory = arena.allocate(4096);
  CHECK(arena.offset_of(memory + 4095).has_value());
  CHECK(!arena.offset_of(memory + 4096));
  CHECK(!arena.offset_of(reinterpret_cast<std::byte*>(&elsewhere)));
  CHECK(!arena.release(memory + 64));
  CHECK(arena.release(memory));
  CHECK(!arena.offset_of(memory));
  CHECK(!arena.release(memory));
}

TEST(released_memory_goes_back_at_once_and_comes_again_zeroed) {
  Arena arena(kArenaBytes);
  const Mapping peer = map_arena(arena.fd(), /*inherit=*/false);
  for (int round = 0; round < 50; ++round) {
    std::byte* const memory = arena.allocate(5 * kHuge);
    CHECK_EQ(held(arena), 5 * kHuge);  // before a store, which could only fail by a signal
    std::byte* const small = arena.allocate(1);
    CHECK_EQ(held(arena), 5 * kHuge + 4096);
    CHECK(arena.release(small));
    CHECK(all_are(memory, 5 * kHuge, 0));
    std::memset(memory, 0x5a, 5 * kHuge);
    CHECK(peer.get()[arena.offset_of(memory).value()] == std::byte{0x5a});
    CHECK(held(arena) >= 5 * kHuge);
    CHECK(arena.release(memory));
    CHECK_EQ(held(arena), 0);
  }
  CHECK(arena.empty());
}

TEST(random_allocations_never_overlap_and_merge_when_free) {
  Arena arena(kArenaBytes);
  Random random(11);
  struct Live {
    std::byte* memory;
    size_t bytes;
    int value;
  };
  std::vector<Live> live;
  for (int i = 0; i < 600; ++i) {
    if (live.size() > 12 || (!live.empty() && random.below(2) == 0)) {
      const size_t at = random.below(live.size());
      CHECK(all_are(live[at].memory, live[at].bytes, live[at].value));
      CHECK(arena.release(live[at].memory));
      live.erase(live.begin() + static_cast<ptrdiff_t>(at));
      continue;
    }
    const size_t bytes = 1 + random.below(random.below(4) == 0 ? 2 * kHuge : 20'000);
    live.push_back({arena.allocate(bytes), bytes, i % 251});
    std::memset(live.back().memory, live.back().value, bytes);
  }
  for (const Live& one : live) CHECK(arena.release(one.memory));
  std::byte* const whole = arena.allocate(kArenaBytes);  // fits only if all has grown together
  CHECK(arena.release(whole));
}

TEST(an_allocation_that_is_too_large_is_an_error_and_leaves_nothing_behind) {
  Arena arena(kArenaBytes);
  CHECK_THROWS(arena.allocate(kArenaBytes + 1), ErrorCode::kLibrary);
  Arena vast(size_t{1} << 44);
  CHECK_THROWS(vast.allocate(available_memory() * 2), ErrorCode::kLibrary);
  CHECK_EQ(held(vast), 0);
}

// What a peer that was stopped writes when it goes on.
TEST(retired_memory_keeps_its_content_whatever_peers_write) {
  Arena arena(kArenaBytes);
  const Mapping peer = map_arena(arena.fd(), /*inherit=*/false);
  constexpr size_t kBytes = kHuge + 12'345;
  for (size_t bytes : {size_t{100}, kBytes}) {
    std::byte* const memory = arena.allocate(bytes);
    std::byte* const other = arena.allocate(bytes);
    const uint64_t offset = arena.offset_of(memory).value();
    std::byte* const theirs = peer.get() + offset;
    std::memset(memory, 3, bytes);
    arena.retire(memory + 64);
    CHECK(all_are(memory, bytes, 3));
    CHECK(all_are(theirs, bytes, 3));
    std::memset(theirs, 9, bytes);
    CHECK(all_are(memory, bytes, 3));
    std::memset(memory, 4, bytes);
    CHECK(all_are(theirs, bytes, 9));
    std::vector<std::byte> old(bytes);
    arena.read_old(offset, old.data(), bytes);
    CHECK(all_are(old.data(), bytes, 9));
    CHECK(!arena.offset_of(memory));
    CHECK(arena.offset_of(other).has_value());
    CHECK(arena.release(memory) && arena.release(other));
    std::byte* const fresh = arena.allocate(bytes);  // never where the peer may still write
    std::memset(theirs, 8, bytes);
    CHECK(all_are(fresh, bytes, 0));
    CHECK(arena.release(fresh));
  }
  arena.forget_peers();
  CHECK_EQ(held(arena), 0);
}

TEST(reading_beyond_the_end_of_an_arena_is_an_error) {
  Arena arena(kArenaBytes);
  CHECK(arena.release(arena.allocate(1)));  // the first allocation makes the arena
  std::vector<std::byte> old(8);
  arena.read_old(kArenaBytes - 8, old.data(), 8);
  for (const uint64_t offset : {kArenaBytes - 7, kArenaBytes}) {
    CHECK(contains(CHECK_THROWS(arena.read_old(offset, old.data(), 8), ErrorCode::kLibrary),
                   "cannot read an arena: Input/output error"));
  }
}

TEST(retiring_loses_no_store_of_another_thread) {
  Arena arena(kArenaBytes);
  constexpr size_t kWords = 4 * kHuge / sizeof(uint64_t);
  auto* const words = reinterpret_cast<std::atomic<uint64_t>*>(arena.allocate(4 * kHuge));
  std::atomic<bool> begun{false};
  std::atomic<bool> retired{false};
  std::vector<uint64_t> stored(kWords, 0);
  std::thread writer([&] {
    Random random(5);
    for (uint64_t i = 1; !retired || i < 100'000; ++i) {
      const size_t at = random.below(kWords);
      words[at] = stored[at] = i;
      begun = true;
    }
  });
  while (!begun) std::this_thread::yield();
  arena.retire(reinterpret_cast<std::byte*>(words));
  retired = true;
  writer.join();
  for (size_t at = 0; at < kWords; ++at) CHECK_EQ(words[at].load(), stored[at]);
}

TEST(a_job_after_a_retirement_shares_a_fresh_arena) {
  ArenaPool pool(kArenaBytes);
  const std::shared_ptr<Arena> first = pool.share();
  CHECK(pool.share() == first);
  std::byte* const memory = pool.allocate(10'000);
  std::memset(memory, 6, 10'000);
  first->retire(memory);
  const std::shared_ptr<Arena> second = pool.share();
  CHECK(second != first);
  CHECK(all_are(memory, 10'000, 6));
  CHECK_EQ(held(*first), 0);
  std::byte* const later = pool.allocate(10);
  CHECK(second->offset_of(later).has_value());
  pool.release(memory);
  pool.release(later);
  CHECK(first->empty() && second->empty());
}

TEST(an_old_arena_stays_while_a_part_of_it_is_in_use) {
  ArenaPool pool(kArenaBytes);
  std::byte* const retired = pool.allocate(10'000);
  std::byte* const kept = pool.allocate(10'000);
  std::memset(kept, 6, 10'000);
  pool.share()->retire(retired);
  pool.share();  // a fresh arena from now on
  pool.release(retired);
  CHECK(all_are(kept, 10'000, 6));
  pool.release(kept);
}

TEST(an_allocation_that_fails_leaves_its_room) {
  Arena arena(kHuge);
  const Fd file(fcntl(arena.fd(), F_DUPFD_CLOEXEC, 0));
  arena.release(arena.allocate(1));  // maps the arena
  CHECK_EQ(close(arena.fd()), 0);
  CHECK_THROWS(arena.allocate(kHuge / 2), ErrorCode::kLibrary);
  CHECK_EQ(dup3(file.get(), arena.fd(), O_CLOEXEC), arena.fd());
  arena.release(arena.allocate(kHuge));
}

TEST(a_forked_child_reads_and_its_stores_stay_its_own) {
  ArenaPool pool(kArenaBytes);
  std::byte* const memory = pool.allocate(3 * kHuge);
  std::byte* const retired = pool.allocate(5000);
  pool.share()->retire(retired);
  std::memset(memory, 1, 3 * kHuge);
  std::memset(retired, 2, 5000);
  pool.before_fork();
  const pid_t child = ::fork();
  if (child == 0) {
    pool.after_fork_in_child();
    const bool right = all_are(memory, 3 * kHuge, 1) && all_are(retired, 5000, 2);
    std::memset(memory, 7, 3 * kHuge);
    std::memset(retired, 7, 5000);
    if (!right || !all_are(memory, 3 * kHuge, 7)) ::_exit(1);
    pool.before_fork();
    const pid_t next = ::fork();
    pool.after_fork_in_child();  // in both: each has its own pages already
    if (next == 0) ::_exit(all_are(memory, 3 * kHuge, 7) && all_are(retired, 5000, 7) ? 0 : 1);
    int status = 1;
    ::_exit(::waitpid(next, &status, 0) == next && status == 0 ? 0 : 1);
  }
  pool.after_fork_in_parent();
  int status = 0;
  CHECK_EQ(::waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
  CHECK(all_are(memory, 3 * kHuge, 1) && all_are(retired, 5000, 2));
  pool.release(memory);
  pool.release(retired);
}
