// SPDX-License-Identifier: Apache-2.0
#include "data/nccl/nccl_communicator.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "base/error.h"
#include "lib/os/futex.h"
#include "lib/os/thread.h"

namespace farandole {
namespace {

constexpr std::chrono::milliseconds kLook{100};  // interval between checks for errors and deadlines
// NCCL's errors are reported after this delay. NCCL may notice a dead peer first, but only the death watch can name it.
constexpr std::chrono::milliseconds kDeathIsHeard{1000};
constexpr std::chrono::seconds kClosingTimeout{10};
constexpr std::chrono::milliseconds kClosingLook{1};
constexpr std::chrono::seconds kAbortTimeout{5};

}  // namespace

// State shared by the communicator and its two threads, the worker and the watcher. The state may outlive the
// communicator, because a thread may stay in NCCL. The worker makes NCCL's calls in a group. The worker holds the mutex
// while the group collects calls, but not in ncclGroupEnd, which does the work and may block. Therefore the watcher
// never aborts while calls are being collected.
class NcclCommunicator::Shared {
 public:
  struct Task {
    const char* what;
    std::function<nccl::Result()> calls;
  };
  explicit Shared(Setup its) : setup(std::move(its)) {}
  void watch();
  bool begin(Task task);  // returns false, without starting the task, unless the state is kReady
  void tell();            // wakes the watcher
  nccl::Result call(const NcclCall& call);

  const Setup setup;
  const nccl::Api& api = *setup.api;
  std::atomic<State> state{State::kReady};

  std::mutex mutex;
  nccl::Comm comm = nullptr;  // nullptr if not created yet, or destroyed
  int launches = 0;
  Deadline done_by = Deadline::never();
  std::string failure;
  bool quit = false;
  std::condition_variable posted;  // wakes the worker

 private:
  void work();
  void note(const char* what, nccl::Result error);
  void fail(const std::string& text);
  Deadline look();
  void give_up(std::unique_lock<std::mutex>& lock);

  std::optional<Task> task_;
  bool calling_ = false;              // true while the worker is in ncclGroupEnd
  std::condition_variable returned_;  // wakes the watcher in give_up()
  std::atomic<uint32_t> news_{0};     // wakes the watcher in watch()
  Deadline ready_by_ = Deadline::never();
  Deadline fails_by_ = Deadline::never();  // set after NCCL has returned an error
  bool fresh_ = false;   // true if a task has started since the watcher's last check
  bool asleep_ = false;  // true while the watcher sleeps until tell()
};

NcclCommunicator::NcclCommunicator(Setup setup, const nccl::UniqueId& id)
    : shared_(std::make_shared<Shared>(std::move(setup))),
      state_(shared_->state),
      watcher_("farandole-nccl", [shared = shared_] { shared->watch(); }) {
  shared_->begin({"ncclCommInitRankConfig", [&s = *shared_, id] {
                    nccl::ConfigV21400 config;
                    return s.api.init_rank(&s.comm, s.setup.members, id, s.setup.member, &config);
                  }});
}

NcclCommunicator::~NcclCommunicator() {
  if (ready() && shared_->launches == 0) close();
  abort();
  watcher_.join_or_leave(given_up_by_);
}

void NcclCommunicator::close() {
  Shared& s = *shared_;
  const Deadline deadline = Deadline::in(kClosingTimeout);
  const auto do_now = [&](const char* what, std::function<nccl::Result()> calls) {
    if (!s.begin({what, std::move(calls)})) return;
    while (state_ == State::kBusy && !deadline.expired()) std::this_thread::sleep_for(kClosingLook);
  };
  do_now("ncclCommFinalize", [&s] { return s.api.finalize(s.comm); });
  do_now("ncclCommDestroy", [&s] { return s.api.destroy(std::exchange(s.comm, nullptr)); });
}

void NcclCommunicator::abort() {
  std::lock_guard lock(shared_->mutex);
  if (shared_->quit) return;
  given_up_by_ = Deadline::in(kAbortTimeout);
  shared_->state = State::kAborted;
  shared_->quit = true;
  shared_->posted.notify_one();
  shared_->tell();
}

void NcclCommunicator::begin(const char* what, std::function<nccl::Result()> calls) {
  if (shared_->begin({what, std::move(calls)})) return;
  throw Error(ErrorCode::kInternal, "NCCL was called while it was busy or had failed");
}

void NcclCommunicator::launch(std::span<const NcclCall> calls) {
  begin("an NCCL launch", [&s = *shared_, calls = std::vector(calls.begin(), calls.end())] {
    nccl::Result result = nccl::kSuccess;
    for (const NcclCall& one : calls) {
      if (result == nccl::kSuccess) result = s.call(one);
    }
    if (s.launches++ == 0 && s.setup.work_timeout.count() > 0) {
      s.done_by = Deadline::in(s.setup.work_timeout);
    }
    return result;
  });
}

void NcclCommunicator::check() const {
  if (!failed()) return;
  std::lock_guard lock(shared_->mutex);
  throw Error(ErrorCode::kLibrary, shared_->failure);
}

void NcclCommunicator::finished() {
  Shared& s = *shared_;
  std::lock_guard lock(s.mutex);
  --s.launches;
  s.done_by = s.launches > 0 && s.setup.work_timeout.count() > 0
                  ? Deadline::in(s.setup.work_timeout)
                  : Deadline::never();
}

bool NcclCommunicator::Shared::begin(Task task) {
  {
    std::lock_guard lock(mutex);
    if (state != State::kReady) return false;
    task_ = std::move(task);
    state = State::kBusy;
    ready_by_ = Deadline::in(setup.open_timeout);
    fresh_ = true;
    if (asleep_) tell();
  }
  posted.notify_one();
  return true;
}

void NcclCommunicator::Shared::tell() {
  news_.fetch_add(1);
  futex_wake(news_, 1, kFutexAnyBit);
}

void NcclCommunicator::Shared::work() {
  const GpuDevice::Scope scope(*setup.device);
  std::unique_lock lock(mutex);
  for (;;) {
    posted.wait(lock, [this] { return task_ || quit; });
    if (quit) return;
    api.group_start();
    const nccl::Result gathered = task_->calls();
    calling_ = true;
    lock.unlock();
    const nccl::Result ended = api.group_end();  // even after an error, an open group must end
    lock.lock();
    calling_ = false;
    const Task done = *std::exchange(task_, std::nullopt);
    if (const nccl::Result error = gathered != nccl::kSuccess ? gathered : ended) {
      note(done.what, error);
    } else if (state == State::kBusy) {
      state = State::kReady;
      setup.changed();
    }
    returned_.notify_all();
  }
}

// Adds a call to the open group. NCCL launches all calls of a group together.
nccl::Result NcclCommunicator::Shared::call(const NcclCall& call) {
  const cuda::Stream stream = setup.device->stream();
  const auto* const in = reinterpret_cast<const void*>(call.input);
  auto* const out = reinterpret_cast<void*>(call.output);
  using Kind = NcclCall::Kind;
  switch (call.kind) {
    case Kind::kAllReduce:
      return api.all_reduce(in, out, call.count, call.type, call.op, comm, stream);
    case Kind::kReduceScatter:
      return api.reduce_scatter(in, out, call.count, call.type, call.op, comm, stream);
    case Kind::kReduce:
      return api.reduce(in, out, call.count, call.type, call.op, call.peer, comm, stream);
    case Kind::kAllGather: return api.all_gather(in, out, call.count, call.type, comm, stream);
    case Kind::kBroadcast:
      return api.broadcast(in, out, call.count, call.type, call.peer, comm, stream);
    case Kind::kSend: return api.send(in, call.count, call.type, call.peer, comm, stream);
    case Kind::kReceive: return api.receive(out, call.count, call.type, call.peer, comm, stream);
  }
  return nccl::kSuccess;
}

void NcclCommunicator::Shared::note(const char* what, nccl::Result error) {
  if (!fails_by_.is_never()) return;
  fails_by_ = Deadline::in(kDeathIsHeard);
  failure = std::string(what) + " failed: " + api.text_of(error, comm) +
            "; a peer may have died. Set NCCL_DEBUG=WARN to see more";
  tell();
}

void NcclCommunicator::Shared::fail(const std::string& text) {
  failure = text;
  state = State::kFailed;
  setup.changed();
}

// Marks the communicator as failed after an NCCL error or a missed deadline. Returns the time of the next check.
Deadline NcclCommunicator::Shared::look() {
  if (state != State::kBusy && state != State::kReady) return Deadline::never();
  nccl::Result found = nccl::kSuccess;
  if (comm && !calling_) api.async_error(comm, &found);
  if (found != nccl::kSuccess) note("NCCL", found);
  if (fails_by_.expired()) {
    fail(failure);
  } else if (state == State::kBusy && fails_by_.is_never() && ready_by_.expired()) {
    fail("NCCL did not connect " + std::to_string(setup.members) +
         " ranks within FARANDOLE_INIT_TIMEOUT. Give each rank its own GPU, set NCCL_SOCKET_IFNAME "
         "to a network that connects all ranks, and set NCCL_DEBUG=INFO to see more");
  } else if (done_by.expired()) {
    fail(
        "a launched bucket did not end within twice FARANDOLE_STALL_ABORT: a GPU or a link hangs, "
        "or the ranks launch NCCL work in different orders; then set FARANDOLE_GPU_ORDER=program");
  }
  if (!fails_by_.is_never()) return fails_by_;
  const bool works = state == State::kBusy || launches > 0 || std::exchange(fresh_, false);
  return works ? Deadline::in(kLook) : Deadline::never();
}

// Sleeps without a time limit only if no work is under way and none has started since the last check. Therefore, in a
// steady stream of buckets, no bucket has to wake this thread.
void NcclCommunicator::Shared::watch() {
  Thread worker;
  std::unique_lock lock(mutex);
  try {
    worker = start_thread("farandole-call", [this] { work(); });
  } catch (const Error& error) {
    fail(error.what());
  }
  while (!quit) {
    const uint32_t ticket = news_.load();
    const Deadline next = look();
    asleep_ = next.is_never();
    lock.unlock();
    futex_wait(news_, ticket, kFutexAnyBit, next);
    lock.lock();
  }
  give_up(lock);
  if (worker.joinable()) worker.join();
}

// Inside a group, ncclCommAbort only sets the abort flag, which ends the worker's call. Afterwards ncclGroupEnd frees
// the communicator, and may never return. An NCCL older than kFirstAbortOfGroups frees the communicator in
// ncclCommAbort, so this function first waits for the worker's call, which returns when a dead peer's connections end.
void NcclCommunicator::Shared::give_up(std::unique_lock<std::mutex>& lock) {
  const GpuDevice::Scope scope(*setup.device);
  const auto is_back = [this] { return !calling_; };
  if (api.version < nccl::kFirstAbortOfGroups) returned_.wait(lock, is_back);
  api.group_start();
  if (comm) api.abort(comm);
  returned_.wait(lock, is_back);
  task_.reset();
  lock.unlock();
  api.group_end();
}

}  // namespace farandole
