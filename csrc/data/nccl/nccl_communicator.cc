// SPDX-License-Identifier: Apache-2.0
// See nccl_communicator.h. Used by NcclBackend; the driver, and a thread of each communicator's own, which watches it.
#include "data/nccl/nccl_communicator.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "base/error.h"
#include "lib/os/futex.h"

namespace farandole {
namespace {

// What a call has begun ends within a few tens of microseconds, as a rule, so the driver polls for that long. After that
// our thread polls; it also looks at NCCL's asynchronous error while work is in flight.
constexpr std::chrono::microseconds kSoon{200};
constexpr std::chrono::microseconds kSoonLook{20};
constexpr std::chrono::milliseconds kSlowestLook{1};
constexpr std::chrono::milliseconds kWorkingLook{100};
constexpr size_t kMostOperators = 32;  // one for each weight, until a bucket comes with more
// NCCL may notice before we do that a peer has died, by whatever error; then we wait for the peer's name.
constexpr std::chrono::milliseconds kDeathIsHeard{500};
constexpr std::chrono::seconds kClosingTimeout{10};
constexpr std::chrono::seconds kAbortTimeout{5};

// What a call that began then adds to its time by being looked at: one percent, but for short and for very long ones.
std::chrono::nanoseconds pause_since(int64_t begun_ns) {
  return std::clamp<std::chrono::nanoseconds>(std::chrono::nanoseconds((now_ns() - begun_ns) / 100),
                                              kSoonLook, kSlowestLook);
}

// One that has failed at once exists all the same (2.28.9 src/init.cc:2159): its asynchronous error says so, and it must
// be aborted.
nccl::Comm new_communicator(const NcclCommunicator::Setup& setup, const nccl::UniqueId& id) {
  GpuDevice::Scope scope(*setup.device);
  nccl::Comm made = nullptr;
  nccl::ConfigV21400 config;
  const nccl::Result result = setup.api->init_rank(&made, setup.members, id, setup.member, &config);
  if (!made) setup.api->check(result, "ncclCommInitRankConfig");
  return made;
}

}  // namespace

NcclCommunicator::NcclCommunicator(Setup setup, const nccl::UniqueId& id)
    : NcclCommunicator(setup, new_communicator(setup, id)) {}

NcclCommunicator::NcclCommunicator(Setup setup, nccl::Comm part)
    : setup_(std::move(setup)),
      comm_(part),
      held_(std::make_shared<Held>()),
      busy_{Deadline::in(setup_.open_timeout)},
      thread_("farandole-nccl", [this, part, held = held_, api = setup_.api,
                                 device = setup_.device] {
        watch();
        give_up(*api, *device, part, *held);  // nothing of ours: we may be gone before it returns
      }) {}

NcclCommunicator::~NcclCommunicator() {
  if (state_ == State::kReady && flight_.launches == 0 && !held_->part) close();
  abort();
  quit_ = true;
  wake();
  thread_.join_or_leave(given_up_by_);
}

// NCCL ends its connections without blocking; a peer that does not is not waited for without end.
void NcclCommunicator::close() {
  std::lock_guard lock(mutex_);
  if (state_ != State::kReady) return;
  GpuDevice::Scope scope(*setup_.device);
  for (const auto& [number, known] : held_->windows) deregister(known);
  held_->windows.clear();
  nccl::Result result = setup_.api->finalize(comm_);
  const Deadline deadline = Deadline::in(kClosingTimeout);
  while (result == nccl::kInProgress && !deadline.expired()) {
    std::this_thread::sleep_for(kSlowestLook);
    if (setup_.api->async_error(comm_, &result) != nccl::kSuccess) break;
  }
  if (result != nccl::kSuccess) return;
  setup_.api->destroy(comm_);
  state_ = State::kAborted;
}

// NCCL may not return from it: nobody's mutex is held there.
void NcclCommunicator::abort() {
  std::lock_guard lock(mutex_);
  if (state_ == State::kAborted) return;
  state_ = State::kAborted;
  held_->given_up = true;
  given_up_by_ = Deadline::in(kAbortTimeout);
  quit_ = true;
  wake();
}

void NcclCommunicator::give_up(const nccl::Api& api, const GpuDevice& device, nccl::Comm comm,
                               Held& held) {
  if (!held.given_up) return;
  GpuDevice::Scope scope(device);
  api.abort(comm);
  if (held.part) api.abort(held.part);
  held.windows.clear();  // NCCL has let go of all of them
}

// What NCCL's calls return does not tell whether they have begun something: its asynchronous error does.
template <class Calls>
void NcclCommunicator::begin(Calls&& calls) {
  std::lock_guard lock(mutex_);
  if (state_ != State::kReady) {
    throw Error(ErrorCode::kInternal, "NCCL is called before it is ready");
  }
  GpuDevice::Scope scope(*setup_.device);
  calls();
  busy_.ready_by = Deadline::in(setup_.open_timeout);
  busy_.begun_ns = now_ns();
  busy_.watched = false;
  state_ = State::kBusy;
  look();
}

// All calls are one group: NCCL launches them together. Operators come first: NCCL makes them outside of groups.
void NcclCommunicator::launch(std::span<const NcclCall> calls) {
  const nccl::Api& api = *setup_.api;
  begin([&] {
    if (weighted_.size() >= kMostOperators) {  // calls that were made with them keep what they need
      for (const auto& [of, made] : weighted_) api.operator_destroy(made, comm_);
      weighted_.clear();
    }
    for (const NcclCall& one : calls) add_operator(one);
    nccl::Result refused = nccl::kSuccess;
    api.check(api.group_start(), "ncclGroupStart", comm_);
    for (const NcclCall& one : calls) {
      if (refused == nccl::kSuccess || refused == nccl::kInProgress) refused = call(one);
    }
    const nccl::Result result = api.group_end();  // a group that was begun must end
    api.check(refused, "an NCCL call", comm_);
    api.check(result, "ncclGroupEnd", comm_);
    if (flight_.launches++ == 0 && setup_.work_timeout.count() > 0) {
      flight_.done_by = Deadline::in(setup_.work_timeout);
    }
    flight_.fresh = true;
    if (asleep_) wake();
  });
}

nccl::Result NcclCommunicator::call(const NcclCall& call) {
  const nccl::Api& api = *setup_.api;
  const cuda::Stream stream = setup_.device->stream();
  const auto* const in = reinterpret_cast<const void*>(call.input);
  auto* const out = reinterpret_cast<void*>(call.output);
  const nccl::RedOp op = call.weight == 1.0 ? call.op : weighted_.at({call.weight, call.type});
  using Kind = NcclCall::Kind;
  switch (call.kind) {
    case Kind::kAllReduce: return api.all_reduce(in, out, call.count, call.type, op, comm_, stream);
    case Kind::kReduceScatter:
      return api.reduce_scatter(in, out, call.count, call.type, op, comm_, stream);
    case Kind::kReduce:
      return api.reduce(in, out, call.count, call.type, op, call.peer, comm_, stream);
    case Kind::kAllGather: return api.all_gather(in, out, call.count, call.type, comm_, stream);
    case Kind::kBroadcast:
      return api.broadcast(in, out, call.count, call.type, call.peer, comm_, stream);
    case Kind::kSend: return api.send(in, call.count, call.type, call.peer, comm_, stream);
    case Kind::kReceive: return api.receive(out, call.count, call.type, call.peer, comm_, stream);
  }
  return nccl::kSuccess;
}

// One that sums weight * input. Kept for the next time.
void NcclCommunicator::add_operator(const NcclCall& call) {
  if (call.weight == 1.0 || weighted_.contains({call.weight, call.type})) return;
  double weight = call.weight;
  float single = static_cast<float>(weight);
  void* scalar = call.type == nccl::kFloat32 ? static_cast<void*>(&single) : &weight;
  nccl::RedOp made = 0;
  setup_.api->check(setup_.api->weighted_sum(&made, scalar, call.type, nccl::kScalarHost, comm_),
                    "ncclRedOpCreatePreMulSum", comm_);
  weighted_[{call.weight, call.type}] = made;
}

// In one group: a communicator that is busy with the first would refuse the second.
void NcclCommunicator::know(std::span<const std::shared_ptr<GpuWindow>> windows) {
  const nccl::Api& api = *setup_.api;
  begin([&] {
    nccl::Result refused = nccl::kSuccess;
    api.check(api.group_start(), "ncclGroupStart", comm_);
    for (const std::shared_ptr<GpuWindow>& window : windows) {
      if (refused != nccl::kSuccess && refused != nccl::kInProgress) break;
      Registration& known = held_->windows[window->number()];
      known.window = window;
      refused = api.window_register
                    ? api.window_register(comm_, window->data(), window->bytes(), &known.as_window,
                                          nccl::kWindowSymmetric)
                    : api.buffer_register(comm_, window->data(), window->bytes(), &known.as_buffer);
    }
    const nccl::Result result = api.group_end();
    api.check(refused, "registering memory", comm_);
    api.check(result, "ncclGroupEnd", comm_);
  });
}

// The part's configuration is ours; whether it shares our resources is NCCL_COMM_SPLIT_SHARE_RESOURCES's to say. Who is
// not in it makes a part of its own: without one NCCL crashes if a peer dies meanwhile (2.30.7 src/init.cc, as in 2.18:
// ncclCommInitRankFunc notes the error in a communicator that is not there).
void NcclCommunicator::split(int member) {
  begin([&] {
    busy_.awaits_part = true;
    busy_.is_in_part = member >= 0;
    setup_.api->check(setup_.api->split(comm_, busy_.is_in_part ? 0 : 1 + setup_.member,
                                        std::max(member, 0), &held_->part, /*config=*/nullptr),
                      "ncclCommSplit", comm_);
  });
}

nccl::Comm NcclCommunicator::take_part() {
  check();
  std::lock_guard lock(mutex_);
  busy_.awaits_part = false;
  const nccl::Comm part = std::exchange(held_->part, nullptr);
  if (busy_.is_in_part) return part;
  GpuDevice::Scope scope(*setup_.device);
  // Not abort: with NCCL_COMM_SPLIT_SHARE_RESOURCES that aborts the world's too.
  setup_.api->destroy(part);
  return nullptr;
}

std::vector<uint32_t> NcclCommunicator::closed_windows() const {
  std::vector<uint32_t> closed;
  for (const auto& [number, known] : held_->windows) {
    if (known.window->closed() && known.window->is_past()) closed.push_back(number);
  }
  return closed;
}

void NcclCommunicator::forget(uint32_t window) {
  begin([&] {
    deregister(held_->windows.at(window));
    held_->windows.erase(window);
  });
}

void NcclCommunicator::deregister(const Registration& known) {
  if (known.as_window) setup_.api->window_deregister(comm_, known.as_window);
  if (known.as_buffer) setup_.api->buffer_deregister(comm_, known.as_buffer);
}

void NcclCommunicator::check() const {
  if (!failed()) return;
  std::lock_guard lock(mutex_);
  throw Error(ErrorCode::kLibrary, failure_);
}

void NcclCommunicator::finished() {
  std::lock_guard lock(mutex_);
  --flight_.launches;
  flight_.done_by = flight_.launches > 0 && setup_.work_timeout.count() > 0
                        ? Deadline::in(setup_.work_timeout)
                        : Deadline::never();
}

bool NcclCommunicator::poll() {
  if (state_ != State::kBusy) return ready();
  std::lock_guard lock(mutex_);
  look();
  if (state_ == State::kBusy && !busy_.watched &&
      now_ns() - busy_.begun_ns > std::chrono::nanoseconds(kSoon).count()) {
    busy_.watched = true;
    wake();
  }
  return ready();
}

Deadline NcclCommunicator::look_again() const {
  return state_ == State::kBusy && !busy_.watched ? Deadline::in(kSoonLook) : Deadline::never();
}

// Called under the mutex: takes over what NCCL says, and fails what is too late.
void NcclCommunicator::look() {
  if (state_ != State::kBusy && state_ != State::kReady) return;
  nccl::Result found = nccl::kSuccess;
  if (const nccl::Result code = setup_.api->async_error(comm_, &found)) found = code;
  if (found == nccl::kSuccess && busy_.awaits_part && !held_->part) found = nccl::kInProgress;
  const bool erred = found != nccl::kSuccess && found != nccl::kInProgress;
  if (!erred) fails_by_.reset();
  if (erred) {
    if (!fails_by_) {
      fails_by_ = Deadline::in(kDeathIsHeard);
      wake();  // our thread looks then, whoever has seen it
    }
    if (!fails_by_->expired()) return;
    fail("NCCL failed: " + std::string(setup_.api->error_text(found)) + " (" +
         setup_.api->last_error(comm_) + "); a peer may have died; NCCL_DEBUG=WARN tells more");
  } else if (state_ == State::kBusy && found == nccl::kSuccess) {
    state_ = State::kReady;
  } else if (state_ == State::kBusy && busy_.ready_by.expired()) {
    fail("NCCL did not connect " + std::to_string(setup_.members) +
         " ranks in time (FARANDOLE_INIT_TIMEOUT); every rank needs a GPU of its own, and a way to "
         "the others (NCCL_SOCKET_IFNAME); NCCL_DEBUG=INFO tells more");
  } else if (flight_.done_by.expired()) {
    fail(
        "a launched bucket did not end in time (FARANDOLE_STALL_ABORT): a GPU or a link hangs, or "
        "NCCL work is launched in another order on some rank (FARANDOLE_GPU_ORDER)");
  }
}

void NcclCommunicator::fail(const std::string& text) {
  failure_ = text;
  state_ = State::kFailed;
}

void NcclCommunicator::wake() {
  news_.fetch_add(1);
  futex_wake(news_, 1, kFutexAnyBit);
}

// It sleeps once nothing has been in flight for one look, so that a steady stream of buckets need not wake it.
void NcclCommunicator::watch() {
  ask_for_punctual_sleeps();
  while (!quit_) {
    const uint32_t ticket = news_.load();
    const Deadline next = next_look();
    if (!quit_) futex_wait(news_, ticket, kFutexAnyBit, next);
  }
}

Deadline NcclCommunicator::next_look() {
  std::lock_guard lock(mutex_);
  const State before = state_;
  look();
  if (state_ != before) setup_.changed();
  const bool lives = state_ == State::kBusy || state_ == State::kReady;
  if (lives && fails_by_) return *fails_by_;
  if (state_ == State::kBusy && busy_.watched) return Deadline::in(pause_since(busy_.begun_ns));
  const bool works = flight_.launches > 0 || std::exchange(flight_.fresh, false);
  asleep_ = !lives || !works;
  return asleep_ ? Deadline::never() : Deadline::in(kWorkingLook);
}

}  // namespace farandole
