// SPDX-License-Identifier: Apache-2.0
#include "data/nccl/nccl_communicator.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "lib/os/futex.h"
#include "lib/os/thread.h"

namespace farandole {
namespace {

// Between looks at NCCL's asynchronous error: while it connects, and while work is in flight.
constexpr std::chrono::milliseconds kConnectingLook{1};
constexpr std::chrono::milliseconds kWorkingLook{100};
constexpr std::chrono::seconds kClosingTimeout{10};

}  // namespace

NcclCommunicator::NcclCommunicator(Setup setup)
    : setup_(std::move(setup)), connected_by_(Deadline::in(setup_.open_timeout)) {
  GpuDevice::Scope scope(*setup_.device);
  if (setup_.part) {
    comm_ = setup_.part;
  } else {
    nccl::ConfigV21400 config;
    setup_.api->check(
        setup_.api->init_rank(&comm_, setup_.members, setup_.id, setup_.member, &config),
        "ncclCommInitRankConfig");
  }
  thread_ = start_thread("farandole-nccl", [this] { watch(); });
}

NcclCommunicator::~NcclCommunicator() {
  bool calm;
  {
    std::lock_guard lock(mutex_);
    quit_ = true;
    calm = state_ == State::kReady && in_flight_ == 0 && !part_;
  }
  wake();
  thread_.join();
  if (!calm) {
    abort();
    return;
  }
  close();
}

// NCCL ends its connections without blocking; a peer that does not is not waited for without end.
void NcclCommunicator::close() {
  GpuDevice::Scope scope(*setup_.device);
  forget_windows(/*all=*/true);
  nccl::Result result = setup_.api->finalize(comm_);
  const Deadline deadline = Deadline::in(kClosingTimeout);
  while (result == nccl::kInProgress && !deadline.expired()) {
    std::this_thread::sleep_for(kConnectingLook);
    if (setup_.api->async_error(comm_, &result) != nccl::kSuccess) break;
  }
  if (result == nccl::kSuccess) {
    setup_.api->destroy(comm_);
  } else {
    setup_.api->abort(comm_);
  }
}

void NcclCommunicator::know(const std::shared_ptr<GpuWindow>& window) {
  auto [at, fresh] = windows_.try_emplace(window->number());
  if (!fresh) return;
  Registration& known = at->second;
  known.window = window;
  const nccl::Api& api = *setup_.api;
  nccl::Result result;
  if (api.window_register) {
    result = api.window_register(comm_, window->data(), window->bytes(), &known.as_window,
                                 nccl::kWindowSymmetric);
    api.check(result, "ncclCommWindowRegister", comm_);
  } else {
    result = api.buffer_register(comm_, window->data(), window->bytes(), &known.as_buffer);
    api.check(result, "ncclCommRegister", comm_);
  }
  std::lock_guard lock(mutex_);
  connecting(result);
}

// The part's configuration is ours; whether it shares our resources is NCCL_COMM_SPLIT_SHARE_RESOURCES's to say.
void NcclCommunicator::split(int member) {
  check();
  GpuDevice::Scope scope(*setup_.device);
  const int color = member < 0 ? nccl::kNoColor : 0;
  const nccl::Result result =
      setup_.api->split(comm_, color, std::max(member, 0), &part_, /*config=*/nullptr);
  setup_.api->check(result, "ncclCommSplit", comm_);
  std::lock_guard lock(mutex_);
  connecting(result);
}

nccl::Comm NcclCommunicator::take_part() {
  check();
  return std::exchange(part_, nullptr);
}

// Nothing is in flight. Their memory may go from here on.
void NcclCommunicator::forget_windows(bool all) {
  GpuDevice::Scope scope(*setup_.device);
  std::erase_if(windows_, [&](const auto& entry) {
    const Registration& known = entry.second;
    if (!all && !known.window->closed()) return false;
    if (known.as_window) setup_.api->window_deregister(comm_, known.as_window);
    if (known.as_buffer) setup_.api->buffer_deregister(comm_, known.as_buffer);
    return true;
  });
}

// Under the mutex: a call has begun something that NCCL goes on with by itself.
void NcclCommunicator::connecting(nccl::Result result) {
  if (result != nccl::kInProgress || state_ != State::kReady) return;
  connected_by_ = Deadline::in(setup_.open_timeout);
  state_ = State::kConnecting;
  wake();
}

void NcclCommunicator::check() const {
  if (!failed()) return;
  std::lock_guard lock(mutex_);
  throw Error(ErrorCode::kLibrary, failure_);
}

void NcclCommunicator::launched(nccl::Result result) {
  std::lock_guard lock(mutex_);
  if (in_flight_++ == 0 && setup_.work_timeout.count() > 0) {
    done_by_ = Deadline::in(setup_.work_timeout);
  }
  connecting(result);
  wake();
}

void NcclCommunicator::finished() {
  std::lock_guard lock(mutex_);
  --in_flight_;
  if (in_flight_ == 0 && state_ == State::kReady) forget_windows(/*all=*/false);
  done_by_ = in_flight_ > 0 && setup_.work_timeout.count() > 0 ? Deadline::in(setup_.work_timeout)
                                                               : Deadline::never();
}

void NcclCommunicator::abort() {
  std::lock_guard lock(mutex_);
  if (state_ == State::kAborted) return;
  const nccl::Comm part = state_ == State::kReady ? std::exchange(part_, nullptr) : nullptr;
  state_ = State::kAborted;
  GpuDevice::Scope scope(*setup_.device);
  if (part) setup_.api->abort(part);
  setup_.api->abort(comm_);
  windows_.clear();  // NCCL has let go of all of them
}

nccl::RedOp NcclCommunicator::weighted(double weight, nccl::DataType type) {
  auto [at, fresh] = weighted_.try_emplace({weight, type}, 0);
  if (!fresh) return at->second;
  float single = static_cast<float>(weight);
  void* scalar = type == nccl::kFloat32 ? static_cast<void*>(&single) : &weight;
  setup_.api->check(setup_.api->weighted_sum(&at->second, scalar, type, nccl::kScalarHost, comm_),
                    "ncclRedOpCreatePreMulSum", comm_);
  return at->second;
}

void NcclCommunicator::fail(const std::string& text) {
  failure_ = text;
  state_ = State::kFailed;
  setup_.changed();
}

void NcclCommunicator::wake() {
  news_.fetch_add(1);
  futex_wake(news_, 1, kFutexAnyBit);
}

// Asleep while there is nothing to look after.
void NcclCommunicator::watch() {
  while (!quit_) {
    const uint32_t ticket = news_.load();
    const Deadline next = look();
    if (!quit_) futex_wait(news_, ticket, kFutexAnyBit, next);
  }
}

Deadline NcclCommunicator::look() {
  std::lock_guard lock(mutex_);
  if (state_ != State::kConnecting && state_ != State::kReady) return Deadline::never();
  nccl::Result found = nccl::kSuccess;
  nccl::Result asked = setup_.api->async_error(comm_, &found);
  if (asked != nccl::kSuccess) found = asked;
  const bool connecting = found == nccl::kInProgress;
  if (found != nccl::kSuccess && !connecting) {
    fail("NCCL failed: " + std::string(setup_.api->error_text(found)) + " (" +
         setup_.api->last_error(comm_) + "); a peer may have died; NCCL_DEBUG=WARN tells more");
  } else if (state_ == State::kConnecting && !connecting) {
    state_ = State::kReady;
    setup_.changed();
  } else if (connecting && connected_by_.expired()) {
    fail("NCCL did not connect " + std::to_string(setup_.members) +
         " ranks in time (FARANDOLE_INIT_TIMEOUT); every rank needs a GPU of its own, and a way to "
         "the "
         "others (NCCL_SOCKET_IFNAME); NCCL_DEBUG=INFO tells more");
  } else if (done_by_.expired()) {
    fail(
        "a launched bucket did not end in time (FARANDOLE_STALL_ABORT): a GPU or a link hangs, or "
        "NCCL work is launched in another order on some rank (FARANDOLE_GPU_ORDER)");
  }
  if (state_ == State::kConnecting) return Deadline::in(kConnectingLook);
  return state_ == State::kReady && in_flight_ > 0 ? Deadline::in(kWorkingLook) : Deadline::never();
}

}  // namespace farandole
