// SPDX-License-Identifier: Apache-2.0
#include "runtime/runtime.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <sstream>
#include <utility>

#include "base/error.h"
#include "base/logging.h"

namespace farandole {
namespace {

// Time for which call() waits before it returns, so that the caller can handle signals and its own timeout. Most calls
// end earlier. Without this wait, the background thread would take over the work.
constexpr std::chrono::milliseconds kCallPatience{20};
// Maximum time for which a failing rank waits for its peers to learn the cause.
constexpr std::chrono::seconds kFarewell{1};
// Maximum time for which a leader waits at the end for members to read the log. On a loaded machine they may be late.
constexpr std::chrono::seconds kDelivery{10};

Coordinator::Settings coordinator_settings(const Config& config, const Topology& topology) {
  Coordinator::Settings settings;
  settings.size = topology.size;
  settings.fusion_bytes = static_cast<size_t>(config.fusion_bytes);
  settings.gpu_fusion_bytes = static_cast<size_t>(config.gpu_fusion_bytes);
  settings.gpu_backend = config.gpu_backend;
  settings.gpu_order = config.gpu_order;
  settings.shared_gpu = config.shared_gpu;
  settings.capacity = static_cast<size_t>(config.cache_capacity);
  settings.check_sites = config.call_sites == "check";
  settings.max_sets = static_cast<int>(config.max_process_sets);
  settings.stall_warn_ns = nanoseconds(config.stall_warn).count();
  settings.stall_abort_ns = nanoseconds(config.stall_abort).count();
  settings.above = HostTree::above(topology.node);
  return settings;
}

// Returns the number of cores that the host's ranks share. Skips ranks in other PID namespaces.
int cores_of_host(const Topology& topology, std::span<const PeerInfo> peer_infos) {
  const PeerInfo& own = peer_infos[static_cast<size_t>(topology.rank)];
  std::vector<pid_t> ranks{0};
  for (Rank rank : topology.local) {
    const PeerInfo& peer = peer_infos[static_cast<size_t>(rank)];
    if (peer.pid_namespace == own.pid_namespace) ranks.push_back(static_cast<pid_t>(peer.pid));
  }
  return cores_of(ranks);
}

}  // namespace

Runtime::Runtime(LocalEndpoint endpoint, Topology topology, std::span<const PeerInfo> peer_infos,
                 const void* mpi_comm)
    : config_(std::move(endpoint.config)), topology_(std::move(topology)) {
  const int64_t began_ns = now_ns();
  set_log({log_level_of(config_.log_level), topology_.rank, host_name(),
           log_format_of(config_.log_format), config_.log_rate});
  check_agreement(peer_infos);
  apply_job_wide_text(config_, peer_infos[0].job_wide);

  const Deadline deadline = Deadline::in(nanoseconds(config_.init_timeout));
  fabric_ = std::make_unique<Fabric>(config_, topology_, peer_infos, endpoint.key, mpi_comm);
  backends_ = std::make_unique<BackendFactory>(
      config_, topology_, *fabric_, [this](SetId set) { return watch_->phases_of(set); });
  fabric_->share_memory(std::move(endpoint.listener), std::move(endpoint.to_leader), peer_infos,
                        backends_->staging_size(kWorldSet, numbers_below(topology_.size)),
                        deadline);
  fabric_->share_arena(std::move(endpoint.arena), deadline);
  watch_ = std::make_unique<RankWatch>(config_, topology_, *fabric_, peer_infos, endpoint.stacks,
                                       began_ns);
  fabric_->link_hosts(std::move(endpoint.hosts), peer_infos, deadline);
  open_engine(cores_of_host(topology_, peer_infos));
  fabric_->sockets().barrier(deadline);
  // Must follow the barrier directly, because from now on a peer may exit.
  watch_->start(peer_infos, [this](Rank rank, Failure failure) { lose(rank, std::move(failure)); });
  try {
    driver_->start();
  } catch (...) {
    watch_->stop();  // its callback uses objects that are destroyed next
    throw;
  }
}

Runtime::Runtime(Config config, Topology topology, std::span<const PeerInfo> peer_infos,
                 std::unique_ptr<Fabric> fabric)
    : config_(std::move(config)), topology_(std::move(topology)), fabric_(std::move(fabric)) {
  backends_ = std::make_unique<BackendFactory>(
      config_, topology_, *fabric_, [this](SetId set) { return watch_->phases_of(set); });
  watch_ = std::make_unique<RankWatch>(config_, topology_, *fabric_, peer_infos, StackSource{},
                                       now_ns());
  open_engine(0);
  driver_->start();
}

Runtime::~Runtime() {
  driver_->stop();
  // Members can read their rings without this process, but not the entries that wait for room in a ring. If a member
  // missed the last one, it would take this rank's end for a death.
  auto delivered = [&] { return !leader_ || !calls_->job.stopped() || leader_->delivered(); };
  driver_->await(delivered, Deadline::in(kDelivery));
  fabric_->finish(Deadline::in(kFarewell));
  watch_->stop();
}

void Runtime::open_leader() {
  HostController::Setup setup{LeaderChannel(fabric_->control(), topology_.local),
                              fabric_->hosts(),
                              fabric_->tree(),
                              fabric_->links(),
                              topology_,
                              fabric_->host_names(),
                              [this](SetId set, const std::vector<Rank>& ranks) {
                                return backends_->staging_size(set, ranks);
                              },
                              watch_->pids()};
  if (topology_.rank == 0) {
    leader_ = std::make_unique<RootController>(coordinator_settings(config_, topology_),
                                               std::move(setup));
  } else {
    leader_ = std::make_unique<HostRelay>(std::move(setup));
  }
}

void Runtime::lose(Rank rank, Failure failure) {
  if (leader_) {
    leader_->lose(rank, std::move(failure));
    fabric_->wakeup().notify();
  } else if (rank == topology_.leader()) {
    calls_->job.fail(std::move(failure));
  }
}

void Runtime::open_engine(int cores) {
  channel_ = std::make_unique<MemberChannel>(fabric_->control(), topology_.local_rank);
  if (fabric_->leads()) open_leader();
  // On rank 0's host, no relay batches reports.
  calls_ = std::make_unique<RankCalls>(RankCalls::Setup{
      topology_.rank, *channel_, topology_.leader() != 0, topology_.local_size() == topology_.size,
      tiny_bytes(topology_.size), watch_->recorder(), fabric_->wakeup()});
  auto spin = [&](Spin::Who who) {
    return Spin(who, config_.spin_us, cores, topology_.local_size());
  };
  engine_ = std::make_unique<Engine>(
      Engine::Setup{topology_, fabric_->links(), *channel_, leader_.get(), *calls_, *watch_,
                    *backends_, spin(Spin::Who::kCaller), fabric_->poller()},
      fabric_->take_staging());
  gpus_ = std::make_unique<GpuAccess>(
      config_, calls_->handles, [this] { fabric_->wakeup().notify(); },
      [this](RankGpu& gpu) { engine_->use_gpu(gpu); });
  driver_ = std::make_unique<Driver>(Driver::Setup{
      *engine_, *calls_, *watch_, fabric_->wakeup(), *channel_, fabric_->leads(),
      spin(Spin::Who::kCaller), spin(Spin::Who::kBackground), config_.priority == "realtime"});
}

void Runtime::say_leave(Leave leave) {
  Deadline limit = Deadline::in(kFarewell);
  if (!leave.failed) {
    const double patience = config_.shutdown_timeout;
    limit = patience == 0 ? Deadline::never() : Deadline::in(nanoseconds(patience));
  }
  if (!calls_->job.leave(leave.failed, limit)) return;
  calls_->close();
  calls_->report(std::move(leave));
  driver_->after_submit();
}

std::optional<Failure> Runtime::leave(bool failed, const std::string& why, Deadline deadline) {
  JobState& job = calls_->job;
  say_leave({failed, why, false});
  const Deadline limit = job.limit();
  auto over = [&] { return job.over() || limit.expired(); };
  if (!failed) watch_->recorder().left();
  if (!driver_->await(over, std::min(deadline, limit)) && !over()) return std::nullopt;
  Failure gave_up;
  if (!failed && !job.over()) {
    std::ostringstream after;
    after << "FARANDOLE_SHUTDOWN_TIMEOUT is " << config_.shutdown_timeout << " s";
    say_leave({true, after.str(), true});
    const Deadline last = job.limit();
    while (!driver_->await([&] { return job.broken(); }, last) && !last.expired()) {
    }
    // The coordinator's failure names the ranks that have not left. If there is no failure, rank 0 does not answer.
    gave_up = job.broken() ? job.failure()
                           : Failure{ErrorCode::kStall, "shutdown(): " + watch_->why_silent()};
  }
  job.fail({ErrorCode::kShutdown, "shutdown() was called while this call was under way"});
  // Blocks until the driver has made all pending calls fail. Signals do not end this wait.
  while (!driver_->await([&] { return job.broken(); }, Deadline::never())) {
  }
  return gave_up;
}

CheckedCall Runtime::prepare(std::span<const farandole_request> tensors, size_t count) {
  if (tensors.empty()) throw Error(ErrorCode::kInvalidArgument, "a call needs a request");
  gpus_->open(tensors);
  const ProcessSet set = calls_->set_of(name_of_request(tensors.front()));
  CheckedCall call = check_call(tensors, count, set, topology_.rank);
  calls_->prepare(call);
  return call;
}

// Returns an error in the inputs, or kOk. On GPUs, also records the events after which the inputs are complete.
Failure Runtime::fault_of(PreparedSubmission& prepared) {
  const Request& request = prepared.call->request;
  if (config_.check_numerics) {
    const Submission mine = prepared.submission();
    for (size_t i = 0; i < request.parts(); ++i) {
      if (Failure unsound = numerics_of(request, i, mine.part(i), topology_.rank)) return unsound;
    }
  }
  if (prepared.call->submission.device == kCpuDevice) return {};
  try {
    const std::vector<uint64_t> usual(prepared.handles.size());
    prepared.produced = gpus_->events_in(prepared.streams.empty() ? usual : prepared.streams);
    return {};
  } catch (const Error& e) {
    return {e.code(), e.what()};
  }
}

// After an argument error, or a NaN with FARANDOLE_CHECK_NUMERICS, the peers' calls fail with the same text.
void Runtime::submit(std::span<PreparedSubmission> batch) {
  size_t sound = 0;
  Failure fault;
  while (sound < batch.size() && !(fault = fault_of(batch[sound]))) ++sound;
  std::exception_ptr error;
  try {
    calls_->submit(batch.first(sound));
    if (fault) {
      calls_->refuse(batch[sound].call->request, fault);
      throw Error(fault.code, fault.text);
    }
  } catch (...) {
    error = std::current_exception();
  }
  driver_->after_submit();
  if (error) std::rethrow_exception(error);
}

bool Runtime::call(PreparedSubmission& prepared) {
  const bool on_cpu = prepared.call->submission.device == kCpuDevice;
  if (config_.check_numerics || !on_cpu) {
    submit({&prepared, 1});
    if (!on_cpu) return false;
  } else {
    std::exception_ptr error;
    try {
      if (calls_->call(prepared)) return true;
    } catch (...) {
      error = std::current_exception();
    }
    driver_->hurry();
    if (error) std::rethrow_exception(error);
  }
  Handle& handle = prepared.handles.front();
  Failure failure;
  const WaitEnd end = driver_->wait({&handle, 1}, Deadline::in(kCallPatience), failure);
  // Without an output, the result is in the handle. Without an input, the handle says whether any rank had an input.
  const bool needs_handle = prepared.inputs.front() == 0 || prepared.outputs.front() == 0;
  if (end != WaitEnd::kDone || needs_handle) return false;
  handles().release(std::exchange(handle, 0));
  return true;
}

void Runtime::refuse(const farandole_request& request, const Failure& why) {
  calls_->refuse(name_of_request(request), why);
  driver_->after_submit();
}

std::vector<Rank> Runtime::ranks_of(SetId set) {
  std::optional<ProcessSet> found = calls_->find_set(set);
  if (!found) {
    throw Error(ErrorCode::kInvalidArgument, "there is no process set " + std::to_string(set));
  }
  return std::move(found->ranks);
}

}  // namespace farandole
