// SPDX-License-Identifier: Apache-2.0
// Jobs of a few ranks around real Runtimes. Ranks are threads of this process, where TSan sees them, or
// forked processes, which may be killed.
#pragma once

#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "control/bootstrap/local_bootstrap.h"
#include "runtime/runtime.h"

#include "base/abi.h"

namespace farandole::check {

// A request that owns what it points to, buffers apart.
struct Ask {
  int32_t op = FARANDOLE_ALLREDUCE;
  std::vector<int64_t> shape;
  const void* input = nullptr;
  void* output = nullptr;
  std::string name;
  int32_t reduce_op = FARANDOLE_SUM;
  int32_t dtype = FARANDOLE_FLOAT32;
  int32_t root = 0;
  int32_t set = 0;
  bool by_members = false;
  std::vector<int64_t> splits = {};
  int32_t device = -1;
  uint64_t stream = 0;

  farandole_request request() const {
    farandole_request r{};
    r.op = op, r.reduce_op = reduce_op, r.dtype = dtype, r.device = device;
    r.root = root, r.process_set = set, r.prescale = r.postscale = 1.0;
    r.ndim = static_cast<int32_t>(shape.size()), r.shape = shape.data();
    r.input = input, r.output = output;
    r.n_splits = static_cast<int32_t>(splits.size()), r.splits = splits.data();
    r.name = name.empty() ? nullptr : name.c_str();
    r.by_members = by_members;
    return r;
  }
};

inline uintptr_t address(const void* data) { return reinterpret_cast<uintptr_t>(data); }

// Prepared calls on one tensor each, submitted together.
struct Batch {
  void add(const CheckedCall& call, const void* input, void* output) {
    calls.push_back(&call);
    inputs.push_back(address(input));
    outputs.push_back(address(output));
    handles.push_back(0);
  }
  void submit(Runtime& runtime) {
    std::vector<PreparedSubmission> all;
    for (size_t i = 0; i < calls.size(); ++i) {
      all.push_back({calls[i], {&inputs[i], 1}, {&outputs[i], 1}, {}, {&handles[i], 1}});
    }
    runtime.submit(all);
  }
  std::vector<const CheckedCall*> calls;
  std::vector<uintptr_t> inputs, outputs;
  std::vector<Handle> handles;
};

using Floats = std::vector<float>;

// Whole numbers: sums over ranks are exact.
inline Floats values_of(int rank, size_t n) {
  Floats values(n);
  for (size_t i = 0; i < n; ++i) values[i] = static_cast<float>((rank + 1) * (1 + i % 97));
  return values;
}
inline Floats sum_over(int ranks, size_t n) {
  Floats sum(n);
  for (size_t i = 0; i < n; ++i) {
    sum[i] = static_cast<float>(ranks * (ranks + 1) / 2) * static_cast<float>(1 + i % 97);
  }
  return sum;
}

// In place.
inline Ask allreduce(Floats& data, std::string name = {}) {
  return {FARANDOLE_ALLREDUCE,
          {static_cast<int64_t>(data.size())},
          data.data(),
          data.data(),
          std::move(name)};
}

// One rank of a job, with calls shorter than the C ABI's.
class TestRank {
 public:
  // nodes: by rank, the lowest rank on its host; empty: all are on one.
  TestRank(LocalBootstrap& its_bootstrap, int its_rank, Config config, std::vector<Rank> nodes = {})
      : bootstrap(its_bootstrap),
        rank(its_rank),
        size(its_bootstrap.ranks()),
        config_(std::move(config)),
        nodes_(std::move(nodes)) {
    nodes_.resize(static_cast<size_t>(size));
  }

  // Ranks in processes or threads of one host.
  void start() {
    LocalEndpoint endpoint(config_);
    std::vector<PeerInfo> peer_infos = bootstrap.exchange(rank, round_++, endpoint.peer_info());
    enter(std::move(endpoint), peer_infos);
  }
  void enter(LocalEndpoint endpoint, const std::vector<PeerInfo>& peer_infos) {
    Topology topology = Topology::of(rank, nodes_);
    runtime_ = std::make_shared<Runtime>(std::move(endpoint), topology, peer_infos);
  }
  void leave() {
    if (!runtime_) return;
    if (!runtime_->leave(false, "", patience())) fail("leave() hung");
    runtime_.reset();
  }
  // Lets go of the runtime as farandole_shutdown does; other threads may hold it still.
  void leave_failed(const std::string& why) {
    const bool over = runtime_->leave(true, why, patience()).has_value();
    runtime_.reset();
    CHECK(over);
  }

  std::shared_ptr<Runtime> runtime() const { return runtime_; }
  bool up() const { return runtime_ != nullptr; }

  Handle submit(const Ask& ask) { return submit(std::vector<Ask>{ask}).front(); }
  // As a group.
  std::vector<Handle> submit(const std::vector<Ask>& asks) {
    std::vector<farandole_request> requests;
    std::vector<uint64_t> streams;
    for (const Ask& ask : asks) {
      requests.push_back(ask.request());
      streams.push_back(ask.stream);
    }
    return submit(*runtime_, requests, streams);
  }
  // Peers hear of an error.
  static std::vector<Handle> submit(Runtime& runtime, std::span<const farandole_request> requests,
                                    std::vector<uint64_t> streams = {}) {
    CheckedCall call;
    try {
      call = runtime.prepare(requests, requests.size());
    } catch (const Error& error) {
      runtime.refuse(requests.front(), {error.code(), error.what()});
      throw;
    }
    std::vector<uintptr_t> inputs, outputs;
    for (const farandole_request& request : requests) {
      inputs.push_back(address(request.input));
      outputs.push_back(address(request.output));
    }
    std::vector<Handle> handles(requests.size());
    PreparedSubmission one{&call, inputs, outputs, streams, handles};
    runtime.submit({&one, 1});
    return handles;
  }
  CheckedCall prepare(const Ask& ask) {
    const farandole_request request = ask.request();
    return runtime_->prepare({&request, 1}, 1);
  }
  Handle submit(const CheckedCall& prepared, const void* input, void* output) {
    Batch batch;
    batch.add(prepared, input, output);
    batch.submit(*runtime_);
    return batch.handles.front();
  }
  // Makes a prepared call in place and waits for it, in its set's cell if that is possible. Empty: it is done.
  Failure call(const CheckedCall& prepared, Floats& data) {
    const uintptr_t at = address(data.data());
    Handle handle = 0;
    PreparedSubmission one{&prepared, {&at, 1}, {&at, 1}, {}, {&handle, 1}};
    if (runtime_->call(one)) return {};
    if (Failure failure = wait({handle})) return failure;
    runtime_->handles().release(handle);
    return {};
  }
  // Empty: all are done.
  Failure wait(const std::vector<Handle>& handles) {
    const Deadline deadline = patience();
    for (;;) {
      Failure failure;
      if (runtime_->driver().wait(handles, deadline, failure) != WaitEnd::kTimeIsUp) return failure;
      if (deadline.expired()) fail("rank " + std::to_string(rank) + " hung in wait()");
    }
  }
  void finish(const std::vector<Handle>& handles) {
    if (Failure failure = wait(handles)) fail("a call failed: " + failure.text);
    for (Handle handle : handles) runtime_->handles().release(handle);
  }
  void finish(Handle handle) { finish(std::vector<Handle>{handle}); }
  void run(const Ask& ask) { finish(submit(ask)); }
  // Whether the call fails, now or later.
  Failure outcome(const Ask& ask) {
    try {
      const Handle handle = submit(ask);
      if (Failure failure = wait({handle})) return failure;
      runtime_->handles().release(handle);
      return {};
    } catch (const Error& error) {
      return {error.code(), error.what()};
    }
  }
  // It does, with this code; returns the text.
  std::string fails(const Ask& ask, ErrorCode code) {
    const Failure failure = outcome(ask);
    CHECK_EQ(failure.code, code);
    return failure.text;
  }
  // The number that a call ends with: the id of its set.
  SetId set_of(Handle handle) {
    CHECK(!wait({handle}));
    int64_t id = 0;
    runtime_->handles().look(handle, [&](const Outcome& outcome) { id = outcome.value; });
    runtime_->handles().release(handle);
    return static_cast<SetId>(id);
  }
  const Tally& tally() const {
    const FlightMemory& memory = runtime_->watch().recorder().memory();
    return memory.page(runtime_->topology().local_rank).tally;
  }
  // How many this rank has moved.
  uint64_t buckets() const { return tally().buckets; }
  // All ranks can still do their ordinary work.
  void check_usable(const std::string& name = {}) {
    for (size_t n : {size_t{3}, size_t{5000}}) {
      Floats data = values_of(rank, n);
      run(allreduce(data, name));
      CHECK(data == sum_over(size, n));
    }
  }

  LocalBootstrap& bootstrap;
  const int rank;
  const int size;

 private:
  Config config_;
  std::vector<Rank> nodes_;
  uint64_t round_ = 0;
  std::shared_ptr<Runtime> runtime_;
};

// Sends this process `signal` (SIGKILL, SIGSTOP) after so many microseconds, whatever it does then.
inline void strike_in(int64_t us, int signal) {
  sigevent event{};
  event.sigev_notify = SIGEV_SIGNAL;
  event.sigev_signo = signal;
  timer_t timer;
  CHECK_EQ(timer_create(CLOCK_MONOTONIC, &event, &timer), 0);
  itimerspec when{};
  when.it_value.tv_nsec = us * 1000 + 1;
  CHECK_EQ(timer_settime(timer, 0, &when, nullptr), 0);
}

// Calls allreduce until the job breaks.
inline Failure work_until_failure(TestRank& self) {
  const Deadline deadline = patience();
  while (!deadline.expired()) {
    for (size_t n : {size_t{3}, size_t{3000}, size_t{60'000}}) {
      Floats data = values_of(self.rank, n);
      const Ask ask = allreduce(data, "size " + std::to_string(n));
      if (Failure failure = self.outcome(ask)) return failure;
      CHECK(data == sum_over(self.size, n));
    }
  }
  fail("the job never broke");
}

inline void check_broken(TestRank& self, const std::string& says) {
  Floats data(3);
  for (int i = 0; i < 2; ++i) {
    CHECK(contains(CHECK_THROWS(self.submit(allreduce(data)), ErrorCode::kPeer), says));
  }
}

// Small blocks, so that a few kilobytes are many; quiet.
inline Config test_config() {
  Config config = read_config();
  config.block_bytes = 4096;
  config.stall_warn = 0;
  config.log_level = "fatal";
  return config;
}

enum class Kind { kThreads, kProcesses };
using Tune = std::function<void(Config&)>;
using Body = std::function<void(TestRank&)>;

using Nodes = std::vector<Rank>;  // as TestRank takes them

inline void run_rank(LocalBootstrap& bootstrap, int rank, const Nodes& nodes, const Tune& tune,
                     const Body& body) {
  Config config = test_config();
  if (tune) tune(config);
  TestRank self(bootstrap, rank, config, nodes);
  self.start();
  body(self);
  self.leave();
  CHECK_EQ(rescued_wakeups(), 0);
}

// Runs body on `ranks` ranks, from init to shutdown.
inline void run_job(Kind kind, int ranks, const Body& body, const Tune& tune = {},
                    const Nodes& nodes = {}) {
  LocalBootstrap bootstrap(ranks);
  const auto run = [&](int rank) { run_rank(bootstrap, rank, nodes, tune, body); };
  if (kind == Kind::kProcesses) return run_in_forks(ranks, run);
  in_threads(ranks, run);
}

// Ranks that may be killed or stopped, in processes that end when `body` does. None outlives its test.
class Children {
 public:
  Children(LocalBootstrap& bootstrap, const Nodes& nodes, const Tune& tune, const Body& body) {
    for (int rank = 0; rank < bootstrap.ranks(); ++rank) {
      pids_.push_back(fork_bound());
      if (pids_.back() > 0) continue;
      try {
        Config config = test_config();
        if (tune) tune(config);
        TestRank self(bootstrap, rank, config, nodes);
        self.start();
        body(self);
        _exit(0);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
      }
      _exit(1);
    }
  }
  ~Children() {
    for (pid_t pid : pids_) {
      if (pid > 0) kill(pid, SIGKILL);
    }
  }
  Children(const Children&) = delete;
  Children& operator=(const Children&) = delete;

  void send(int rank, int signal) const { CHECK_EQ(kill(pid_of(rank), signal), 0); }
  void await_stop(int rank) const {
    int status = 0;
    CHECK_EQ(waitpid(pid_of(rank), &status, WUNTRACED), pid_of(rank));
    CHECK(WIFSTOPPED(status));
  }
  // How it has ended, once it has.
  int end_of(int rank) {
    int status = 0;
    CHECK_EQ(waitpid(pid_of(rank), &status, 0), pid_of(rank));
    pids_[static_cast<size_t>(rank)] = 0;
    return status;
  }
  void end_well() {
    for (int rank = 0; rank < static_cast<int>(pids_.size()); ++rank) CHECK_EQ(end_of(rank), 0);
  }

 private:
  pid_t pid_of(int rank) const { return pids_[static_cast<size_t>(rank)]; }

  std::vector<pid_t> pids_;
};

// Calls are given up after so long.
inline Tune stall_after(double seconds) {
  return [seconds](Config& config) { config.stall_abort = seconds; };
}

// Both kinds of ranks, in jobs of these sizes.
inline void run_jobs(std::vector<int> sizes, const Body& body, const Tune& tune = {}) {
  for (int ranks : sizes) {
    run_job(Kind::kProcesses, ranks, body, tune);
    run_job(Kind::kThreads, ranks, body, tune);
  }
}

// The lines of /proc/self/maps about segments of ours: private mappings come and go with the allocator.
inline std::vector<std::string> mapped_segments() {
  std::ifstream maps("/proc/self/maps");
  std::vector<std::string> found;
  for (std::string line; std::getline(maps, line);) {
    if (contains(line, "farandole-")) found.push_back(line);
  }
  return found;
}

// A process set of these ranks; all ranks call it.
inline SetId add_set(TestRank& self, std::vector<int64_t> ranks) {
  // The shape is the list of ranks.
  return self.set_of(self.submit({FARANDOLE_ADD_SET, std::move(ranks), nullptr, nullptr, ""}));
}

// By the C ABI: prepared, submitted and forgotten. Returns the code.
inline int32_t submit_by_abi(const Ask& ask, int64_t& handle) {
  const farandole_request request = ask.request();
  const int64_t call = farandole_prepare_call(&request, 1);
  if (call < 0) return static_cast<int32_t>(-call);
  const uintptr_t input = address(ask.input), output = address(ask.output);
  const int32_t code = farandole_submit(&call, &input, &output, nullptr, 1, &handle);
  farandole_forget_prepared(call);
  return code;
}

// Starts this process as a rank, by the C ABI.
inline void init_by_abi(LocalBootstrap& bootstrap, int rank, const Nodes& nodes) {
  char own[4096];
  const int32_t bytes = farandole_prepare(own, sizeof own);
  CHECK(bytes > 0);
  const auto* first = reinterpret_cast<const std::byte*>(own);
  std::vector<ByteString> all;
  for (const PeerInfo& peer : bootstrap.exchange(rank, 0, {first, first + bytes})) {
    all.push_back(peer.encode());
  }
  std::vector<const char*> blobs;
  std::vector<int32_t> sizes;
  for (const ByteString& blob : all) {
    blobs.push_back(reinterpret_cast<const char*>(blob.data()));
    sizes.push_back(static_cast<int32_t>(blob.size()));
  }
  const farandole_world world{rank, bootstrap.ranks(), nodes.data(), blobs.data(), sizes.data(), {},
                              1,    "a key of 16 byte"};
  CHECK_EQ(farandole_start(&world), FARANDOLE_OK);
}

// A world of one, by the C ABI.
inline void init_alone() {
  LocalBootstrap bootstrap(1);
  init_by_abi(bootstrap, 0, {0});
}

inline void shut_down() { CHECK_EQ(farandole_shutdown(0, "", 60), FARANDOLE_OK); }

}  // namespace farandole::check
