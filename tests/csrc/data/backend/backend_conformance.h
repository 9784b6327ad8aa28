// SPDX-License-Identifier: Apache-2.0
// What every Backend for host memory must pass: members stepped in random order by one thread, as threads
// that sleep on their event counts, and as forked processes.
#pragma once

#include <fcntl.h>

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "check.h"
#include "data/backend/backend.h"
#include "data/backend/random_bucket.h"
#include "data/shm/host_arenas.h"
#include "lib/ipc/event_count.h"
#include "lib/ipc/segment.h"

namespace farandole::check {

// Where the members' buffers lie.
enum class Buffers { kPrivate, kShared, kMixed };

// Steps until there is nothing to do; true: the bucket is finished.
inline bool exhaust(Backend& backend) {
  for (;;) {
    const Progress progress = backend.step();
    if (progress != Progress::kMoved) return progress == Progress::kFinished;
  }
}

// The members of one set and the memory they share; made before they part.
class BackendWorld {
 public:
  struct Place {
    int member;
    int members;
    std::byte* memory;
    size_t bytes;
    std::vector<Wakeup> wakeups;
    HostArenas* arenas;
  };
  using Factory = std::function<std::unique_ptr<Backend>(const Place&)>;

  BackendWorld(int members, size_t bytes, Factory factory, Buffers buffers = Buffers::kPrivate)
      : members_(members),
        buffers_(buffers),
        memory_(Segment::create("backend-test", kRoom + bytes, /*inherit=*/true)),
        factory_(std::move(factory)) {
    CHECK(static_cast<size_t>(members) * sizeof(EventCount) <= kBellsRoom);
    for (int member = 0; member < members; ++member) {
      owned_.push_back(std::make_shared<Arena>(kArenaBytes));
    }
    const ArenaDirectory directory(memory_.data() + kBellsRoom, members);
    for (int member = 0; member < members; ++member) {
      std::vector<Fd> fds;
      for (const auto& arena : owned_) fds.emplace_back(fcntl(arena->fd(), F_DUPFD_CLOEXEC, 0));
      arenas_.push_back(std::make_unique<HostArenas>(owned_[static_cast<size_t>(member)], member,
                                                     std::move(fds), directory));
    }
  }

  int members() const { return members_; }
  EventCount& count(int member) const {
    return reinterpret_cast<EventCount*>(memory_.data())[member];
  }
  Wakeup wakeup(int member) const { return count(member); }
  std::unique_ptr<Backend> backend(int member) const {
    Place place{member,
                members_,
                memory_.data() + kRoom,
                memory_.size() - kRoom,
                {},
                arenas_[static_cast<size_t>(member)].get()};
    for (int other = 0; other < members_; ++other) place.wakeups.push_back(wakeup(other));
    return factory_(place);
  }
  MemberBucket bucket(const BucketSpec& specs, int member) const {
    return MemberBucket(specs, member, members_, memory_of(member));
  }
  Memory memory_of(int member) const {
    Arena* const arena = owned_[static_cast<size_t>(member)].get();
    return {buffers_ == Buffers::kPrivate ? nullptr : arena, buffers_ == Buffers::kMixed};
  }
  const HostArenas& arenas(int member) const { return *arenas_[static_cast<size_t>(member)]; }

 private:
  static constexpr size_t kBellsRoom = 4096;
  static constexpr size_t kRoom = 2 * kBellsRoom;
  static constexpr size_t kArenaBytes = size_t{256} << 20;
  const int members_;
  const Buffers buffers_;
  const Segment memory_;
  const Factory factory_;
  std::vector<std::shared_ptr<Arena>> owned_;
  std::vector<std::unique_ptr<HostArenas>> arenas_;
};

// Prints the seed if `body` fails.
template <class Body>
void with_seed(uint64_t seed, Body&& body) {
  try {
    body(seed);
  } catch (...) {
    std::fprintf(stderr, "failed with seed %llu\n", static_cast<unsigned long long>(seed));
    throw;
  }
}

// Runs one bucket as the engine does: step, and sleep on its own event count when there is nothing to do, or until
// it is time to look again.
inline void drive(Backend& backend, Wakeup wakeup) {
  for (;;) {
    const Progress progress = backend.step();
    if (progress == Progress::kFinished) return;
    if (progress == Progress::kMoved) continue;
    const uint32_t ticket = wakeup.prepare();
    if (backend.ready()) continue;
    wakeup.wait(Sleeper::kCaller, ticket, [&] { return backend.ready(); }, backend.look_again());
  }
}

inline void run_member(const BackendWorld& world, int member,
                       const std::vector<BucketSpec>& buckets) {
  const std::unique_ptr<Backend> backend = world.backend(member);
  for (const BucketSpec& specs : buckets) {
    const MemberBucket bucket = world.bucket(specs, member);
    backend->begin(bucket.parts());
    drive(*backend, world.wakeup(member));
    bucket.check();
  }
}

inline void run_threads(const BackendWorld& world, const std::vector<BucketSpec>& buckets) {
  in_threads(world.members(), [&](int member) { run_member(world, member, buckets); });
  CHECK_EQ(rescued_wakeups(), 0);
}

inline void run_forks(const BackendWorld& world, const std::vector<BucketSpec>& buckets) {
  run_in_forks(world.members(), [&](int member) {
    run_member(world, member, buckets);
    CHECK_EQ(rescued_wakeups(), 0);
  });
}

// A member of a simulation. One that has nothing to do falls asleep as EventCount's sleepers do, and is
// stepped again only after it was woken, or if it wants to look again: a forgotten wake-up shows as a
// deadlock.
class SimulatedMember {
 public:
  SimulatedMember(const BackendWorld& world, int member, const std::vector<BucketSpec>& buckets)
      : member_(member),
        world_(world),
        buckets_(buckets),
        backend_(world.backend(member)),
        sleepers_(reinterpret_cast<std::atomic<uint32_t>*>(&world.count(member)) + 1) {}

  bool finished() const { return next_ == buckets_.size() && bucket_ == nullptr; }
  bool awake() const {
    return (sleepers_->load() & kAsleep) == 0 || !backend_->look_again().is_never();
  }
  size_t steps() const { return steps_; }

  void step() {
    if (bucket_ == nullptr) {
      bucket_ = std::make_unique<MemberBucket>(buckets_[next_++], member_, world_.members(),
                                               world_.memory_of(member_));
      backend_->begin(bucket_->parts());
      return;
    }
    sleepers_->fetch_and(~kAsleep);
    const bool ready = backend_->ready();
    const Deadline looks_again = backend_->look_again();
    const Progress progress = backend_->step();
    ++steps_;
    if (ready) CHECK(progress != Progress::kWaiting);
    if (looks_again.is_never()) CHECK_EQ(ready, progress != Progress::kWaiting);
    if (progress == Progress::kWaiting) sleepers_->fetch_or(kAsleep);
    if (progress == Progress::kFinished) {
      bucket_->check();
      bucket_.reset();
      if (next_ % 2 == 0) backend_->rest();
    }
  }

 private:
  static constexpr uint32_t kAsleep = static_cast<uint32_t>(Sleeper::kCaller);

  const int member_;
  const BackendWorld& world_;
  const std::vector<BucketSpec>& buckets_;
  std::unique_ptr<Backend> backend_;
  std::atomic<uint32_t>* const sleepers_;  // EventCount's flags follow its word
  std::unique_ptr<MemberBucket> bucket_;
  size_t next_ = 0;
  size_t steps_ = 0;
};

// Steps the members in random order, each for a random while, so that some fall far behind.
inline void simulate(const BackendWorld& world, const std::vector<BucketSpec>& buckets,
                     Random& random) {
  std::vector<std::unique_ptr<SimulatedMember>> members;
  for (int member = 0; member < world.members(); ++member) {
    members.push_back(std::make_unique<SimulatedMember>(world, member, buckets));
  }
  for (;;) {
    std::vector<SimulatedMember*> runnable;
    size_t unfinished = 0;
    for (const auto& member : members) {
      if (member->finished()) continue;
      ++unfinished;
      if (member->awake()) runnable.push_back(member.get());
    }
    if (unfinished == 0) return;
    if (runnable.empty())
      fail("all members that are not finished sleep: a lost wake-up or a deadlock");
    SimulatedMember& member = *runnable[random.below(runnable.size())];
    const size_t steps = one_in(random, 4) ? 1 + random.below(20) : 1;
    for (size_t i = 0; i < steps && !member.finished() && member.awake(); ++i) member.step();
  }
}

}  // namespace farandole::check
